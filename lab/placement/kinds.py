"""Which placements keep experts in part, and which cells ask for one that cannot run anywhere. Without torch: asked before anything is loaded.

What it does not prove: that the rest can run here; that is found while loading (`lab.placement.tiers`).
"""

from __future__ import annotations

from collections.abc import Mapping

from lab.cell import Cell, ComponentPlan

KINDS = ("tiered", "cpu_cold")
"""Placements of experts that this package serves."""


def kind_of(plan: Mapping[str, ComponentPlan]) -> str | None:
    """`tiered` or `cpu_cold`, or None where the experts are in one place."""
    placement = plan["experts"].placement if "experts" in plan else "device"
    return placement if placement in KINDS else None


def refused_before_loading(cell: Cell) -> str | None:
    """Why this cell's placement of experts cannot run at all, whatever the machine, or None."""
    if cell.engine != "local" or (kind := kind_of(cell.path.components)) is None:
        return None
    if cell.device.torch_device == "cpu":
        return f"{kind} placement keeps experts in front of a second memory, and device={cell.device.name} has only one; choose a GPU, e.g. device=cuda"
    if kind == "tiered" and cell.placement.slots is None and cell.placement.resident_layers is None:
        return f"{kind} placement was not told how much stays on the GPU; give placement.slots=N (experts a layer) or placement.resident_layers=N"
    return None
