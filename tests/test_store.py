"""The store: a record is whole or absent, an attempt is never overwritten, and what a killed process left is closed exactly once."""

from __future__ import annotations

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lab import store as store_module
from lab.cell import Cell
from lab.locks import GaveUpError, hold, is_locked, try_lock
from lab.project import Project
from lab.reconcile import reconcile
from lab.record import Record, Status
from lab.store import RECORD, RESERVE, RUNNING, Attempt, Store, load_record, write_atomic
from tests.runner_helpers import cell_of, make_project, record_of


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return make_project(tmp_path / "p")


@pytest.fixture
def store(project: Project) -> Store:
    return Store(project.runs)


@pytest.fixture
def cell(project: Project) -> Cell:
    return cell_of(project, "layers=3")


def skeleton(cell: Cell) -> dict[str, object]:
    whole = record_of(cell).model_dump(mode="json")
    return {k: whole[k] for k in ("cell_id", "cell_hash", "cell", "artifact", "provenance", "resume_key", "started_at")}


def opened(store: Store, cell: Cell) -> Attempt:
    return store.open_attempt(cell, {"pid": os.getpid(), "record": skeleton(cell)})


def test_a_record_comes_back_as_it_was_written(store: Store, cell: Cell) -> None:
    attempt = opened(store, cell)
    assert attempt.folder == store.runs / cell.id / "001"
    assert (attempt.folder / RESERVE).stat().st_size == store_module.RESERVE_BYTES
    file = store.finish(attempt.folder, record_of(cell))
    attempt.close()
    assert load_record(file) == record_of(cell)
    assert sorted(p.name for p in attempt.folder.iterdir()) == [RECORD]


def test_attempts_opened_at_once_get_numbers_of_their_own(store: Store, cell: Cell) -> None:
    with ThreadPoolExecutor(8) as pool:
        attempts = list(pool.map(lambda _: opened(store, cell), range(16)))
    assert sorted(a.number for a in attempts) == list(range(1, 17))
    for attempt in attempts:
        assert json.loads((attempt.folder / RUNNING).read_text())["attempt"] == attempt.number
        attempt.close()
    assert len(list((store.runs / cell.id).iterdir())) == 16


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "record.json"
    write_atomic(file, "old")

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_an_attempt_that_cannot_reserve_its_space_leaves_nothing(store: Store, cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_file: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lab.store.reserve", full)
    with pytest.raises(OSError, match="No space"):
        opened(store, cell)
    assert list((store.runs / cell.id).iterdir()) == []


def test_the_newest_valid_attempt_counts(store: Store, cell: Cell) -> None:
    for status in (Status.OK, Status.TIMEOUT):
        attempt = opened(store, cell)
        store.finish(attempt.folder, record_of(cell, status, attempt=attempt.number))
        attempt.close()
    spoilt = store.runs / cell.id / "003" / RECORD
    spoilt.parent.mkdir()
    spoilt.write_text('{"schema_version": 1, "status"')
    newest = store.newest(cell)
    assert newest is not None
    assert (newest.record.attempt, newest.record.status) == (2, Status.TIMEOUT)
    assert [s.record.attempt for s in store.records()] == [1, 2]
    assert [file for file, _ in store.unreadable()] == [spoilt]


def test_a_record_of_another_cell_is_not_taken_for_this_one(store: Store, cell: Cell, project: Project) -> None:
    attempt = opened(store, cell)
    file = store.finish(attempt.folder, record_of(cell_of(project, "layers=6")))
    attempt.close()
    assert store.newest(cell) is None
    ((bad, why),) = store.unreadable()
    assert bad == file and "lies in the folder of another cell" in why, "its number and marks would be those of another attempt"


def test_cells_that_share_an_id_are_told_apart_by_hash(store: Store, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cell, "id", property(lambda self: "twin"))
    one, other = (cell_of(project, f"layers={layers}") for layers in (3, 6))
    store.add(record_of(one))
    assert store.newest(one) is not None and store.newest(other) is None


def test_a_lock_tells_who_holds_it_and_can_be_given_up(tmp_path: Path) -> None:
    file = tmp_path / ".lock"
    told: list[str] = []
    with hold(file, "pid 1, cell a", told.append, lambda _: True):
        assert is_locked(file)
        with pytest.raises(GaveUpError), hold(file, "pid 2", told.append, lambda _: True):
            raise AssertionError("two holders")
    assert told == ["pid 1, cell a"]
    assert not is_locked(file)


def test_an_attempt_of_a_living_process_is_left_alone(store: Store, cell: Cell) -> None:
    attempt = opened(store, cell)
    assert reconcile(store) == []
    attempt.close()


def test_an_attempt_of_a_dead_process_is_closed_exactly_once(store: Store, cell: Cell) -> None:
    opened(store, cell).close()  # the kernel would have given the marker's lock back like this
    with ThreadPoolExecutor(4) as pool:
        added = [stored for found in pool.map(lambda _: reconcile(store), range(4)) for stored in found]
    assert len(added) == 1
    record = load_record(store.runs / cell.id / "001" / RECORD)
    assert record.status is Status.CRASHED
    assert "the lab process was killed" in record.reason
    assert record.gaps["ppl"].fill == "python -m lab run path=x"
    assert not (store.runs / cell.id / "001" / RUNNING).exists()
    assert reconcile(store) == []


UNUSABLE = ["", "[]", "{}", "null", '{"pid": 1, "attempt": 1, "record": {}}', '{"pid": 1, "attempt": null, "record": []}', "older schema"]


def spoil(store: Store, cell: Cell, content: str) -> Path:
    """The folder of a dead attempt with `content` as its marker."""
    attempt = opened(store, cell)
    if content == "older schema":
        content = json.dumps({"pid": 1, "attempt": attempt.number, "record": {**skeleton(cell), "engine_version": 3}})
    (attempt.folder / RUNNING).write_text(content)
    attempt.close()
    return attempt.folder


@pytest.mark.parametrize("content", UNUSABLE)
def test_an_unusable_marker_is_put_aside_and_stops_nobody(store: Store, cell: Cell, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = spoil(store, cell, content)
    opened(store, cell).close()
    assert [s.record.attempt for s in reconcile(store)] == [2]
    shown = capsys.readouterr().err
    assert (shown.count("\n"), shown.count("warning: "), "running.json.unusable" in shown) == (2, 1, True)
    assert [p.name for p in folder.iterdir()] == ["running.json.unusable"]
    assert reconcile(store) == []
    assert capsys.readouterr().err == ""
    attempt = opened(store, cell)
    attempt.close()
    assert attempt.number == 3, "the number stays taken"


@pytest.mark.parametrize("content", UNUSABLE)
def test_an_attempt_with_an_unusable_marker_is_closed_if_a_record_beside_it_tells_its_cell(store: Store, cell: Cell, content: str) -> None:
    first = opened(store, cell)
    store.finish(first.folder, record_of(cell))
    first.close()
    folder = spoil(store, cell, content)
    (added,) = reconcile(store)
    assert load_record(folder / RECORD) == added.record
    assert (added.record.attempt, added.record.status, added.record.cell_hash) == (2, Status.CRASHED, cell.hash)
    assert "its running marker was not usable" in added.record.notes[1]
    assert added.record.gaps["ppl"].fill == "python -m lab run path=x"
    assert sorted(p.name for p in folder.iterdir()) == [RECORD]


def test_a_record_of_another_cell_in_the_folder_tells_nothing(store: Store, cell: Cell, project: Project) -> None:
    other = cell_of(project, "layers=6")
    first = opened(store, cell)
    store.finish(first.folder, record_of(other))
    first.close()
    spoil(store, cell, "[]")
    assert reconcile(store) == []


def test_one_attempt_that_the_disk_refuses_does_not_keep_the_others_open(store: Store, cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(2):
        opened(store, cell).close()
    real = Store.finish

    def finish(self: Store, folder: Path, record: Record) -> Path:
        if folder.name == "001":
            raise PermissionError(errno.EACCES, "Permission denied", str(folder))
        return real(self, folder, record)

    monkeypatch.setattr(Store, "finish", finish)
    assert [s.record.attempt for s in reconcile(store)] == [2]


def test_half_made_folders_go_once_their_owner_is_dead(store: Store, cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    parent = store.runs / cell.id
    folders = [parent / f".new-{name}" for name in ("dead", "bare", "alive", "young")]
    for folder in folders:
        folder.mkdir(parents=True)
        if folder.name != ".new-bare":
            (folder / RUNNING).write_text("")
        if folder.name != ".new-young":
            os.utime(folder, (1, 1))
    lock = try_lock(parent / ".new-alive" / RUNNING)
    assert lock is not None
    assert reconcile(store) == []
    os.close(lock)
    assert sorted(p.name for p in parent.iterdir()) == [".new-alive", ".new-young"]


def test_a_folder_being_made_is_locked_before_it_takes_its_time(store: Store, cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "SETTLED_S", -1.0)
    seen: list[list[Path]] = []
    real = store_module.reserve

    def reserve(file: Path) -> None:
        seen.append(store.half_made())
        real(file)

    monkeypatch.setattr(store_module, "reserve", reserve)
    opened(store, cell).close()
    assert seen == [[]]


def test_locks_end_with_their_descriptor(tmp_path: Path) -> None:
    descriptor = try_lock(tmp_path / "l")
    assert descriptor is not None
    assert try_lock(tmp_path / "l") is None
    os.close(descriptor)
    again = try_lock(tmp_path / "l")
    assert again is not None
    os.close(again)
