"""Where results go: the tracking store that mirrors them, and the records themselves.

Neither is needed to measure: records are mirrored later by `import`, and one spoilt record hides no other. A store that answers can still refuse a run.
"""

from __future__ import annotations

import os
import re
import sqlite3

from lab.checks.check import Finding, check, ok, warn
from lab.locks import is_locked
from lab.mlflow_store import probe, sqlite_file, tracking_uri
from lab.project import Project
from lab.store import RUNNING, Store

PROBE_S = 1.0
_LATER = "; records are kept all the same, and python -m lab import brings them there later"


@check("mlflow")
def tracking(project: Project) -> Finding:
    """Whether the tracking store can be written now."""
    uri = tracking_uri(project)
    shown, file = _without_password(uri), sqlite_file(uri)
    try:
        probe(uri, PROBE_S)
    except (OSError, sqlite3.Error, ValueError) as error:
        return warn(f"{shown}: {' '.join(str(error).split())}", f"start it, or set MLFLOW_TRACKING_URI to another{_LATER}")
    if file is not None and not os.access(file if file.exists() else file.parent, os.W_OK):
        return warn(f"{shown}: may not be written", f"change its permissions, or set MLFLOW_TRACKING_URI to another{_LATER}")
    return ok(f"{shown}: made by the first run" if file is not None and not file.exists() else f"{shown} answers")


@check("records")
def records(project: Project, closed: int) -> Finding:
    """How many records and running attempts there are, and which files are spoilt. `closed` attempts of killed processes were closed just now."""
    store = Store(project.runs)
    count, bad = len(store.record_files()), store.unreadable()
    running = sum(is_locked(folder / RUNNING) for folder in store.unfinished())
    said = f"{count} records, {len(bad)} unreadable, {running} attempts running, {closed} closed now"
    values = {"records": count, "unreadable": len(bad), "running": running, "closed": closed}
    if bad:
        spoilt = "; ".join(f"{project.short(file)}: {why}" for file, why in bad)
        return warn(f"{said}; {spoilt}", "put the file back from a copy, or move its folder away and measure again", **values)
    return ok(said, **values)


def _without_password(uri: str) -> str:
    """The address as it may be shown and kept: user and password left out."""
    return re.sub(r"//[^/]*@", "//", uri)
