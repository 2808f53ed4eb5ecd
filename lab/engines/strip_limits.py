"""When a cell keeps strip caches, and what limits them: the part of `lab.engines.strips` that needs no torch, so that ledger, engine and evidence agree.

Why a file of its own: the evidence is judged in the parent process, which imports no torch. Kestrel's settings are VLLM_GW_BUDGET_MB (host), VLLM_GW_SLOTS
and VLLM_CUDA_WCACHE_MB (device); here they are `placement.host_budget_mb`, `placement.slots` and `placement.device_budget_mb`.
What it does not prove: that the CUDA port counts as its ancestor on the CPU does; it is not public.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lab.cell import Cell

MB = 1 << 20
"""Budgets are counted in 2^20 bytes, as the CPU engine's own cap of 768 MiB is."""
COMPONENTS = ("trunk", "experts")
"""Components whose matrices have an entry: the seven of each layer, a layer's experts stacked."""


@dataclass(frozen=True)
class Limit:
    """One cache: where it lies, its budget (in `MB`) and its number of entries, None without limit."""

    where: Literal["host", "device"]
    budget_mb: int | None
    slots: int | None

    def holds(self, entries: int, nbytes: int) -> bool:
        """Whether so many entries of so many bytes together stay."""
        return (self.slots is None or entries <= self.slots) and (self.budget_mb is None or nbytes <= self.budget_mb * MB)

    def __str__(self) -> str:
        """The settings, as a person would change them."""
        budget = "no budget given" if self.budget_mb is None else f"placement.{self.where}_budget_mb={self.budget_mb}"
        return budget if self.slots is None else f"{budget}, placement.slots={self.slots}"


def strip_limits(cell: Cell) -> tuple[Limit, ...]:
    """The caches of a cell, the one that is computed from last: on the host, and on the device where that is another memory.

    Empty where there is none: without a VQF file kept as it is, and without a limit that counts here (a CPU has no device budget).
    """
    p, chosen = cell.placement, cell.path.components
    if cell.path.format != "vqf" or any(chosen[name].codec != "source" for name in COMPONENTS if name in chosen):
        return ()
    places = [Limit("host", p.host_budget_mb, p.slots)]
    if cell.device.torch_device != "cpu":
        places.append(Limit("device", p.device_budget_mb, p.slots))
    return tuple(places) if any((one.budget_mb, one.slots) != (None, None) for one in places) else ()
