"""The matrix: which attempt counts, what stands where nothing counts, and that the books close for any history of records."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab import matrix as matrix_module
from lab.books import BooksError
from lab.cell import Cell
from lab.errors import LabError
from lab.experiment import Experiment
from lab.matrix import Matrix, Unreadable, build_matrix
from lab.metrics import METRICS
from lab.record import Gap, Record, Status
from tests.matrix_helpers import cell, complete, compose, measured, record, small

METRIC_NAMES = ("ppl", "kld_mean", "pp512_tok_s", "expert_cosine")


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return small(tmp_path_factory.mktemp("matrix"))


def entry(matrix: Matrix, of: Cell, metric: str) -> matrix_module.Entry:
    return matrix.entries[of.id, metric]


def test_without_records_every_entry_is_not_run(experiment: Experiment) -> None:
    matrix = build_matrix(experiment, [], compose)
    assert (matrix.totals.expected, matrix.totals.measured, matrix.totals.not_run) == (24, 0, 24)
    gap = entry(matrix, cell("fine", 6), "ppl").gap
    assert gap == Gap(
        status=Status.NOT_RUN,
        reason="never attempted",
        fill="python -m lab run model=nano device=cpu bench=standard path=fine layers=6",
    )


def test_measured_and_gaps_of_one_attempt(experiment: Experiment) -> None:
    of = cell("fine")
    implausible = Gap(status=Status.IMPLAUSIBLE, reason="above the roofline", fill="python -m lab run it")
    matrix = build_matrix(experiment, [record(of, {"ppl": measured("ppl", 20.0)}, gaps={"pp512_tok_s": implausible})], compose)
    found = entry(matrix, of, "ppl")
    assert found.measurement is not None and found.measurement.value == 20.0 and found.state == "measured"
    assert entry(matrix, of, "pp512_tok_s").gap == implausible
    silent = entry(matrix, of, "kld_mean")
    assert silent.state == "not_run" and silent.gap is not None and silent.gap.reason == "attempt 1 did not measure it"
    assert (matrix.totals.measured, matrix.totals.gaps) == (1, 23)


def test_a_gap_without_a_command_gets_the_cells_own(experiment: Experiment) -> None:
    of = cell("fine")
    matrix = build_matrix(experiment, [record(of, gaps={"ppl": Gap(status=Status.TIMEOUT, reason="slow", fill=" ")})], compose)
    gap = entry(matrix, of, "ppl").gap
    assert gap is not None and gap.fill.endswith("path=fine layers=3")


def test_a_failed_cell_explains_every_metric(experiment: Experiment) -> None:
    of = cell("coarse")
    matrix = build_matrix(experiment, [record(of, status=Status.UNSUPPORTED, reason="no kernel yet")], compose)
    gaps = [entry(matrix, of, name).gap for name in METRIC_NAMES]
    assert {(g.status, g.reason) for g in gaps if g} == {(Status.UNSUPPORTED, "no kernel yet")} and None not in gaps


def test_a_retried_attempt_replaces_the_failed_one(experiment: Experiment) -> None:
    of = cell("fine")
    matrix = build_matrix(experiment, [record(of, status=Status.CRASHED), complete(of, 0.1, attempt=2)], compose)
    row = matrix.rows[2]
    assert row.cell == of and row.current is not None and row.current.attempt == 2
    assert [r.attempt for r in row.superseded] == [1] and row.later == ()
    assert row.record_path == f"runs/{of.id}/002/record.json"
    assert (matrix.totals.attempts, matrix.totals.current, matrix.totals.superseded) == (2, 1, 1)


def test_a_later_failure_does_not_displace_an_ok_attempt_but_is_known(experiment: Experiment) -> None:
    of = cell("fine")
    matrix = build_matrix(experiment, [complete(of, 0.1), record(of, status=Status.CRASHED, attempt=2)], compose)
    row = matrix.rows[2]
    assert row.status is Status.OK and [r.attempt for r in row.later] == [2]


def test_of_failed_attempts_the_newest_is_shown(experiment: Experiment) -> None:
    of = cell("fine")
    failures = [record(of, status=Status.TIMEOUT, attempt=2), record(of, status=Status.CRASHED)]
    assert build_matrix(experiment, failures, compose).rows[2].status is Status.TIMEOUT


def test_time_decides_between_attempts_of_two_machines(experiment: Experiment) -> None:
    of = cell("fine")
    east = complete(of, 0.1, attempt=1, started_at="2026-08-02T00:30:00+02:00")
    west = complete(of, 0.2, attempt=9, started_at="2026-08-01T20:00:00Z")
    unknown = complete(of, 0.3, attempt=99, started_at="yesterday")
    row = build_matrix(experiment, [unknown, east, west], compose).rows[2]
    assert row.current == east


@pytest.mark.parametrize("changed", [{"protocol": "ppl/window@0"}, {"unit": "bit/B"}])
def test_numbers_of_another_protocol_do_not_count(experiment: Experiment, changed: dict[str, Any]) -> None:
    of = cell("fine")
    matrix = build_matrix(experiment, [record(of, {"ppl": measured("ppl", 20.0, **changed)})], compose)
    gap = entry(matrix, of, "ppl").gap
    assert gap is not None and gap.status is Status.NOT_RUN
    assert "attempt 1 measured ppl under" in gap.reason and "it is now ppl/window@1 in ppl" in gap.reason
    assert (matrix.totals.current, matrix.totals.superseded, matrix.totals.measured) == (0, 1, 0)


def test_a_raised_protocol_version_makes_old_records_stale(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [complete(cell("fine"), 0.1)]
    assert build_matrix(experiment, records, compose).totals.measured == 4
    monkeypatch.setitem(METRICS, "pp512_tok_s", dataclasses.replace(METRICS["pp512_tok_s"], protocol="pp@2"))
    after = build_matrix(experiment, records, compose)
    assert (after.totals.measured, after.totals.superseded) == (0, 1)


def test_an_older_current_protocol_beats_a_newer_stale_one(experiment: Experiment) -> None:
    of = cell("fine")
    stale = record(of, {"ppl": measured("ppl", 1.5, protocol="ppl/window@0")}, attempt=2)
    assert build_matrix(experiment, [complete(of, 0.1), stale], compose).rows[2].current == complete(of, 0.1)


def test_records_of_other_cells_are_counted_apart(experiment: Experiment) -> None:
    matrix = build_matrix(experiment, [complete(cell("fine", 12), 0.1)], compose)
    assert (matrix.totals.elsewhere, matrix.totals.measured) == (1, 0)


def test_the_same_record_read_twice_counts_once(experiment: Experiment) -> None:
    matrix = build_matrix(experiment, [complete(cell("fine"), 0.1)] * 2, compose)
    assert (matrix.totals.attempts, matrix.totals.superseded) == (1, 0)


def test_an_unreadable_record_is_an_infra_gap_unless_another_attempt_stands(experiment: Experiment) -> None:
    of = cell("fine")
    spoilt = Unreadable(of.id, f"runs/{of.id}/001/record.json", "record: not JSON")
    gap = entry(build_matrix(experiment, [], compose, [spoilt]), of, "ppl").gap
    assert gap is not None and gap.status is Status.INFRA and spoilt.path in gap.reason
    matrix = build_matrix(experiment, [complete(of, 0.1, attempt=2)], compose, [spoilt])
    assert matrix.rows[2].status is Status.OK and matrix.totals.unreadable == 1


def test_the_long_form(experiment: Experiment) -> None:
    of = cell("fine")
    frame = build_matrix(experiment, [complete(of, 0.1, speed=100.0)], compose).frame()
    assert len(frame) == 24
    line = frame[(frame.cell == of.id) & (frame.metric == "pp512_tok_s")].iloc[0]
    assert (line.state, line.value, line["min"], line["max"], line.unit, line.attempt) == ("measured", 100.0, 99.0, 101.0, "tok/s", 1)
    gaps = frame[frame.state != "measured"]
    assert gaps.value.isna().all() and gaps.reason.notna().all() and gaps.fill.str.startswith("python -m lab run ").all()


def test_overrides_that_are_no_cell_name_the_file(experiment: Experiment) -> None:
    def broken(overrides: list[str]) -> Cell:
        raise LabError("layers=3: no")

    with pytest.raises(LabError, match=r"experiments/small\.yaml: model=nano .*: layers=3: no"):
        build_matrix(experiment, [], broken)


def test_two_names_for_one_cell_are_refused(experiment: Experiment) -> None:
    with pytest.raises(LabError, match="the same cell as"):
        build_matrix(experiment, [], lambda overrides: cell())


def test_books_that_do_not_close_are_never_returned(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_module, "_expected", lambda experiment, compose_cell: [(cell(), experiment.points()[0])])
    with pytest.raises(BooksError, match=r"24 expected are not 0 measured \+ 4 gaps"):
        build_matrix(experiment, [], compose)


CELLS = [cell(path, layers) for path in ("reference", "fine", "coarse", "foreign") for layers in (3, 6)]


@st.composite
def histories(draw: st.DrawFn) -> list[Record]:
    """Any mix of OK, partial, stale and failed attempts over expected and foreign cells."""
    records = []
    for number in range(1, draw(st.integers(1, 15))):
        of, status = draw(st.sampled_from(CELLS)), draw(st.sampled_from([Status.OK, Status.OK, *Status]))
        names = draw(st.sets(st.sampled_from(METRIC_NAMES)))
        protocols = {name: draw(st.sampled_from([METRICS[name].protocol, "old@0"])) for name in sorted(names)}
        metrics = {n: measured(n, 1.5, protocol=p) for n, p in protocols.items()} if status is Status.OK else {}
        gaps = {n: Gap(status=Status.IMPLAUSIBLE, reason="no", fill="") for n in METRIC_NAMES if n not in metrics and draw(st.booleans())}
        records.append(record(of, metrics, attempt=number, status=status, gaps=gaps))
    return records


@given(histories(), st.randoms(use_true_random=False))
def test_the_books_close_for_any_history_in_any_order(experiment: Experiment, records: list[Record], order: random.Random) -> None:
    matrix = build_matrix(experiment, records, compose)
    totals = matrix.totals
    assert totals.expected == 24 == totals.measured + totals.gaps
    assert totals.attempts == len(records) == totals.current + totals.superseded + totals.elsewhere
    assert all((e.measurement is None) != (e.gap is None) for e in matrix.entries.values())
    for found in (e for e in matrix.entries.values() if e.measurement):
        assert found.row.current is not None and found.row.current.status is Status.OK
        assert found.measurement is not None and found.measurement.protocol == METRICS[found.metric].protocol
    shuffled = records + records[: len(records) // 2]
    order.shuffle(shuffled)
    assert build_matrix(experiment, shuffled, compose).long_form() == matrix.long_form()
