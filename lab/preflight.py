"""What can be known before a child is started: the files are whole, the path has code, the disk has room.

A wrong file or command is a `LabError` (exit 2, nothing recorded), found for every cell of a sweep before the first one runs. A cell that
is right but cannot be measured here and now is a `GapError`, which becomes a record. Passing does not promise that the model fits.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from lab.cell import Cell
from lab.errors import GapError, LabError
from lab.project import Project
from lab.record import Status

MIN_FREE_BYTES = 2 << 20
"""For the log of an attempt; the record has its own reserve."""

Inspect = Callable[[Path], dict[str, Any]]


def inspect_artifacts(project: Project, cells: Iterable[Cell], inspect: Inspect | None = None) -> dict[str, dict[str, Any]]:
    """Check the files of every cell, each file once; {cell hash: facts with sha256 and corpus_sha256}. Raises LabError.

    A cell whose path cannot run needs no files, and has no sha256.
    """
    look = cache(inspect or _inspect())
    digest = cache(_corpus_sha256)
    found: dict[str, dict[str, Any]] = {}
    for cell in cells:
        facts: dict[str, Any] = {"path": cell.model.artifact}
        if cell.path.unsupported is None:
            facts |= look(project.path(cell.model.artifact))
            layers = facts.get("layers")
            if isinstance(layers, int) and cell.layers > layers:
                raise LabError(f"layers={cell.layers}: {cell.model.name} has {layers} layers; choose 1 to {layers}")
            facts["corpus_sha256"] = digest(project.path(cell.model.corpus), cell.model.corpus)
        found[cell.hash] = facts
    return found


def check_cell(project: Project, cell: Cell) -> None:
    """Raise GapError where the cell cannot be measured here and now."""
    if cell.path.unsupported is not None:
        raise GapError(Status.UNSUPPORTED, cell.path.unsupported.strip())
    free = shutil.disk_usage(project.runs).free
    if free < MIN_FREE_BYTES:
        needed = f"{MIN_FREE_BYTES >> 20} MiB needed"
        raise GapError(Status.INFRA, f"disk full: {free / 2**20:.1f} MiB free for {project.short(project.runs)}, {needed}")


def _corpus_sha256(file: Path, name: str) -> str:
    """sha256 (hex) of the held-out text. Raises LabError, which calls it `name`, for what the worker could not score."""
    try:
        content = file.read_bytes()
        text = content.decode("utf-8")
    except FileNotFoundError:
        raise LabError(f"{name}: the held-out text (model.corpus) is missing") from None
    except OSError as error:
        raise LabError(f"{name}: the held-out text (model.corpus) cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise LabError(f"{name}: the held-out text (model.corpus) is not UTF-8: {error.reason} at byte {error.start}") from None
    if not text.strip():
        raise LabError(f"{name}: the held-out text (model.corpus) is empty")
    return hashlib.sha256(content).hexdigest()


def _inspect() -> Inspect:
    from lab.artifacts import inspect

    return inspect
