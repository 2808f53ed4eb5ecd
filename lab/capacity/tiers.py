"""Which weights lie on the device where a path keeps only some of them there: experts by layer and slot, and Kestrel's strip cache.

Experts (`tiered`, `cpu_cold`): the first `placement.resident_layers` layers stay on the device whole, of the others `placement.slots` experts each; host
memory holds all experts of the layers that are not whole on the device. Streamed layers pass through a staging area of one layer's experts.
Strip cache: the sizes are those of the CPU engine's cache that the CUDA port is said to descend from (int8 codes, a float32 scale per 32 weights); the port
itself is not public, so the prediction is one of the lab's own engine (`lab.engines.strips`) and for Kestrel's an inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lab.capacity.ledger import Residency
from lab.capacity.sizes import ModelSizes, Weight
from lab.capacity.storage import Stored
from lab.cell import Cell, Placement
from lab.engines.strip_limits import COMPONENTS, MB, Limit, strip_limits

STAGED_LAYERS = 1
"""Layers' worth of experts on the device that prompts stream through: one stack is multiplied while the other is filled."""
_STRIP_GROUP = 32


@dataclass(frozen=True)
class Tier:
    """The device's share of the routed experts: `whole` layers entirely, `slots` of `count` experts in the others, if there are any (`partial`); and
    `staged`: experts that the staging area has room for."""

    whole: frozenset[int]
    slots: int
    count: int
    partial: bool
    staged: int = 0

    def missed(self, layer: int | None, used: float) -> float:
        """Of `used` different experts of a layer, those not on the device when requests hit in proportion to the slots."""
        return 0.0 if layer in self.whole else used * (1 - self.slots / self.count)

    def least_missed(self, layer: int | None, used: float) -> float:
        """The same when every slot holds one of them: however good the cache, more cannot hit."""
        return 0.0 if layer in self.whole else max(0.0, used - self.slots)


def tier_of(cell: Cell, sizes: ModelSizes) -> Tier | None:
    """The tier of a cell whose experts are `tiered` or `cpu_cold`, else None. More layers or slots than there are count as all."""
    plan = cell.path.components.get("experts")
    layers = sizes.expert_layers
    if plan is None or plan.placement not in ("tiered", "cpu_cold") or not layers:
        return None
    count = next(w.shape[0] for w in sizes.weights if w.kind == "experts")
    whole, slots = kept_experts(cell.placement, count, layers)
    partly = len(layers) - len(whole)
    return Tier(whole, slots, count, partial=partly > 0, staged=min(STAGED_LAYERS, partly) * count)


def kept_experts(placement: Placement, count: int, layers: Sequence[int]) -> tuple[frozenset[int], int]:
    """(layers of `layers` whose `count` experts all stay on the device, slots of each of the others). The engine asks here, too (`lab.placement`)."""
    slots = min(placement.slots or 0, count)
    return frozenset(layers if slots == count else layers[: placement.resident_layers or 0]), slots


def expert_residency(cell: Cell, tier: Tier, sizes: ModelSizes, needed_bytes: int) -> Residency:
    """How many experts lie on the device."""
    layers = len(sizes.expert_layers)
    kept = len(tier.whole) * tier.count + (layers - len(tier.whole)) * tier.slots
    return Residency(what="experts", where="device", kept=kept, total=layers * tier.count, needed_bytes=needed_bytes, limit=_limit(cell.placement))


def _limit(placement: Placement) -> str:
    given = [f"placement.{key}={value}" for key, value in placement.model_dump().items() if value is not None]
    return ", ".join(given) or "neither placement.slots nor placement.resident_layers is given"


@dataclass(frozen=True)
class Strips:
    """The strip caches of a VQF cell: one entry per layer and matrix. `host` and `device` are the bytes each holds; `missing` names (layer, matrix) of
    the entries that do not stay where they are computed and are built (and moved) again in every pass."""

    host: int
    device: int
    missing: frozenset[tuple[int | None, str]]
    residency: tuple[Residency, ...]


def strips_of(cell: Cell, tensors: Sequence[Stored]) -> Strips | None:
    """The strip caches, or None for a cell without any (`strip_limits`), which computes from the file's blocks."""
    limits = strip_limits(cell)
    if not limits:
        return None
    # Preloading walks layers, and in each its matrices: within a layer the order of the list.
    entries = sorted((t.weight for t in tensors if has_strip(t.weight)), key=lambda weight: weight.layer or 0)
    kept = {limit.where: _kept(entries, limit.budget_mb, limit.slots) for limit in limits}
    held = {where: sum(map(strip_bytes, stay)) for where, stay in kept.items()}
    missing = frozenset((w.layer, w.name) for w in entries) - {(w.layer, w.name) for w in kept[limits[-1].where]}
    residency = tuple(_strip_residency(limit, len(kept[limit.where]), entries) for limit in limits)
    return Strips(held["host"], held.get("device", 0), missing, residency)


def has_strip(weight: Weight) -> bool:
    """Whether the weight has an entry in the cache: the seven matrices of each layer, a layer's experts stacked."""
    return weight.layer is not None and weight.component in COMPONENTS


def strip_bytes(weight: Weight) -> int:
    """Bytes of one entry: int8 codes and a float32 scale for every 32 weights."""
    return weight.count + 4 * weight.count // _STRIP_GROUP


def _kept(entries: Sequence[Weight], budget_mb: int | None, slots: int | None) -> list[Weight]:
    """What stays after preloading: over a limit the oldest entry is evicted, so the latest remain."""
    kept: list[Weight] = []
    held = 0
    for entry in reversed(entries[-slots:] if slots else entries):
        held += strip_bytes(entry)
        if budget_mb is not None and held > budget_mb * MB:
            break
        kept.append(entry)
    return kept


def _strip_residency(limit: Limit, kept: int, entries: Sequence[Weight]) -> Residency:
    needed_bytes = sum(map(strip_bytes, entries))
    return Residency(what="weights", where=limit.where, kept=kept, total=len(entries), needed_bytes=needed_bytes, limit=str(limit))
