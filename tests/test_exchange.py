"""Records that travel: the same set however often and in whatever order they arrive, and nothing at all from a file with a fault."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import lab.compose
from lab.errors import LabError
from lab.exchange import HANDFUL, export_command, import_command, take_in
from lab.parcels import Parcel, merge, read_parcels, to_text
from lab.project import Project
from lab.record import Record, Status
from lab.standing import record_id, standings
from lab.store import MARKS, Store, load_marks, marks_of
from lab.tracking import Tracker
from tests.matrix_helpers import cell, complete, compose, invalidated, keep, project_at, record

FINE, COARSE = cell("fine"), cell("coarse")


@pytest.fixture(autouse=True)
def _no_mlflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Mirroring has tests of its own and takes MLflow's seconds."""
    monkeypatch.setattr(Tracker, "mirror_all", lambda self, records, patience_s=None, advance=None: [])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/none.db")


@pytest.fixture
def east(tmp_path: Path) -> Project:
    made = project_at(tmp_path / "east")
    keep(made, complete(FINE, 0.1, attempt=1), record(FINE, status=Status.OOM, attempt=3), complete(COARSE, 0.3, attempt=5))
    return made


@pytest.fixture
def west(tmp_path: Path) -> Project:
    made = project_at(tmp_path / "west")
    keep(made, complete(FINE, 0.2, attempt=2), complete(FINE, 0.4, attempt=4))
    return made


def exported(project: Project, name: str = "out.jsonl", *words: str) -> Path:
    file = project.root / name
    assert export_command(project, [str(file), *words]) == 0
    return file


def held(project: Project) -> list[tuple[str, int, str, tuple[str, ...]]]:
    """What is in runs/, by cell and number."""
    return [(one.record.cell_id, one.record.attempt, record_id(one.record), tuple(m.reason for m in one.marks)) for one in Store(project.runs).records()]


def test_what_is_exported_arrives_as_it_was(east: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Store(east.runs).mark(east.runs / FINE.id / "001", [invalidated()])
    there = project_at(tmp_path / "there")
    assert import_command(there, [str(exported(east))]) == 0
    assert held(there) == held(east) and len(held(there)) == 3
    for one in Store(east.runs).records():
        assert (there.runs / one.file.relative_to(east.runs)).read_bytes() == one.file.read_bytes()
    assert "3 records in" in capsys.readouterr().out


def test_two_machines_gave_out_the_same_numbers_and_time_orders_them(east: Project, west: Project, tmp_path: Path) -> None:
    there = project_at(tmp_path / "there")
    import_command(there, [str(exported(west)), str(exported(east))])
    fine = [one.record for one in Store(there.runs).read(FINE.id)[0]]
    assert [(one.attempt, one.started_at[14:16]) for one in fine] == [(1, "01"), (2, "02"), (3, "03"), (4, "04")]


def test_importing_again_and_from_overlapping_files_adds_nothing(east: Project, west: Project, capsys: pytest.CaptureFixture[str]) -> None:
    first = exported(east)
    import_command(west, [str(first)])
    both = exported(west, "both.jsonl")
    before = held(west)
    capsys.readouterr()
    assert import_command(west, [str(first), str(both), str(both)]) == 0
    assert capsys.readouterr().out.startswith(f"5 records in {first}, {both}, {both}: 0 new, 5 were here; marks changed on 0\n")
    assert held(west) == before
    import_command(east, [str(both)])
    assert {one[2] for one in held(east)} == {one[2] for one in held(west)}


def test_marks_travel_and_add_up(east: Project, west: Project) -> None:
    import_command(west, [str(exported(east))])
    Store(east.runs).mark(east.runs / FINE.id / "001", [invalidated("wrong text")])
    number = next(one.record.attempt for one in Store(west.runs).read(FINE.id)[0] if one.record.started_at[14:16] == "01")
    Store(west.runs).mark(west.runs / FINE.id / f"{number:03d}", [invalidated("busy", at="2026-08-03")])
    import_command(west, [str(exported(east))])
    import_command(east, [str(exported(west))])
    for project, at in ((east, 1), (west, number)):
        assert [mark.reason for mark in load_marks(project.runs / FINE.id / f"{at:03d}")] == ["wrong text", "busy"]


def test_only_an_experiments_cells_are_exported(east: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.compose, "compose_cells", lambda words, project: [compose(words)])
    keep(east, complete(cell("foreign"), 0.1, attempt=7))
    assert len(read_parcels(exported(east))) == 4
    assert {one.record.cell_id for one in read_parcels(exported(east, "small.jsonl", "experiment=small"))} == {FINE.id, COARSE.id}


Damage = Callable[[list[str]], list[str]]


def changed(line: int, old: str, new: str) -> Damage:
    return lambda lines: [text.replace(old, new, 1) if number == line else text for number, text in enumerate(lines, 1)]


def rewritten(line: int, **fields: object) -> Damage:
    """The record of that line with other fields, and the id that fits them."""

    def damage(lines: list[str]) -> list[str]:
        data = json.loads(lines[line - 1])
        data["record"] |= fields
        data["record_id"] = record_id(Record.model_validate(data["record"]))
        return [json.dumps(data) if number == line else text for number, text in enumerate(lines, 1)]

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda lines: lines[:-1], ":3: holds 2 records where its header says 3"),
        (lambda lines: [*lines, lines[-1]], ":5: holds 4 records where its header says 3"),
        (lambda lines: [*lines[:-1], lines[-1][:100]], ":4: line: Invalid JSON"),
        (lambda lines: [], ":1: no export of the lab"),
        (lambda lines: lines[1:], ":1: no export of the lab"),
        (lambda lines: [lines[0], "", *lines[1:]], ":2: line: Invalid JSON"),
        (changed(1, '"version": 1', '"version": 2'), ":1: format version 2; this lab reads version 1"),
        (changed(1, '"count": 3', '"count": "3"'), ":1: count: not a whole number"),
        (changed(1, "migration-lab-records", "other"), ":1: no export of the lab"),
        (changed(3, '"elapsed_s":30.0', '"elapsed_s":31.0'), ":3: record_id: does not fit the record"),
        (changed(3, '"elapsed_s":', '"mood":1,"elapsed_s":'), ":3: record.mood: Extra inputs are not permitted"),
        (changed(4, '"marks":[]', '"marks":[{"what":"praised"}]'), ":4: marks.0.what:"),
        (rewritten(2, cell_id="../../outside"), ":2: record.cell_id: '../../outside' cannot be a folder's name"),
        (rewritten(2, cell_id=".hidden"), ":2: record.cell_id: '.hidden' cannot be a folder's name"),
        (rewritten(4, started_at="yesterday"), ":4: record.started_at: 'yesterday' is no time in ISO 8601"),
        (rewritten(2, cell_hash=cell("reference").hash), ":2: record.cell_hash: "),
        (rewritten(3, cell_id=COARSE.id), ":3: record.cell_id: "),
        (rewritten(3, cell={}), ":3: record.cell.model: Field required"),
        (rewritten(2, provenance={"experiments": None}), ":2: record.provenance.experiments: Input should be a valid dictionary"),
    ],
)
def test_a_file_with_a_fault_is_one_line_and_nothing_is_taken_from_it(east: Project, west: Project, damage: Damage, message: str) -> None:
    good, bad = exported(west, "good.jsonl"), exported(east, "bad.jsonl")
    bad.write_text("\n".join(damage(bad.read_text().splitlines())), encoding="utf-8")
    there = project_at(east.root / "there")
    with pytest.raises(LabError, match=re.escape(f"{bad}{message}")) as caught:
        import_command(there, [str(good), str(bad)])
    assert "\n" not in str(caught.value)
    assert not there.runs.exists()


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[]\n", b'{"format": 1}\n', b"null"])
def test_any_other_file_is_no_export(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(LabError, match="x:1: no export of the lab"):
        read_parcels(tmp_path / "x")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name one file to write; usage: python -m lab export FILE [experiment=NAME]"),
        (["a", "b"], "name one file to write"),
        (["a", "--all"], "name one file to write"),
        (["experiments/small.yaml"], "experiments/small.yaml: is there and is no export of the lab"),
        (["nowhere/a"], "nowhere/a: the folder nowhere is not there"),
        (["a", "experiment=big"], "unknown experiment 'big'"),
    ],
)
def test_a_wrong_export_writes_nothing(east: Project, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str) -> None:
    monkeypatch.chdir(east.root)
    with pytest.raises(LabError, match=re.escape(message)):
        export_command(east, words)
    assert sorted(path.name for path in east.root.iterdir()) == ["experiments", "runs"]


def test_an_export_of_nothing_is_refused_and_an_earlier_export_is_replaced(east: Project, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no record to export: runs has 0"):
        export_command(project_at(tmp_path / "empty"), [str(tmp_path / "x")])
    file = exported(east)
    keep(east, complete(FINE, 0.9, attempt=8))
    assert len(read_parcels(exported(east))) == 4 and file.name == "out.jsonl"


def test_an_unreadable_record_is_left_out_and_told(east: Project, capsys: pytest.CaptureFixture[str]) -> None:
    (east.runs / FINE.id / "001" / "record.json").write_text("{")
    assert export_command(east, [str(east.root / "out.jsonl")]) == 3
    assert len(read_parcels(east.root / "out.jsonl")) == 2
    shown = capsys.readouterr()
    assert f"left out: runs/{FINE.id}/001/record.json is unreadable" in shown.err
    assert "2 records, 0 marks; 1 that cannot be read are NOT in it" in shown.out


def test_only_what_belongs_in_the_file_can_be_missing_from_it(east: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab.compose, "compose_cells", lambda words, project: [compose(words)])
    foreign = cell("foreign")
    keep(east, complete(foreign, 0.1))
    (east.runs / foreign.id / "001" / "record.json").write_text("{")
    assert export_command(east, [str(east.root / "out.jsonl"), "experiment=small"]) == 0
    (east.runs / FINE.id / "001" / "record.json").write_text("{")
    assert export_command(east, [str(east.root / "out.jsonl"), "experiment=small"]) == 3


def test_an_import_says_what_it_cannot_read_and_ends_no_run_because_of_it(
    east: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def ended(self: Tracker) -> int:
        raise AssertionError("the record that explains a run may be the one that cannot be read")

    monkeypatch.setattr(Tracker, "end_left_running", ended)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    (east.runs / FINE.id / "001" / "record.json").write_text("{")
    assert import_command(east, []) == 3
    shown = capsys.readouterr()
    assert shown.out.endswith("the rest were there; 1 more cannot be read\n")
    assert f"unreadable, not mirrored: runs/{FINE.id}/001/record.json" in shown.err and "runs left RUNNING are left alone" in shown.err


@pytest.mark.parametrize("content", ["", "{}", '[{"what": "invalidated"'])
def test_an_invalidated_number_does_not_come_back_because_its_marks_are_spoilt(east: Project, content: str) -> None:
    file = exported(east)
    marks = east.runs / FINE.id / "001" / MARKS
    Store(east.runs).mark(marks.parent, [invalidated()])
    marks.write_text(content)
    before = sorted(east.runs.rglob("*.json"))
    with pytest.raises(LabError, match=f"runs/{FINE.id}/001: holds a record of the import, but its marks cannot be read .*; repair it, or delete") as caught:
        import_command(east, [str(file)])
    assert "\n" not in str(caught.value) and sorted(east.runs.rglob("*.json")) == before
    marks.unlink()
    assert import_command(east, [str(file)]) == 0 and len(Store(east.runs).read(FINE.id)[0]) == 2


def test_nor_because_the_record_itself_is_spoilt(east: Project) -> None:
    file = exported(east)
    spoilt = east.runs / FINE.id / "001" / "record.json"
    Store(east.runs).mark(spoilt.parent, [invalidated()])
    marked = exported(east, "marked.jsonl")
    spoilt.write_text("{")
    with pytest.raises(LabError, match=f"runs/{FINE.id}/001: is marked, but which record it holds cannot be read .*; repair it, or move the folder"):
        import_command(east, [str(file)])
    import_command(east, [str(marked)])
    assert [one.marks != () for one in Store(east.runs).read(FINE.id)[0]] == [False, True], "with its marks it may come back"


def test_a_spoilt_record_that_nobody_marked_is_brought_back_by_an_import(east: Project) -> None:
    file = exported(east)
    (east.runs / FINE.id / "001" / "record.json").write_text("{")
    assert import_command(east, [str(file)]) == 3
    assert [one.record.attempt for one in Store(east.runs).read(FINE.id)[0]] == [2, 3]


def test_a_mark_that_arrives_reaches_the_record_whichever_copy_is_shown(east: Project, tmp_path: Path) -> None:
    store = Store(east.runs)
    file = exported(east)
    shutil.copytree(east.runs / FINE.id / "001", east.runs / FINE.id / "009")
    there = project_at(tmp_path / "there")
    import_command(there, [str(file)])
    Store(there.runs).mark(there.runs / FINE.id / "001", [invalidated("wrong text")])
    import_command(east, [str(exported(there))])
    held_now = store.read(FINE.id)[0]
    stands = {record.attempt: standing.text for record, standing in standings([one.record for one in held_now], marks_of(held_now))}
    assert stands == {1: "INVALIDATED: wrong text", 2: "CURRENT"} and store.newest(FINE) is not None
    assert [one.record.attempt for one in held_now] == [1, 2, 9]


def test_a_number_that_was_taken_meanwhile_is_never_overwritten(east: Project) -> None:
    store = Store(east.runs)
    added = store.add(complete(FINE, 0.5, attempt=1, notes=["new"]))
    assert (added.record.attempt, added.file.parent.name) == (3, "003")
    assert [one.record.attempt for one in store.read(FINE.id)[0]] == [1, 2, 3]


def test_an_attempt_that_the_disk_refuses_leaves_nothing_behind(east: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    before = sorted(path.name for path in (east.runs / FINE.id).iterdir())
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        take_in(Store(east.runs), [Parcel(complete(FINE, 0.7, attempt=6))])
    assert sorted(path.name for path in (east.runs / FINE.id).iterdir()) == before


def test_copies_are_merged_with_all_their_marks() -> None:
    one = complete(FINE, 0.1)
    copies = [Parcel(one, (invalidated("a"),)), Parcel(one.model_copy(update={"attempt": 7}), (invalidated("b"), invalidated("a")))]
    (merged,) = merge(copies)
    assert {mark.reason for mark in merged.marks} == {"a", "b"} and len(merged.marks) == 2


@pytest.mark.parametrize("count", [HANDFUL, HANDFUL + 1])
def test_many_records_show_a_progress_bar_on_standard_error(tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int) -> None:
    file = tmp_path / "many.jsonl"
    file.write_text(to_text(Parcel(complete(FINE, 0.1, attempt=number)) for number in range(1, count + 1)))
    import_command(project_at(tmp_path / "there"), [str(file)])
    shown = capsys.readouterr()
    assert ("reading in" in shown.err and f"{count}/{count}" in shown.err) == (count > HANDFUL)
    assert "reading in" not in shown.out and f"{count} new" in shown.out


def test_an_import_needs_no_file_and_knows_its_flags(east: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert import_command(east, []) == 0
    assert capsys.readouterr().out == "0 records: 0 mirrored now, 0 not, the rest were there\n"
    with pytest.raises(LabError, match="--all: unknown flag of `import`"):
        import_command(east, ["--all"])


def test_a_gzipped_export_is_the_same_records_and_a_broken_one_is_one_line(east: Project, tmp_path: Path) -> None:
    file = exported(east, "out.jsonl.gz")
    plain = exported(east)
    assert [parcel.record_id for parcel in read_parcels(file)] == [parcel.record_id for parcel in read_parcels(plain)] != []
    assert file.stat().st_size < plain.stat().st_size / 2
    assert export_command(east, [str(file)]) == 0, "an earlier export of that name is replaced"
    (cut := tmp_path / "cut.jsonl.gz").write_bytes(file.read_bytes()[:-40])
    with pytest.raises(LabError, match=r"cut\.jsonl\.gz: no whole gzip file"):
        read_parcels(cut)
    (other := tmp_path / "other.jsonl.gz").write_bytes(b"not gzipped")
    with pytest.raises(LabError, match="is there and is no export of the lab"):
        export_command(east, [str(other)])
