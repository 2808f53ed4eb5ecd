"""The capacity gate of a run: the ledger's estimates, raised by earlier failures, against what this machine has free now.

A cell that cannot fit costs minutes of loading and may take the machine down with it, so it is not started; an estimate can be wrong the other way, so
`force=true` starts it all the same. Either way the record keeps estimates and free memory, from which a real failure teaches the next estimate. Passing
is no promise: fragmentation and neighbours are not foreseen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lab.capacity import NoLedger, capacity_evidence, estimate_with_memory, judge, ledgers, machine_memory, past_ooms
from lab.cell import Cell
from lab.errors import GapError
from lab.gates import forced, not_checked, passed
from lab.project import Project, say
from lab.record import GateResult, Status
from lab.store import RECORD, Stored, load_attempt


def prepare(project: Project, cells: Sequence[Cell]) -> None:
    """Compute the ledgers of all cells of a sweep at once; each by itself would start torch anew."""
    ledgers(project, cells)


def capacity_gate(project: Project, cell: Cell, force: bool) -> tuple[GateResult, dict[str, Any]]:
    """The gate's result and what the record keeps under `evidence["capacity"]`. Raises GapError (OOM_PREDICTED) for a misfit that is not forced."""
    ledger = ledgers(project, [cell])[cell.hash]
    if isinstance(ledger, NoLedger):
        return not_checked("capacity", ledger.reason), {}
    device, host = machine_memory(project, cell)
    estimates = estimate_with_memory(ledger, past_ooms(_relatives(project, cell)))
    verdict = judge(ledger, device, host, estimates)
    raised = {"estimate_bytes": estimates.device.bytes, "host_estimate_bytes": estimates.host.bytes, "raised": estimates.reason}
    kept = capacity_evidence(ledger, device, host) | raised
    said = verdict.sentence + (f"; the estimate was {estimates.reason}" if estimates.reason else "")
    for kept_there in (one for one in ledger.residency if one.degrades):
        foreseen = f"{kept_there.where}: only {kept_there.kept} of {kept_there.total} {kept_there.what} will stay resident ({kept_there.limit})"
        said += f"; {foreseen}"
        say(f"  expected to end as DEGRADED: {foreseen}, the rest is rebuilt in every pass")
    if verdict.fits is None:
        return not_checked("capacity", said), kept
    if verdict.fits:
        return passed("capacity", said), kept
    if force:
        return forced("capacity", said), kept
    raise GapError(Status.OOM_PREDICTED, f"{said} (python -m lab plan says what would fit)")


def _relatives(project: Project, cell: Cell) -> Iterator[Stored]:
    """Attempts at cells of the same model, path and device, at any depth: the only ones whose failures say something about this cell."""
    name = f"{cell.model.name}-{cell.path.name}-L*-{cell.device.name}-*"
    for file in sorted(project.runs.glob(f"{name}/*/{RECORD}")):
        try:
            yield load_attempt(file)
        except (OSError, ValueError):
            continue  # named by `doctor` and `matrix`; an unreadable attempt teaches nothing
