"""The traps of `test_traps_peers` that are about MLflow (peers notes, section 1b: 10 in part, 13, 14), against a real SQLite store.

They show what the lab hands to MLflow and what it counts; what a tracking server makes of it is not tested here.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient

from lab.cell import Cell
from lab.cli import import_records
from lab.fill import fill_command
from lab.mlflow_store import EXPERIMENT, client_for, tracking_uri
from lab.project import Project
from lab.record import Status
from lab.store import Store, Stored
from lab.tracking import Tracker
from tests.runner_helpers import cell_of, make_project, record_of

CELL = ("path=expert_q2", "layers=3")


@pytest.fixture(scope="module")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that MLflow has made its tables in, which takes it seconds."""
    file = tmp_path_factory.mktemp("store") / "mlflow.db"
    client_for(f"sqlite:///{file}").search_experiments()
    return file


@pytest.fixture
def project(tmp_path: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project with an empty store of its own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "p"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    made = make_project(tmp_path / "p")
    shutil.copy(empty_store, made.root / "mlflow.db")
    return made


def stored(project: Project, cell: Cell, **changes: Any) -> Stored:
    """A finished record of the cell, in its place."""
    attempt = Store(project.runs).open_attempt(cell, {})
    record = record_of(cell, attempt=attempt.number, **changes)
    file = Store(project.runs).finish(attempt.folder, record)
    attempt.close()
    return Stored(file, record)


def mlflow_runs(project: Project) -> list[Run]:
    """What the project's store holds."""
    client = client_for(tracking_uri(project))
    experiment = client.get_experiment_by_name(EXPERIMENT)
    return list(client.search_runs([experiment.experiment_id])) if experiment else []


def test_trap_10_what_was_not_mirrored_is_not_counted(project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Trap 10 (ktransformers): failed inserts are counted as inserted. Here the sum, the exit code and the runs agree, and the next import makes up."""
    for layers in (3, 6, 9):
        stored(project, cell_of(project, "path=expert_q2", f"layers={layers}"))
    upload, calls = MlflowClient.log_artifacts, []

    def failing(client: MlflowClient, run_id: str, folder: str) -> None:
        calls.append(run_id)
        if len(calls) == 2:
            raise OSError("no space for artifacts")
        upload(client, run_id, folder)

    monkeypatch.setattr(MlflowClient, "log_artifacts", failing)
    monkeypatch.setattr("lab.tracking.PATIENCE_S", 0.0)
    assert import_records(project, []) == 3
    assert capsys.readouterr().out.endswith("3 records: 2 mirrored now, 1 not, the rest were there\n")
    assert sorted(run.info.status for run in mlflow_runs(project)) == ["FAILED", "FINISHED", "FINISHED"]
    assert import_records(project, []) == 0
    assert capsys.readouterr().out.endswith("3 records: 1 mirrored now, 0 not, the rest were there\n")


def test_trap_13_names_are_legal_for_any_override_and_long_values_are_cut_visibly(project: Project) -> None:
    """Trap 13 (MLflow): names exclude + = [ ] @, and values over a limit may be cut with just a warning. Here overrides are values, and a cut shows."""
    cell = cell_of(project, *CELL, "model.corpus='held@out=[1]+{a}.txt'", "path.components.ple.options.scale=block128")
    fill = fill_command(project, cell)
    gap = {"status": Status.INFRA, "reason": "long " * 3000, "fill": fill}
    assert Tracker(project).mirror(stored(project, cell, gaps={"kld_mean": gap}, provenance={"fill": fill})).error is None
    (run,) = mlflow_runs(project)
    assert run.data.tags["fill"] == fill and all(sign in fill for sign in "+=[]@")
    assert run.data.tags["gap.kld_mean"].startswith("INFRA: long") and run.data.tags["gap.kld_mean"].endswith("[cut; whole in record.json]")
    names = [*run.data.tags, *run.data.params, *run.data.metrics]
    assert [name for name in names if not re.fullmatch(r"[\w./ -]{1,250}", name)] == [] and len(run.data.params) <= 100


def test_trap_14_the_default_store_is_sqlite_whatever_the_working_folder(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 14 (lightning-hydra-template): a file store, which MLflow refuses by default since 3.13. Here it is one SQLite file at the root."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert Tracker(project).mirror(stored(project, cell_of(project, *CELL))).error is None
    with sqlite3.connect(project.root / "mlflow.db") as connection:
        assert connection.execute("SELECT status FROM runs").fetchall() == [("FINISHED",)]
    assert not list(elsewhere.iterdir()) and not (project.root / "mlruns").exists()
