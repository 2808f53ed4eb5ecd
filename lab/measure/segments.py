"""Where the time of a run goes, protocol `segments@1`: matrix products against everything else, from torch's profiler, in a run of its own.

Why a run of its own: the profiler slows every operation down, so none of its times is a speed. A range is put around each product by replacing the model's
operation for the length of the run. On a GPU a range's time is that of the kernels launched in it, on a CPU its wall time; idle gaps between kernels
count for nothing. Kestrel's own segments (VLLM_CUDA_PROF) are not published, so shares of the two do not compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from lab.engines.local import LocalEngine
from lab.errors import GapError
from lab.measure.products import products
from lab.measure.text import Corpus
from lab.measure.throughput import DECODE, PREFILL
from lab.metrics import METRICS
from lab.models import Model
from lab.record import Measurement, Status

STEPS = 32
"""Decode steps profiled; their time counts DECODE / STEPS times. All of them would be half a million events in a large model."""
_RANGE = "lab/"
_WHOLE = f"{_RANGE}pass"
_LEAST_ATTRIBUTED = 0.95
"""Of the device's time, what must be linked to a pass: kernels that the profiler cannot place would silently count as no product."""


@contextmanager
def marked(model: Model) -> Iterator[None]:
    """Inside, every product of the model runs in a profiler range named after its kind. The operations are put back whatever happens."""
    held = [(product, getattr(product.owner, product.attribute)) for product in products(model)]
    try:
        for product, operation in held:
            setattr(product.owner, product.attribute, _in_range(f"{_RANGE}{product.kind}", operation))
        yield
    finally:
        for product, operation in held:
            setattr(product.owner, product.attribute, operation)


def _in_range(name: str, operation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with record_function(name):
            return operation(x)

    return run


def range_seconds(run: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Seconds in each of the lab's ranges while `run` runs. Raises GapError where the profiler saw no time, or a device's time outside the ranges."""
    gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]) as profiler:
        run()
        if gpu:
            torch.cuda.synchronize(device)
    return seconds_of(profiler.events() or (), gpu)


def seconds_of(events: Iterable[Any], gpu: bool) -> dict[str, float]:
    """The same from the profiler's events. A range also stands on the GPU's own timeline, where it is no work: only kernels, copies and fills count."""
    found: dict[str, float] = {}
    on_device = 0.0
    for event in events:
        ours, on_cpu = event.name.startswith(_RANGE), event.device_type.name == "CPU"
        if ours and on_cpu:
            found[event.name] = found.get(event.name, 0.0) + (_launched_us(event) if gpu else event.cpu_time_total) / 1e6
        elif not ours and not on_cpu:
            on_device += event.time_range.elapsed_us() / 1e6
    if not found.get(_WHOLE):
        raise GapError(Status.UNSUPPORTED, "torch's profiler saw no time in the run")
    if gpu and not _LEAST_ATTRIBUTED <= found[_WHOLE] / on_device <= 1 / _LEAST_ATTRIBUTED:
        raise GapError(
            Status.UNSUPPORTED, f"torch's profiler puts {found[_WHOLE] / on_device:.0%} of the device's time into the passes: launches are not linked"
        )
    return found


def _launched_us(event: Any) -> float:
    """Microseconds on the device of everything launched inside a range on the CPU."""
    own = sum(kernel.duration for kernel in event.kernels if not kernel.name.startswith(_RANGE))
    return float(own) + sum(_launched_us(child) for child in event.cpu_children)


def gemm_share(engine: LocalEngine, corpus: Corpus) -> Measurement:
    """gemm_share over a prefill of PREFILL tokens and DECODE steps after it, after one run that warms up. Raises GapError where the profiler cannot tell."""
    text = corpus.prompts(1, PREFILL + STEPS)

    def prefill(state: Any) -> None:
        with record_function(_WHOLE):
            engine.logits(text[:, :PREFILL], state, last_only=True)

    def decode(state: Any) -> None:
        for position in range(PREFILL, PREFILL + STEPS):
            with record_function(_WHOLE):
                engine.logits(text[:, position : position + 1], state, last_only=True)

    with marked(engine.model):
        warm = engine.new_state(1, PREFILL + STEPS)
        prefill(warm)
        decode(warm)
        state = engine.new_state(1, PREFILL + STEPS)
        phases = {"prefill": range_seconds(lambda: prefill(state), engine.device), "decode": range_seconds(lambda: decode(state), engine.device)}
    phases["decode"] = {name: seconds * DECODE / STEPS for name, seconds in phases["decode"].items()}
    return _measured(phases, engine.device)


def _measured(phases: dict[str, dict[str, float]], device: torch.device) -> Measurement:
    whole = sum(seconds[_WHOLE] for seconds in phases.values())
    in_products = {phase: sum(s for name, s in seconds.items() if name != _WHOLE) for phase, seconds in phases.items()}
    details = {
        "definition": f"time in matrix products / time of the forward passes, over {PREFILL} tokens prefilled and {DECODE} steps ({STEPS} profiled)",
        "time": "of the kernels on the device" if device.type == "cuda" else "wall time of the ranges; the profiler's own cost counts as other",
        "share_by_phase": {phase: in_products[phase] / seconds[_WHOLE] for phase, seconds in phases.items()},
        "seconds_by_phase": {phase: _segments(seconds) for phase, seconds in phases.items()},
        "products": "decoding of the weights included; attention's scores and sums are not among them",
    }
    known = METRICS["gemm_share"]
    return Measurement(value=sum(in_products.values()) / whole, unit=known.unit, protocol=known.protocol, details=details)


def _segments(seconds: dict[str, float]) -> dict[str, float]:
    """Seconds by kind of product, and what is left of the whole."""
    kinds = {name.removeprefix(_RANGE): value for name, value in seconds.items() if name != _WHOLE}
    return {**kinds, "other": seconds[_WHOLE] - sum(kinds.values())}
