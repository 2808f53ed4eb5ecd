"""Speed on real text: `pp@1` (prefill), `tg@1` (decode of one sequence), `agg@1` (decode of four together).

Prefill: 512 tokens into an empty state, clock stopped when the last token's logits are there. Decode: from a 512-token context, 128 steps, each timed by
itself with the device idle at both ends and the next-token choice taken inside; the token fed next is the text's own, so that routers see text and not a
loop. Four sequences share one wall clock and count total tokens. Warm-up runs cover the same shapes; every repeat has other prompts; all samples are kept.
"""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
from torch import Tensor

from lab.counters import Counters, Tally
from lab.measure.text import Corpus
from lab.metrics import METRICS
from lab.models.qwen4_exp.model import ModelState
from lab.record import Measurement

PREFILL = 512
DECODE = 128
LANES = 4


class Engine(Protocol):
    """What speed is measured on."""

    counters: Counters

    def new_state(self, batch: int, capacity: int) -> ModelState:
        """An empty state."""

    def logits(self, ids: Tensor, state: ModelState | None = None, last_only: bool = False) -> Tensor:
        """One forward pass."""

    def synchronise(self) -> None:
        """Waits for the device."""


def prefill_rate(engine: Engine, corpus: Corpus, warmup: int, repeats: int, bounds: dict[str, Any]) -> Measurement:
    """pp512_tok_s. `bounds` as from `machine_bounds`; the roofline is the slower of arithmetic and one read of the weights used."""
    samples, realised = [], 0
    for run in range(warmup + repeats):
        prompt = corpus.prompts(1, PREFILL, offset=run)
        state = engine.new_state(1, PREFILL)
        engine.synchronise()
        started = time.perf_counter()
        engine.logits(prompt, state, last_only=True)
        engine.synchronise()
        elapsed = time.perf_counter() - started
        if run >= warmup:
            samples.append(PREFILL / elapsed)
            realised = state.length
    with engine.counters.span() as read:
        engine.logits(corpus.prompts(1, PREFILL), engine.new_state(1, PREFILL), last_only=True)
    bound = PREFILL / max(read.flops / bounds["flops_s"], read.weight_bytes / bounds["read_bytes_s"])
    return _measured(
        "pp512_tok_s",
        samples,
        bound,
        {
            "requested_tokens": PREFILL,
            "realised_tokens": realised,
            "warmup": warmup,
            "cache": "empty state each repeat, other text each repeat",
            "flops_per_token": read.flops / PREFILL,
            "roofline_tok_s": bound,
        },
    )


def decode_rate(engine: Engine, corpus: Corpus, lanes: int, warmup: int, repeats: int, bounds: dict[str, Any]) -> tuple[Measurement, Measurement]:
    """(tokens per second over all `lanes` sequences, bytes read per token). Roofline: the counted weight and state bytes over read bandwidth."""
    samples, steps_ms, realised, step_bytes = [], [], 0, 0.0
    for run in range(warmup + repeats):
        text = corpus.prompts(lanes, PREFILL + DECODE, offset=run * lanes)
        state = engine.new_state(lanes, PREFILL + DECODE)
        engine.logits(text[:, :PREFILL], state, last_only=True)
        with engine.counters.span() as read:
            times = _timed_steps(engine, text, state)
        if run >= warmup:
            samples.append(lanes * DECODE / sum(times))
            steps_ms += [1e3 * t for t in times]
            realised = lanes * (state.length - PREFILL)
            step_bytes = _step_bytes(read, state)
    bound = lanes * bounds["read_bytes_s"] / step_bytes
    quantiles = torch.tensor(steps_ms, dtype=torch.float64).quantile(torch.tensor([0.5, 0.95], dtype=torch.float64))
    details = {
        "requested_tokens": lanes * DECODE,
        "realised_tokens": realised,
        "lanes": lanes,
        "context_tokens": PREFILL,
        "warmup": warmup,
        "step_ms_p50": float(quantiles[0]),
        "step_ms_p95": float(quantiles[1]),
        "roofline_tok_s": bound,
        "bytes_per_step": step_bytes,
        "fed": "the text's own next token; the greedy choice is computed inside the step",
    }
    rate = _measured("tg128_tok_s" if lanes == 1 else "agg4_tg128_tok_s", samples, bound, details)
    known = METRICS["decode_bytes_per_token"]
    return rate, Measurement(value=step_bytes / lanes, unit=known.unit, protocol=known.protocol, details={"lanes": lanes, "context_tokens": PREFILL})


def _timed_steps(engine: Engine, text: Tensor, state: ModelState) -> list[float]:
    """Seconds of each of the DECODE steps."""
    times = []
    for position in range(PREFILL, PREFILL + DECODE):
        engine.synchronise()
        started = time.perf_counter()
        engine.logits(text[:, position : position + 1], state, last_only=True).argmax(-1)
        engine.synchronise()
        times.append(time.perf_counter() - started)
    return times


def _step_bytes(read: Tally, state: ModelState) -> float:
    """Mean bytes a step reads: counted weight bytes, and the state it carries."""
    return read.weight_bytes / DECODE + state.read_bytes()


def _measured(name: str, samples: list[float], bound: float, details: dict[str, Any]) -> Measurement:
    known = METRICS[name]
    result = Measurement.from_samples(samples, known.unit, known.protocol, details={**details, "repeats": len(samples)})
    return result.model_copy(update={"roofline_pct": 100 * result.value / bound})
