"""Speed over prompts and contexts that a bench asks for beside the usual ones: `pp/wide@1` and `tg/wide@1`, one sequence and four.

Why beside `pp@1` and `tg@1`: those have one size each, and a long prompt, an empty context and a deep one load a model differently. One pass prefills a
prompt and decodes from it, so that a deep context is made once and not twice; both clocks run as in lab.measure.throughput: stopped with the device idle,
the text's own next tokens fed, other text each repeat. It warms up with whole prompts and fewer steps. Decoding at one depth says nothing about another.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.cell import BenchSpec
from lab.counters import Tally
from lab.measure.text import Corpus
from lab.measure.throughput import DECODE, PREFILL, WARM, Bounds, Engine, decode_bound, measured, timed_steps
from lab.measure.tiers import Carried
from lab.metrics import decode_metric, prefill_metric
from lab.models import State
from lab.record import Measurement

WARM_STEPS = 16
"""Decode steps of a run that is not measured: a step's shapes are the same at every position."""


@dataclass(frozen=True)
class Pass:
    """`lanes` sequences of `tokens` tokens: prefilled, and decoded from, where the bench asks for it and nothing else measures it."""

    lanes: int
    tokens: int
    prefill: bool
    decode: bool
    room: int
    """Tokens that the state has room for: few different numbers, because an engine prepares a step for each (lab.engines.graphs)."""

    @property
    def names(self) -> tuple[str, ...]:
        """The metrics that the pass measures."""
        prefill = (prefill_metric(self.lanes, self.tokens),) if self.prefill else ()
        return (*prefill, *((decode_metric(self.lanes, self.tokens),) if self.decode else ()))


def passes(bench: BenchSpec) -> tuple[Pass, ...]:
    """What the bench asks for beyond `pp@1`, `tg@1` and `agg@1`; short before long, one sequence before four."""
    found = []
    sizes = sorted({*bench.prefill_tokens, *bench.decode_depths})
    for lanes in bench.wide_lanes:
        for tokens in sizes:
            prefill = tokens in bench.prefill_tokens and (lanes, tokens) != (1, PREFILL)
            decode = tokens in bench.decode_depths and tokens != PREFILL
            if prefill or decode:
                found.append(Pass(lanes, tokens, prefill, decode, (PREFILL if tokens <= PREFILL else sizes[-1]) + DECODE))
    return tuple(found)


def owed(bench: BenchSpec) -> tuple[str, ...]:
    """The metrics of all passes."""
    return tuple(name for one in passes(bench) for name in one.names)


@dataclass
class _Run:
    """One run of a pass: seconds and counts of the prompt, then of the steps."""

    prefill_s: float
    prompt: Tally
    prompt_rows: int
    decode_s: float = 0.0
    steps_s: tuple[float, ...] = ()
    step_bytes: float = 0.0
    step_rows: int = 0
    launched: str = ""


def measure(engine: Engine, corpus: Corpus, wanted: Pass, warmup: int, repeats: int, bounds: Bounds) -> dict[str, Measurement]:
    """The pass's metrics. Raises LabError where the text is too short for one such sequence."""
    over_prompt, over_steps = Carried(engine), Carried(engine)
    texts = enumerate(_texts(corpus, wanted, warmup + repeats))
    runs = [_run(engine, text, wanted, run >= warmup, over_prompt, over_steps) for run, text in texts][warmup:]
    shape = {
        "lanes": wanted.lanes,
        "warmup": warmup,
        "cache_state": WARM,
        "state_tokens": wanted.room,
        "text_cycled": bool((warmup + repeats) * wanted.lanes * _length(wanted) > len(corpus.ids)),
    }
    found = {}
    if wanted.prefill:
        name = prefill_metric(wanted.lanes, wanted.tokens)
        found[name] = _prefill(name, engine, wanted, runs, bounds, shape, over_prompt)
    if wanted.decode:
        name = decode_metric(wanted.lanes, wanted.tokens)
        found[name] = _decode(name, engine, wanted, runs, bounds, shape, over_steps)
    return found


def _length(wanted: Pass) -> int:
    return wanted.tokens + (DECODE if wanted.decode else 0)


def _texts(corpus: Corpus, wanted: Pass, runs: int) -> Iterator[Tensor]:
    for run in range(runs):
        yield corpus.prompts(wanted.lanes, _length(wanted), offset=run * wanted.lanes)


def _run(engine: Engine, text: Tensor, wanted: Pass, counts: bool, over_prompt: Carried, over_steps: Carried) -> _Run:
    state, rows = engine.new_state(wanted.lanes, wanted.room), engine.counters.rows
    before, steps = rows("embed"), DECODE if counts else WARM_STEPS
    with engine.counters.span() as prompt, over_prompt.over(1, counts and wanted.prefill):
        engine.synchronise()
        started = time.perf_counter()
        if wanted.tokens:
            engine.logits(text[:, : wanted.tokens], state, last_only=True)
        engine.synchronise()
        elapsed = time.perf_counter() - started
    run = _Run(elapsed, prompt, rows("embed") - before)
    if wanted.decode:
        before, state_bytes = rows("embed"), _state_bytes(state)
        with engine.counters.span() as read, over_steps.over(steps, counts):
            run.decode_s, times = timed_steps(engine, text, state, wanted.tokens, steps)
        run.steps_s, run.step_rows = tuple(times), rows("embed") - before
        # The state grows evenly from step to step, so its mean is that of both ends.
        run.step_bytes = read.weight_bytes / steps + engine.vector_bytes + (state_bytes + _state_bytes(state)) / 2
        run.launched = "as a captured graph" if getattr(state, "graph", None) is not None else "operation by operation"
    return run


def _state_bytes(state: State) -> float:
    """Bytes of state that a step has to read: of keys and values what sparse attention may choose at most, where the model says so."""
    chosen = getattr(state, "chosen_bytes", None)
    return float(state.read_bytes() if chosen is None else chosen())


def _prefill(name: str, engine: Engine, wanted: Pass, runs: list[_Run], bounds: Bounds, shape: dict[str, Any], carried: Carried) -> Measurement:
    """The roofline is the slowest of arithmetic, one read of the weights used and what crosses the bus, as in pp@1. Of arithmetic only products count."""
    tokens, read = wanted.lanes * wanted.tokens, runs[-1].prompt
    details = {"requested_tokens": tokens, "realised_tokens": runs[-1].prompt_rows, "prompt_tokens": wanted.tokens, **shape}
    details |= {"flops_per_token": read.flops / tokens, **carried.details(bounds)}
    bound = None
    if bounds is not None:
        least = read.flops / bounds["flops_s"], (read.weight_bytes + engine.vector_bytes) / bounds["read_bytes_s"], carried.least_s(bounds)
        bound = tokens / max(least)
    return measured(name, [tokens / run.prefill_s for run in runs], bound, details)


def _decode(name: str, engine: Engine, wanted: Pass, runs: list[_Run], bounds: Bounds, shape: dict[str, Any], carried: Carried) -> Measurement:
    steps = torch.tensor([1e3 * t for run in runs for t in run.steps_s], dtype=torch.float64).quantile(torch.tensor([0.5, 0.95], dtype=torch.float64))
    step_bytes = runs[-1].step_bytes
    details = {
        "requested_tokens": wanted.lanes * DECODE,
        "realised_tokens": runs[-1].step_rows,
        "context_tokens": wanted.tokens,
        **shape,
        "warm_steps": WARM_STEPS,
        "step_ms_p50": float(steps[0]),
        "step_ms_p95": float(steps[1]),
        "bytes_per_step": step_bytes,
        "launched": runs[-1].launched,
        "fed": "the text's own next token; the greedy choice is computed inside the step",
        **carried.details(bounds),
    }
    bound = decode_bound(step_bytes, wanted.lanes, bounds, engine.device.type == "cpu", carried.least_s(bounds))
    return measured(name, [wanted.lanes * DECODE / run.decode_s for run in runs], bound, details)
