"""Hypotheses and targets: they follow the records, stay open beside a gap, and are decided by no reported figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.compose import compose_cells
from lab.errors import LabError
from lab.experiment import Experiment
from lab.matrix import build_matrix
from lab.project import Project
from lab.record import Measurement, Status
from lab.report.capacity import NO_CAPACITY
from lab.report.claims import Claims, judge_claims
from lab.report.measured import bases, compare_speeds, noisy, steps
from lab.report.overview import questions, target_sections
from lab.report.tables import references
from lab.report.verdicts import fixed, judge, judge_target, straddles
from tests.matrix_helpers import PROVENANCE, SMALL, cell, complete, compose, measured, record, small
from tests.report.support import EN, ladder, section, stage, text_of
from tests.runner_helpers import ROOT

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
        ({"reference": 0.0, "fine": 0.1, "coarse": 0.1}, "OPEN", "not decided: the samples or errors of fine and coarse do not separate them"),
        ({"reference": 0.0, "fine": 0.1, "coarse": 0.102}, "OPEN", "not decided: the samples or errors of fine and coarse do not separate them"),
        ({"reference": 0.3, "fine": 0.1, "coarse": 0.102}, "FAILS", "reference 0.300 is not below fine 0.100"),
        ({"reference": 0.0, "coarse": 0.2}, "OPEN", "not decided: fine, 6 layers is NOT_RUN"),
    ],
)
def test_an_order_hypothesis_holds_fails_or_stays_open(experiment: Experiment, values: dict[str, float], word: str, why: str) -> None:
    matrix = build_matrix(experiment, ladder(values), compose)
    verdict = judge(matrix, experiment.hypotheses[0], EN)
    assert (verdict.word, verdict.why) == (word, why)
    assert f"### ladder: {word}" in text_of(matrix)


@pytest.mark.parametrize(("speed", "word"), [(120.0, "HOLDS"), (101.0, "OPEN"), (80.0, "FAILS")])
def test_an_order_of_speeds_needs_samples_that_lie_apart(tmp_path: Path, speed: float, word: str) -> None:
    experiment = small(
        tmp_path, SMALL.replace("metric: kld_mean", "metric: pp512_tok_s").replace("[reference, fine, coarse], metric", "[fine, coarse], metric")
    )
    matrix = build_matrix(experiment, [complete(cell("fine", 6), 0.1), complete(cell("coarse", 6), 0.1, speed=speed)], compose)
    assert judge(matrix, experiment.hypotheses[0], EN).word == word


FASTER = """  - id: faster
    statement: Coarse is faster.
    criterion: {metric: pp512_tok_s, where: {path: coarse, layers: 6}, against: {path: reference, layers: 6}, comparison: ">=", value: 1.5, unit: x}
"""


@pytest.mark.parametrize(
    ("made", "word", "told"),
    [
        ({}, "HOLDS", ()),
        ({"machine": {"cpu": "Big CPU", "cores": 96}}, "OPEN", ("machine.cpu (Big CPU / Bench CPU)", "machine.cores (96 / 2)")),
        ({"packages": {"torch": "2.10.0"}}, "OPEN", ("torch (2.10.0 / 2.9.0)",)),
        ({"machine": None}, "OPEN", ("machine.cpu (– / Bench CPU)",)),
        ({"code_sha256": "beef" * 16}, "HOLDS", ("code (beefbeefbeef / c0dec0dec0de)",)),
        ({"env": {"OMP_NUM_THREADS": "1"}}, "HOLDS", ("env.OMP_NUM_THREADS (1 / –)",)),
    ],
)
def test_a_ratio_across_machines_is_open_and_other_code_is_a_remark(tmp_path: Path, made: dict[str, Any], word: str, told: tuple[str, ...]) -> None:
    experiment = small(tmp_path, SMALL + FASTER)
    base, ours = complete(cell("reference", 6), 0.0), complete(cell("coarse", 6), 0.2, speed=200.0, provenance={**PROVENANCE, **made})
    matrix = build_matrix(experiment, [base, ours], compose)
    verdict = judge(matrix, experiment.hypotheses[1], EN)
    assert verdict.word == word
    said = verdict.why if word == "OPEN" else " ".join(verdict.remarks)
    assert all(text in said for text in told) and bool(said) == bool(told)
    assert f"### faster: {word}" in text_of(matrix)


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


def test_two_metrics_of_one_cell_are_told_apart() -> None:
    matrix = stage("flash_next_h200")
    hypothesis = next(one for one in matrix.experiment.hypotheses if one.id == "four-together-pay")
    verdict = judge(matrix, hypothesis, EN)
    together, alone = "Decode of 4 sequences together, total (expert_q2, 48 layers)", "Decode, 128 tokens (expert_q2, 48 layers)"
    assert verdict.why == f"not decided: {together} is NOT_RUN; {alone} is NOT_RUN"
    found = steps(matrix, verdict, EN)
    assert found.header == ["Path", "tok/s"] and [row[0] for row in found.rows] == [together, alone]


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


ANY = TARGET.replace("where: {layers: 6}", "where: {layers: 6}, quantifier: any")
CLOSED = "dead_ends:\n  - {id: end, what: coarse, evidence: e, since: '2026-08', reopen: r, source: s, where: {path: coarse}}\n"


@pytest.mark.parametrize(
    ("speeds", "every", "one"),
    [
        ({}, "OPEN", "OPEN"),
        ({"reference": 20.0}, "MISSED", "OPEN"),
        ({"fine": 200.0}, "OPEN", "REACHED"),
        ({"reference": 20.0, "fine": 200.0}, "MISSED", "REACHED"),
        ({"reference": 20.0, "fine": 30.0}, "MISSED", "MISSED"),
        ({"reference": 95.0, "fine": 200.0}, "REACHED", "REACHED"),
        ({"reference": 95.0, "fine": 200.0, "coarse": 10.0}, "MISSED", "REACHED"),
    ],
)
def test_a_target_for_any_is_reached_by_one_cell_and_no_target_asks_for_closed_ones(tmp_path: Path, speeds: dict[str, float], every: str, one: str) -> None:
    """Coarse is a dead end: it counts only where somebody was forced past it and measured."""
    records = [complete(cell(path, 6), 0.1, speed=speed) for path, speed in speeds.items()]
    for text, word in ((TARGET, every), (ANY, one)):
        experiment = small(tmp_path, SMALL + text + CLOSED)
        matrix = build_matrix(experiment, records, compose)
        result = judge_target(matrix, experiment.targets[0])
        assert result.word == word
        assert [aim.outcome for aim in result.aims][-1] == ("MISSED" if "coarse" in speeds else "CLOSED")
        shown = text_of(matrix)
        assert (">= 90 tok/s in one cell at least" in section(shown, 1)) == (text is ANY)
        assert ("A dead end closes 1 of them" in section(shown, 3)) == ("coarse" not in speeds)
        assert ("1 closed by a dead end" in section(shown, 12)) == ("coarse" not in speeds)


def test_a_dead_end_that_was_refused_or_failed_under_force_is_told_apart(tmp_path: Path) -> None:
    experiment = small(tmp_path, SMALL + TARGET + CLOSED)
    for status, outcome in ((Status.DEAD_END, "CLOSED"), (Status.OOM, "OPEN")):
        matrix = build_matrix(experiment, [record(cell("coarse", 6), status=status)], compose)
        assert judge_target(matrix, experiment.targets[0]).aims[-1].outcome == outcome
    alone = small(tmp_path, SMALL + TARGET.replace("{layers: 6}", "{path: coarse}") + CLOSED)
    assert judge_target(build_matrix(alone, [], compose), alone.targets[0]).word == "OPEN", "nothing is reached where nothing is asked"


@pytest.mark.parametrize(
    ("since", "attempts", "told"),
    [
        ("", 1, "Criterion, fixed before the first run: "),
        ("2026-07-31", 1, "Criterion, registered on 2026-07-31, before the first record of its cells (2026-08-01): "),
        ("'2026-08-01'", 1, "Criterion, registered on 2026-08-01, the day of the first record of its cells: "),
        ("2026-08-02", 1, "Criterion, registered on 2026-08-02, after the first record of its cells (2026-08-01): "),
        ("2026-08-02", 0, "Criterion, registered on 2026-08-02, with no record of its cells yet: "),
    ],
)
def test_a_criterion_says_when_it_was_registered(tmp_path: Path, since: str, attempts: int, told: str) -> None:
    """An attempt that failed counts as one: it may have been what the criterion was made after."""
    text = SMALL + (f"    since: {since}\n" if since else "")
    past = [record(cell("fine", 6), status=Status.OOM), record(cell("coarse", 3), started_at="2020-01-01T00:00:00+00:00")]
    matrix = build_matrix(small(tmp_path, text), past if attempts else past[1:], compose)
    shown = section(text_of(matrix), 5)
    assert told in shown and ("before the first run" in shown) == (not since)
    assert (since.strip("'") in section(text_of(matrix, "zh"), 5)) if since else "首次运行前固定的判据" in text_of(matrix, "zh")


def test_an_attempt_without_a_readable_time_dates_nothing(tmp_path: Path) -> None:
    experiment = small(tmp_path, SMALL + "    since: 2026-08-02\n")
    matrix = build_matrix(experiment, [record(cell("fine", 6), started_at="yesterday")], compose)
    assert fixed(judge(matrix, experiment.hypotheses[0], EN), EN).endswith("with no record of its cells yet")


@pytest.mark.parametrize("since", ["'2026-13-01'", "'2026-8-1'", "20260801", "soon", "2026-08-01 10:00:00", "[2026-08-01]"])
def test_what_is_no_day_is_one_line(tmp_path: Path, since: str) -> None:
    with pytest.raises(LabError, match=r"^experiments/small.yaml:13: hypotheses.0.since: .* is not a day; write it as YYYY-MM-DD$"):
        small(tmp_path, SMALL + f"    since: {since}\n")


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


def test_a_difference_beside_a_comparison_is_said_below_the_table(experiment: Experiment) -> None:
    warned = {**PROVENANCE, "machine_state": {"before": {"cpu_clocks": {"state": "warn", "found": "powersave"}}}}
    records = [complete(cell("reference", 6), 0.0), complete(cell("fine", 6), 0.1, speed=120.0, provenance=warned)]
    matrix = build_matrix(experiment, records, compose)
    assert compare_speeds(matrix, EN).notes == ["fine, 6 layers and what it is set against also differ in machine_state.cpu_clocks (powersave / –)"]
    assert "powersave / –" in section(text_of(matrix), 4)


def test_no_speed_is_compared_with_a_gap(experiment: Experiment) -> None:
    table = compare_speeds(build_matrix(experiment, ladder({"fine": 0.1}), compose), EN)
    assert table.rows == [["fine, 6 layers", "not compared: the other is NOT_RUN"]]


def test_wide_repeats_are_called_noisy(experiment: Experiment) -> None:
    wide = record(cell("fine"), {"pp512_tok_s": measured("pp512_tok_s", 100.0, spread=0.2)})
    narrow = record(cell("coarse"), {"pp512_tok_s": measured("pp512_tok_s", 100.0, spread=0.05)})
    assert noisy(build_matrix(experiment, [wide, narrow], compose), EN) == ["fine, 3 layers: PP, tok/s: 90.0 to 110"]


def test_claims_of_an_experiment_without_any_are_none(tmp_path: Path) -> None:
    assert judge_claims(build_matrix(small(tmp_path), [], compose), NO_CAPACITY, EN) == Claims((), ())


def test_a_baseline_is_the_cell_on_the_same_files_before_the_one_on_their_source(tmp_path: Path) -> None:
    """One engine's cell on a converted file is set against the other engine's on that file, not against the one on the original."""
    text = SMALL.split("axes:")[0] + (
        "baseline: {engine: llama_cpp}\ncells:\n"
        + "".join(
            f"  - {{path: gguf_plugin, layers: 6, artifact: {name}, engine: {engine}}}\n" for name in ("a.gguf", "b.gguf") for engine in ("local", "llama_cpp")
        )
        + "metrics: [pp512_tok_s]\n"
    )
    matrix = build_matrix(small(tmp_path, text), [], lambda words: compose_cells(words, Project(root=ROOT, runs=tmp_path))[0])
    found = {row.key: base for row in matrix.rows if (base := bases(matrix).get(row.key))}
    ours = [row for row in matrix.rows if row.cell.engine == "local"]
    assert [found[row.key].cell.model.artifact for row in ours] == ["a.gguf", "b.gguf"] and len(found) == 2
    assert all(found[row.key].cell.engine == "llama_cpp" for row in ours)
