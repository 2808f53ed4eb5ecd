"""The gates before anything is loaded: the way is not closed, its code and device are there, the files are whole.

A wrong file or command is a `LabError` (exit 2, nothing recorded), found for every cell of a sweep before the first one runs. A cell that
is right but is not to be measured here and now is stopped at a gate, which becomes a record. Only what a cell needs is looked at: a closed way or a
path without code needs no files. Passing does not promise that the model fits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lab.cell import SYNTHETIC, Cell, ModelSpec
from lab.compose import sizes_file
from lab.dead_ends import closed_way
from lab.devices import accelerators, is_expected, shows_gpu
from lab.errors import ArtifactRefusedError, LabError
from lab.gates import forced, passed
from lab.placement.kinds import kind_of, refused_before_loading, too_many_slots
from lab.project import Project
from lab.record import GateResult, Status

VQF_ARCHITECTURES = ("qwen3", "qwen3_moe")
"""What a VQF file can hold."""

Inspect = Callable[[Path, ModelSpec], dict[str, Any]]
"""(project root, model) -> what its files are."""


@dataclass
class Clearance:
    """What the gates found for one cell before anything was read or loaded. With `stop`, the cell ends there; `lines` tell a person why."""

    gates: list[GateResult] = field(default_factory=list)
    stop: tuple[Status, str] | None = None
    lines: list[str] = field(default_factory=list)


def clear(project: Project, cell: Cell, force: bool, artifact: Mapping[str, Any] = MappingProxyType({})) -> Clearance:
    """The gates before anything is read; `artifact` is what `inspect_artifacts` found, of which only a refusal counts. Raises LabError where an experiment file
    is wrong."""
    found = Clearance()
    closed = closed_way(project, cell)
    if closed is None:
        found.gates.append(passed("dead_end"))
    elif force:
        found.gates.append(forced("dead_end", closed.reason()))
    else:
        found.stop, found.lines = (Status.DEAD_END, closed.reason()), closed.lines()
        return found
    if why := unsupported(cell) or _misplaced(project, cell) or _elsewhere(cell):
        found.stop = (Status.UNSUPPORTED, why)
    elif refused := artifact.get("refused"):
        found.stop, found.lines = (Status.ARTIFACT_REFUSED, refused["reason"]), refused["lines"]  # whatever force says: no option relaxes this
    return found


def unsupported(cell: Cell) -> str | None:
    """Why this cell cannot run with this version, whatever the machine, or None."""
    if cell.path.unsupported is not None:
        return cell.path.unsupported.strip()
    if cell.path.format == "vqf" and cell.model.arch not in VQF_ARCHITECTURES:
        return f"VQF files hold models of the qwen3 family, not {cell.model.arch}"
    if other := _other_format(cell):
        return other
    if cell.engine == "transformers" and (why := _not_for_transformers(cell)):
        return why
    return refused_before_loading(cell)


def _misplaced(project: Project, cell: Cell) -> str | None:
    """Why the model's experts cannot be placed as asked, by the config.json that holds its sizes, or None; files in one format say it when they load."""
    if (kind := kind_of(cell.path.components)) is None:
        return None
    file = sizes_file(project, cell.model.artifact, cell.model.geometry, cell.model.source)
    if file is None or file.suffix != ".json":
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        experts = data.get("text_config", data).get("num_experts") or 0
    except (OSError, ValueError, AttributeError):
        return None  # what is wrong with the file is said where it is read whole
    return too_many_slots(kind, cell.placement.slots or 0, experts if isinstance(experts, int) else 0)


def _elsewhere(cell: Cell) -> str | None:
    """Why the cell's device is not here, or None."""
    if not is_expected(cell.device.expect, here := accelerators()):
        return f"device={cell.device.name} is not here: this machine has {', '.join(here) or 'no accelerator'}"
    if cell.engine in ("local", "transformers") and cell.device.torch_device.startswith("cuda") and not here and not shows_gpu():
        return f"device={cell.device.name} is not here: this machine shows no GPU, or CUDA_VISIBLE_DEVICES hides it; choose device=cpu"
    return None


def inspect_artifacts(project: Project, cells: Iterable[Cell], force: bool = False, inspect: Inspect | None = None) -> dict[str, dict[str, Any]]:
    """Check the files of every cell, each file once; {cell hash: facts with sha256 and corpus_sha256}. Raises LabError.

    A cell that an earlier gate stops, or that a server runs, needs no files here, and has no sha256.
    """
    look = cache(inspect or _inspect())
    digest = cache(_corpus_sha256)
    found: dict[str, dict[str, Any]] = {}
    for cell in cells:
        facts: dict[str, Any] = {"path": cell.model.artifact}
        if clear(project, cell, force).stop is None:
            if cell.engine == "server":  # a server has its own files, perhaps on another machine
                facts |= _served(project, cell, look)
            else:
                try:
                    facts |= look(project.root, cell.model)
                except ArtifactRefusedError as refused:
                    facts["refused"] = {"reason": str(refused), "lines": refused.lines}
            layers = facts.get("layers")
            if isinstance(layers, int) and cell.layers > layers:
                raise LabError(f"layers={cell.layers}: {cell.model.name} has {layers} layers; choose 1 to {layers}")
            facts["corpus_sha256"] = digest(project.path(cell.model.corpus), cell.model.corpus)
        found[cell.hash] = facts
    return found


def _served(project: Project, cell: Cell, look: Inspect) -> dict[str, Any]:
    """What the file is that the server is started with, where the lab can tell: the digest then stands in the record."""
    spec = cell.path.server
    if spec is None or not any("{artifact}" in word for word in spec.command) or not project.path(cell.model.artifact).exists():
        return {}
    try:
        return look(project.root, cell.model)
    except LabError:
        return {}  # the server may read what the lab does not


def _not_for_transformers(cell: Cell) -> str | None:
    """Why transformers' own model cannot run this cell, or None."""
    if not cell.path.reference or any(plan.codec != "source" or plan.placement != "device" for plan in cell.path.components.values()):
        return f"engine=transformers holds weights as they are computed with, and path={cell.path.name} stores them otherwise; use path=reference"
    if cell.mode == "graph":
        return "mode=graph: transformers' model is run operation by operation, as its generate() does; use mode=auto"
    return None


def needs_file(cell: Cell) -> str | None:
    """The format (`gguf`, `vqf`) of the file that the path runs where the artifact is another; None where it is one, or random codes."""
    wanted, artifact = cell.path.format, cell.model.artifact
    return None if wanted is None or cell.engine == "server" or artifact == SYNTHETIC or artifact.endswith(f".{wanted}") else wanted


def _other_format(cell: Cell) -> str | None:
    """Why the path does not run this artifact, with what would, or None."""
    artifact, name = cell.model.artifact, cell.model.name
    if artifact == SYNTHETIC and cell.path.format == "gguf" and cell.engine != "server":  # of VQF, random blocks of the types that the path assumes
        return f"path={cell.path.name} runs GGUF files; artifact={SYNTHETIC} is for paths that choose their codecs"
    wanted = needs_file(cell)
    if wanted is None:
        return None
    options = "--types q8_0" if wanted == "gguf" else "--wmode q4"
    make = f", or make one with python -m lab convert {artifact} models/{name}/{name}.{wanted} --to {wanted} {options}"
    possible = cell.model.arch == "qwen4_exp" if wanted == "gguf" else cell.model.arch in VQF_ARCHITECTURES
    return f"path={cell.path.name} runs {wanted.upper()} files, and {artifact} is none: give artifact=FILE.{wanted}{make if possible else ''}"


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
    from lab.artifacts import open_model
    from lab.artifacts.kinship import check_kinship

    def look(root: Path, model: ModelSpec) -> dict[str, Any]:
        artifact = open_model(root, model)
        check_kinship(root, model, artifact.config())
        return artifact.inspect()

    return look
