"""Prompts and contexts that a bench asks for: which passes they make, what is counted in each, and that a bench without them stays what it was."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.admission import decide
from lab.cell import BenchSpec
from lab.compose import compose_cells
from lab.counters import Counters
from lab.errors import LabError
from lab.measure import wide
from lab.measure.text import Corpus
from lab.measure.wide import Pass, measure, owed, passes
from lab.metrics import METRICS, WIDE
from lab.models.qwen4_exp.config import from_file
from lab.models.qwen4_exp.model import ModelState
from lab.project import Project
from lab.record import Measurement, Status, WorkerResult
from tests.matrix_helpers import cell, measured

ROOT = Path(__file__).parents[2]
BOUNDS = {"read_bytes_s": 1e9, "flops_s": 1e12}
SMALL: dict[str, Any] = {"name": "b", "ppl_context": 8, "ppl_stride": 4, "ppl_windows": 1, "warmup": 1, "repeats": 5, "timeout_s": 9}


@dataclasses.dataclass
class FakeState:
    capacity: int
    length: int = 0

    def nbytes(self) -> int:
        return 100 * self.capacity

    def read_bytes(self) -> float:
        return 100.0 * self.length


class FakeEngine:
    """Reads 1,000 bytes and computes 10 operations for each row; keeps what it was asked for."""

    device, dtype, vector_bytes = torch.device("cpu"), torch.float32, 7

    def __init__(self) -> None:
        self.counters, self.calls, self.states = Counters(), list[tuple[int, ...]](), list[FakeState]()

    def new_state(self, batch: int, capacity: int) -> FakeState:
        self.states.append(FakeState(capacity))
        return self.states[-1]

    def logits(self, ids: Tensor, state: Any = None, last_only: bool = False) -> Tensor:
        assert state.length + ids.shape[1] <= state.capacity and last_only
        state.length += ids.shape[1]
        self.calls.append(tuple(ids.shape))
        self.counters.add((None, "embed", "bf16", "cpu"), ids.numel(), 0, 0)
        self.counters.add((0, "trunk", "bf16", "cpu"), ids.numel(), 1000, 10 * ids.numel())
        return torch.zeros(ids.shape[0], 1, 3)

    def synchronise(self) -> None:
        return None


def text(tokens: int) -> Corpus:
    return Corpus(torch.arange(tokens) % 11, None, {"name": "t", "tokens": tokens})


def test_the_h200_bench_asks_for_every_wide_metric_once_and_the_usual_ones_stay_where_they_are() -> None:
    bench = compose_cells(["model=nano", "device=cpu", "bench=h200"], Project(root=ROOT, runs=ROOT / "runs"))[0].bench
    assert sorted(owed(bench)) == sorted(WIDE) and len(set(WIDE)) == 9
    assert not {"pp512_tok_s", "tg128_tok_s", "agg4_tg128_tok_s"} & set(WIDE)
    assert [(one.lanes, one.tokens) for one in passes(bench)] == [(1, 0), (1, 2048), (1, 4096), (4, 0), (4, 512), (4, 2048), (4, 4096)]
    assert passes(bench)[4] == Pass(4, 512, prefill=True, decode=False, room=640), "four sequences from 512 tokens are agg@1's"
    assert [one.room for one in passes(bench)] == [640, 4224, 4224, 640, 640, 4224, 4224], "a step is prepared for two sizes of state, not for six"
    assert all(METRICS[name].optional for name in WIDE)
    alone = compose_cells(["model=nano", "device=cpu", "bench=h200_tier"], Project(root=ROOT, runs=ROOT / "runs"))[0].bench
    assert {one.lanes for one in passes(alone)} == {1} and set(owed(alone)) == {name for name in WIDE if not name.startswith("agg4")}
    assert {**bench.model_dump(), "name": "", "wide_lanes": ()} == {**alone.model_dump(), "name": "", "wide_lanes": ()}


def test_a_bench_without_wide_passes_has_the_identity_it_had_and_owes_nothing() -> None:
    plain = BenchSpec(**SMALL)
    assert passes(plain) == () and owed(plain) == ()
    known = cell().model_copy(update={"bench": plain})
    asking = known.model_copy(update={"bench": plain.model_copy(update={"decode_depths": (0,)})})
    assert set(known.identity()["bench"]) == {"name", "ppl_context", "ppl_stride", "ppl_windows", "warmup", "repeats"}
    assert known.hash != asking.hash


def test_a_size_without_a_metric_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"bench.prefill_tokens: 1024 is not measured; choose from 512, 2048, 4096"):
        BenchSpec(**SMALL, prefill_tokens=(512, 1024))


def test_one_pass_prefills_once_and_decodes_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide, "DECODE", 20)
    engine = FakeEngine()
    found = measure(engine, text(3000), Pass(4, 64, prefill=True, decode=True, room=90), 1, 5, BOUNDS)
    assert list(found) == ["agg4_pp64_tok_s", "agg4_tg128_d64_tok_s"]
    prompts, steps = [shape for shape in engine.calls if shape[1] > 1], [shape for shape in engine.calls if shape[1] == 1]
    assert prompts == [(4, 64)] * 6 and steps == [(4, 1)] * (wide.WARM_STEPS + 5 * 20)
    assert {state.capacity for state in engine.states} == {90} and len(engine.states) == 6
    prefill, decode = found.values()
    assert len(prefill.samples) == len(decode.samples) == 5
    assert (prefill.details["requested_tokens"], prefill.details["realised_tokens"]) == (256, 256)
    assert (decode.details["requested_tokens"], decode.details["realised_tokens"]) == (80, 80)
    assert prefill.details["flops_per_token"] == 10 and decode.details["context_tokens"] == 64
    # 1,000 bytes of weights a step, the small parameters, and the state's mean from 64 to 84 tokens.
    assert decode.details["bytes_per_step"] == 1000 + 7 + 7400
    assert prefill.details["roofline_tok_s"] == 256 / max(2560 / 1e12, 1007 / 1e9)
    assert decode.roofline_pct is None, "so few bytes may lie in a CPU's cache"


@pytest.fixture(autouse=True)
def _metrics_of_small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, like in (("agg4_pp64_tok_s", "agg4_pp512_tok_s"), ("agg4_tg128_d64_tok_s", "agg4_tg128_d0_tok_s")):
        monkeypatch.setitem(METRICS, name, dataclasses.replace(METRICS[like], name=name))


def test_an_empty_context_is_not_prefilled_and_a_text_that_wraps_says_so() -> None:
    engine = FakeEngine()
    (found,) = measure(engine, text(3000), Pass(1, 0, prefill=False, decode=True, room=128), 1, 5, None).values()
    assert set(engine.calls) == {(1, 1)} and found.details["text_cycled"] is False and found.roofline_pct is None
    (found,) = measure(FakeEngine(), text(700), Pass(1, 0, prefill=False, decode=True, room=128), 1, 5, None).values()
    assert found.details["text_cycled"] is True
    with pytest.raises(LabError, match="too few for prompts of 4096"):
        measure(FakeEngine(), text(700), Pass(1, 4096, prefill=True, decode=False, room=4224), 1, 5, None)


def test_nanos_text_holds_every_sequence_of_the_h200_bench() -> None:
    """147,750 tokens; the longest pass takes 6 x 4 sequences of 4,224."""
    longest = max(6 * one.lanes * (one.tokens + 128) for one in passes(BenchSpec(**SMALL, prefill_tokens=(4096,), decode_depths=(0, 4096))))
    assert longest + 4224 < 147_750


def test_a_state_reads_of_keys_and_values_what_the_indexer_may_choose() -> None:
    config = from_file(ROOT / "experiments" / "nano" / "config.json")
    state = ModelState(config, 2, 400, torch.device("cpu"), torch.float32)
    state.length = config.indexer_budget + config.indexer_block
    assert state.chosen_bytes() == state.read_bytes()
    at_choice, state.length = state.chosen_bytes(), 400
    per_token = sum(config.is_sparse) * 2 * 4 * config.indexer_head_dim
    assert state.chosen_bytes() == pytest.approx(at_choice + per_token * (400 - config.indexer_budget - config.indexer_block))


def test_four_sequences_below_one_are_implausible_at_every_depth() -> None:
    metrics: dict[str, Measurement] = {
        "tg128_d4096_tok_s": measured("tg128_d4096_tok_s", 100.0),
        "agg4_tg128_d4096_tok_s": measured("agg4_tg128_d4096_tok_s", 60.0),
    }
    decision = decide(cell(), WorkerResult(status=Status.OK, metrics=metrics), lambda *_: [])
    assert decision.gaps["agg4_tg128_d4096_tok_s"][0] is Status.IMPLAUSIBLE and "tg128_d4096_tok_s" in decision.metrics
