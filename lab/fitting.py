"""The capacity gate of a run: the ledger's estimate, raised by earlier failures, against what this machine has free now.

A cell that cannot fit costs minutes of loading and may take the machine down with it, so it is not started; an estimate can be wrong the other way, so
`force=true` starts it all the same. Either way the record keeps estimate and free memory, from which a real failure teaches the next estimate. Passing
is no promise: fragmentation and neighbours are not foreseen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lab.capacity import NoLedger, capacity_evidence, estimate_with_memory, judge, ledgers, machine_memory, past_ooms
from lab.cell import Cell
from lab.errors import GapError
from lab.gates import forced, passed
from lab.project import Project
from lab.record import GateResult, Record, Status
from lab.store import RECORD, load_record


def prepare(project: Project, cells: Sequence[Cell]) -> None:
    """Compute the ledgers of all cells of a sweep at once; each by itself would start torch anew."""
    ledgers(project, cells)


def capacity_gate(project: Project, cell: Cell, force: bool) -> tuple[GateResult, dict[str, Any]]:
    """The gate's result and what the record keeps under `evidence["capacity"]`. Raises GapError (OOM_PREDICTED) for a misfit that is not forced."""
    ledger = ledgers(project, [cell])[cell.hash]
    if isinstance(ledger, NoLedger):
        return GateResult(gate="capacity", outcome="not_checked", detail=ledger.reason), {}
    device, host = machine_memory(project, cell)
    estimate = estimate_with_memory(ledger, past_ooms(_relatives(project, cell)))
    verdict = judge(ledger, device, host, estimate)
    kept = capacity_evidence(ledger, device, host) | {"estimate_bytes": estimate.bytes, "raised": estimate.reason}
    said = verdict.sentence + (f"; the estimate was {estimate.reason}" if estimate.reason else "")
    if verdict.fits is not False:
        return passed("capacity", said), kept
    if force:
        return forced("capacity", said), kept
    raise GapError(Status.OOM_PREDICTED, f"{said} (python -m lab plan says what would fit)")


def _relatives(project: Project, cell: Cell) -> Iterator[Record]:
    """Records of the same model, path and device, at any depth: the only ones whose failures say something about this cell."""
    name = f"{cell.model.name}-{cell.path.name}-L*-{cell.device.name}-*"
    for file in sorted(project.runs.glob(f"{name}/*/{RECORD}")):
        try:
            yield load_record(file)
        except (OSError, ValueError):
            continue  # named by `doctor` and `matrix`; an unreadable record teaches nothing
