"""Hypotheses and targets: they follow the records, stay open beside a gap, and are decided by no reported figure."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.experiment import Experiment
from lab.matrix import build_matrix
from lab.record import Measurement
from lab.report.capacity import NO_CAPACITY
from lab.report.claims import Claims, judge_claims
from lab.report.measured import compare_speeds, noisy, steps
from lab.report.overview import questions, target_sections
from lab.report.tables import references
from lab.report.verdicts import judge, judge_target, straddles
from tests.matrix_helpers import SMALL, cell, complete, compose, measured, record, small
from tests.report.support import EN, ladder, section, text_of

TARGET = "targets:\n  - {metric: pp512_tok_s, comparison: '>=', value: 90, unit: tok/s, source: the post, where: {layers: 6}}\n"
VALUE = """  - id: close
    statement: Fine stays close.
    criterion: {metric: kld_mean, where: {path: fine, layers: 6}, against: {path: coarse, layers: 6}, comparison: "<=", value: 0.5, unit: x}
  - id: fast
    statement: Fine is fast.
    criterion: {metric: pp512_tok_s, where: {path: fine, layers: 6}, comparison: ">=", value: 90, unit: tok/s}
"""
CLAIM = """claims:
  - {id: c, what: their number, quantity: pp, value: 5000, unit: tok/s, source: the post, unknown: all, where: {path: fine, layers: 6}}
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    return small(tmp_path, SMALL + VALUE + TARGET + CLAIM)


@pytest.mark.parametrize(
    ("values", "word", "why"),
    [
        ({"reference": 0.0, "fine": 0.1, "coarse": 0.2}, "HOLDS", ""),
        ({"reference": 0.0, "fine": 0.2, "coarse": 0.1}, "FAILS", "fine 0.200 is not below coarse 0.100"),
        ({"reference": 0.0, "fine": 0.1, "coarse": 0.1}, "FAILS", "fine 0.100 is not below coarse 0.100"),
        ({"reference": 0.0, "coarse": 0.2}, "OPEN", "not decided: fine, 6 layers is NOT_RUN"),
    ],
)
def test_an_order_hypothesis_holds_fails_or_stays_open(experiment: Experiment, values: dict[str, float], word: str, why: str) -> None:
    matrix = build_matrix(experiment, ladder(values), compose)
    verdict = judge(matrix, experiment.hypotheses[0], EN)
    assert (verdict.word, verdict.why) == (word, why)
    assert f"### ladder: {word}" in text_of(matrix)


def test_a_verdict_within_the_error_says_so(experiment: Experiment) -> None:
    matrix = build_matrix(experiment, ladder({"reference": 0.0, "fine": 0.1, "coarse": 0.102}), compose)
    verdict = judge(matrix, experiment.hypotheses[0], EN)
    assert verdict.word == "HOLDS" and verdict.remarks == ("fine and coarse lie within two standard errors of each other",)


@given(fine=st.floats(0.01, 0.9), coarse=st.floats(0.01, 0.9))
def test_a_ratio_holds_exactly_where_the_numbers_say_so(tmp_path_factory: pytest.TempPathFactory, fine: float, coarse: float) -> None:
    experiment = small(tmp_path_factory.mktemp("ratio"), SMALL + VALUE)
    verdict = judge(build_matrix(experiment, ladder({"fine": fine, "coarse": coarse}), compose), experiment.hypotheses[1], EN)
    assert verdict.word == ("HOLDS" if fine <= 0.5 * coarse else "FAILS")
    assert bool(verdict.why) == (verdict.word == "FAILS")


def test_a_value_hypothesis_is_open_beside_a_gap_whatever_was_reported(experiment: Experiment) -> None:
    matrix = build_matrix(experiment, [], compose)
    assert [judge(matrix, h, EN).word for h in experiment.hypotheses] == ["OPEN"] * 3
    assert judge_target(matrix, experiment.targets[0]).word == "OPEN"


def test_a_limit_inside_the_spread_is_a_remark(experiment: Experiment) -> None:
    matrix = build_matrix(experiment, [complete(cell("fine", 6), 0.1, speed=90.4)], compose)
    verdict = judge(matrix, experiment.hypotheses[2], EN)
    assert verdict.word == "HOLDS" and verdict.remarks == ("the measurement's own spread lies on both sides of 90.0 tok/s",)
    assert straddles(Measurement(value=5, unit="ppl", protocol="p", stderr=0.6), 6.0) and not straddles(Measurement(value=5, unit="ppl", protocol="p"), 5.0)


def test_the_steps_show_cosines_and_the_noise_floor_where_measured(experiment: Experiment) -> None:
    matrix = build_matrix(experiment, ladder({"fine": 0.1}), compose)
    found = steps(matrix, judge(matrix, experiment.hypotheses[0], EN), EN)
    assert ["fine, 6 layers", "0.100 ± 0.0010", "0.98765", "1.00e-06"] in found.rows
    assert ["coarse, 6 layers", "*NOT_RUN*", "*NOT_RUN*", "–"] in found.rows
    empty = build_matrix(experiment, [], compose)
    assert len(steps(empty, judge(empty, experiment.hypotheses[0], EN), EN).header) == 2


def test_targets_are_reached_missed_or_open(experiment: Experiment) -> None:
    records = [complete(cell("reference", 6), 0.0, speed=95.0), complete(cell("fine", 6), 0.1, speed=50.0)]
    matrix = build_matrix(experiment, records, compose)
    result = judge_target(matrix, experiment.targets[0])
    assert [aim.outcome for aim in result.aims] == ["REACHED", "MISSED", "OPEN"] and result.word == "MISSED"
    text = text_of(matrix)
    assert ">= 90 tok/s" in section(text, 1) and "2 of 3 cells measured; best 95.0 tok/s (R1)" in section(text, 1)
    for line in ("95.0 REACHED", "50.0 MISSED", "*NOT_RUN*"):
        assert line in section(text, 3)
    assert judge_target(build_matrix(experiment, records[:1], compose), experiment.targets[0]).word == "OPEN"
    whole = [complete(cell(path, 6), 0.1, speed=95.0) for path in ("reference", "fine", "coarse")]
    assert judge_target(build_matrix(experiment, whole, compose), experiment.targets[0]).word == "REACHED"


def test_a_reported_figure_stands_beside_a_target_and_decides_nothing(experiment: Experiment) -> None:
    matrix = build_matrix(experiment, [], compose)
    results = [judge_target(matrix, experiment.targets[0])]
    claims = judge_claims(matrix, NO_CAPACITY, EN)
    found = target_sections(matrix, results, claims, EN)[0]
    assert found.inside == ["5000 tok/s - their number: would reach it"] and found.outside == [] and found.cells.rows == []
    assert "*NOT_RUN* (3)" in found.all_gaps and found.heading.endswith(": OPEN")
    table = questions(matrix, [], results, references(matrix), EN)
    assert table.rows == [["Prefill, 512 tokens, 6 layers (the post)", ">= 90 tok/s", "gap (NOT_RUN)", "OPEN"]]


@pytest.mark.parametrize(("speed", "word"), [(120.0, "faster ×1.20"), (80.0, "slower ×0.800"), (101.0, "not separated ×1.01")])
def test_faster_and_slower_need_the_statistics(experiment: Experiment, speed: float, word: str) -> None:
    records = [complete(cell("reference", 6), 0.0, speed=100.0), complete(cell("fine", 6), 0.1, speed=speed)]
    rows = {row[0]: row[1] for row in compare_speeds(build_matrix(experiment, records, compose), EN).rows}
    assert list(rows) == ["fine, 6 layers"] and rows["fine, 6 layers"].startswith(word)


def test_no_speed_is_compared_with_a_gap(experiment: Experiment) -> None:
    table = compare_speeds(build_matrix(experiment, ladder({"fine": 0.1}), compose), EN)
    assert table.rows == [["fine, 6 layers", "not compared: the reference is NOT_RUN"]]


def test_wide_repeats_are_called_noisy(experiment: Experiment) -> None:
    wide = record(cell("fine"), {"pp512_tok_s": measured("pp512_tok_s", 100.0, spread=0.2)})
    narrow = record(cell("coarse"), {"pp512_tok_s": measured("pp512_tok_s", 100.0, spread=0.05)})
    assert noisy(build_matrix(experiment, [wide, narrow], compose), EN) == ["fine, 3 layers: PP, tok/s: 90.0 to 110"]


def test_claims_of_an_experiment_without_any_are_none(tmp_path: Path) -> None:
    assert judge_claims(build_matrix(small(tmp_path), [], compose), NO_CAPACITY, EN) == Claims((), ())
