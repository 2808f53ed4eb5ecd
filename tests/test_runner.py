"""The runner with real processes: every way an attempt can end leaves one record with a status. Turns and disks: `test_runner_turns`."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from lab import child
from lab.metrics import CORE
from lab.places import absolute_paths
from lab.project import Project
from lab.reconcile import reconcile
from lab.record import Record, Status
from lab.runner import Runner
from lab.signals import StopSignals
from lab.store import LOG, RECORD, RUNNING, Store, load_record
from tests.fake_lab import WORKER, evidence, inspect
from tests.fake_lab import runner as fake_runner
from tests.runner_helpers import cell_of, interrupt, is_gone, lab, make_project, start_lab, until, worker_pid

CELL = ("path=expert_q2", "layers=3", "device=cpu")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "p"))
    return make_project(tmp_path / "p")


def attempt(project: Project, monkeypatch: pytest.MonkeyPatch, mode: str, *words: str) -> Record:
    """Run one cell in this process, with a real child, and return the record as it was stored."""
    monkeypatch.setenv("FAKE_MODE", mode)
    cell = cell_of(project, *CELL[:2], *words)
    with StopSignals() as stop:
        done = fake_runner(project).run(cell, inspect(project.root, cell.model), stop, skip_ok=False)
    assert done.file is not None
    assert load_record(done.file) == done.record
    return done.record


def assert_all_gaps(record: Record) -> None:
    assert not record.metrics
    assert set(record.gaps) == set(CORE)
    assert {(g.status, g.reason) for g in record.gaps.values()} == {(record.status, record.reason)}
    assert "\n" not in record.reason


def test_a_good_run_is_ok_and_says_where_it_comes_from(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    record = attempt(project, monkeypatch, "ok")
    assert record.status is Status.OK
    assert record.metrics["tg128_tok_s"].median == 50.5
    assert record.metrics.keys() | record.gaps.keys() == set(CORE)
    assert record.gaps["kld_mean"].fill == "python -m lab run model=nano path=expert_q2 layers=3 device=cpu bench=quick"
    assert record.artifact["sha256"] == "0" * 64
    assert [Path(word).name for word in record.provenance["worker_argv"]] == [Path(word).name for word in WORKER]
    assert not list(absolute_paths(record.provenance["command"]))
    assert any("another worker than lab.worker" in note for note in record.notes)
    assert {"git", "code_sha256", "packages", "machine", "env", "command"} <= record.provenance.keys()
    assert record.provenance["phases"][0]["name"] == "load"
    folder = project.runs / record.cell_id / "001"
    assert "hello on stdout" in (folder / LOG).read_text()
    assert "hello on stderr" in (folder / LOG).read_text()
    assert sorted(p.name for p in folder.iterdir()) == [LOG, RECORD]


@pytest.mark.parametrize(
    ("mode", "status", "reason"),
    [
        ("die", Status.CRASHED, "SIGKILL (out of memory is a common cause) in phase load; last log line: allocating far too much"),
        ("raise", Status.CRASHED, "ended without a result (exit code 1) in phase load; last log line: ValueError: the worker has a bug"),
        ("silent", Status.CRASHED, "ended without a result in phase load"),
        ("garbage", Status.CRASHED, "unreadable event"),
        ("nan", Status.CRASHED, "invalid event: metrics.ppl.value"),
        ("oom", Status.OOM, "needs 9 GB"),
        ("other-code", Status.INFRA, "the code under lab/ changed"),
        ("other-files", Status.INFRA, "the files changed between check and measurement"),
        ("not-executed", Status.PATH_NOT_EXECUTED, "experts ran bf16, not q2_g32"),
    ],
)
def test_what_goes_wrong_in_the_worker_is_a_recorded_gap(project: Project, monkeypatch: pytest.MonkeyPatch, mode: str, status: Status, reason: str) -> None:
    record = attempt(project, monkeypatch, mode)
    assert record.status is status
    assert reason in record.reason
    assert_all_gaps(record)
    if mode in ("die", "not-executed"):
        assert record.evidence["unadmitted_metrics"]["ppl"]["value"] == 9.5
    if mode == "raise":
        assert any("Traceback" in line for line in record.evidence["log_tail"])


def test_an_unsupported_path_is_a_record_without_a_child(project: Project) -> None:
    cell = cell_of(project, "path=tiered", "layers=3")
    runner = Runner(project, ("/nonexistent/worker",), evidence)
    runner.tracker = fake_runner(project).tracker
    with StopSignals() as stop:
        record = runner.run(cell, {}, stop, skip_ok=False).record
    assert record.status is Status.UNSUPPORTED
    assert "keeps experts in front of a second memory" in record.reason
    assert_all_gaps(record)
    assert not (project.runs / record.cell_id / "001" / LOG).exists()


def test_a_worker_that_cannot_be_started_is_a_record(project: Project) -> None:
    runner = Runner(project, ("/nonexistent/worker",), evidence)
    runner.tracker = fake_runner(project).tracker
    with StopSignals() as stop:
        record = runner.run(cell_of(project, *CELL[:2]), {}, stop, skip_ok=False).record
    assert record.status is Status.CRASHED
    assert_all_gaps(record)


@pytest.mark.parametrize("mode", ["hang", "stubborn"])
def test_a_timeout_ends_the_child(project: Project, monkeypatch: pytest.MonkeyPatch, mode: str, tmp_path: Path) -> None:
    monkeypatch.setattr(child, "GRACE_S", 0.3)
    monkeypatch.setenv("FAKE_SIGN", str(tmp_path / "sign"))
    record = attempt(project, monkeypatch, mode, "bench.timeout_s=2")
    assert record.status is Status.TIMEOUT
    assert "bench.timeout_s=2 s, in phase load" in record.reason
    ended = {"hang": (-15, "SIGTERM"), "stubborn": (-9, "SIGKILL")}[mode]
    assert record.provenance["worker"] == {"ended": "timeout", "exit_code": ended[0], "signal": ended[1]}
    assert_all_gaps(record)
    assert is_gone(int((tmp_path / "sign").read_text()))


def test_a_bug_of_the_lab_keeps_its_traceback_and_leaves_a_record(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("lab.admission.decide", bug)
    with pytest.raises(ZeroDivisionError):
        attempt(project, monkeypatch, "ok")
    (stored,) = Store(project.runs).records()
    assert stored.record.status is Status.CRASHED
    assert "the lab itself failed: ZeroDivisionError: a bug" in stored.record.reason


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_lab_stops_its_child_and_records_it(project: Project, tmp_path: Path, number: signal.Signals) -> None:
    process = start_lab(project, "run", *CELL, "--json", FAKE_MODE="hang", FAKE_SIGN=str(tmp_path / "sign"))
    pid = worker_pid(tmp_path / "sign", process)
    code, out, err = interrupt(process, number)
    assert code == 130
    record = Record.model_validate_json(out)
    assert record.status is Status.CRASHED
    assert record.reason == f"interrupted by {number.name}"
    assert_all_gaps(record)
    assert "Traceback" not in err
    assert is_gone(pid)
    assert not (project.runs / record.cell_id / "001" / RUNNING).exists()


def test_the_child_killed_from_outside_is_recorded(project: Project, tmp_path: Path) -> None:
    process = start_lab(project, "run", *CELL, FAKE_MODE="hang", FAKE_SIGN=str(tmp_path / "sign"))
    os.kill(worker_pid(tmp_path / "sign", process), signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == 3
    (stored,) = Store(project.runs).records()
    assert stored.record.status is Status.CRASHED
    assert "SIGKILL" in stored.record.reason


def test_a_killed_lab_takes_its_child_along_and_the_next_command_closes_the_attempt(project: Project, tmp_path: Path) -> None:
    process = start_lab(project, "run", *CELL, FAKE_MODE="hang", FAKE_SIGN=str(tmp_path / "sign"))
    pid = worker_pid(tmp_path / "sign", process)
    interrupt(process, signal.SIGKILL)
    until(lambda: is_gone(pid))
    store = Store(project.runs)
    assert list(store.records()) == []
    code, _, err = lab(project, "run", *CELL)
    assert code == 0
    assert "left by a killed lab process" in err
    first, second = (s.record for s in store.records())
    assert (first.attempt, first.status, second.attempt, second.status) == (1, Status.CRASHED, 2, Status.OK)
    assert_all_gaps(first)
    assert reconcile(store) == []


def test_a_record_that_cannot_be_written_sets_its_numbers_aside(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lab.store.Store.finish", full)
    record = attempt(project, monkeypatch, "ok")
    assert record.status is Status.INFRA
    assert "disk full while writing the record; the cell had ended as OK" in record.reason
    assert_all_gaps(record)
    assert record.evidence["unadmitted_metrics"]["ppl"]["value"] == 9.5
    monkeypatch.undo()
    monkeypatch.setattr("tempfile.tempdir", str(project.root))
    (back,) = reconcile(Store(project.runs))
    assert back.record == record
    assert reconcile(Store(project.runs)) == []
