"""Attempts by their address, and invalidation: a mark beside a record that nobody edits."""

from __future__ import annotations

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lab import history
from lab.cell import Cell
from lab.errors import LabError
from lab.history import find_attempt, invalidate_command
from lab.matrix import build_matrix
from lab.project import Project
from lab.record import Status
from lab.standing import Kind
from lab.store import MARKS, RECORD, Store, load_attempt, load_marks, marks_of
from lab.tracking import Tracker
from tests.matrix_helpers import cell, complete, compose, invalidated, keep, project_at, record, small

OF = cell("fine")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """OK, failed, OK and failed attempts of one cell. MLflow is left out: its tags are tested with it."""
    monkeypatch.setattr(Tracker, "restate", lambda self, cell_id: True)
    made = project_at(tmp_path)
    keep(
        made,
        complete(OF, 0.1, attempt=1, provenance={"fill": "python -m lab run it"}),
        record(OF, status=Status.OOM, attempt=2),
        complete(OF, 0.3, attempt=3, provenance={"fill": "python -m lab run it"}),
        record(OF, status=Status.TIMEOUT, attempt=4),
    )
    return made


def folder(project: Project, number: int) -> Path:
    return project.runs / OF.id / f"{number:03d}"


@pytest.mark.parametrize(("word", "number"), [("{}", 3), ("{}/1", 1), ("{}/002", 2), ("runs/{}/004/record.json", 4)])
def test_an_attempt_is_found_by_its_address(project: Project, word: str, number: int) -> None:
    assert find_attempt(project, word.format(OF.id)).file == folder(project, number) / RECORD


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("nano", "nano: neither a cell in runs nor a record file"),
        ("", "neither a cell in runs nor a record file"),
        ("../runs", "neither a cell in runs nor a record file"),
        (f"{OF.id[:-1]}/1", f"(did you mean {OF.id}?)"),
        (f"{OF.id}/7", f"{OF.id}/7: no such attempt; {OF.id} has 4 with a record: 001, 002, 003, 004"),
        (f"{OF.id}/one", "no such attempt"),
        ("experiments/small.yaml", "experiments/small.yaml: not a record that can be read: record: Invalid JSON"),
    ],
)
def test_what_is_no_attempt_is_one_line(project: Project, word: str, message: str) -> None:
    with pytest.raises(LabError, match=re.escape(message)) as caught:
        find_attempt(project, word)
    assert "\n" not in str(caught.value)


def test_a_cell_without_an_ok_attempt_or_with_two_meanings_must_be_named_more_exactly(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 3):
        Store(project.runs).mark(folder(project, number), [invalidated()])
    with pytest.raises(LabError, match="no OK attempt that was not invalidated; attempt 4 is TIMEOUT"):
        find_attempt(project, OF.id)
    monkeypatch.setattr(Cell, "id", property(lambda self: "twin"))
    keep(project, complete(OF, 0.1, attempt=9), complete(cell("coarse"), 0.1, attempt=8))
    with pytest.raises(LabError, match=r"two different cells share this id; name the attempt, e.g. twin/2"):
        find_attempt(project, "twin")


def test_an_invalidated_attempt_stays_marked_and_gives_its_place_away(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder(project, 3) / RECORD).read_bytes()
    assert invalidate_command(project, [f"{OF.id}/3", "--reason", "wrong\n text"]) == 0
    assert capsys.readouterr().out == f"{OF.id}/003: invalidated: wrong text\ncurrent now: attempt 1, OK\n"
    assert (folder(project, 3) / RECORD).read_bytes() == before
    (mark,) = load_marks(folder(project, 3))
    assert (mark.what, mark.reason, mark.by != "") == ("invalidated", "wrong text", True)
    assert find_attempt(project, OF.id).record.attempt == 1


def test_when_nothing_is_left_the_command_that_measures_again_is_told(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (1, 2, 3, 4):
        assert invalidate_command(project, [f"--reason=all of it {number}", f"{OF.id}/{number}"]) == 0
    assert "current now: attempt 4, TIMEOUT" in capsys.readouterr().out.splitlines()[-3]


def test_a_cell_without_any_valid_attempt_names_the_command(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (2, 4, 1, 3):
        invalidate_command(project, [f"{OF.id}/{number}", "--reason", "busy"])
    assert capsys.readouterr().out.splitlines()[-1] == "no attempt of this cell counts now; to measure it again: python -m lab run it"


def test_another_reason_is_another_mark_and_the_same_one_is_refused(project: Project) -> None:
    invalidate_command(project, [f"{OF.id}/3", "--reason", "busy"])
    invalidate_command(project, [f"{OF.id}/3", "--reason", "wrong text"])
    with pytest.raises(LabError, match="is invalidated already, for that very reason"):
        invalidate_command(project, [f"{OF.id}/003", "--reason", "busy"])
    assert [mark.reason for mark in load_marks(folder(project, 3))] == ["busy", "wrong text"]


def test_invalidating_a_copy_invalidates_what_it_is_a_copy_of(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder(project, 3), folder(project, 7))
    assert invalidate_command(project, [f"{OF.id}/7", "--reason", "busy"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "current now: attempt 1, OK"
    found = Store(project.runs).read(OF.id)[0]
    matrix = build_matrix(small(project.root), [one.record for one in found], compose, marks=marks_of(found))
    row = next(row for row in matrix.rows if row.cell == OF)
    assert row.current is not None and row.current.attempt == 1
    assert [(record.attempt, standing.text) for record, standing in row.standings if standing.kind is Kind.INVALIDATED] == [(3, "INVALIDATED: busy")]
    assert (matrix.totals.attempts, matrix.totals.copies, matrix.totals.invalidated) == (5, 1, 1)
    for number in (2, 4):
        Store(project.runs).mark(folder(project, number), [invalidated()])
    newest = Store(project.runs).newest(OF)
    assert newest is not None and newest.record.attempt == 1, "neither of the two is what a sweep skips by"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name one attempt; usage: python -m lab invalidate CELL_ID/ATTEMPT --reason TEXT"),
        ([OF.id, "--reason", "x"], "name one attempt"),
        ([f"{OF.id}/3"], "--reason TEXT is missing"),
        ([f"{OF.id}/3", "--reason"], "--reason TEXT is missing"),
        ([f"{OF.id}/3", "--reason", " "], "--reason TEXT is missing"),
        ([f"{OF.id}/3", "--reason=a", "--reason=b"], "given twice"),
        ([f"{OF.id}/3", "--force"], "--force: unknown flag of `invalidate`"),
        ([f"{OF.id}/9", "--reason", "x"], "no such attempt"),
    ],
)
def test_a_wrong_command_marks_nothing(project: Project, words: list[str], message: str) -> None:
    with pytest.raises(LabError, match=re.escape(message)):
        invalidate_command(project, words)
    assert list(project.runs.rglob(MARKS)) == []


def test_a_record_of_another_project_cannot_be_marked_here(project: Project, tmp_path: Path) -> None:
    (other,) = keep(project_at(tmp_path / "other"), complete(OF, 0.1))
    with pytest.raises(LabError, match="bring it here first"):
        invalidate_command(project, [str(other.file), "--reason", "x"])


def test_marks_put_at_once_are_all_kept(project: Project) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: invalidate_command(project, [f"{OF.id}/3", "--reason", f"reason {i}"]), range(8)))
    assert len(load_marks(folder(project, 3))) == 8


def test_the_newest_result_of_a_cell_is_never_an_invalidated_one(project: Project) -> None:
    """What a sweep skips by: a cell whose only result was invalidated is measured again."""
    store, of = Store(project.runs), OF
    Store(project.runs).mark(folder(project, 4), [invalidated()])
    newest = store.newest(of)
    assert newest is not None and newest.record.attempt == 3
    for number in (1, 2, 3):
        store.mark(folder(project, number), [invalidated()])
    assert store.newest(of) is None


@pytest.mark.parametrize("content", ["", "{}", '[{"what": "invalidated"}]', '[{"what": "praised", "reason": "x", "at": "x", "by": "x"}]'])
def test_a_record_whose_marks_cannot_be_read_counts_as_unreadable(project: Project, content: str) -> None:
    (folder(project, 3) / MARKS).write_text(content)
    found, bad = Store(project.runs).read(OF.id)
    assert [one.record.attempt for one in found] == [1, 2, 4]
    assert [(file, why.startswith("marks.json: ")) for file, why in bad] == [(folder(project, 3) / RECORD, True)]


def test_a_record_in_another_folder_has_that_folders_number(project: Project) -> None:
    folder(project, 3).rename(folder(project, 12))
    assert load_attempt(folder(project, 12) / RECORD).record.attempt == 12
    assert json.loads((folder(project, 12) / RECORD).read_text())["attempt"] == 3


def test_a_user_without_a_name_is_known_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise KeyError("uid not found")

    monkeypatch.setattr(history.getpass, "getuser", nobody)
    assert re.fullmatch(r"uid \d+", history._user())


def test_cells_are_told_apart_by_hash(project: Project) -> None:
    other: Cell = cell("coarse")
    assert Store(project.runs).newest(other) is None
