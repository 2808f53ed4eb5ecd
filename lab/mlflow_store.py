"""Which MLflow store is used, whether it can be used now, and the client for it.

The default is one SQLite file at the project root with an explicit folder for artifacts, since MLflow's own defaults follow the working
folder. MLflow retries a locked or absent store for minutes, so it is probed first, cheaply and with a limit. MLflow is imported
here, late, because that takes seconds that do not belong beside a measurement.
"""

from __future__ import annotations

import logging
import os
import socket
import sqlite3
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from lab.project import Project

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

EXPERIMENT = "migration-lab"
_CONNECT_S = 3.0


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
    return MlflowClient(tracking_uri=uri)


def _probe_sqlite(file: Path, seconds: float) -> None:
    """Take the write lock and give it back, waiting at most `seconds` for whoever holds it."""
    connection = sqlite3.connect(file, timeout=seconds, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    finally:
        connection.close()
