"""Cells with their ledgers, judged: what the verb `plan` shows and what a gate before a run asks.

Memory is what is free on this machine where the cell's device is in it, else what the device's file says, else not known; host memory of a machine that is
not here is not known either. Nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lab.capacity.fit import Suggestion, largest_tiers, what_would_fit
from lab.capacity.ledger import Ledger, NoLedger
from lab.capacity.memory import is_here, machine_memory
from lab.capacity.past import Estimates, PastOom, estimate_with_memory, past_ooms
from lab.capacity.service import ledgers
from lab.capacity.verdict import GIB, Verdict, judge
from lab.cell import SYNTHETIC, Cell
from lab.compose import sizes_file
from lab.errors import LabError
from lab.project import Project
from lab.store import Store


@dataclass(frozen=True)
class Judged:
    """A verdict against one device memory (bytes, None: not known), called `memory`; for a single cell with what would fit."""

    memory: str
    device_memory: int | None
    host_memory: int | None
    verdict: Verdict
    suggestions: tuple[Suggestion, ...] = ()


@dataclass(frozen=True)
class Planned:
    """One cell with its ledger, its estimates after earlier failures, and its verdicts."""

    cell: Cell
    ledger: Ledger | NoLedger
    estimates: Estimates | None
    judged: tuple[Judged, ...]
    files: str | None = None
    """What is to be said of the cell's files: that they are not here, or another model's."""

    @property
    def fits(self) -> bool:
        """Whether it is known to fit every memory it was judged against."""
        return bool(self.judged) and all(j.verdict.fits for j in self.judged)

    def document(self) -> dict[str, Any]:
        """As JSON."""
        if isinstance(self.ledger, NoLedger):
            return {"cell_id": self.cell.id, "reason": self.ledger.reason}
        totals = {"device_bytes": self.ledger.device_bytes, "host_bytes": self.ledger.host_bytes}
        estimates = asdict(self.estimates) if self.estimates else None
        judged = [asdict(j) for j in self.judged]
        return {"cell_id": self.cell.id, "ledger": {**self.ledger.model_dump(mode="json"), **totals}, "estimates": estimates, "judged": judged}


def plan_cells(project: Project, cells: Sequence[Cell], memories_gib: Sequence[float] = (), suggest: bool = False) -> list[Planned]:
    """Every cell judged, against `memories_gib` where given; with `suggest` also what would make it fit, or the largest tier of one that fits.

    Raises LabError.
    """
    found = ledgers(project, cells)
    past = past_ooms(Store(project.runs).records())
    planned = []
    for cell in cells:
        ledger = found[cell.hash]
        if isinstance(ledger, NoLedger):
            planned.append(Planned(cell, ledger, None, (), _files(project, cell)))
            continue
        estimates = estimate_with_memory(ledger, past)
        judged = tuple(
            Judged(name, device, host, judge(ledger, device, host, estimates), tuple(_ways(project, cell, ledger, device, host, past) if suggest else ()))
            for name, device, host in _memories(project, cell, memories_gib)
        )
        planned.append(Planned(cell, ledger, estimates, judged, _files(project, cell)))
    return planned


def _files(project: Project, cell: Cell) -> str | None:
    """That the cell's files are not here, and where the sizes are from instead; or that they are another model's. None where nothing is to be said."""
    artifact = cell.model.artifact
    if artifact == SYNTHETIC:
        return None
    if not project.path(artifact).exists():
        sizes = sizes_file(project, artifact, cell.model.geometry, cell.model.source)
        return f"{artifact} is not here" + (f"; the sizes are those of {project.short(sizes)}" if sizes else "")
    if not artifact.endswith((".gguf", ".vqf")):
        return None
    from lab.artifacts import open_model
    from lab.artifacts.kinship import check_kinship

    try:
        check_kinship(project.root, cell.model, open_model(project.root, cell.model).config())
    except LabError as error:
        return f"a run would refuse: {error}"
    return None


def _memories(project: Project, cell: Cell, asked_gib: Sequence[float]) -> list[tuple[str, int | None, int | None]]:
    """(name, device bytes, host bytes) to judge against."""
    device, host = machine_memory(project, cell)
    here = is_here(cell)
    host_known = host if here else None
    if asked_gib:
        return [(f"{size:g} GiB", int(size * GIB), host_known) for size in asked_gib]
    return [("free here" if here else f"device={cell.device.name}", device, host_known)]


def _ways(project: Project, cell: Cell, ledger: Ledger, device: int | None, host: int | None, past: Sequence[PastOom]) -> list[Suggestion]:
    """What would make the cell fit; for one that fits and keeps its experts in part, how many it could keep."""
    if judge(ledger, device, host, estimate_with_memory(ledger, past)).short_by_bytes:
        return what_would_fit(project, cell, device, host, past)
    tiered = any(plan.placement == "tiered" for plan in cell.path.components.values())
    return largest_tiers(project, cell, device, host, past) if tiered else []
