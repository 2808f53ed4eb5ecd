"""What forbids setting two numbers against each other and what is only said beside them, and that every place that compares gives one answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.compare import compare_records
from lab.doubts import Rate, observations
from lab.errors import LabError
from lab.likeness import OF_THE_MACHINE, beside, contrast, unlike
from lab.matrix import build_matrix
from lab.record import Record
from lab.report.measured import compare_speeds
from lab.report.verdicts import judge
from tests.matrix_helpers import PROVENANCE, SMALL, cell, complete, compose, measured, record, small
from tests.report.support import EN

PP = "pp512_tok_s"
BASE = cell("reference", 6)
Change = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
"""What another record has instead: in its provenance, in its cell, in the details of its speed."""
FORBIDDING: dict[str, Change] = {
    "machine.cpu": ({"machine": {**PROVENANCE["machine"], "cpu": "Other CPU"}}, {}, {}),
    "machine.cores": ({"machine": {**PROVENANCE["machine"], "cores": 96}}, {}, {}),
    "torch": ({"packages": {"torch": "2.10.0"}}, {}, {}),
    "triton": ({"packages": {**PROVENANCE["packages"], "triton": "3.6"}}, {}, {}),
    "device.threads": ({}, {"device": {**BASE.device.model_dump(), "threads": 1}}, {}),
    "bench.repeats": ({}, {"bench": {**BASE.bench.model_dump(), "repeats": 9}}, {}),
    "cache_state": ({}, {}, {"cache_state": "cold"}),
}
SAID: dict[str, dict[str, Any]] = {
    "code": {"code_sha256": "beef" * 16},
    "env.OMP_NUM_THREADS": {"env": {"OMP_NUM_THREADS": "1"}},
    "machine_state.swap": {"machine_state": {"after": {"swap": {"state": "warn", "found": "3 GiB in use"}}}},
}
IDLE: dict[str, Change] = {
    "kernel": ({"machine": {**PROVENANCE["machine"], "system": "Linux 9", "memory_bytes": 1}}, {}, {}),
    "a GPU that a CPU cell does not use": ({"machine": {**PROVENANCE["machine"], "accelerators": ["H200"]}}, {}, {}),
    "time allowed": ({}, {"bench": {**BASE.bench.model_dump(), "timeout_s": 9.0}}, {}),
}


def made(path: str, change: Change = ({}, {}, {}), speed: float = 100.0, layers: int = 6) -> Record:
    """A complete record of the path, changed; its cell stays the one that the experiment expects, as its hash says."""
    provenance, of, details = change
    full = complete(cell(path, layers), 0.1, speed, provenance={**PROVENANCE, **provenance})
    metrics = {**full.metrics, PP: measured(PP, speed, details=details)}
    return full.model_copy(update={"cell": {**full.cell, **of}, "metrics": metrics})


@pytest.mark.parametrize("details", [{"chunks": 8}, {"bos": "id 1 first in every chunk"}, {"context": 2048}])
def test_how_a_perplexity_was_cut_forbids_the_comparison_and_what_the_bench_asked_of_another_does_not(details: dict[str, Any]) -> None:
    asked = {"bench": {**BASE.bench.model_dump(), "llama_half_chunks": 16}}
    assert unlike(made("reference"), made("fine", ({}, asked, {})), PP) == []
    assert [one.what for one in unlike(made("reference"), made("fine", ({}, asked, details)), PP)] == list(details)


@pytest.mark.parametrize("key", FORBIDDING)
def test_what_moves_a_speed_forbids_the_comparison_both_ways(key: str) -> None:
    a, b = made("reference"), made("fine", FORBIDDING[key])
    assert [one.what for one in unlike(a, b, PP)] == [key] == [one.what for one in unlike(b, a, PP)]
    assert [(one.a, one.b) for one in unlike(a, b, PP)] == [(one.b, one.a) for one in unlike(b, a, PP)]
    quality = [one.what for one in unlike(a, b, "kld_mean")]
    assert quality == ([key] if key.startswith(("device.", "bench.")) else []), "a machine moves no divergence, another device or bench may"


@pytest.mark.parametrize("key", IDLE)
def test_what_moves_nothing_forbids_nothing_and_is_not_said(key: str) -> None:
    a, b = made("reference"), made("fine", IDLE[key])
    assert unlike(a, b, PP) == [] == beside(a, b)


@pytest.mark.parametrize("key", SAID)
def test_what_may_be_compared_on_purpose_is_said_and_forbids_nothing(key: str) -> None:
    a, b = made("reference"), made("fine", (SAID[key], {}, {}))
    assert unlike(a, b, PP) == [] and [one.what for one in beside(a, b)] == [key]
    other = b.model_copy(update={"artifact": {"sha256": "dead" * 16}})
    assert [one.what for one in beside(a, other)] == sorted([key, "weights"], key=lambda one: (one.startswith("e"), one.startswith("m")))


def test_where_neither_says_on_what_it_ran_nobody_knows_that_it_was_one_machine() -> None:
    a, b = (made(path, ({"machine": None}, {}, {})) for path in ("reference", "fine"))
    assert [str(one) for one in unlike(a, b, PP)] == ["machine.cpu is recorded by neither", "machine.cores is recorded by neither"]
    assert unlike(a, b, "kld_mean") == [], "a divergence does not need to know"


def test_a_warning_on_both_sides_is_no_difference() -> None:
    a, b = (made(path, (SAID["machine_state.swap"], {}, {})) for path in ("reference", "fine"))
    assert beside(a, b) == []


def test_on_a_gpu_its_name_counts() -> None:
    gpu = {"device": {**BASE.device.model_dump(), "torch_device": "cuda"}}
    a, b = (made(path, ({"machine": {**PROVENANCE["machine"], "accelerators": [name]}}, gpu, {})) for path, name in (("reference", "R9700"), ("fine", "H200")))
    assert [one.brief for one in unlike(a, b, PP)] == ["machine.accelerators (R9700 / H200)"]


def test_timed_metrics_and_memory_are_of_the_machine() -> None:
    assert {"tg128_tok_s", "load_s", "peak_memory_bytes", "decode_multiple"} <= OF_THE_MACHINE
    assert not {"ppl", "kld_mean", "expert_cosine", "resident_bytes", "decode_bytes_per_token"} & OF_THE_MACHINE


@given(st.lists(st.sampled_from(sorted(FORBIDDING)), min_size=3, max_size=3))
def test_being_alike_is_mutual_and_carries_over(keys: list[str]) -> None:
    """So that the first of several cells can stand for all, and a series is a class of records."""
    a, b, c = (made(path, FORBIDDING[key]) for path, key in zip(("reference", "fine", "coarse"), keys, strict=True))
    alike = [unlike(x, y, PP) == [] for x, y in ((a, b), (b, c), (a, c))]
    assert alike == [keys[0] == keys[1], keys[1] == keys[2], keys[0] == keys[2]]


def compared(a: Record, b: Record) -> str:
    """What `compare` says of the two speeds; where every metric is refused, it raises instead."""
    try:
        return next(one.word or "refused" for one in compare_records(a, b) if one.metric == PP)
    except LabError:
        return "refused"


@pytest.mark.parametrize(("key", "change"), [*FORBIDDING.items(), *((key, (said, {}, {})) for key, said in SAID.items()), *IDLE.items()])
def test_report_compare_verdict_and_doubts_give_one_answer(tmp_path: Path, key: str, change: Change) -> None:
    criterion = SMALL.split("hypotheses:")[0] + "hypotheses:\n  - id: fast\n    statement: s\n    criterion: "
    criterion += f"{{metric: {PP}, where: {{path: fine, layers: 6}}, against: {{path: reference, layers: 6}}, comparison: '>=', value: 1.5, unit: x}}\n"
    a, b = made("reference"), made("fine", change, speed=200.0)
    matrix = build_matrix(small(tmp_path, criterion), [a, b], compose)
    forbidden = key in FORBIDDING
    assert bool(unlike(b, a, PP)) == forbidden
    (row,) = compare_speeds(matrix, EN).rows
    assert row[1].startswith(f"not compared: {key} differ" if forbidden else "faster ×2.00")
    assert judge(matrix, matrix.experiment.hypotheses[0], EN).word == ("OPEN" if forbidden else "HOLDS")
    assert compared(b, a) == ("refused" if forbidden else "faster")
    shallow, deep = made("fine", layers=3), made("fine", change)
    cells = (cell("fine", 3), cell("fine", 6).model_validate(deep.cell))
    rates = [Rate(str(i), of, one, "pp", one.metrics[PP]) for i, (of, one) in enumerate(zip(cells, (shallow, deep), strict=True))]
    assert (len({one.series for one in observations(rates)}) == 2) == forbidden


def test_repeats_are_ranked_estimates_tested_and_single_values_left() -> None:
    fast, slow = measured(PP, 120.0), measured(PP, 100.0)
    assert (found := contrast(fast, slow)) is not None and found.word == "faster"
    low, high = (measured("ppl", value, stderr=0.1) for value in (20.0, 22.0))
    assert (found := contrast(low, high)) is not None and found.word == "lower"
    assert contrast(measured("expert_cosine", 0.9), measured("expert_cosine", 0.8)) is None
    assert contrast(measured("ppl", 20.0, stderr=0.0), measured("ppl", 21.0, stderr=0.0)) is None


def test_a_number_that_one_side_does_not_have_is_no_comparison() -> None:
    with pytest.raises(KeyError):
        unlike(made("reference"), record(cell("fine"), {}), PP)
