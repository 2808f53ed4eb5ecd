"""Facts of many records folded into one list: said once where all agree, spelled out where they differ.

Used for provenance and protocols, so that a table mixing two machines, two code versions or two contexts cannot look uniform. Keys are
whatever the records hold; nothing is looked up elsewhere, and a fact missing from some records is shown as missing there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lab.likeness import machine
from lab.record import Record
from lab.report.numbers import significant

MISSING = "(not recorded)"
IDENTITY = ("machine", "device", "torch", "code", "artifact")
"""What numbers depend on beyond their cell; a difference in one of them is said at the top of the report. `lab.likeness` says what it forbids."""

_HASH_SHOWN = 12
_LIST_SHOWN = 8
_VALUES_SHOWN = 6


@dataclass(frozen=True)
class Fact:
    """One key over all records: its text, and whether the records differ in it."""

    key: str
    text: str
    differs: bool


def flatten(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys. A long list is named by its length: its values belong in the record."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        elif isinstance(value, list | tuple):
            plain = len(value) <= _LIST_SHOWN and not any(isinstance(item, Mapping | list | tuple) for item in value)
            flat[f"{prefix}{key}"] = ", ".join(str(item) for item in value) if plain else f"({len(value)} items)"
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def fold(sources: Iterable[Mapping[str, Any]]) -> list[Fact]:
    """One Fact per key that any source holds, in order of first appearance."""
    flats = [flatten(source) for source in sources]
    keys = dict.fromkeys(key for flat in flats for key in flat)
    return [_fact(key, [flat.get(key, MISSING) for flat in flats]) for key in keys]


def _fact(key: str, values: list[Any]) -> Fact:
    counts = Counter(_text(value) for value in values)
    if len(counts) == 1:
        return Fact(key, next(iter(counts)), False)
    if len(counts) > _VALUES_SHOWN and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        return Fact(key, f"{_text(min(values))} to {_text(max(values))}", True)
    shown = [f"{text} ({count})" for text, count in sorted(counts.items())[:_VALUES_SHOWN]]
    rest = len(counts) - len(shown)
    return Fact(key, "; ".join(shown) + (f"; and {rest} more" if rest else ""), True)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return significant(value, 4)
    return "–" if value in (None, "") else str(value)


def identity(record: Record) -> dict[str, str]:
    """What the record's numbers depend on beyond its cell, one text per IDENTITY kind. Hashes are cut to their start."""
    made, device = flatten(machine(record)), record.cell["device"]
    cores = made["machine.cores"]
    hardware = [made["machine.cpu"], f"{cores} cores" if cores else None, made["machine.accelerators"]]
    code, artifact = str(record.provenance.get("code_sha256") or ""), str(record.artifact.get("sha256") or "")
    return {
        "machine": ", ".join(str(part) for part in hardware if part) or MISSING,
        "device": ", ".join(str(device[key]) for key in ("torch_device", "compute_dtype") if key in device) or MISSING,
        "torch": str(made["torch"] or MISSING),
        "code": f"sha256 {code[:_HASH_SHOWN]}" if code else MISSING,
        "artifact": f"sha256 {artifact[:_HASH_SHOWN]}" if artifact else MISSING,
    }


def differences(records: Iterable[Record]) -> list[Fact]:
    """The IDENTITY kinds in which the records disagree."""
    return [fact for fact in fold(identity(record) for record in records) if fact.differs]
