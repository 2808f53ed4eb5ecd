"""The runner with real processes: whose turn it is, what is skipped, and a disk that refuses. Nothing is doubled, lost or invented."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from lab import provenance
from lab.cell import Cell
from lab.fallback import fallback_records
from lab.locks import try_lock
from lab.project import Project
from lab.provenance import code_sha256, resume_key
from lab.record import Record, Status
from lab.runner import CellRun, Runner, StoppedError
from lab.signals import StopSignals
from lab.store import Store
from lab.sweep import run_cells
from tests.fake_lab import WORKER, inspect
from tests.fake_lab import runner as fake_runner
from tests.runner_helpers import cell_of, interrupt, lab, make_project, start_lab, worker_pid

CELL = ("path=expert_q2", "layers=3", "device=cpu")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "p"))
    return make_project(tmp_path / "p")


def test_a_sweep_goes_on_past_a_failed_cell_and_repeats_only_what_is_not_ok(project: Project) -> None:
    sweep = ("run", "-m", "path=reference,expert_q2,tiered", "layers=3", "device=cpu")
    code, out, err = lab(project, *sweep, FAKE_MODE="die-q2")
    assert code == 3
    assert "3 cells = 1 OK (0 of them skipped) + 2 gaps" in out
    code, out, err = lab(project, *sweep, "--json")
    assert code == 3
    assert [r["status"] for r in json.loads(out)] == ["OK", "OK", "UNSUPPORTED"]
    assert err.count("skipped, already OK") == 1
    attempts = [(s.record.cell["path"]["name"], s.record.attempt, s.record.status) for s in Store(project.runs).records()]
    assert sorted(attempts) == [
        ("expert_q2", 1, Status.CRASHED),
        ("expert_q2", 2, Status.OK),
        ("reference", 1, Status.OK),
        ("tiered", 1, Status.UNSUPPORTED),
        ("tiered", 2, Status.UNSUPPORTED),
    ]


def test_only_a_sweep_skips_and_only_unless_forced(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*words: str, multirun: bool) -> str:
        runner = fake_runner(project)
        assert run_cells(project, ["path=reference", *CELL[1:], *words], multirun, None, runner=runner, inspect=inspect) == 0
        return capsys.readouterr().err

    assert "skipped" not in run(multirun=False)
    assert "skipped" in run(multirun=True)
    assert "skipped" not in run("force=true", multirun=True)
    assert "skipped" not in run(multirun=False)
    assert [s.record.attempt for s in Store(project.runs).records()] == [1, 2, 3]


def test_an_ok_cell_with_a_gap_that_may_be_filled_is_measured_again(project: Project) -> None:
    sweep = ("run", "-m", "path=expert_q2", "layers=3", "device=cpu")
    assert lab(project, *sweep, FAKE_MODE="part")[0] == 0
    code, _, err = lab(project, *sweep)
    assert code == 0
    assert "attempt 001 is OK but left gaps that may be filled (kld_mean INFRA); measured again" in err
    code, _, err = lab(project, *sweep)
    assert (code, err.count("skipped, already OK")) == (0, 1)
    assert [s.record.attempt for s in Store(project.runs).records()] == [1, 2]


def test_what_moves_the_numbers_moves_the_resume_key(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = cell_of(project, *CELL[:2])
    a, b = {"sha256": "a", "corpus_sha256": "a"}, {"sha256": "a", "corpus_sha256": "b"}
    keys = {resume_key(cell, a, WORKER), resume_key(cell, b, WORKER), resume_key(cell, a, ("python", "-m", "other"))}
    monkeypatch.setattr("lab.provenance.code_sha256", lambda: "other code")
    keys.add(resume_key(cell, a, WORKER))
    monkeypatch.setenv("OMP_NUM_THREADS", "17")
    keys.add(resume_key(cell, a, WORKER))
    assert len(keys) == 5


@pytest.mark.parametrize("name", ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION", "NVIDIA_TF32_OVERRIDE"])
def test_what_chooses_or_changes_the_gpu_is_recorded_and_moves_the_resume_key(project: Project, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    cell = cell_of(project, *CELL[:2])
    monkeypatch.delenv(name, raising=False)
    before = resume_key(cell, {}, WORKER)
    monkeypatch.setenv(name, "1")
    assert resume_key(cell, {}, WORKER) != before
    assert provenance.environment()[name] == "1"


def test_another_tokenizers_moves_the_resume_key(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = cell_of(project, *CELL[:2])
    before = resume_key(cell, {}, WORKER)
    real = provenance._version
    monkeypatch.setattr("lab.provenance._version", lambda name: "0.0" if name == "tokenizers" else real(name))
    assert resume_key(cell, {}, WORKER) != before


def test_the_code_is_read_anew_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.provenance.__file__", str(tmp_path / "provenance.py"))
    (tmp_path / "a.py").write_text("1")
    before = code_sha256()
    (tmp_path / "a.py").write_text("2")
    assert code_sha256() != before


class _Waiting(StopSignals):
    """Calls `meanwhile` when somebody waits for the lock for the first time."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self.meanwhile: Callable[[], None] | None = meanwhile

    def wait(self, seconds: float) -> bool:
        if self.meanwhile:
            self.meanwhile()
            self.meanwhile = None
        return super().wait(seconds)


def test_the_wait_is_no_part_of_the_attempt_and_the_code_is_that_of_its_end(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.runs.mkdir()
    holder = try_lock(project.runs / ".lock")
    assert holder is not None
    ended: list[datetime] = []

    def meanwhile() -> None:
        time.sleep(1.5)
        monkeypatch.setattr("lab.provenance.code_sha256", lambda: "edited while waiting")
        ended.append(datetime.now(UTC).replace(microsecond=0))
        os.close(holder)

    cell = cell_of(project, *CELL[:2])
    key_before = fake_runner(project).resume_key(cell, {})
    begun = datetime.now(UTC)
    with _Waiting(meanwhile) as stop:
        record = fake_runner(project).run(cell, {"sha256": "0" * 64}, stop, skip_ok=True).record
    assert record.status is Status.OK
    assert datetime.fromisoformat(record.started_at) >= ended[0]
    assert record.elapsed_s < (datetime.now(UTC) - begun).total_seconds() - 1.4
    assert record.provenance["code_sha256"] == "edited while waiting"
    assert record.resume_key == fake_runner(project).resume_key(cell, {"sha256": "0" * 64}) != key_before


@pytest.mark.parametrize("where", ["lab.runner.hold", "lab.store.Store.open_attempt", "lab.store.Store.newest"])
def test_a_file_system_that_times_out_is_a_record_and_no_stop(project: Project, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def late(*_: object) -> None:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(where, late)
    assert run_cells(project, CELL, True, None, runner=fake_runner(project), inspect=inspect) == 3
    (kept,) = fallback_records(project.runs)
    assert (kept.record.status, kept.record.reason) == (Status.INFRA, "runs: Connection timed out")


def test_a_sweep_that_did_not_reach_every_cell_is_not_ok(project: Project) -> None:
    class Stops(Runner):
        def run(self, cell: Cell, artifact: dict[str, object], stop: StopSignals, skip_ok: bool, position: str = "", force: bool = False) -> CellRun:
            if cell.layers == 6:
                raise StoppedError("stop")
            return super().run(cell, artifact, stop, skip_ok, position, force)

    stops = Stops(project, WORKER, lambda *_: [])
    stops.tracker = fake_runner(project).tracker
    assert run_cells(project, ["path=reference", "layers=3,6", "device=cpu"], True, None, runner=stops, inspect=inspect) == 3


def test_two_sweeps_at_once_lose_and_double_nothing(project: Project) -> None:
    words = ("run", "-m", "path=reference,expert_q2", "layers=3,6", "device=cpu", "--json")
    both = [start_lab(project, *words, FAKE_MODE="slow") for _ in range(2)]
    answers = [(*p.communicate(timeout=60), p.returncode) for p in both]
    assert [code for _, _, code in answers] == [0, 0]
    assert [len(json.loads(out)) for out, _, _ in answers] == [4, 4]
    records = [s.record for s in Store(project.runs).records()]
    assert [(r.attempt, r.status) for r in records] == [(1, Status.OK)] * 4
    assert sum(err.count("skipped, already OK") for _, err, _ in answers) == 4
    # One at a time: whoever waited for the lock started before, but its child ran after the other's had ended.
    phases = sorted((r.finished_at, r.provenance["phases"][0]["at_s"]) for r in records)
    assert len({finished for finished, _ in phases}) == 4


def test_a_second_run_waits_and_says_for_whom(project: Project, tmp_path: Path) -> None:
    first = start_lab(project, "run", *CELL, FAKE_MODE="hang", FAKE_SIGN=str(tmp_path / "sign"))
    worker_pid(tmp_path / "sign", first)
    second = start_lab(project, "run", "path=reference", *CELL[1:])
    assert second.stderr is not None
    line = second.stderr.readline()
    assert f"another measurement is running (pid {first.pid}, nano-expert_q2-L3" in line
    code, _, _ = interrupt(second, signal.SIGINT)
    assert code == 130
    interrupt(first, signal.SIGINT)
    assert [s.record.cell["path"]["name"] for s in Store(project.runs).records()] == ["expert_q2"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount a small disk here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_fills_up_in_the_middle_still_takes_the_record(project: Project, small_disk: Path) -> None:
    onto = Project(project.root, small_disk / "runs")
    code, out, _ = lab(onto, "run", *CELL, "--json", FAKE_MODE="fill-disk", FAKE_DISK=str(small_disk))
    record = Record.model_validate_json(out)
    assert (code, record.status) == (0, Status.OK)
    assert "log.txt is incomplete: No space left on device" in record.notes
    assert [s.record for s in Store(onto.runs).records()] == [record]


def test_a_disk_that_is_full_already_is_a_record_elsewhere_and_comes_back(project: Project, small_disk: Path) -> None:
    onto = Project(project.root, small_disk / "runs")
    filler = small_disk / "filler"
    with filler.open("wb", buffering=0) as stream, suppress(OSError):
        while True:
            stream.write(b"\0" * 4096)
    code, out, err = lab(onto, "run", *CELL, "--json")
    record = Record.model_validate_json(out)
    assert (code, record.status) == (3, Status.INFRA)
    assert "disk full" in record.reason
    assert "the record is kept in" in err
    assert "Traceback" not in err
    assert len(list(fallback_records(onto.runs))) == 1
    filler.unlink()
    code, _, err = lab(onto, "run", "path=reference", *CELL[1:])
    assert code == 0
    assert {s.record.status for s in Store(onto.runs).records()} == {Status.INFRA, Status.OK}
    assert list(fallback_records(onto.runs)) == []


def test_too_little_disk_is_a_record_in_place(project: Project, small_disk: Path) -> None:
    onto = Project(project.root, small_disk / "runs")
    (small_disk / "filler").write_bytes(b"\0" * (3 << 20))
    code, out, _ = lab(onto, "run", *CELL, "--json")
    record = Record.model_validate_json(out)
    assert (code, record.status) == (3, Status.INFRA)
    assert "disk full" in record.reason
    assert [s.record for s in Store(onto.runs).records()] == [record]


def test_a_runs_folder_that_is_a_file_is_an_infra_record(project: Project) -> None:
    project.runs.write_text("in the way")
    code, out, err = lab(project, "run", *CELL, "--json")
    assert (code, json.loads(out)["status"]) == (3, "INFRA")
    assert "the record is kept in" in err
    assert "Traceback" not in err


def test_an_experiment_file_that_breaks_during_a_sweep_costs_its_cell_and_not_the_sweep(project: Project) -> None:
    class Breaks(Runner):
        def run(self, cell: Cell, artifact: dict[str, object], stop: StopSignals, skip_ok: bool, position: str = "", force: bool = False) -> CellRun:
            half_saved = self.project.root / "experiments" / "x.yaml"
            half_saved.write_text("name: [") if cell.layers == 6 else half_saved.unlink(missing_ok=True)
            return super().run(cell, artifact, stop, skip_ok, position, force)

    runner = Breaks(project, WORKER, lambda *_: [])
    runner.tracker = fake_runner(project).tracker
    assert run_cells(project, ["path=reference", "layers=3,6,12", "device=cpu"], True, None, runner=runner, inspect=inspect) == 3
    found = {s.record.cell["layers"]: s.record for s in Store(project.runs).records()}
    assert [found[layers].status for layers in (3, 6, 12)] == [Status.OK, Status.INFRA, Status.OK]
    assert "experiments/x.yaml:1: not valid YAML" in found[6].reason
