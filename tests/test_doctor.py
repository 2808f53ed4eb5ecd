"""What `doctor` prints and when it says that nothing can be measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab import doctor
from lab.checks.check import Check
from lab.project import Project
from tests.checks.support import FULL, PLENTY, Rooms, machine, rooms
from tests.runner_helpers import make_project

CHECKS = (
    Check("ok", "580.159.04 (nvidia-smi)", name="driver"),
    Check("warn", "64 MiB of 64 MiB free", "docker --shm-size=16g (or --ipc=host); elsewhere: mount -o remount,size=16g /dev/shm", name="shm"),
    Check("unknown", "no cpufreq files", name="cpu_clocks"),
)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    return make_project(tmp_path / "p")


def test_one_entry_each_aligned_with_the_fix_below() -> None:
    assert doctor.lines(CHECKS) == [
        "ok    driver      580.159.04 (nvidia-smi)",
        "WARN  shm         64 MiB of 64 MiB free",
        "                  fix: docker --shm-size=16g (or --ipc=host); elsewhere: mount",
        "                       -o remount,size=16g /dev/shm",
        "?     cpu_clocks  no cpufreq files",
        "ready to measure (bad: 0, warnings: 1, not known: 1)",
    ]


@given(st.lists(st.text(alphabet="abcdefgh/-", min_size=1, max_size=30), min_size=1, max_size=40))
def test_no_line_is_wider_than_a_terminal_and_no_word_is_lost(words: list[str]) -> None:
    printed = doctor.lines([Check("ok", " ".join(words), name="memory")])[:-1]
    assert max(map(len, printed)) <= doctor.WIDTH
    assert " ".join(printed).split() == ["ok", "memory", *words]


@pytest.mark.parametrize(
    ("disks", "ready", "words"),
    [
        (PLENTY, True, "ready to measure (bad: 0, "),
        ({**PLENTY, "/dev/shm": FULL}, True, "WARN  shm          /dev/shm: No space left on device\n"),
        ({**PLENTY, "/tmp": FULL}, False, "BAD   disk_tmp     /tmp: disk full\n                   fix: free space there, or set TMPDIR"),
    ],
    ids=["all well", "a warning", "a full /tmp"],
)
def test_only_what_is_bad_makes_it_say_no(project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str], disks: Rooms, ready: bool, words: str) -> None:
    assert doctor.examine(project, machine(tmp_path / "m", room=rooms(disks))) is ready
    assert words in capsys.readouterr().out
