"""What earlier out-of-memory failures say about an estimate: a ledger that once came out too small is raised for every cell at least as deep.

A cell that ran out of memory at one place needed more there than there was, so its ledger was too small there by at least that ratio; a deeper cell of the
same model, path and device is raised at that place by the largest ratio seen, and nowhere else. Both numbers are kept, and an estimate is never lowered. A
failure that was invalidated, or of which nothing says where memory ran out, teaches nothing. One failure beside a busy neighbour raises an estimate too
much: then invalidate it, or force the cell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lab.capacity.ledger import Ledger, Place
from lab.cell import Cell
from lab.record import Record, Status
from lab.standing import record_id
from lab.store import Stored

_KEPT: Mapping[Place, tuple[str, str]] = {"device": ("ledger_bytes", "device_free_bytes"), "host": ("host_bytes", "host_free_bytes")}
"""Where `capacity_evidence` keeps a place's bytes by the ledger and its free bytes."""
_SAID: Mapping[Place, re.Pattern[str]] = {
    # torch's caching allocators: c10/cuda/CUDACachingAllocator.cpp, which ROCm builds translate to HIP.
    "device": re.compile(r"\b(CUDA|HIP) out of memory\b"),
    # torch's allocator for the CPU (c10/core/impl/alloc_cpu.cpp); Python's and NumPy's own error; `lab.child` for the kernel.
    "host": re.compile(r"DefaultCPUAllocator|\bMemoryError\b|\b[Uu]nable to allocate\b|\bmain memory ran out\b"),
}


@dataclass(frozen=True)
class PastOom:
    """A cell that ran out of memory at `place`: its ledger's bytes there then, and the bytes that were free there when it started. Where both places are
    one memory, `place` is the device."""

    model: str
    path: str
    device: str
    layers: int
    place: Place
    predicted_bytes: int
    free_bytes: int
    attempt: str = ""


@dataclass(frozen=True)
class Estimate:
    """Bytes to reckon with at one place, beside the ledger's own, and why they differ (empty where they do not)."""

    ledger_bytes: int
    bytes: int
    reason: str = ""


@dataclass(frozen=True)
class Estimates:
    """Both places. Where they are one memory, `device` is that of everything, and `host` a part of it."""

    device: Estimate
    host: Estimate

    @property
    def sizes(self) -> dict[Place, int]:
        """The bytes to reckon with, by place."""
        return {"device": self.device.bytes, "host": self.host.bytes}

    @property
    def reason(self) -> str:
        """Why they differ from the ledger's; empty where they do not."""
        return "; ".join(filter(None, (self.device.reason, self.host.reason)))


def needed_bytes(ledger: Ledger) -> int:
    """What the ledger asks of the compute device's memory: with one memory for both places, everything."""
    return ledger.device_bytes + (ledger.host_bytes if ledger.one_memory else 0)


def own_sizes(ledger: Ledger) -> dict[Place, int]:
    """The ledger's own bytes by place."""
    return {"device": needed_bytes(ledger), "host": ledger.host_bytes}


def estimate_with_memory(ledger: Ledger, past: Iterable[PastOom]) -> Estimates:
    """The ledger's totals, each raised by what failed before at that place, at this depth or a smaller one."""
    names = (ledger.model, ledger.path, ledger.device)
    failed = [oom for oom in past if (oom.model, oom.path, oom.device) == names and oom.layers <= ledger.layers and oom.predicted_bytes > 0]
    own = own_sizes(ledger)
    return Estimates(*(_raised(own[place], "memory" if ledger.one_memory else f"{place} memory", (o for o in failed if o.place == place)) for place in _KEPT))


def _raised(own: int, where: str, failed: Iterable[PastOom]) -> Estimate:
    best = Estimate(own, own)
    for oom in failed:
        # More than free_bytes were needed: the least whole number that says so, scaled, rounded up.
        raised = -(-own * (oom.free_bytes + 1) // oom.predicted_bytes)
        if raised > best.bytes:
            which = f" ({oom.attempt})" if oom.attempt else ""
            sizes = f"the ledger said {oom.predicted_bytes} bytes and {oom.free_bytes} were free"
            reason = f"raised by {(oom.free_bytes + 1) / oom.predicted_bytes:.3f}: out of {where} at {oom.layers} layers{which}, where {sizes}"
            best = Estimate(own, raised, reason)
    return best


def capacity_evidence(ledger: Ledger, device_memory: int | None, host_memory: int | None) -> dict[str, Any]:
    """What a record keeps of its ledger under `evidence["capacity"]`, so that a failure can be read back from it."""
    return {"ledger_bytes": needed_bytes(ledger), "host_bytes": ledger.host_bytes, "device_free_bytes": device_memory, "host_free_bytes": host_memory}


def place_out_of_memory(reason: str) -> Place | None:
    """Where memory ran out, from the error's message; None where it does not tell. Kept as `ran_out` in the `capacity_evidence` of a record."""
    return next((place for place, said in _SAID.items() if said.search(reason)), None)


def past_ooms(attempts: Iterable[Stored]) -> list[PastOom]:
    """The real failures among the attempts: status OOM, with `capacity_evidence` from before the attempt. An invalidated one does not count, nor does any
    copy of it."""
    failed = [(record_id(one.record), one) for one in attempts if one.record.status is Status.OOM]
    invalidated = {identity for identity, one in failed if one.marks}
    found = (_read(one.record) for identity, one in failed if identity not in invalidated)
    return [oom for oom in found if oom is not None]


def _read(record: Record) -> PastOom | None:
    """The failure, or None where the record does not tell what there was."""
    kept = record.evidence.get("capacity")
    try:
        cell = Cell.model_validate(record.cell)
    except ValueError:
        return None  # no cell of this version: nothing says which estimates it would raise
    if not isinstance(kept, dict):
        return None
    ran_out = "device" if cell.device.torch_device == "cpu" else kept.get("ran_out")
    for place, keys in _KEPT.items():
        predicted, free = (kept.get(key) for key in keys)
        if place == ran_out and isinstance(predicted, int) and isinstance(free, int):
            attempt = f"{record.cell_id}/{record.attempt:03d}"
            return PastOom(cell.model.name, cell.path.name, cell.device.name, cell.layers, place, predicted, free, attempt)
    return None
