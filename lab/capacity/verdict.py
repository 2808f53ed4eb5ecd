"""Whether a ledger fits a memory, and by how much.

A verdict compares totals; it knows nothing of fragmentation or of what else is on the device by the time the cell loads.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.capacity.ledger import Ledger
from lab.capacity.past import Estimates, own_sizes

GIB = 1 << 30


@dataclass(frozen=True)
class Verdict:
    """`fits` is None where a memory that counts is not known. `short_by_bytes` is what is missing, on the device and the host together;
    `device_spare_bytes` what the device has left (negative: is short of), None where its memory is not known."""

    fits: bool | None
    short_by_bytes: int
    device_spare_bytes: int | None
    sentence: str


@dataclass(frozen=True)
class _Place:
    """Bytes needed at a place and free there (None: not known, which leaves the verdict open only where it `counts`)."""

    name: str
    needed: int
    free: int | None
    counts: bool = True

    @property
    def spare(self) -> int | None:
        return None if self.free is None else self.free - self.needed

    @property
    def short(self) -> int:
        return max(0, -self.spare) if self.spare is not None else 0

    def said(self) -> str:
        if self.free is None:
            return f"{self.name} needs {gib(self.needed)}, its memory is not known"
        found = f"is short by {gib(self.short)}" if self.short else f"has {gib(self.free - self.needed)} to spare"
        return f"{self.name} {found} ({gib(self.needed)} of {gib(self.free)})"


def judge(ledger: Ledger, device_memory: int | None, host_memory: int | None, estimates: Estimates | None = None) -> Verdict:
    """Compare the ledger (raised to `estimates`, where earlier failures ask for it) with the free bytes of both places; None is not known.

    Where both places are one memory, `device_memory` counts for the sum, and each budget of the cell for its share of it; where they are two, a budget counts
    as a smaller memory. Host memory that is not known leaves the verdict open only where weights lie there.
    """
    sizes = estimates.sizes if estimates else own_sizes(ledger)
    if ledger.one_memory:
        memory = _Place("memory", sizes["device"], device_memory)
        device = _Place("device budget", ledger.device_bytes, ledger.device_limit_bytes)
        host = _Place("host budget", ledger.host_bytes, ledger.host_limit_bytes)
        # What the budgets lack and what the sum lacks are the same bytes, so they do not add up.
        short = max(memory.short, device.short + host.short)
        return _verdict([memory, *(budget for budget in (device, host) if budget.free is not None)], short, _least(memory.spare, device.spare))
    device = _Place("device", sizes["device"], _least(device_memory, ledger.device_limit_bytes))
    host = _Place("host", sizes["host"], _least(host_memory, ledger.host_limit_bytes), counts=ledger.weight_bytes("host") > 0)
    return _verdict([device, host], device.short + host.short, device.spare)


def _verdict(places: list[_Place], short: int, device_spare: int | None) -> Verdict:
    fits = False if short else None if any(place.free is None and place.counts for place in places) else True
    word = {True: "fits", False: "does not fit", None: "not known whether it fits"}[fits]
    return Verdict(fits, short, device_spare, f"{word}: {'; '.join(place.said() for place in places)}")


def _least(memory: int | None, limit: int | None) -> int | None:
    known = [m for m in (memory, limit) if m is not None]
    return min(known) if known else None


def gib(size: int) -> str:
    """Bytes as people read them here: GiB of 2^30 bytes."""
    return f"{size / GIB:.2f} GiB"
