"""Room for records, cache, temporary files and shared memory, with disks that are full, small, read-only or absent."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from lab.checks import storage
from lab.checks.source import Room, room_in
from lab.project import Project
from lab.store import MIN_FREE_BYTES
from tests.checks.support import FULL, GIB, PLENTY, machine, rooms


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "p").mkdir()
    return Project(tmp_path / "p", tmp_path / "p" / "runs")


@pytest.mark.parametrize(
    ("room", "state", "words"),
    [
        (Room(100 * GIB, 200 * GIB), "ok", "100.0 GiB of 200.0 GiB free"),
        (Room(GIB // 2, 200 * GIB), "warn", "512 MiB of 200.0 GiB free"),
        (Room(MIN_FREE_BYTES - 1, 200 * GIB), "bad", "free"),
        (FULL, "bad", "runs: disk full"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "bad", "runs: disk full"),
        (OSError(errno.EROFS, "Read-only file system"), "bad", "runs: Read-only file system"),
    ],
)
def test_records_need_room(tmp_path: Path, project: Project, room: Room | OSError, state: str, words: str) -> None:
    found = storage.runs(machine(tmp_path, room=rooms({str(project.root): room})), project)
    assert found.state == state and words in found.found
    assert ("LAB_RUNS" in found.fix) is (state != "ok")


def test_a_run_does_without_its_cache(tmp_path: Path, project: Project) -> None:
    full = machine(tmp_path, room=rooms({str(project.root): FULL}))
    assert (storage.runs(full, project).state, storage.cache(full, project).state) == ("bad", "warn")


def test_a_full_tmp_is_named_although_python_would_take_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    full = storage.tmp(machine(tmp_path, room=rooms({**PLENTY, "/tmp": FULL})))
    assert (full.state, full.found) == ("bad", "/tmp: disk full") and "TMPDIR" in full.fix
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    assert storage.tmp(machine(tmp_path, room=room_in)).found.endswith("gone: No such file or directory")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert storage.tmp(machine(tmp_path, room=room_in)).values["total_bytes"] > 0


@pytest.mark.parametrize(
    ("room", "state"), [(Room(64 << 20, 64 << 20), "warn"), (Room(8 * GIB, 8 * GIB), "ok"), (FileNotFoundError(2, "No such file"), "warn")]
)
def test_a_containers_shared_memory(tmp_path: Path, room: Room | OSError, state: str) -> None:
    found = storage.shm(machine(tmp_path, room=rooms({"/dev/shm": room})))
    assert found.state == state
    assert ("--shm-size" in found.fix) is (state == "warn")


def test_the_room_is_real_and_looking_leaves_nothing(tmp_path: Path) -> None:
    free, total = room_in(tmp_path)
    assert 0 < free <= total
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NotADirectoryError):
        (tmp_path / "file").touch()
        room_in(tmp_path / "file")
