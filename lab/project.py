"""Where things are: the project root, its configuration, the records and the cache.

One place decides, so that nothing depends on the folder a command was started in. `LAB_ROOT` and `LAB_RUNS` override the root and the
records folder. Also holds `say`, the one way to print progress: on standard error, and never able to stop a measurement.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from lab.errors import LabError


@dataclass(frozen=True)
class Project:
    """The folders of one checkout. All paths are absolute."""

    root: Path
    runs: Path

    @property
    def conf(self) -> Path:
        """The Hydra configuration."""
        return self.root / "conf"

    @property
    def cache(self) -> Path:
        """Things that can be made again: the machine's bandwidth, reference logits."""
        return self.root / ".cache"

    def path(self, text: str) -> Path:
        """`text` as a path, relative to the project root unless absolute."""
        return self.root / text

    def short(self, path: Path) -> str:
        """`path` as people read it: relative to the root where it lies inside."""
        return str(path.relative_to(self.root)) if path.is_relative_to(self.root) else str(path)


def find_project() -> Project:
    """The project of this command: LAB_ROOT, or the folder with pyproject.toml and conf/ above the package or the current folder.

    Raises LabError where there is none.
    """
    named = os.environ.get("LAB_ROOT")
    if named:
        root = Path(named).resolve()
        if not (root / "conf" / "config.yaml").is_file():
            raise LabError(f"LAB_ROOT={named}: no conf/config.yaml there")
    else:
        candidates = [Path(__file__).resolve().parent.parent, Path.cwd(), *Path.cwd().parents]
        found = [c for c in candidates if (c / "conf" / "config.yaml").is_file() and (c / "pyproject.toml").is_file()]
        if not found:
            raise LabError("no project here: run inside the checkout (the folder with pyproject.toml and conf/), or set LAB_ROOT to it")
        root = found[0]
    runs = os.environ.get("LAB_RUNS")
    return Project(root=root, runs=Path(runs).resolve() if runs else root / "runs")


def forget_stdout() -> None:
    """After the reader of our output went away (`| head`): send the rest nowhere, or Python complains once more while closing it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def say(line: str) -> None:
    """Print one line of progress on standard error."""
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        # A closed terminal or a reader that went away must not cost a measurement: the record is what counts.
        return
