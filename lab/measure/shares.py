"""Which component takes which share of a model's time, protocol `components@1`: from torch's trace of a run of its own, in any path of the local engine.

Why a trace: on a GPU a kernel belongs to the part of the model that launched it, whatever it is called, and the trace links each kernel with its launch.
Ranges are put around the parts by replacing their methods for the length of the run. A decode step is launched operation by operation: the kernels are
those that the captured step replays, but the gaps between them, and what overlaps on two streams, are not. So the shares are of the sum of the kernels'
own times: they say where work is, not how much faster a step without that part would be; what a CPU computes beside a GPU is not in them.
On a CPU they are of the ranges' wall time.
"""

from __future__ import annotations

import json
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from lab.engines.local import LocalEngine
from lab.errors import GapError
from lab.measure.text import Corpus
from lab.metrics import METRICS
from lab.models import Model
from lab.record import Measurement, Status

SHARES = ("decode_experts_share", "prefill_experts_share")
"""The metrics measured here; the other components' shares are their details."""
PROMPT = 512
STEPS = 8
"""Decode steps in the trace, after as many that warm up."""
RANGE = "lab/"
WHOLE = "whole"
OTHER, TRANSFERS = "other", "transfers"
WEAK = "?"
LEAST_ATTRIBUTED = 0.95
"""Of the device's time, what must lie in the passes: kernels that the trace cannot place would silently count as nobody's."""
TARGETS = (
    ("lab.models.qwen4_exp.hyper", "HyperMixer.__call__", "hyper_connections"),
    ("lab.models.qwen4_exp.model", "write_back", "hyper_connections"),
    ("lab.models.qwen4_exp.step", "StepMixer.__call__", "hyper_connections"),
    ("lab.models.qwen4_exp.delta", "GatedDelta.__call__", "gdn"),
    ("lab.models.qwen4_exp.step", "StepDelta.__call__", "gdn"),
    ("lab.models.qwen4_exp.sparse_attention", "SparseAttention.__call__", "attention"),
    ("lab.models.qwen4_exp.step", "StepAttention.__call__", "attention"),
    ("lab.models.qwen4_exp.ngram", "NGramInjection.__call__", "ngram"),
    ("lab.models.qwen4_exp.step", "DecodeStep._inject", "ngram"),
    ("lab.models.qwen4_exp.step", "DecodeStep._ahead", "prefetch"),
    ("lab.models.qwen4_exp.chain", "ChainMixer.__call__", "hyper_connections"),
    ("lab.models.qwen4_exp.chain", "ChainDelta.__call__", "gdn"),
    ("lab.models.qwen4_exp.chain", "ChainAttention.__call__", "attention"),
    ("lab.models.qwen4_exp.chain", "ChainOut.__call__", "outputs"),
    ("lab.models.qwen4_exp.injection_step", "StepInjection.__call__", "ngram"),
    ("lab.models.qwen4_exp.chain", "ChainStep._start", "embedding"),
    ("lab.models.qwen4_exp.chain", "ChainMoe.__call__", "router_and_shared"),
    ("lab.kernels.moe_step", "gate_up", "experts"),
    ("lab.kernels.moe_step", "down_back", "experts"),
    ("lab.kernels.project_step", "project", WEAK + "head"),
    ("lab.models.qwen4_exp.prompt", "PromptMixer.__call__", "hyper_connections"),
    ("lab.models.qwen4_exp.prompt", "norm_prompt", "hyper_connections"),
    ("lab.models.qwen4_exp.prompt", "PromptDelta.__call__", "gdn"),
    ("lab.models.qwen4_exp.prompt", "PromptAttention.__call__", "attention"),
    ("lab.models.qwen4_exp.prompt", "PromptNGram.__call__", "ngram"),
    ("lab.models.qwen4_exp.prompt", "PromptMoe.__call__", "router_and_shared"),
    ("lab.models.qwen4_exp.prompt", "slot_outputs", "experts"),
    ("lab.models.qwen4_exp.prompt", "sum_slots", "experts"),
    ("lab.models.qwen4_exp.moe", "SparseMoe.__call__", "router_and_shared"),
    ("lab.models.qwen4_exp.step", "StepMoe.__call__", "router_and_shared"),
    ("lab.ops", "PackedExperts.__call__", "experts"),
    ("lab.ops_gpu", "KernelExperts.__call__", "experts"),
    ("lab.ops_gpu_blocks", "BlockExperts.__call__", "experts"),
    ("lab.kernels.experts", "LowBitExperts.__call__", "experts"),
    ("lab.kernels.experts_bf16", "Bf16Experts.__call__", "experts"),
    ("lab.placement.tiered", "TieredExperts.__call__", "experts"),
    ("lab.placement.tiered", "TieredExperts.step", "experts"),
    ("lab.placement.tiered", "TieredExperts.bring", TRANSFERS),
    ("lab.placement.rooms", "Buffer.fill", TRANSFERS),
    ("lab.placement.cold", "ColdExperts.__call__", "experts"),
    ("lab.placement.cold", "ColdExperts.step", "experts"),
    ("lab.placement.cold", "copy_experts", TRANSFERS),
    ("lab.models.transformer.attention", "Attention.__call__", "attention"),
    ("lab.models.transformer.mlp", "DenseMlp.__call__", "mlp"),
    ("lab.models.transformer.mlp", "RoutedMlp.__call__", "router_and_shared"),
    ("lab.models.transformer.step", "StepAttention.__call__", "attention"),
    ("lab.models.transformer.step", "StepDense.__call__", "mlp"),
    ("lab.models.transformer.step", "StepRouted.__call__", "router_and_shared"),
)
"""(module, attribute path, component): the innermost range around a launch decides; a WEAK one only where it stands in no other part. `outputs` are the output
projections of both kinds of blocks with their write-back, one launch each in a chained step; there the experts' last launch writes back, too."""
_OF_MODEL = (("embed", "embedding"), ("head", "head"))


@dataclass
class Attributed:
    """Seconds and launches by component over all passes of a trace; `device_s` is the time of everything on the device, `kernels` the longest by name."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    launches: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    kernels: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    device_s: float = 0.0

    @property
    def whole_s(self) -> float:
        """Seconds of all components together."""
        return sum(self.seconds.values())


@contextmanager
def marked(model: Model) -> Iterator[None]:
    """Inside, every known part of any model runs in a range named after its component; everything is put back whatever happens."""
    held: list[tuple[Any, str, Any]] = []
    places = [(*_owner(module, path), component) for module, path, component in TARGETS]
    places += [(model, name, component) for name, component in _OF_MODEL]
    try:
        for owner, name, component in places:
            if owner is not None and (whole := getattr(owner, name, None)) is not None:
                held.append((owner, name, vars(owner).get(name, whole)))
                setattr(owner, name, _in_range(RANGE + component, whole))
        yield
    finally:
        for owner, name, whole in reversed(held):
            setattr(owner, name, whole)


def _owner(module: str, path: str) -> tuple[Any, str]:
    """(what holds the attribute, its name); None where this version of the code has no such part."""
    owner: Any = import_module(module) if _importable(module) else None
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
    return owner, name


def _importable(module: str) -> bool:
    """Kernels need triton, which a machine without a GPU may lack."""
    try:
        import_module(module)
    except ImportError:
        return False
    return True


def _in_range(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return operation(*args, **kwargs)

    return run


def attribute(events: Iterable[Mapping[str, Any]], gpu: bool) -> Attributed:
    """The events of one of torch's traces (Chrome's format, times in microseconds), each device operation given to the range that launched it."""
    known = [event for event in events if event.get("ph") == "X"]
    ranges: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for event in known:
        if event.get("cat") == "user_annotation" and event["name"].startswith(RANGE):
            ranges[event["tid"]].append(event)
    found = Attributed()
    if not gpu:
        for own in ranges.values():
            for component, seconds in _exclusive(own):
                found.seconds[component] += seconds
                found.launches[component] += 1
        return found
    launched_at = {
        event["args"]["correlation"]: event
        for event in known
        if event.get("cat") in ("cuda_runtime", "cuda_driver", "hip_runtime") and "correlation" in event.get("args", {})
    }
    work = [event for event in known if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    launches = [(launched_at.get(event.get("args", {}).get("correlation")), event) for event in work]
    places = _innermost(ranges, [launch for launch, _ in launches if launch is not None])
    for launch, event in launches:
        seconds = event["dur"] / 1e6
        found.device_s += seconds
        if launch is not None and id(launch) in places:
            component = TRANSFERS if _over_the_bus(event["name"]) else places[id(launch)]
            found.seconds[component] += seconds
            found.launches[component] += 1
            found.kernels[component, event["name"]] += seconds
    return found


def _over_the_bus(name: str) -> bool:
    return any(word in name for word in ("HtoD", "DtoH", "HostToDevice", "DeviceToHost"))


def _component(name: str) -> str:
    return OTHER if name == RANGE + WHOLE else name.removeprefix(RANGE).removeprefix(WEAK)


def _deciding(around: list[str]) -> str:
    """Of the ranges around a launch, outermost first, the one that it belongs to."""
    strong = [name for name in around if not name.startswith(RANGE + WEAK)]
    return strong[-1] if strong and strong[-1] != RANGE + WHOLE else around[-1]


def _innermost(ranges: Mapping[Any, list[Mapping[str, Any]]], launches: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    """The component of the innermost range around each launch, by the event's id; launches outside every range are left out."""
    points: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for launch in launches:
        points[launch["tid"]].append(launch)
    found = {}
    for thread, own in points.items():
        waiting = sorted(ranges.get(thread, ()), key=lambda event: (event["ts"], -event["dur"]))
        stack, at = [], 0
        for launch in sorted(own, key=lambda event: event["ts"]):
            while at < len(waiting) and waiting[at]["ts"] <= launch["ts"]:
                stack.append(waiting[at])
                at += 1
            stack = [event for event in stack if event["ts"] + event["dur"] >= launch["ts"]]
            if stack:
                found[id(launch)] = _component(_deciding([event["name"] for event in stack]))
    return found


def _exclusive(ranges: list[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """(component, seconds of the range without those inside it)."""
    inner: list[list[Any]] = []
    for event in sorted(ranges, key=lambda event: (event["ts"], -event["dur"])):
        while inner and inner[-1][0]["ts"] + inner[-1][0]["dur"] <= event["ts"]:
            done, own = inner.pop()
            yield _component(done["name"]), own / 1e6
        if inner:
            inner[-1][1] -= event["dur"]
        inner.append([event, event["dur"]])
    for done, own in inner:
        yield _component(done["name"]), own / 1e6


def traced(run: Callable[[], object], device: torch.device) -> Attributed:
    """What `run` did, by component. Raises GapError where the trace shows no time, or too little of the device's time in the passes."""
    gpu = device.type == "cuda"
    if gpu:
        torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as profiler:
        run()
        if gpu:
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        try:
            events = json.loads(file.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
        except (ValueError, KeyError) as error:
            raise GapError(Status.INFRA, f"torch's trace cannot be read ({error!r})") from None
    found = attribute(events, gpu)
    if not found.whole_s:
        raise GapError(Status.UNSUPPORTED, "torch's trace shows no time in the run")
    if gpu and found.whole_s < LEAST_ATTRIBUTED * found.device_s:
        raise GapError(
            Status.UNSUPPORTED, f"torch's trace puts {found.whole_s / found.device_s:.0%} of the device's time into the passes: launches are not linked"
        )
    return found


@torch.no_grad()
def component_shares(engine: LocalEngine, corpus: Corpus) -> dict[str, Measurement]:
    """Both metrics, over one prompt of PROMPT tokens and STEPS steps after it. Its work is counted for no token. Raises GapError where nothing can be told."""
    text = corpus.prompts(1, PROMPT + 2 * STEPS).to(engine.device)
    state = engine.model.new_state(1, PROMPT + 2 * STEPS, engine.device, engine.dtype)
    step = engine.graphs.plain_step()
    position = torch.tensor([PROMPT], dtype=torch.int32, device=engine.device)

    def prefill(into: Any) -> None:
        with record_function(RANGE + WHOLE):
            engine.plain_logits(text[:, :PROMPT], into, True)

    def decode(start: int) -> None:
        for at in range(PROMPT + start, PROMPT + start + STEPS):
            with record_function(RANGE + WHOLE):
                if step is None:
                    engine.plain_logits(text[:, at : at + 1], state, True)
                else:
                    step(text[:, at : at + 1], state, position)
            if step is not None:
                state.length += 1
                position.add_(1)

    with engine.counters.recording(), marked(engine.model):
        prefill(engine.model.new_state(1, PROMPT, engine.device, engine.dtype))
        prompt = traced(lambda: prefill(state), engine.device)
        decode(0)
        steps = traced(lambda: decode(STEPS), engine.device)
    how = "the decode step's kernels, launched operation by operation" if step is not None else "the plain forward code"
    return {
        "decode_experts_share": _measured("decode_experts_share", steps, engine, {"tokens": STEPS, "context_tokens": PROMPT, "launched": how}),
        "prefill_experts_share": _measured(
            "prefill_experts_share", prompt, engine, {"tokens": PROMPT, "context_tokens": 0, "launched": "the plain forward code"}
        ),
    }


def _measured(name: str, found: Attributed, engine: LocalEngine, around: dict[str, Any]) -> Measurement:
    passes = around["tokens"] if name.startswith("decode") else 1
    ordered = sorted(found.seconds.items(), key=lambda item: -item[1])
    longest = sorted(found.kernels.items(), key=lambda item: -item[1])[:12]
    details = {
        "definition": "time in the routed experts / time of all components, over the passes",
        "time": "sum of the kernels' own times; two streams may overlap"
        if engine.device.type == "cuda"
        else "wall time of the ranges, the profiler's cost included",
        **around,
        "share_by_component": {component: seconds / found.whole_s for component, seconds in ordered},
        "us_per_pass": {component: 1e6 * seconds / passes for component, seconds in ordered},
        "launches_per_pass": {component: found.launches[component] / passes for component, _ in ordered},
        "longest_us_per_pass": [[component, kernel[:80], 1e6 * seconds / passes] for (component, kernel), seconds in longest],
        "attributed": found.whole_s / found.device_s if found.device_s else 1.0,
    }
    known = METRICS[name]
    return Measurement(value=found.seconds.get("experts", 0.0) / found.whole_s, unit=known.unit, protocol=known.protocol, details=details)
