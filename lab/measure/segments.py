"""Where the time of a run goes, protocol `segments@1`: matrix products against everything else, from torch's trace of a run of its own.

Why a run of its own: the profiler slows every operation down, so none of its times is a speed. A range is put around each product by replacing the
operation for the length of the run; where decoding replays a captured step, the products are that step's, launched one by one. On a GPU a range's time is
that of the kernels launched in it, linked by the trace's correlation numbers (`lab.measure.shares`), on a CPU its wall time; idle gaps between kernels
count for nothing. Kestrel's own segments (VLLM_CUDA_PROF) are not published, so shares of the two do not compare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from lab.engines.local import LocalEngine
from lab.measure.products import products, stacked_products
from lab.measure.shares import RANGE, WHOLE, Attributed, traced
from lab.measure.text import Corpus
from lab.measure.throughput import DECODE, PREFILL
from lab.metrics import METRICS
from lab.models import Model
from lab.record import Measurement

STEPS = 32
"""Decode steps profiled; their time counts DECODE / STEPS times. All of them would be half a million events in a large model."""


@contextmanager
def marked(model: Model, step: Any = None) -> Iterator[None]:
    """Inside, every product of the model, and of its decode step, runs in a range named after its kind. The operations are put back whatever happens."""
    places = [(product.owner, product.attribute, product.kind) for product in products(model)]
    places += [(holder, attribute, kind) for holder, attribute, kind, _, _ in stacked_products(step)]
    held = [(owner, attribute, getattr(owner, attribute)) for owner, attribute, _ in places]
    try:
        for (owner, attribute, kind), (_, _, operation) in zip(places, held, strict=True):
            setattr(owner, attribute, _in_range(f"{RANGE}{kind}", operation))
        yield
    finally:
        for owner, attribute, operation in held:
            setattr(owner, attribute, operation)


def _in_range(name: str, operation: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with record_function(name):
            return operation(x)

    return run


@torch.no_grad()
def gemm_share(engine: LocalEngine, corpus: Corpus) -> Measurement:
    """gemm_share over a prefill of PREFILL tokens and DECODE steps after it, after one run that warms up. Raises GapError where the trace cannot tell."""
    text = corpus.prompts(1, PREFILL + STEPS).to(engine.device)
    step = engine.graphs.plain_step()

    def new_state() -> Any:
        return engine.model.new_state(1, PREFILL + STEPS, engine.device, engine.dtype)

    def prefill(state: Any) -> None:
        with record_function(RANGE + WHOLE):
            engine.plain_logits(text[:, :PREFILL], state, True)

    def decode(state: Any) -> None:
        position = torch.tensor([PREFILL], dtype=torch.int32, device=engine.device)
        for at in range(PREFILL, PREFILL + STEPS):
            with record_function(RANGE + WHOLE):
                if step is None:
                    engine.plain_logits(text[:, at : at + 1], state, True)
                else:
                    step(text[:, at : at + 1], state, position)
            position += step is not None

    with marked(engine.model, step):
        prefill(warm := new_state())
        decode(warm)
        state = new_state()
        phases = {"prefill": traced(lambda: prefill(state), engine.device), "decode": traced(lambda: decode(state), engine.device)}
    return _measured(phases, engine.device, step)


def _measured(phases: dict[str, Attributed], device: torch.device, step: Any) -> Measurement:
    times = {"prefill": 1.0, "decode": DECODE / STEPS}
    seconds = {phase: {kind: times[phase] * s for kind, s in found.seconds.items()} for phase, found in phases.items()}
    whole = {phase: sum(own.values()) for phase, own in seconds.items()}
    in_products = {phase: sum(own.get(kind, 0.0) for kind in ("attention", "mlp", "head")) for phase, own in seconds.items()}
    details = {
        "definition": f"time in matrix products / time of the forward passes, over {PREFILL} tokens prefilled and {DECODE} steps ({STEPS} profiled)",
        "time": "of the kernels on the device" if device.type == "cuda" else "wall time of the ranges; the profiler's own cost counts as other",
        "share_by_phase": {phase: in_products[phase] / whole[phase] for phase in phases},
        "seconds_by_phase": seconds,
        "decode": "the plain forward code" if step is None else "the kernels of the captured step, launched one by one",
        "attributed": {phase: found.whole_s / found.device_s for phase, found in phases.items() if found.device_s},
        "products": "decoding of the weights included; attention's scores and sums are not among them",
    }
    known = METRICS["gemm_share"]
    return Measurement(value=sum(in_products.values()) / sum(whole.values()), unit=known.unit, protocol=known.protocol, details=details)
