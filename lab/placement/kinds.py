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


def too_few_slots(kind: str | None, slots: int, count: int, top_k: int, batch: int = 1) -> str | None:
    """Why a step of `batch` sequences may ask for more of a layer's `count` experts than its slots can hold, or None. No slots at all is a choice: nothing is
    kept; and what `cpu_cold` has no slot for is computed where it lies."""
    needed = min(batch * top_k, count)
    if kind != "tiered" or not 0 < slots < needed:
        return None
    sequences = f"{batch} sequence{'s' if batch > 1 else ''}"
    return f"placement.slots={slots}: a step of {sequences} may use {needed} different experts of a layer; the least that works is placement.slots={needed}"


def too_many_slots(kind: str | None, slots: int, count: int) -> str | None:
    """Why a layer of `count` experts (0: a dense model) cannot be kept in part with so many slots, or None."""
    if kind is None:
        return None
    if not count:
        return f"{kind} placement keeps routed experts in part, and this model has none"
    return f"placement.slots={slots}: the model has {count} experts a layer; choose 1 to {count}" if slots > count else None


def _meaningless(cell: Cell) -> str | None:
    kind = kind_of(cell.path.components)
    for component, part in cell.path.components.items():
        if part.placement in KINDS and component != "experts":
            return f"path.components.{component}.placement={part.placement}: only experts can be kept in part; choose device or host"
    heard = ("slots", "resident_layers") if kind is not None and cell.engine == "local" else ("slots",) if cell.path.format == "vqf" else ()
    for key in ("slots", "resident_layers"):
        if key not in heard and (value := getattr(cell.placement, key)) is not None:
            return f"placement.{key}={value}: path {cell.path.name} keeps no component in part this way here; use path=tiered or path=cpu_cold, or leave it out"
    return None


def refused_before_loading(cell: Cell) -> str | None:
    """Why this cell's placement cannot run at all, whatever the machine, or None. A placement that means nothing on its path is refused, too: it would be
    the same work under an identity of its own."""
    if meaningless := _meaningless(cell):
        return meaningless
    if cell.engine != "local" or (kind := kind_of(cell.path.components)) is None:
        return None
    if cell.device.torch_device == "cpu":
        return f"{kind} placement keeps experts in front of a second memory, and device={cell.device.name} has only one; choose a GPU, e.g. device=cuda"
    if kind == "tiered" and cell.placement.slots is None and cell.placement.resident_layers is None:
        return f"{kind} placement was not told how much stays on the GPU; give placement.slots=N (experts a layer) or placement.resident_layers=N"
    return None
