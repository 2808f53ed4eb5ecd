"""Which weights lie on the device where a path keeps only some of them there: experts by layer and slot, and Kestrel's strip cache.

Experts (`tiered`, `cpu_cold`): the first `placement.resident_layers` layers stay on the device whole, of the others `placement.slots` experts each; host
memory holds all experts of the layers that are not whole on the device. Streamed layers pass through a staging area of one layer's experts.
Strip cache: the sizes are those of the CPU engine's cache that the CUDA port is said to descend from (int8 codes, a float32 scale per 32 weights); the port
itself is not public, so the prediction is an inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lab.capacity.ledger import Place, Residency
from lab.capacity.sizes import ModelSizes, Weight
from lab.capacity.storage import Stored, is_vqf
from lab.cell import Cell, Placement

MB = 1 << 20
"""Budgets are counted in 2^20 bytes, as the CPU engine's own cap of 768 MiB is."""
_STRIP_GROUP = 32


@dataclass(frozen=True)
class Tier:
    """The device's share of the routed experts: `whole` layers entirely, `slots` of `count` experts in the others, if there are any (`partial`)."""

    whole: frozenset[int]
    slots: int
    count: int
    partial: bool

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
    slots = min(cell.placement.slots or 0, count)
    whole = frozenset(layers if slots == count else layers[: cell.placement.resident_layers or 0])
    return Tier(whole, slots, count, partial=len(whole) < len(layers))


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
    the entries that do not stay on the device and are built and moved again in every pass."""

    host: int
    device: int
    missing: frozenset[tuple[int | None, str]]
    residency: tuple[Residency, ...]


def strips_of(cell: Cell, tensors: Sequence[Stored]) -> Strips | None:
    """The strip caches, or None for a cell without a VQF file, without a budget, or on the CPU, which computes from the file's blocks."""
    p = cell.placement
    if not is_vqf(cell) or cell.device.torch_device == "cpu" or (p.slots, p.host_budget_mb, p.device_budget_mb) == (None, None, None):
        return None
    # Preloading walks layers, and in each its matrices: the order of the list.
    entries = [t.weight for t in tensors if has_strip(t.weight)]
    host, device = _kept(entries, p.host_budget_mb, p.slots), _kept(entries, p.device_budget_mb, p.slots)
    total = sum(strip_bytes(w) for w in entries)
    residency = (
        _strip_residency("host", len(host), len(entries), total, p.host_budget_mb, "host_budget_mb", p.slots),
        _strip_residency("device", len(device), len(entries), total, p.device_budget_mb, "device_budget_mb", p.slots),
    )
    missing = frozenset((w.layer, w.name) for w in entries) - {(w.layer, w.name) for w in device}
    return Strips(sum(map(strip_bytes, host)), sum(map(strip_bytes, device)), missing, residency)


def has_strip(weight: Weight) -> bool:
    """Whether the weight has an entry in the cache: the seven matrices of each layer, a layer's experts stacked."""
    return weight.layer is not None and weight.component in ("trunk", "experts")


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


def _strip_residency(where: Place, kept: int, total: int, needed_bytes: int, budget_mb: int | None, key: str, slots: int | None) -> Residency:
    limits = ["no budget given" if budget_mb is None else f"placement.{key}={budget_mb}", *([] if slots is None else [f"placement.slots={slots}"])]
    return Residency(what="weights", where=where, kept=kept, total=total, needed_bytes=needed_bytes, limit=", ".join(limits))
