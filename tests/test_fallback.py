"""Records that `runs/` did not take: kept, taken back once, and never at the cost of another record."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from lab.cell import Cell
from lab.fallback import fallback_folder, fallback_records, write_fallback
from lab.locks import is_locked
from lab.project import Project
from lab.reconcile import reconcile
from lab.record import Record, Status
from lab.standing import record_id
from lab.store import LOG, RECORD, RUNNING, Attempt, Store, Stored, load_record
from tests.runner_helpers import cell_of, make_project, record_of


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return make_project(tmp_path / "p")


@pytest.fixture
def store(project: Project) -> Store:
    made = Store(project.runs)
    made.runs.mkdir(parents=True)
    return made


@pytest.fixture
def cell(project: Project) -> Cell:
    return cell_of(project, "layers=3")


def opened(store: Store, cell: Cell, started_at: str = "2026-11-29T10:00:00.000+00:00") -> Attempt:
    return store.open_attempt(cell, {"pid": os.getpid(), "record": {"started_at": started_at}})


def test_a_kept_record_of_an_unknown_origin_stops_nobody(store: Store) -> None:
    folder = fallback_folder() / "x"
    folder.mkdir(parents=True)
    (folder / "origin.json").write_text("[]")
    assert list(fallback_records(store.runs)) == []


def test_a_kept_record_goes_back_to_its_place(store: Store, cell: Cell) -> None:
    attempt = opened(store, cell)
    kept = write_fallback(record_of(cell, Status.INFRA, attempt=1), store.runs)
    store.abandon(attempt.folder)
    attempt.close()
    assert [s.file for s in fallback_records(store.runs)] == [kept]
    assert list(fallback_records(store.runs.parent)) == [], "another project's records are not ours"
    assert [s.record.status for s in reconcile(store)] == [Status.INFRA]
    assert load_record(store.runs / cell.id / "001" / RECORD).attempt == 1
    assert list(fallback_records(store.runs)) == []


def test_a_kept_record_never_displaces_another(store: Store, cell: Cell) -> None:
    attempt = opened(store, cell)
    store.finish(attempt.folder, record_of(cell))
    attempt.close()
    write_fallback(record_of(cell, Status.INFRA, attempt=0), store.runs)
    reconcile(store)
    assert [(s.record.attempt, s.record.status) for s in store.records()] == [(1, Status.OK), (2, Status.INFRA)]


def test_kept_records_come_back_in_the_order_of_their_runs(store: Store, cell: Cell) -> None:
    """The temporary folders have random names; attempt numbers must follow time all the same."""
    for minute in (5, 1, 9, 3, 7):
        record = record_of(cell, Status.INFRA, attempt=0)
        write_fallback(record.model_copy(update={"started_at": f"2026-01-01T00:0{minute}:00+00:00"}), store.runs)
    store.runs.mkdir(parents=True, exist_ok=True)
    reconcile(store)
    starts = [load_record(file).started_at for file in store.record_files()]
    assert len(starts) == 5 and starts == sorted(starts)


def test_a_fallback_folder_of_somebody_else_is_refused(store: Store, cell: Cell, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    fallback_folder().symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError):
        write_fallback(record_of(cell), store.runs)


def test_a_record_goes_to_the_folder_that_waits_for_it_and_keeps_its_log(store: Store, cell: Cell) -> None:
    """On a disk that became read-only, neither log nor marker could be taken away."""
    attempt = opened(store, cell)
    (attempt.folder / LOG).write_text("it began")
    attempt.close()
    write_fallback(record_of(cell, Status.INFRA, attempt=1), store.runs)
    (added,) = reconcile(store)
    assert added.file == attempt.folder / RECORD
    assert sorted(path.name for path in attempt.folder.iterdir()) == [LOG, RECORD]
    assert reconcile(store) == [], "and the attempt is not closed a second time, as CRASHED"


@pytest.mark.parametrize("alive", [True, False])
def test_an_attempt_that_has_the_number_by_now_keeps_it(store: Store, cell: Cell, alive: bool) -> None:
    """As after runs/ was emptied by hand: 001 is another attempt, which may still be running."""
    write_fallback(record_of(cell, Status.INFRA, attempt=1), store.runs)
    attempt = opened(store, cell, started_at="2026-12-01T00:00:00.000+00:00")
    if not alive:
        attempt.close()
    added = reconcile(store)
    assert [one.record.attempt for one in added if one.record.status is Status.INFRA] == [2]
    if alive:
        assert (attempt.folder / RUNNING).exists() and not (attempt.folder / RECORD).exists()
        attempt.close()


def test_a_record_is_taken_back_only_while_nobody_else_adds_any(store: Store, cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import beside it would take the same number: whichever wrote last would be all that is left."""
    seen: list[bool] = []
    real_add, real_finish = Store.add, Store.finish

    def add(self: Store, record: Record) -> Stored:
        seen.append(is_locked(self.runs / ".history.lock"))
        return real_add(self, record)

    def finish(self: Store, folder: Path, record: Record) -> Path:
        seen.append(is_locked(self.runs / ".history.lock"))
        return real_finish(self, folder, record)

    monkeypatch.setattr(Store, "add", add)
    monkeypatch.setattr(Store, "finish", finish)
    attempt = opened(store, cell)
    store.abandon(attempt.folder)
    attempt.close()
    for number in (0, 1, 7):
        write_fallback(record_of(cell, Status.INFRA, attempt=number, notes=[str(number)]), store.runs)
    assert len(reconcile(store)) == 3 and seen == [True] * 3


def test_an_import_that_comes_first_loses_nothing(store: Store, cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fallback(record_of(cell, Status.INFRA, attempt=1), store.runs)
    carried = record_of(cell, notes=["from elsewhere"])
    real = Store.changing

    def changing(self: Store) -> AbstractContextManager[None]:
        @contextmanager
        def after_an_import() -> Iterator[None]:
            with real(self):
                self.add(carried)
            with real(self):
                yield

        return after_an_import()

    monkeypatch.setattr(Store, "changing", changing)
    reconcile(store)
    assert {record_id(one.record) for one in store.records()} >= {record_id(carried), record_id(record_of(cell, Status.INFRA))}
    assert len(store.records()) == 2


def test_a_kept_folder_that_cannot_be_removed_is_taken_in_once(
    store: Store, cell: Cell, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_fallback(record_of(cell, Status.INFRA, attempt=1), store.runs)

    def refused(folder: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", refused)
        assert [one.record.status for one in reconcile(store)] == [Status.INFRA], "what was taken in is told all the same"
        assert reconcile(store) == [] == reconcile(store)
    assert capsys.readouterr().err.count("is not possible now") == 3
    assert reconcile(store) == [] and list(fallback_records(store.runs)) == []
    assert len(store.records()) == 1


def test_what_somebody_else_put_there_is_not_looked_at(store: Store, cell: Cell, tmp_path: Path) -> None:
    write_fallback(record_of(cell), store.runs)
    fallback_folder().rename(tmp_path / "elsewhere")
    fallback_folder().symlink_to(tmp_path / "elsewhere")
    assert list(fallback_records(store.runs)) == [] == reconcile(store)
