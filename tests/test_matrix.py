"""The matrix: which attempt counts, what stands where nothing counts, and that the books close for any history of records."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab import matrix as matrix_module
from lab.books import BooksError
from lab.cell import Cell
from lab.doubts import Rate, observations
from lab.errors import LabError
from lab.experiment import Experiment
from lab.matrix import Matrix, Unreadable, build_matrix
from lab.metrics import METRICS
from lab.record import Gap, Record, Status
from tests.matrix_helpers import PROVENANCE, SMALL, cell, complete, compose, invalidated, measured, record, small

METRIC_NAMES = ("ppl", "kld_mean", "pp512_tok_s", "expert_cosine")


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return small(tmp_path_factory.mktemp("matrix"))


def entry(matrix: Matrix, of: Cell, metric: str) -> matrix_module.Entry:
    return matrix.entries[of.hash, metric]


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
    assert (matrix.totals.current, matrix.totals.stale, matrix.totals.measured) == (0, 1, 0)


def test_a_raised_protocol_version_makes_old_records_stale(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [complete(cell("fine"), 0.1)]
    assert build_matrix(experiment, records, compose).totals.measured == 4
    monkeypatch.setitem(METRICS, "pp512_tok_s", dataclasses.replace(METRICS["pp512_tok_s"], protocol="pp@2"))
    after = build_matrix(experiment, records, compose)
    assert (after.totals.measured, after.totals.stale) == (0, 1)


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


def rates(of: Cell, pp: float, spread: float = 0.02, **rest: Any) -> Record:
    return record(of, {"pp512_tok_s": measured("pp512_tok_s", pp, spread)}, **rest)


def test_an_invalidated_attempt_leaves_a_gap_that_says_why(experiment: Experiment) -> None:
    of = cell("fine")
    marks = {(of.id, 2): (invalidated("wrong text"),)}
    only = build_matrix(experiment, [complete(of, 0.1, attempt=2)], compose, marks=marks)
    gap = entry(only, of, "ppl").gap
    assert gap is not None and (gap.status, gap.reason) == (Status.INVALIDATED, "attempt 2 was invalidated: wrong text")
    assert gap.fill.endswith("path=fine layers=3")
    assert (only.totals.current, only.totals.invalidated, only.totals.attempts) == (0, 1, 1)
    both = build_matrix(experiment, [complete(of, 0.1, attempt=2), complete(of, 0.2, attempt=1)], compose, marks=marks)
    assert both.rows[2].current == complete(of, 0.2, attempt=1)
    assert [standing.text for _, standing in both.rows[2].standings] == ["CURRENT", "INVALIDATED: wrong text"]


def test_of_stale_and_invalidated_attempts_the_stale_one_is_told(experiment: Experiment) -> None:
    of = cell("fine")
    stale = record(of, {"ppl": measured("ppl", 1.5, protocol="ppl/window@0")}, attempt=1)
    row = build_matrix(experiment, [stale, complete(of, 0.1, attempt=2)], compose, marks={(of.id, 2): (invalidated(),)}).rows[2]
    assert row.status is Status.NOT_RUN and "measured ppl under ppl/window@0" in row.reason


def test_records_of_other_weights_than_the_pinned_ones_do_not_count(tmp_path: Path) -> None:
    pinned = small(tmp_path, SMALL + "weights: {nano: " + "dead" * 16 + "}\n")
    matrix = build_matrix(pinned, [complete(cell("fine"), 0.1)], compose)
    gap = entry(matrix, cell("fine"), "ppl").gap
    assert gap is not None and gap.status is Status.NOT_RUN and "the experiment pins nano to deaddeaddead" in gap.reason
    assert (matrix.totals.other_weights, matrix.totals.measured) == (1, 0)


def test_more_layers_faster_than_fewer_takes_both_numbers_away(experiment: Experiment) -> None:
    slow, fast = cell("fine", 3), cell("fine", 6)
    matrix = build_matrix(experiment, [rates(slow, 100.0), rates(fast, 150.0), rates(cell("coarse", 6), 150.0)], compose)
    (flag,) = matrix.flags
    assert flag.names == (f"{slow.id}/pp512_tok_s", f"{fast.id}/pp512_tok_s")
    for of in (slow, fast):
        gap = entry(matrix, of, "pp512_tok_s").gap
        assert gap is not None and (gap.status, gap.reason) == (Status.IMPLAUSIBLE, flag.sentence())
        assert f"layers={of.layers}" in gap.fill
    assert "nano fine on cpu, bench standard: 150 tok/s at 6 layers is faster than 100 tok/s at 3 layers" in flag.sentence()
    assert entry(matrix, cell("coarse", 6), "pp512_tok_s").measurement is not None
    assert matrix.totals.measured == 1 and "IMPLAUSIBLE" in {line["status"] for line in matrix.long_form()}


def test_a_number_that_admission_would_refuse_today_is_a_gap(experiment: Experiment) -> None:
    """Recorded before the rule was there, or carried in from elsewhere."""
    of = cell("fine")
    metrics = {"ppl": measured("ppl", -3.0), "pp512_tok_s": measured("pp512_tok_s", 100.0, spread=0.0), "kld_mean": measured("kld_mean", 0.1)}
    matrix = build_matrix(experiment, [record(of, metrics)], compose)
    found = {name: entry(matrix, of, name) for name in metrics}
    assert [name for name, one in found.items() if one.measurement] == ["kld_mean"] and matrix.totals.measured == 1
    gaps = [found[name].gap for name in ("ppl", "pp512_tok_s")]
    assert [gap.status for gap in gaps if gap] == [Status.NUMERIC_INVALID, Status.IMPLAUSIBLE]
    assert gaps[0] is not None and gaps[0].reason == "ppl -3 is impossible: its values go from 1 to infinity (attempt 1 recorded it as a number)"
    assert gaps[0].fill.endswith("path=fine layers=3")


def test_a_refused_number_casts_no_doubt_on_others(experiment: Experiment) -> None:
    records = [rates(cell("fine", 3), 100.0), rates(cell("fine", 6), 150.0, spread=0.0)]
    matrix = build_matrix(experiment, records, compose)
    assert matrix.flags == () and entry(matrix, cell("fine", 3), "pp512_tok_s").measurement is not None


def test_copies_of_a_record_are_counted_and_shown_as_one(experiment: Experiment) -> None:
    of = cell("fine")
    one, other = complete(of, 0.1, attempt=2), complete(of, 0.2, attempt=3)
    copies = [one.model_copy(update={"attempt": number}) for number in (7, 9)]
    matrix = build_matrix(experiment, [copies[0], other, one, copies[1], one], compose, marks={(of.id, 9): (invalidated(),)})
    row = matrix.rows[2]
    assert [(record.attempt, standing.kind) for record, standing in row.standings] == [(2, "INVALIDATED"), (3, "CURRENT")]
    assert (matrix.totals.attempts, matrix.totals.current, matrix.totals.invalidated, matrix.totals.copies) == (4, 1, 1, 2)


def test_four_sequences_slower_than_one_are_no_number(tmp_path: Path) -> None:
    experiment = small(tmp_path, SMALL.replace("pp512_tok_s,", "tg128_tok_s, agg4_tg128_tok_s,"))
    metrics = {name: measured(name, value) for name, value in (("tg128_tok_s", 100.0), ("agg4_tg128_tok_s", 50.0), ("ppl", 20.0))}
    matrix = build_matrix(experiment, [record(cell("fine"), metrics)], compose)
    assert [name for name in experiment.metrics if entry(matrix, cell("fine"), name).measurement] == ["ppl", "tg128_tok_s"], "as at admission"
    gap = entry(matrix, cell("fine"), "agg4_tg128_tok_s").gap
    assert gap is not None and gap.status is Status.IMPLAUSIBLE and "slower than one alone" in gap.reason


@pytest.mark.parametrize(
    "changed",
    [
        {"provenance": {**PROVENANCE, "machine": {"cpu": "Other CPU"}}},
        {"provenance": {**PROVENANCE, "packages": {"torch": "3.0"}}},
        {"artifact": {"sha256": "dead" * 16}},
        {"provenance": {}},
    ],
)
def test_rates_of_other_machines_packages_or_weights_are_not_set_against_each_other(experiment: Experiment, changed: dict[str, Any]) -> None:
    matrix = build_matrix(experiment, [rates(cell("fine", 3), 100.0), rates(cell("fine", 6), 150.0, **changed)], compose)
    assert (matrix.flags, matrix.totals.measured) == ((), 2)
    unknown = [rates(cell("fine", layers), speed, provenance={}) for layers, speed in ((3, 100.0), (6, 150.0))]
    assert build_matrix(experiment, unknown, compose).flags == (), "nobody knows that it was one machine"


def test_two_series_that_read_alike_are_told_apart(experiment: Experiment) -> None:
    other = {"provenance": {**PROVENANCE, "machine": {**PROVENANCE["machine"], "cpu": "Other CPU"}}}
    pairs = [(cell(path, layers), speed, rest) for path, rest in (("fine", {}), ("coarse", other)) for layers, speed in ((3, 100.0), (6, 150.0))]
    alike = [Rate(str(i), of.model_copy(update={"path": pairs[0][0].path}), rates(of, v, **rest), "pp", measured("pp512_tok_s", v))
             for i, (of, v, rest) in enumerate(pairs)]  # fmt: skip
    series = [o.series for o in observations(alike)]
    assert series[0] == series[1] != series[2] == series[3] and all("fine on cpu, bench standard (series " in text for text in series)


def test_rates_that_overlap_are_left_alone(experiment: Experiment) -> None:
    assert build_matrix(experiment, [rates(cell("fine", 3), 100.0, 0.2), rates(cell("fine", 6), 110.0, 0.2)], compose).flags == ()


def test_a_changed_experiment_file_is_listed_with_its_records(experiment: Experiment) -> None:
    def under(sha256: str | None, attempt: int, of: Cell) -> Record:
        return complete(of, 0.1, attempt=attempt, provenance={**PROVENANCE, **({"experiments": {"small": sha256, "big": "b" * 64}} if sha256 else {})})

    fine, foreign = cell("fine"), cell("foreign")
    records = [under("new" * 3, 4, fine), under("old" * 3, 1, fine), under(None, 5, fine), under("old" * 3, 2, fine), under(experiment.sha256, 3, fine)]
    changes = build_matrix(experiment, [*records, under("else" * 3, 6, foreign)], compose).registered_changes
    assert [(c.sha256, c.first[14:16], c.last[14:16], c.records) for c in changes] == [("old" * 3, "01", "02", 2), ("new" * 3, "04", "04", 1)]


def test_cells_that_share_an_id_keep_entries_of_their_own(experiment: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cell, "id", property(lambda self: "same"))
    records = [rates(cell("fine", 3), 100.0), rates(cell("fine", 6), 150.0, attempt=2), complete(cell("coarse", 3), 0.3, attempt=3)]
    matrix = build_matrix(experiment, records, compose)
    assert len(matrix.entries) == 24 == matrix.totals.expected
    assert {key[0] for key, found in matrix.entries.items() if found.gap and found.gap.status is Status.IMPLAUSIBLE} == {
        cell("fine", 3).hash, cell("fine", 6).hash
    }  # fmt: skip
    assert entry(matrix, cell("coarse", 3), "pp512_tok_s").measurement is not None


def test_attempts_that_do_not_add_up_are_refused(experiment: Experiment) -> None:
    totals = build_matrix(experiment, [complete(cell("fine"), 0.1)], compose).totals
    with pytest.raises(
        BooksError, match=r"2 attempts are not 1 current \+ 0 superseded \+ 0 invalidated \+ 0 stale \+ 0 other weights \+ 0 elsewhere \+ 0 copies"
    ):
        dataclasses.replace(totals, attempts=2).close()


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
    assert totals.attempts == len(records) == totals.current + totals.superseded + totals.stale + totals.elsewhere
    assert all((e.measurement is None) != (e.gap is None) for e in matrix.entries.values())
    for found in (e for e in matrix.entries.values() if e.measurement):
        assert found.row.current is not None and found.row.current.status is Status.OK
        assert found.measurement is not None and found.measurement.protocol == METRICS[found.metric].protocol
    shuffled = records + records[: len(records) // 2]
    order.shuffle(shuffled)
    assert build_matrix(experiment, shuffled, compose).long_form() == matrix.long_form()


CLOSED = (
    SMALL
    + """\
dead_ends:
  - {id: deep, what: coarse at depth, evidence: it was slow, since: "2026", reopen: a faster kernel, source: a post, where: {path: coarse, layers: 6}}
"""
)


def test_a_dead_end_that_nobody_walked_is_no_open_task(tmp_path: Path) -> None:
    matrix = build_matrix(small(tmp_path, CLOSED), [], compose)
    dead = next(row for row in matrix.rows if (row.cell.path.name, row.cell.layers) == ("coarse", 6))
    gap = matrix.entry(dead, "ppl").gap
    assert dead.status is Status.DEAD_END and gap is not None and gap.status is Status.DEAD_END
    assert "it was slow" in gap.reason and "a faster kernel" in gap.reason and gap.fill.endswith("layers=6 force=true")
    assert [row.status for row in matrix.rows].count(Status.NOT_RUN) == 5
    assert matrix.totals.not_run == 5 * 4 and matrix.totals.gaps == 6 * 4


def test_what_was_forced_past_a_dead_end_shows_its_numbers(tmp_path: Path) -> None:
    matrix = build_matrix(small(tmp_path, CLOSED), [complete(cell("coarse", 6), 0.5)], compose)
    dead = next(row for row in matrix.rows if (row.cell.path.name, row.cell.layers) == ("coarse", 6))
    assert dead.status is Status.OK and matrix.entry(dead, "kld_mean").measurement is not None


def test_what_a_cell_does_not_owe_is_a_gap_that_says_why(tmp_path: Path) -> None:
    text = SMALL + "not_owed: [{where: {path: reference}, metrics: [kld_mean], reason: it is its own reference}]\n"
    matrix = build_matrix(small(tmp_path, text), [], compose)
    found = {row.cell.path.name: matrix.entry(row, "kld_mean").gap for row in matrix.rows if row.cell.layers == 3}
    assert found["reference"] is not None and found["reference"].status is Status.UNSUPPORTED
    assert found["reference"].reason == "not applicable: it is its own reference"
    assert found["fine"] is not None and found["fine"].status is Status.NOT_RUN


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{where: {path: reference}, metrics: [load_s], reason: r}", "'load_s' is not among this experiment's metrics"),
        ("{where: {path: nobody}, metrics: [ppl], reason: r}", "no expected cell matches"),
    ],
)
def test_a_wrong_exemption_is_refused(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(LabError, match=message):
        small(tmp_path, SMALL + f"not_owed: [{line}]\n")
