"""Whether a ledger fits a memory, and by how much.

A verdict compares totals; it knows nothing of fragmentation or of what else is on the device by the time the cell loads.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.capacity.ledger import Ledger
from lab.capacity.past import Estimate, needed_bytes

GIB = 1 << 30


@dataclass(frozen=True)
class Verdict:
    """`fits` is None where a memory that counts is not known. `short_by_bytes` is what is missing, on the device and the host together;
    `device_spare_bytes` what the device has left (negative: is short of), None where its memory is not known."""

    fits: bool | None
    short_by_bytes: int
    device_spare_bytes: int | None
    sentence: str


def judge(ledger: Ledger, device_memory: int | None, host_memory: int | None, estimate: Estimate | None = None) -> Verdict:
    """Compare the ledger (its device side raised to `estimate`, where earlier failures ask for it) with the free bytes of both places; None is not known.

    Where both places are one memory, `device_memory` counts for the sum. A budget of the cell counts as a smaller memory. Host memory that is not known
    leaves the verdict open only where weights lie there.
    """
    raised = 0 if estimate is None else estimate.bytes - estimate.ledger_bytes
    if ledger.one_memory:
        return _verdict([("memory", needed_bytes(ledger) + raised, device_memory, True)])
    return _verdict(
        [
            ("device", needed_bytes(ledger) + raised, _least(device_memory, ledger.device_limit_bytes), True),
            ("host", ledger.host_bytes, _least(host_memory, ledger.host_limit_bytes), ledger.weight_bytes("host") > 0),
        ]
    )


def _verdict(places: list[tuple[str, int, int | None, bool]]) -> Verdict:
    """From (name, needed, free, whether an unknown memory matters) of each place."""
    short, parts, unknown = 0, [], False
    for name, needed, free, counts in places:
        if free is None:
            unknown = unknown or counts
            parts.append(f"{name} needs {gib(needed)}, its memory is not known")
        elif needed > free:
            short += needed - free
            parts.append(f"{name} is short by {gib(needed - free)} ({gib(needed)} of {gib(free)})")
        else:
            parts.append(f"{name} has {gib(free - needed)} to spare ({gib(needed)} of {gib(free)})")
    fits = False if short else None if unknown else True
    word = {True: "fits", False: "does not fit", None: "not known whether it fits"}[fits]
    _, needed, free, _ = places[0]
    return Verdict(fits, short, None if free is None else free - needed, f"{word}: {'; '.join(parts)}")


def _least(memory: int | None, limit: int | None) -> int | None:
    known = [m for m in (memory, limit) if m is not None]
    return min(known) if known else None


def gib(size: int) -> str:
    """Bytes as people read them here: GiB of 2^30 bytes."""
    return f"{size / GIB:.2f} GiB"
