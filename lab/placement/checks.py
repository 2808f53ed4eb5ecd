"""What must be shown for experts kept in part: every request found or missed, every missed expert brought, the tables whole, nothing fallen back.

The counts come from the device, where the slots are chosen; the rows they are compared with are counted on the host, where operations are launched. A tier
that was switched off, that serves another share than asked for, or that lost count shows here. What it does not prove: that a hit held the right bytes,
which is what comparing the outputs with the resident path is for (tests, and parity in every run).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lab.cell import Cell
from lab.placement.kinds import kind_of
from lab.record import Status

_LISTS = ("requests", "hits", "misses", "streamed_rows")


def devices_of(cell: Cell, component: str, device: str) -> set[str]:
    """Where a component's operations may run: on `device`, and experts that are `cpu_cold` on the CPU as well."""
    return {device, "cpu"} if component == "experts" and kind_of(cell.path.components) == "cpu_cold" else {device}


def promised_share(cell: Cell, component: str, evidence: dict[str, Any]) -> float:
    """The share of a component's weights that its placement promises on its device: all of them, but for experts that are kept in part."""
    told = evidence.get("tiers")
    if component != "experts" or kind_of(cell.path.components) is None or not told or not told.get("layers"):
        return 1.0
    partly, total = len(told["layers"]), told["total_layers"]
    return float((total - partly) * told["count"] + partly * told["slots"]) / float(total * told["count"])


def shares_slots(evidence: Mapping[str, Any]) -> bool:
    """Whether sequences decoded together push each other's experts out: four may then be slower than one (96.5 and 84.9 tok/s with 64 of 512 slots).

    False for evidence that is not as a worker writes it, which a record from elsewhere may hold."""
    told = evidence.get("tiers")
    if not isinstance(told, Mapping) or not isinstance(told.get("layers"), list) or not told["layers"]:
        return False
    slots, count = told.get("slots"), told.get("count")
    return isinstance(slots, int) and isinstance(count, int) and slots < count


def least_together(single: float, shared: bool) -> float:
    """The rate below which four sequences together cannot be, beside one alone at `single`: its own; where they share slots, their turns one after another."""
    return single / 4 if shared else single


def findings(cell: Cell, evidence: dict[str, Any]) -> list[tuple[Status, str]]:
    """What speaks against the placement: of experts kept in part, and of host memory that could not be pinned."""
    refused = [(Status.DEGRADED, f"placement: {reason}") for reason in evidence.get("pinned", {}).get("refused", ())]
    return [*_experts(cell, evidence), *refused]


def _experts(cell: Cell, evidence: dict[str, Any]) -> list[tuple[Status, str]]:
    kind = kind_of(cell.path.components)
    if kind is None:
        return []
    told = evidence.get("tiers")
    if not told or told.get("kind") != kind:
        return [(Status.PATH_NOT_EXECUTED, f"experts: {kind} placement was asked for, and the worker reported {(told or {}).get('kind', 'none')}")]
    found = [(Status.PATH_NOT_EXECUTED, f"experts: {problem}") for problem in _asked(cell, told)]
    if not told["layers"]:
        return found
    if missing := [name for name in _LISTS if len(told.get(name, ())) != len(told["layers"])]:
        return [*found, (Status.PATH_NOT_EXECUTED, f"experts: the worker reported no {', '.join(missing)} of its {len(told['layers'])} layers kept in part")]
    split = _split(cell, told, evidence) if kind == "cpu_cold" else []
    found += [(Status.PATH_NOT_EXECUTED, f"experts: {problem}") for problem in [*_counts(told, evidence), *split, *told.get("inconsistent", ())]]
    return found + [(Status.DEGRADED, f"experts: {problem}") for problem in told.get("problems", ())]


def _asked(cell: Cell, told: dict[str, Any]) -> list[str]:
    """Slots and layers that are not those of the cell."""
    slots = min(cell.placement.slots or 0, told["count"])
    partly = 0 if slots == told["count"] else max(0, told["total_layers"] - (cell.placement.resident_layers or 0))
    found = []
    if told["slots"] != slots:
        found.append(f"{told['slots']} slots a layer, placement.slots={cell.placement.slots} was asked for")
    if len(told["layers"]) != partly:
        found.append(f"{len(told['layers'])} layers were kept in part, the placement asks for {partly}")
    return found


def _counts(told: dict[str, Any], evidence: dict[str, Any]) -> list[str]:
    """Layers whose requests are not all accounted for."""
    needed = evidence["tokens_forwarded"] * told["per_token"]
    found = []
    for layer, asked, hits, misses, streamed in zip(told["layers"], *(told[name] for name in _LISTS), strict=True):
        if hits + misses != asked:
            found.append(f"layer {layer}: {hits} hits and {misses} misses are not the {asked} requests")
        if asked + streamed != needed:
            found.append(f"layer {layer}: {asked} requests to the slots and {streamed} streamed, where the tokens forwarded need {needed}")
    return found


def _split(cell: Cell, told: dict[str, Any], evidence: dict[str, Any]) -> list[str]:
    """Layers whose rows were not computed where their requests say: without a slot by the CPU's job, which counts for itself, all others on the device. Two
    rows a request: gate with up, and down."""
    device = cell.device.torch_device.split(":")[0]
    if device == "cpu":  # its own second memory, in tests: both count in one place
        return []
    rows = {(op["layer"], op["device"]): op["rows"] for op in evidence["ops"] if op["component"] == "experts"}
    found = []
    for layer, _, hits, misses, streamed in zip(told["layers"], *(told[name] for name in _LISTS), strict=True):
        for where, needed in (("cpu", misses), (device, hits + streamed)):
            if (ran := rows.get((layer, where), 0)) != 2 * needed:
                found.append(f"layer {layer}: {ran} rows were computed on {where}, where {needed} requests need {2 * needed}")
    return found
