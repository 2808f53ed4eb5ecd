"""What earlier out-of-memory failures say about an estimate: a ledger that once came out too small is raised for every cell at least as deep.

A cell that ran out of memory needed more than there was, so its ledger was too small by at least that ratio; a deeper cell of the same model, path and
device is raised by the largest ratio seen. Both numbers are kept, and an estimate is never lowered. One failure beside a busy neighbour raises it too much:
then force the cell.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from lab.capacity.ledger import Ledger
from lab.record import Record, Status


@dataclass(frozen=True)
class PastOom:
    """A cell that ran out of memory: its ledger's bytes then, and the bytes that were free when it started."""

    model: str
    path: str
    device: str
    layers: int
    predicted_bytes: int
    free_bytes: int
    attempt: str = ""


@dataclass(frozen=True)
class Estimate:
    """Bytes to reckon with on the device, beside the ledger's own, and why they differ (empty where they do not)."""

    ledger_bytes: int
    bytes: int
    reason: str


def needed_bytes(ledger: Ledger) -> int:
    """What the ledger asks of the compute device's memory: with one memory for both places, everything."""
    return ledger.device_bytes + (ledger.host_bytes if ledger.one_memory else 0)


def estimate_with_memory(ledger: Ledger, past: Iterable[PastOom]) -> Estimate:
    """The ledger's total, raised by what failed before at this depth or a smaller one."""
    own = needed_bytes(ledger)
    best = Estimate(own, own, "")
    for oom in past:
        if (oom.model, oom.path, oom.device) != (ledger.model, ledger.path, ledger.device) or oom.layers > ledger.layers or oom.predicted_bytes <= 0:
            continue
        # More than free_bytes were needed: the least whole number that says so, scaled, rounded up.
        raised = -(-own * (oom.free_bytes + 1) // oom.predicted_bytes)
        if raised > best.bytes:
            which = f" ({oom.attempt})" if oom.attempt else ""
            sizes = f"the ledger said {oom.predicted_bytes} bytes and {oom.free_bytes} were free"
            reason = f"raised by {(oom.free_bytes + 1) / oom.predicted_bytes:.3f}: out of memory at {oom.layers} layers{which}, where {sizes}"
            best = Estimate(own, raised, reason)
    return best


def capacity_evidence(ledger: Ledger, device_memory: int | None, host_memory: int | None) -> dict[str, Any]:
    """What a record keeps of its ledger under `evidence["capacity"]`, so that a failure can be read back from it."""
    return {"ledger_bytes": needed_bytes(ledger), "host_bytes": ledger.host_bytes, "device_free_bytes": device_memory, "host_free_bytes": host_memory}


def past_ooms(records: Iterable[Record]) -> list[PastOom]:
    """The real failures among the records: status OOM, with `capacity_evidence` from before the attempt."""
    found = []
    for record in records:
        kept = record.evidence.get("capacity")
        if record.status is not Status.OOM or not isinstance(kept, dict):
            continue
        predicted, free = kept.get("ledger_bytes"), kept.get("device_free_bytes")
        if isinstance(predicted, int) and isinstance(free, int):
            model, path, device = (str(record.cell[key]["name"]) for key in ("model", "path", "device"))
            attempt = f"{record.cell_id}/{record.attempt:03d}"
            found.append(PastOom(model, path, device, int(record.cell["layers"]), predicted, free, attempt))
    return found
