"""Speed on real text: `pp@1` (prefill), `tg@1` (decode of one sequence), `agg@1` (decode of four together).

Prefill: 512 tokens into an empty state, clock stopped when the last token's logits are there. Decode: from a 512-token context, 128 steps over one wall
clock, the device idle at both ends of each step and the next-token choice taken inside; the token fed next is the text's own, so that routers see text
and not a loop. Four sequences share that clock and count total tokens. Realised tokens are counted where the engine looks up embeddings. Warm-up runs
cover the same shapes; every repeat has other prompts; all samples are kept.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
from torch import Tensor

from lab.counters import Counters
from lab.measure.text import Corpus
from lab.measure.tiers import Carried
from lab.metrics import METRICS
from lab.models import State
from lab.record import Measurement

PREFILL = 512
DECODE = 128
LANES = 4
WARM = "weights loaded, shapes warmed up; empty state and other text each repeat"
"""The cache state of every rate here. Numbers of another state are another condition, and are not compared with these."""

Bounds = dict[str, Any] | None
"""What `machine_bounds` found, or None where it could not be measured."""


class Engine(Protocol):
    """What speed is measured on."""

    counters: Counters
    device: torch.device
    dtype: torch.dtype
    """What it computes in."""

    @property
    def vector_bytes(self) -> int:
        """Bytes of small parameters that every forward pass reads."""

    def new_state(self, batch: int, capacity: int) -> State:
        """An empty state."""

    def logits(self, ids: Tensor, state: State | None = None, last_only: bool = False) -> Tensor:
        """One forward pass."""

    def synchronise(self) -> None:
        """Waits for the device."""


CACHEABLE_BYTES = 1 << 28
"""Fewer bytes than this may come from a processor's cache, which the measured bandwidth of the memory does not bound."""


def decode_bound(step_bytes: float, lanes: int, bounds: Bounds, on_cpu: bool, bus_s: float = 0.0) -> float | None:
    """Tokens per second at most when every step reads `step_bytes`, and the bus is busy for `bus_s` at the same time; None where there are no bounds, or
    where a CPU's cache may hold that much."""
    if bounds is None or (on_cpu and step_bytes < CACHEABLE_BYTES):
        return None
    return float(lanes / max(step_bytes / bounds["read_bytes_s"], bus_s))


def prefill_rate(engine: Engine, corpus: Corpus, warmup: int, repeats: int, bounds: Bounds) -> Measurement:
    """pp512_tok_s. The roofline is the slowest of arithmetic, one read of the weights used and what crosses the bus; without `bounds` there is none."""
    samples, realised, read = [], 0, engine.counters.totals()
    carried = Carried(engine)
    for run in range(warmup + repeats):
        prompt = corpus.prompts(1, PREFILL, offset=run)
        state = engine.new_state(1, PREFILL)
        before = engine.counters.rows("embed")
        with engine.counters.span() as read, carried.over(1, run >= warmup):  # noqa: F811 - the last repeat's counts are the ones used
            engine.synchronise()
            started = time.perf_counter()
            engine.logits(prompt, state, last_only=True)
            engine.synchronise()
            elapsed = time.perf_counter() - started
        realised = engine.counters.rows("embed") - before
        if run >= warmup:
            samples.append(PREFILL / elapsed)
    details = {
        "requested_tokens": PREFILL,
        "realised_tokens": realised,
        "warmup": warmup,
        "cache_state": WARM,
        "flops_per_token": read.flops / PREFILL,
        **carried.details(bounds),
    }
    bound = None
    if bounds is not None:
        least = read.flops / bounds["flops_s"], (read.weight_bytes + engine.vector_bytes) / bounds["read_bytes_s"], carried.least_s(bounds)
        bound = PREFILL / max(least)
    return measured("pp512_tok_s", samples, bound, details)


def decode_rate(engine: Engine, corpus: Corpus, lanes: int, warmup: int, repeats: int, bounds: Bounds) -> tuple[Measurement, Measurement]:
    """(tokens per second over all `lanes` sequences, bytes read per token). Roofline: the counted weight and state bytes over read bandwidth."""
    samples, steps_ms, realised, step_bytes = [], [], 0, 0.0
    carried = Carried(engine)
    for run in range(warmup + repeats):
        text = corpus.prompts(lanes, PREFILL + DECODE, offset=run * lanes)
        state = engine.new_state(lanes, PREFILL + DECODE)
        engine.logits(text[:, :PREFILL], state, last_only=True)
        before, state_bytes = engine.counters.rows("embed"), state.read_bytes()
        with engine.counters.span() as read, carried.over(DECODE, run >= warmup):
            elapsed, times = timed_steps(engine, text, state, PREFILL, DECODE)
        realised = engine.counters.rows("embed") - before
        # The state grows evenly from step to step, so its mean is that of both ends.
        step_bytes = read.weight_bytes / DECODE + engine.vector_bytes + (state_bytes + state.read_bytes()) / 2
        if run >= warmup:
            samples.append(lanes * DECODE / elapsed)
            steps_ms += [1e3 * t for t in times]
    quantiles = torch.tensor(steps_ms, dtype=torch.float64).quantile(torch.tensor([0.5, 0.95], dtype=torch.float64))
    details = {
        "requested_tokens": lanes * DECODE,
        "realised_tokens": realised,
        "lanes": lanes,
        "context_tokens": PREFILL,
        "warmup": warmup,
        "cache_state": WARM,
        "step_ms_p50": float(quantiles[0]),
        "step_ms_p95": float(quantiles[1]),
        "bytes_per_step": step_bytes,
        "fed": "the text's own next token; the greedy choice is computed inside the step",
        **carried.details(bounds),
    }
    bound = decode_bound(step_bytes, lanes, bounds, engine.device.type == "cpu", carried.least_s(bounds))
    rate = measured("tg128_tok_s" if lanes == 1 else "agg4_tg128_tok_s", samples, bound, details)
    known = METRICS["decode_bytes_per_token"]
    return rate, Measurement(value=step_bytes / lanes, unit=known.unit, protocol=known.protocol, details={"lanes": lanes, "context_tokens": PREFILL})


def timed_steps(engine: Engine, text: Tensor, state: State, start: int, steps: int) -> tuple[float, list[float]]:
    """(seconds from the first step's start to the last one's end, seconds of each of the `steps` steps from position `start` of the text)."""
    times = []
    engine.synchronise()
    first = started = time.perf_counter()
    for position in range(start, start + steps):
        engine.logits(text[:, position : position + 1], state, last_only=True).argmax(-1)
        engine.synchronise()
        ended = time.perf_counter()
        times.append(ended - started)
        started = ended
    return started - first, times


def measured(name: str, samples: list[float], bound: float | None, details: dict[str, Any]) -> Measurement:
    """A rate from its samples, with its share of `bound` (tokens per second at most)."""
    known = METRICS[name]
    result = Measurement.from_samples(samples, known.unit, known.protocol, details={**details, "repeats": len(samples), "roofline_tok_s": bound})
    return result if bound is None else result.model_copy(update={"roofline_pct": 100 * result.value / bound})
