"""`python -m lab`, with a stand-in for the worker, the artifact check and the evidence check. For tests of everything around them.

The seams are Python arguments and attributes, not settings: no environment variable and no flag of the real command leads here, and the
record names the worker it came from. MLflow, slow to load, is left out unless FAKE_MLFLOW=1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lab import preflight, sweep
from lab.cell import Cell, ModelSpec
from lab.cli import main
from lab.errors import LabError
from lab.project import Project
from lab.record import Status
from lab.runner import Runner
from lab.store import Stored
from lab.tracking import Mirrored, Tracker

WORKER = (sys.executable, str(Path(__file__).with_name("fake_worker.py")))


class NoTracker(Tracker):
    """Mirrors nothing."""

    def mirror_all(self, records: Iterable[Stored], patience_s: float | None = None) -> list[Mirrored]:
        """Pretend, for each record."""
        return [Mirrored("none", "0", "now", error="left out in this test") for _ in records]


def inspect(root: Path, model: ModelSpec) -> dict[str, Any]:
    """Accept any folder with a config.json."""
    folder = root / model.artifact
    if not (folder / "config.json").is_file():
        raise LabError(f"{folder.name}: no config.json")
    return {"format": "fake", "sha256": "0" * 64, "layers": 12}


def evidence(_cell: Cell, found: dict[str, Any]) -> list[tuple[Status, str]]:
    """Believe the worker unless it confesses."""
    return [(Status.PATH_NOT_EXECUTED, "experts ran bf16, not q2_g32")] if found.get("fallback") else []


def runner(project: Project) -> Runner:
    """A runner that starts the fake worker."""
    made = Runner(project, WORKER, evidence)
    if os.environ.get("FAKE_MLFLOW") != "1":
        made.tracker = NoTracker(project)
    return made


if __name__ == "__main__":
    setattr(preflight, "_inspect", lambda: inspect)  # noqa: B010 - a seam for this file only
    setattr(sweep, "Runner", runner)  # noqa: B010
    sys.exit(main(sys.argv[1:]))
