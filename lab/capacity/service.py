"""Ledgers for the parent process: asked from a process that may import torch, many cells at once, and kept in the cache.

A kept ledger counts only under the same cell (figures of the device included), the same sizes and the same code, so that it cannot go stale; ledgers of
other code are removed when new ones are kept. The cache can be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lab.capacity.ledger import Ledger, NoLedger
from lab.cell import Cell
from lab.compose import sizes_file
from lab.errors import LabError
from lab.project import Project, say
from lab.provenance import code_sha256


def ledgers(project: Project, cells: Sequence[Cell]) -> dict[str, Ledger | NoLedger]:
    """The ledger of each cell by `cell.hash`, or why there is none. Cells that differ only in planning figures of the device have one hash: ask for them
    apart. Raises LabError when the accounting process itself fails."""
    code = code_sha256()
    found: dict[str, Ledger | NoLedger] = {}
    wanted: list[tuple[Cell, Path, Path]] = []
    for cell in cells:
        sizes = sizes_file(project, cell.model.artifact, cell.model.geometry, cell.model.source)
        if sizes is None:
            found[cell.hash] = NoLedger(reason=f"the sizes of {cell.model.name} are not known: no {cell.model.artifact}/config.json and no model.geometry")
            continue
        file = project.cache / "capacity" / code[:16] / f"{_key(cell, sizes)}.json"
        kept = _kept(file)
        if kept is not None:
            found[cell.hash] = kept
        else:
            wanted.append((cell, sizes, file))
    if wanted:
        for (cell, _, file), answer in zip(wanted, _ask(project, wanted), strict=True):
            found[cell.hash] = NoLedger(reason=answer["reason"]) if "reason" in answer else Ledger.model_validate(answer["ledger"])
            _keep(file, found[cell.hash])
        _forget_others(project.cache / "capacity" / code[:16])
    return found


def _key(cell: Cell, sizes: Path) -> str:
    if sizes.suffix == ".json":
        known = hashlib.sha256(sizes.read_bytes()).hexdigest()
    else:  # weights, of which only the header counts: they are too large to be read for a plan
        known = f"{sizes.resolve()} {sizes.stat().st_size} {sizes.stat().st_mtime_ns}"
    parts = {"cell": cell.model_dump(mode="json"), "sizes": known}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def question(project: Project, cell: Cell, sizes: Path) -> dict[str, Any]:
    """What the accounting process is asked of one cell."""
    return {"cell": cell.model_dump(mode="json"), "sizes": str(sizes), "name": project.short(sizes)}


def _ask(project: Project, wanted: Sequence[tuple[Cell, Path, Path]]) -> list[dict[str, Any]]:
    request = json.dumps([question(project, cell, sizes) for cell, sizes, _ in wanted])
    package_root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [package_root, os.environ.get("PYTHONPATH")]))}
    done = subprocess.run(
        [sys.executable, "-m", "lab.capacity"], input=request, stdout=subprocess.PIPE, text=True, check=False, cwd=project.root, env=environment
    )
    if done.returncode:
        raise LabError(f"the capacity ledger could not be made: its process ended with exit code {done.returncode}; what it printed above says why")
    answers: list[dict[str, Any]] = json.loads(done.stdout)
    return answers


def _kept(file: Path) -> Ledger | NoLedger | None:
    """The cached answer, or None where there is none or it is not whole (it is then made again)."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        return NoLedger.model_validate(data) if "reason" in data else Ledger.model_validate(data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, ValidationError) as error:
        say(f"{file.name}: cached ledger not readable ({str(error).splitlines()[0]}); making it again")
        return None


def _keep(file: Path, answer: Ledger | NoLedger) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.part")
        partial.write_text(answer.model_dump_json(), encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        say(f"the capacity ledger was not kept in the cache: {error.strerror}")


def _forget_others(folder: Path) -> None:
    """Remove the ledgers of other code. Whatever cannot be removed costs space and nothing else."""
    if folder.is_dir():
        for other in folder.parent.iterdir():
            if other != folder:
                shutil.rmtree(other, ignore_errors=True)
