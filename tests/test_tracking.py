"""MLflow as a mirror: terminal statuses, gaps as tags and never as numbers, and stores in trouble that cost neither time nor results."""

from __future__ import annotations

import json
import shutil
import sqlite3
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from lab.cli import import_records
from lab.fallback import fallback_records
from lab.history import invalidate_command
from lab.locks import hold
from lab.metrics import METRICS
from lab.mlflow_store import EXPERIMENT, artifact_location, client_for, lock_file, sqlite_file, tracking_uri
from lab.project import Project
from lab.record import Measurement, Status
from lab.run_fields import params
from lab.runner import Runner
from lab.standing import record_id
from lab.store import MIRROR, Store, Stored, load_attempt, load_record
from lab.sweep import run_cells
from lab.tracking import Tracker
from tests.fake_lab import WORKER, evidence, inspect
from tests.runner_helpers import cell_of, make_project, record_of

CELL = ("path=expert_q2", "layers=3", "device=cpu")


@pytest.fixture(autouse=True)
def _own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with its tables and nothing in them; making one takes MLflow seconds."""
    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    client_for(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def fresh_project(tmp_path: Path) -> Project:
    return make_project(tmp_path / "p")


@pytest.fixture
def project(fresh_project: Project, empty_store: Path) -> Project:
    shutil.copy(empty_store, fresh_project.root / "mlflow.db")
    return fresh_project


def stored(project: Project, status: Status = Status.OK, **changes: object) -> Stored:
    cell = cell_of(project, *CELL[:2])
    store = Store(project.runs)
    attempt = store.open_attempt(cell, {})
    times = {"started_at": f"2026-11-29T10:{attempt.number:02d}:00.000+00:00", "finished_at": f"2026-11-29T10:{attempt.number:02d}:05.000+00:00"}
    record = record_of(cell, status, attempt=attempt.number, **times, **changes)
    file = store.finish(attempt.folder, record)
    attempt.close()
    return Stored(file, record)


def runs(project: Project) -> list[Run]:
    client: MlflowClient = client_for(tracking_uri(project))
    experiment = client.get_experiment_by_name(EXPERIMENT)
    return list(client.search_runs([experiment.experiment_id])) if experiment else []


def test_an_ok_record_is_a_finished_run_with_its_numbers(fresh_project: Project) -> None:
    project = fresh_project
    one = stored(project)
    answer = Tracker(project).mirror(one)
    assert answer.error is None
    (run,) = runs(project)
    assert run.info.run_id == answer.run_id
    assert (run.info.status, run.info.run_name) == ("FINISHED", f"{one.record.cell_id}#001")
    assert run.info.end_time - run.info.start_time == 5000
    assert run.data.metrics == {
        "ppl": 9.5, "tg128_tok_s": 50.0, "tg128_tok_s_min": 49.0, "tg128_tok_s_max": 51.0, "tg128_tok_s_roofline_pct": 40.0
    }  # fmt: skip
    assert run.data.tags["gap.kld_mean"] == "NOT_RUN: for a reason"
    assert run.data.tags["cell_id"] == one.record.cell_id
    assert run.data.params["path"] == "expert_q2"
    assert run.data.params["codec.experts"] == "q2_g32"
    files = {f.path for f in client_for(tracking_uri(project)).list_artifacts(run.info.run_id)}
    assert files == {"config.yaml", "record.json"}
    assert (project.root / "mlartifacts").is_dir()
    assert (project.root / "mlflow.db").is_file()
    assert json.loads((one.file.parent / MIRROR).read_text())["run_id"] == run.info.run_id
    assert not Path("mlruns").exists()


@pytest.mark.parametrize(
    ("status", "worker", "expected"),
    [
        (Status.PATH_NOT_EXECUTED, {"ended": "exit", "signal": None}, "FAILED"),
        (Status.CRASHED, {"ended": "exit", "signal": "SIGSEGV"}, "FAILED"),
        (Status.CRASHED, {"ended": "exit", "signal": "SIGKILL"}, "KILLED"),
        (Status.CRASHED, {"ended": "interrupted"}, "KILLED"),
        (Status.CRASHED, {"ended": "lab_killed"}, "KILLED"),
        (Status.TIMEOUT, {"ended": "timeout"}, "KILLED"),
        (Status.UNSUPPORTED, None, "FAILED"),
    ],
)
def test_a_gap_is_a_tag_and_never_a_number(project: Project, status: Status, worker: dict[str, object] | None, expected: str) -> None:
    provenance = {"fill": "x"} | ({"worker": worker} if worker else {})
    Tracker(project).mirror(stored(project, status, provenance=provenance))
    (run,) = runs(project)
    assert run.info.status == expected
    assert run.data.metrics == {}
    assert run.data.tags["status"] == status.value
    assert run.data.tags["gap.kld_mean"] == f"{status}: for a reason"


def test_mirroring_again_doubles_nothing(project: Project) -> None:
    one, two = stored(project), stored(project)
    tracker = Tracker(project)
    assert [a.new for a in tracker.mirror_all([one, two])] == [True, True]
    assert [a.new for a in Tracker(project).mirror_all([one, two])] == [False, False]
    assert len(runs(project)) == 2


def test_a_run_taken_out_of_sight_does_not_come_back(project: Project) -> None:
    one = stored(project)
    client_for(tracking_uri(project)).delete_run(str(Tracker(project).mirror(one).run_id))
    assert Tracker(project).mirror(one).new is False
    assert runs(project) == []


def test_an_interrupted_mirroring_is_not_left_running_and_is_completed_later(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    one = stored(project)

    def broken(*_: object) -> None:
        raise RuntimeError("no space for artifacts")

    monkeypatch.setattr(Tracker, "_fill", broken)
    answer = Tracker(project).mirror(one, patience_s=0)
    assert answer.error == "RuntimeError: no space for artifacts"
    (run,) = runs(project)
    assert (run.info.status, run.data.tags["mirror"]) == ("FAILED", "incomplete")
    monkeypatch.undo()
    Tracker(project).mirror(one)
    (run,) = runs(project)
    assert (run.info.status, run.data.tags["mirror"], run.data.metrics["ppl"]) == ("FINISHED", "complete", 9.5)


def test_a_run_left_running_by_a_killed_lab_is_completed(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    one = stored(project)
    # As a SIGKILL between creating and ending the run would leave it.
    monkeypatch.setattr(Tracker, "_fill", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    monkeypatch.setattr(MlflowClient, "set_terminated", lambda *_, **__: None)
    with pytest.raises(KeyboardInterrupt):
        Tracker(project).mirror(one)
    monkeypatch.undo()
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert [r.info.status for r in runs(project)] == ["RUNNING"]
    Tracker(project).mirror(one)
    assert [r.info.status for r in runs(project)] == ["FINISHED"]


def test_a_locked_store_costs_a_line_and_import_makes_up_for_it(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    Tracker(project).mirror(stored(project))
    blocker = sqlite3.connect(project.root / "mlflow.db", isolation_level=None)
    blocker.execute("BEGIN EXCLUSIVE")
    two, three = stored(project), stored(project)
    begin = time.monotonic()
    answers = Tracker(project).mirror_all([two, three], patience_s=1)
    assert time.monotonic() - begin < 10
    assert all("database is locked" in (a.error or "") for a in answers)
    assert capsys.readouterr().err.count("python -m lab import tries again") == 2
    assert "database is locked" in json.loads((two.file.parent / MIRROR).read_text())["error"]
    blocker.execute("ROLLBACK")
    blocker.close()
    answers = Tracker(project).mirror_all(Store(project.runs).records())
    assert [(a.new, a.error) for a in answers] == [(False, None), (True, None), (True, None)]
    assert len(runs(project)) == 3


def test_a_locked_store_does_not_change_the_outcome_of_a_run(project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    Tracker(project).mirror(stored(project))
    blocker = sqlite3.connect(project.root / "mlflow.db", isolation_level=None)
    blocker.execute("BEGIN EXCLUSIVE")
    monkeypatch.setattr("lab.tracking.PATIENCE_S", 1.0)
    assert run_cells(project, CELL, False, None, runner=Runner(project, WORKER, evidence), inspect=inspect) == 0
    shown = capsys.readouterr()
    assert "mlflow: not mirrored (OperationalError: database is locked)" in shown.out
    assert import_records(project, []) == 3
    blocker.close()
    assert import_records(project, []) == 0
    assert capsys.readouterr().out.endswith("2 records: 1 mirrored now, 0 not, the rest were there\n")


def test_a_record_that_went_away_costs_a_line_and_nothing_else(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    gone, there = stored(project), stored(project)
    gone.file.unlink()
    answers = Tracker(project).mirror_all([gone, there])
    assert [(a.error is None, a.record_sha256 == "") for a in answers] == [(False, True), (True, False)]
    assert "No such file or directory" in capsys.readouterr().err
    assert len(runs(project)) == 1


def test_a_left_over_record_that_went_away_does_not_change_the_outcome_of_a_run(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(project.root))
    gone = stored(project)
    gone.file.unlink()
    monkeypatch.setattr("lab.runner.reconcile", lambda _store: [gone])
    assert run_cells(project, CELL, False, None, runner=Runner(project, WORKER, evidence), inspect=inspect) == 0
    assert [s.record.status for s in Store(project.runs).records()] == [Status.OK]
    assert list(fallback_records(project.runs)) == []
    assert len(runs(project)) == 1


def test_a_server_that_is_away_is_given_up_quickly(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    begin = time.monotonic()
    answer = Tracker(project).mirror(stored(project), patience_s=1)
    assert time.monotonic() - begin < 10
    assert answer.error is not None
    assert "ConnectionRefusedError" in answer.error


def test_the_stores_address_is_absolute_and_can_be_overridden(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tracking_uri(project) == f"sqlite:///{project.root}/mlflow.db"
    assert artifact_location(tracking_uri(project)) == (project.root / "mlartifacts").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "https://tracking.example")
    assert tracking_uri(project) == "https://tracking.example"
    assert artifact_location("https://tracking.example") is None


def test_a_sweep_is_mirrored_and_says_where(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cells(project, ["path=expert_q2,tiered", *CELL[1:]], True, None, runner=Runner(project, WORKER, evidence), inspect=inspect) == 3
    assert {r.info.status for r in runs(project)} == {"FINISHED", "FAILED"}
    tiered = next(r for r in runs(project) if r.data.params["path"] == "tiered")
    assert tiered.data.metrics == {}
    assert tiered.data.tags["gap.ppl"].startswith("UNSUPPORTED: tiered placement")
    for one in Store(project.runs).records():
        assert json.loads((one.file.parent / MIRROR).read_text())["error"] is None
        assert load_record(one.file) == one.record
    assert "2 cells = 1 OK" in capsys.readouterr().out


def standing_tags(project: Project) -> dict[str, str]:
    return {run.data.tags["attempt"]: run.data.tags["standing"] for run in runs(project)}


def test_a_newer_attempt_changes_how_the_earlier_ones_stand(project: Project) -> None:
    tracker = Tracker(project)
    tracker.mirror(stored(project, Status.OOM))
    assert standing_tags(project) == {"1": "CURRENT"}
    tracker.mirror(stored(project))
    assert standing_tags(project) == {"1": "SUPERSEDED by attempt 2", "2": "CURRENT"}
    tracker.mirror(stored(project, Status.TIMEOUT))
    assert standing_tags(project) == {"1": "SUPERSEDED by attempt 2", "2": "CURRENT", "3": "SUPERSEDED by attempt 2"}


def test_an_invalidation_reaches_every_run_of_its_cell_and_no_number_changes(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    Tracker(project).mirror_all([stored(project), stored(project)])
    cell_id = cell_of(project, *CELL[:2]).id
    assert invalidate_command(project, [f"{cell_id}/2", "--reason", "the machine was busy"]) == 0
    assert standing_tags(project) == {"1": "CURRENT", "2": "INVALIDATED: the machine was busy"}
    assert all((run.info.status, run.data.metrics["ppl"]) == ("FINISHED", 9.5) for run in runs(project))
    assert "current now: attempt 1, OK" in capsys.readouterr().out


def test_an_invalidation_stands_when_the_store_is_away(project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    one = stored(project)
    Tracker(project).mirror(one)
    blocker = sqlite3.connect(project.root / "mlflow.db", isolation_level=None)
    blocker.execute("BEGIN EXCLUSIVE")
    monkeypatch.setattr("lab.tracking.PATIENCE_S", 0.5)
    assert invalidate_command(project, [f"{one.record.cell_id}/1", "--reason", "busy"]) == 0
    assert "how earlier attempts stand was not updated (OperationalError: database is locked)" in capsys.readouterr().err
    blocker.close()
    assert standing_tags(project) == {"1": "CURRENT"}
    assert import_records(project, []) == 0
    assert standing_tags(project) == {"1": "INVALIDATED: busy"}


def test_a_protocol_that_moved_on_shows_at_the_next_import(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    Tracker(project).mirror(stored(project))
    monkeypatch.setitem(METRICS, "ppl", replace(METRICS["ppl"], protocol="ppl/window@2"))
    assert import_records(project, []) == 0
    assert standing_tags(project)["1"] == "STALE_PROTOCOL: attempt 1 measured ppl under ppl/window@1 in ppl; it is now ppl/window@2 in ppl"


def test_mlflow_is_rebuilt_from_the_records_alone(project: Project, empty_store: Path) -> None:
    def shown() -> list[tuple[object, ...]]:
        unlike = ("mlflow.runName", "mlflow.user")
        return sorted(
            (r.info.run_name, r.info.status, r.data.metrics, r.data.params, {k: v for k, v in r.data.tags.items() if k not in unlike}) for r in runs(project)
        )

    for status in (Status.OK, Status.OOM, Status.OK):
        stored(project, status)
    assert import_records(project, []) == 0
    before = shown()
    (project.root / "mlflow.db").unlink()
    shutil.rmtree(project.root / "mlartifacts")
    shutil.copy(empty_store, project.root / "mlflow.db")
    assert import_records(project, []) == 0
    assert shown() == before and len(before) == 3


def test_runs_left_running_without_a_record_are_ended_and_say_why(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    one = stored(project)
    client = client_for(tracking_uri(project))
    Tracker(project).mirror(one)
    experiment = client.get_experiment_by_name(EXPERIMENT).experiment_id
    other = client.create_experiment("somebody else's")
    lost, foreign = client.create_run(experiment), client.create_run(other)
    client.delete_run(client.create_run(experiment).info.run_id)
    mine = client.create_run(experiment, tags={"record_id": "0" * 64, "mirror": "incomplete"})
    assert import_records(project, []) == 0
    assert "2 runs were left RUNNING and no record explains them" in capsys.readouterr().err
    for run in (lost, mine):
        found = client.get_run(run.info.run_id)
        assert found.info.status == "KILLED" and "no record explains it" in found.data.tags["mirror"]
    assert client.get_run(foreign.info.run_id).info.status == "RUNNING"
    assert import_records(project, []) == 0
    assert "left RUNNING" not in capsys.readouterr().err


def test_a_run_that_was_ended_so_is_completed_once_its_record_arrives(project: Project) -> None:
    one = stored(project)
    client = client_for(tracking_uri(project))
    Tracker(project).mirror(stored(project))
    experiment = client.get_experiment_by_name(EXPERIMENT).experiment_id
    client.create_run(experiment, tags={"record_id": record_id(one.record), "mirror": "incomplete"})
    assert Tracker(project).end_left_running() == 1
    assert import_records(project, []) == 0
    assert [(run.info.status, run.data.tags["mirror"]) for run in runs(project)] == [("FINISHED", "complete")] * 2


def test_a_record_under_another_number_is_the_same_run(project: Project) -> None:
    """Two machines mirror into one store; one of them imported the record of the other."""
    one = stored(project)
    first = Tracker(project).mirror(one)
    moved = one.file.parent.with_name("007")
    one.file.parent.rename(moved)
    (moved / MIRROR).unlink()
    again = Tracker(project).mirror(load_attempt(moved / one.file.name))
    assert (again.new, again.run_id) == (False, first.run_id)


def test_a_run_of_an_earlier_version_is_recognised_and_brought_up_to_date(project: Project) -> None:
    """Before there was a record_id, runs were known by the sha256 of the record's file; mirror.json says which."""
    one = stored(project)
    answer = Tracker(project).mirror(one)
    client = client_for(tracking_uri(project))
    for name in ("record_id", "standing"):
        client.delete_tag(answer.run_id, name)
    again = Tracker(project).mirror(one)
    assert (again.new, again.run_id) == (False, answer.run_id)
    assert standing_tags(project) == {"1": "CURRENT"}


def test_a_run_of_an_earlier_version_is_found_without_the_hint_and_brought_up_to_date(project: Project) -> None:
    one = stored(project, artifact={"sha256": "f00d" * 16})
    tracker = Tracker(project)
    answer = tracker.mirror(one)
    client = client_for(tracking_uri(project))
    for name in ("record_id", "standing", "weights_sha256"):
        client.delete_tag(answer.run_id, name)
    (one.file.parent / MIRROR).unlink()
    again = tracker.mirror(one)
    assert (again.new, again.run_id) == (False, answer.run_id)
    (run,) = runs(project)
    assert (run.data.tags["standing"], run.data.tags["weights_sha256"]) == ("CURRENT", "f00d" * 16)


def test_params_that_an_earlier_version_did_not_write_are_added(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    one = stored(project)
    with monkeypatch.context() as patch:
        patch.setattr("lab.tracking.params", lambda record: {"path": "expert_q2"})
        Tracker(project).mirror(one)
    Tracker(project).mirror(one)
    (run,) = runs(project)
    assert run.data.params == params(one.record) and run.data.params["mode"] == "auto"


def test_a_number_that_is_refused_today_is_a_tag_and_no_number(project: Project) -> None:
    bad = {"ppl": Measurement(value=-3.0, unit="ppl", protocol="ppl/window@1"), "kld_p99": Measurement(value=0.5, unit="nat", protocol="kld@1")}
    one = stored(project, metrics=bad)
    Tracker(project).mirror(one)
    (run,) = runs(project)
    assert run.data.metrics == {"kld_p99": 0.5}
    assert run.data.tags["gap.ppl"] == "NUMERIC_INVALID: ppl -3 is impossible: its values go from 1 to infinity"


def test_no_run_is_ended_while_the_record_that_may_explain_it_cannot_be_read(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = stored(project), stored(project)
    Tracker(project).mirror(one)
    client = client_for(tracking_uri(project))
    left = client.create_run(client.get_experiment_by_name(EXPERIMENT).experiment_id, tags={"record_id": record_id(other.record), "mirror": "incomplete"})
    whole = other.file.read_bytes()
    other.file.write_bytes(whole[:100])
    assert import_records(project, []) == 3
    assert client.get_run(left.info.run_id).info.status == "RUNNING"
    assert "1 more cannot be read" in capsys.readouterr().out
    other.file.write_bytes(whole)
    assert import_records(project, []) == 0
    assert client.get_run(left.info.run_id).info.status == "FINISHED"


@pytest.mark.parametrize("content", ["", "[]", '{"uri": 1}', '{"uri": "%s", "run_id": "%s"}'])
def test_a_wrong_hint_costs_a_search_and_nothing_else(project: Project, content: str) -> None:
    one = stored(project)
    answer = Tracker(project).mirror(one)
    if "%s" in content:
        content %= (tracking_uri(project), "0" * 32)
    (one.file.parent / MIRROR).write_text(content)
    again = Tracker(project).mirror(one)
    assert (again.new, again.run_id) == (False, answer.run_id)
    assert json.loads((one.file.parent / MIRROR).read_text())["run_id"] == answer.run_id


def test_a_long_mirroring_lets_others_write_in_between(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    many = [stored(project) for _ in range(12)]
    monkeypatch.setattr("lab.mlflow_store.TURN_S", 0.0)
    waited: list[bool] = []

    def somebody() -> None:
        with hold(lock_file(tracking_uri(project), project), "somebody", lambda owner: None, lambda seconds: bool(time.sleep(seconds))):
            waited.append(len(answers) == 0)

    answers: list[object] = []
    other = threading.Thread(target=somebody)
    started: list[bool] = []

    def advance() -> None:
        if not started:
            started.append(True)
            other.start()

    answers += Tracker(project).mirror_all(many, advance=advance)
    other.join(timeout=30)
    assert waited == [True]
    assert len(runs(project)) == 12


def test_a_host_without_mlflow_measures_without_waiting(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records are exported; the patience that a locked store gets would be spent on a package that does not appear."""

    def missing(uri: str) -> None:
        raise ModuleNotFoundError("No module named 'mlflow'")

    monkeypatch.setattr("lab.mlflow_store.client_for", missing)
    kept = stored(project)
    started = time.monotonic()
    answer = Tracker(project).mirror(kept, 30.0)
    assert answer.error is not None and "No module named 'mlflow'" in answer.error
    assert time.monotonic() - started < 10.0


def test_a_store_is_made_whole_or_not_at_all(fresh_project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends while MLflow builds its schema must not leave a file that no later import can use."""

    def ended(self: MlflowClient, **_: object) -> None:
        raise KeyboardInterrupt

    client_for.cache_clear()
    file = sqlite_file(tracking_uri(fresh_project))
    assert file is not None and not file.exists()
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "search_experiments", ended)
        with pytest.raises(KeyboardInterrupt):
            client_for(tracking_uri(fresh_project))
    assert not file.exists(), "the half-made store lies aside"
    client_for.cache_clear()
    assert client_for(tracking_uri(fresh_project)).search_experiments() and file.exists()
    assert not list(file.parent.glob(".*.new"))
