"""The rules of `lab.plausibility` over the measured cells of a matrix: which numbers can be set against each other.

A series holds rates between which nothing but the depth differs: model, path with its options, device, bench, placement and mode, the weights, and what
`lab.likeness` asks to be equal. The lab's own code is not part of it, since every edit of any file would switch the rules off; where it differs, the
flag says so. Where a record does not say on what it ran, its rates are compared with its own only. No doubt does not mean that a number is right.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from lab.cell import Cell, Placement
from lab.likeness import circumstances, untold
from lab.placement.checks import shares_slots
from lab.plausibility import RATES, Observation
from lab.record import Measurement, Record
from lab.registered import QUANTITIES
from lab.standing import record_id

QUANTITY_OF = {str(QUANTITIES[name].beside) if name in QUANTITIES else name: name for name in RATES}
"""The quantity that the rules know each of our rates by."""


@dataclass(frozen=True)
class Rate:
    """One measured rate of a current attempt, with a name that a flag can give back."""

    name: str
    cell: Cell
    record: Record
    quantity: str
    measurement: Measurement


def observations(rates: Iterable[Rate]) -> list[Observation]:
    """The rates as the rules take them, each in its series."""
    known = list(rates)
    keys = [series_key(rate) for rate in known]
    sharing: dict[str, set[str]] = defaultdict(set)
    for rate, key in zip(known, keys, strict=True):
        sharing[_title(rate.cell)].add(key)
    found = []
    for rate, key in zip(known, keys, strict=True):
        title, m = _title(rate.cell), rate.measurement
        series = title if len(sharing[title]) == 1 else f"{title} (series {key[:8]})"
        low, high = m.value if m.min is None else m.min, m.value if m.max is None else m.max
        code = str(rate.record.provenance.get("code_sha256") or "")
        crowded = shares_slots(rate.record.evidence)
        found.append(Observation(rate.name, series, rate.cell.layers, rate.quantity, m.value, low, high, code=code, shares_slots=crowded))
    return found


def series_key(rate: Rate) -> str:
    """sha256 (hex) of everything but the depth and the lab's code that moves a rate."""
    metric = next(name for name, quantity in QUANTITY_OF.items() if quantity == rate.quantity)
    parts = {
        "cell": {key: value for key, value in rate.cell.identity().items() if key != "layers"},
        "around": circumstances(rate.record, metric),
        "cache_state": rate.measurement.details.get("cache_state"),
        "weights": rate.record.artifact.get("sha256"),
        "only": record_id(rate.record) if untold(rate.record, metric) else None,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _title(cell: Cell) -> str:
    """The series as people read it; two that read alike are told apart by their key."""
    placed = "" if cell.placement == Placement() else ", " + ", ".join(f"{key}={value}" for key, value in cell.placement.model_dump(exclude_none=True).items())
    mode = "" if cell.mode == "auto" else f", {cell.mode}"
    return f"{cell.model.name} {cell.path.name} on {cell.device.name}, bench {cell.bench.name}{placed}{mode}"
