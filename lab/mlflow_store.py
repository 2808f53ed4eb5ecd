"""Which MLflow store is used, whether it can be used now, whose turn it is to write, and the client for it.

The default is one SQLite file at the project root with an explicit folder for artifacts, since MLflow's own defaults follow the working
folder. MLflow retries a locked or absent store for minutes, so it is probed first, cheaply and with a limit. MLflow is imported
here, late, because that takes seconds that do not belong beside a measurement.
"""

from __future__ import annotations

import logging
import os
import socket
import sqlite3
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from lab.locks import POLL_S, hold
from lab.project import Project

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

EXPERIMENT = "migration-lab"
TURN_S = 5.0
"""How long one writer may keep the others waiting: below their patience."""
_CONNECT_S = 3.0
_PAGE = 1000


def tracking_uri(project: Project) -> str:
    """MLFLOW_TRACKING_URI, or mlflow.db at the project root."""
    return os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{project.root / 'mlflow.db'}"


def sqlite_file(uri: str) -> Path | None:
    """The file of a SQLite URI, absolute; None for other stores."""
    return Path(uri.removeprefix("sqlite:///")).resolve() if uri.startswith("sqlite:///") else None


def artifact_location(uri: str) -> str | None:
    """Where a new experiment keeps its artifacts: `mlartifacts` beside the SQLite file; None leaves it to the server."""
    file = sqlite_file(uri)
    return (file.parent / "mlartifacts").as_uri() if file else None


def lock_file(uri: str, project: Project) -> Path:
    """The lock of everybody who writes to this store: beside the SQLite file, whose creation two processes would otherwise race for."""
    file = sqlite_file(uri)
    return file.with_name(file.name + ".lock") if file else project.runs / ".mlflow.lock"


def probe(uri: str, seconds: float) -> None:
    """Return once the store can be written, or raise OSError or sqlite3.Error when it could not be for `seconds`."""
    file = sqlite_file(uri)
    if file is not None:
        if file.exists():
            _probe_sqlite(file, seconds)
        return
    parts = urlsplit(uri)
    if parts.scheme in ("http", "https"):
        port = parts.port or (443 if parts.scheme == "https" else 80)
        socket.create_connection((parts.hostname or "", port), timeout=min(seconds, _CONNECT_S)).close()


@cache
def client_for(uri: str) -> MlflowClient:
    """The client, with telemetry off, few retries and quiet logs. Takes 1 to 2 s the first time. Raises what MLflow raises."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from mlflow.tracking import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    file = sqlite_file(uri)
    if file is not None and not file.exists():
        # MLflow builds its schema in dozens of steps; a process that is ended among them would leave a file that nothing can repair.
        for left in file.parent.glob(f".{file.name}-*.new"):
            left.unlink(missing_ok=True)
        aside = file.with_name(f".{file.name}-{os.getpid()}-{time.monotonic_ns()}.new")
        MlflowClient(tracking_uri=f"sqlite:///{aside}").search_experiments(max_results=1)
        aside.replace(file)
    return MlflowClient(tracking_uri=uri)


class Turn:
    """The right to write to the store, with its client and experiment. Taken when first needed, kept over many records, given back now and then."""

    def __init__(self, uri: str, project: Project) -> None:
        self.uri, self.file = uri, lock_file(uri, project)
        self._lock = ExitStack()
        self._since: float | None = None
        self._experiment = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.give_back()

    def take(self, deadline: float) -> tuple[MlflowClient, str]:
        """The client and the experiment's id. Raises GaveUpError, OSError or what MLflow raises when the store was not free by `deadline` (monotonic)."""
        if self._since is not None and time.monotonic() - self._since > TURN_S:
            self.give_back()
            time.sleep(1.5 * POLL_S)  # whoever waits looks once in POLL_S
        if self._since is None:

            def wait(seconds: float) -> bool:
                time.sleep(seconds)
                return time.monotonic() > deadline

            self._lock.enter_context(hold(self.file, f"pid {os.getpid()}", lambda owner: None, wait))
            probe(self.uri, max(1.0, deadline - time.monotonic()))
            self._experiment = self._experiment or _experiment(client_for(self.uri), self.uri)
            self._since = time.monotonic()
        return client_for(self.uri), self._experiment

    def give_back(self) -> None:
        """Let others write, and look at the store anew when it is next taken. Safe to call twice."""
        self._lock.close()
        self._since = None


def _experiment(client: MlflowClient, uri: str) -> str:
    """The id of the lab's experiment, made if it is not there."""
    found = client.get_experiment_by_name(EXPERIMENT)
    return str(found.experiment_id if found is not None else client.create_experiment(EXPERIMENT, artifact_location=artifact_location(uri)))


def all_runs(client: MlflowClient, experiment: str, condition: str) -> Iterator[Run]:
    """Every run that meets MLflow's filter `condition`, also the deleted ones, page by page."""
    from mlflow.entities import ViewType

    token = None
    while True:
        page = client.search_runs([experiment], condition, run_view_type=ViewType.ALL, max_results=_PAGE, page_token=token)
        yield from page
        if not (token := page.token):
            return


def get_run(client: MlflowClient, run_id: str) -> Run | None:
    """The run of that id, or None. Raises what MLflow raises for anything but an unknown run."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(run_id)
    except MlflowException as error:
        if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def _probe_sqlite(file: Path, seconds: float) -> None:
    """Take the write lock and give it back, waiting at most `seconds` for whoever holds it."""
    connection = sqlite3.connect(file, timeout=seconds, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    finally:
        connection.close()
