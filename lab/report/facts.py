"""Facts of many records folded into one list: said once where all agree, spelled out where they differ.

Used for provenance and protocols, so that a table mixing two machines, two code versions or two contexts cannot look uniform. Keys are
whatever the records hold; nothing is looked up elsewhere, and a fact missing from some records is shown as missing there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lab.likeness import machine
from lab.record import Record
from lab.report.language import Language
from lab.report.numbers import significant

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


def flatten(data: Mapping[str, Any], lang: Language, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys. A long list is named by its length: its values belong in the record or in a table (`listed`)."""
    flat: dict[str, Any] = {}
    for key, value in data.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, lang, f"{prefix}{key}."))
        elif isinstance(value, list | tuple):
            plain = len(value) <= _LIST_SHOWN and not any(isinstance(item, Mapping | list | tuple) for item in value)
            flat[f"{prefix}{key}"] = ", ".join(str(item) for item in value) if plain else lang("facts.items", count=len(value))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def fold(sources: Iterable[Mapping[str, Any]], lang: Language) -> list[Fact]:
    """One Fact per key that any source holds, in order of first appearance."""
    flats = [flatten(source, lang) for source in sources]
    keys = dict.fromkeys(key for flat in flats for key in flat)
    missing = lang("facts.missing")
    return [_fact(key, [flat.get(key, missing) for flat in flats], lang) for key in keys]


def _fact(key: str, values: list[Any], lang: Language) -> Fact:
    counts = Counter(said(value, lang) for value in values)
    if len(counts) == 1:
        return Fact(key, next(iter(counts)), False)
    if len(counts) > _VALUES_SHOWN and all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        return Fact(key, lang("range", low=said(min(values), lang), high=said(max(values), lang)), True)
    shown = [f"{text} ({count})" for text, count in sorted(counts.items())[:_VALUES_SHOWN]]
    rest = len(counts) - len(shown)
    return Fact(key, "; ".join(shown) + (lang("facts.more", count=rest) if rest else ""), True)


def said(value: Any, lang: Language) -> str:
    """One recorded value as text: numbers to four digits, what the lab words itself in the language of the report, a dash for none."""
    if isinstance(value, float):
        return significant(value, 4)
    return "–" if value in (None, "") else lang.recorded(str(value))


def listed(value: Any, lang: Language) -> list[dict[str, Any]] | None:
    """The items of a short list of mappings, each as dotted keys without digests, which tell a reader nothing; None for any other value."""
    if not isinstance(value, list) or not 0 < len(value) <= _LIST_SHOWN or not all(isinstance(item, Mapping) for item in value):
        return None
    flats = [{key: found for key, found in flatten(item, lang).items() if not key.endswith("sha256")} for item in value]
    inner = {key.split(".", maxsplit=1)[0] for flat in flats for key in flat if "." in key}
    return [{key: found for key, found in flat.items() if key not in inner} for flat in flats]  # an absent mapping is no column of its own


def identity(record: Record, lang: Language) -> dict[str, str]:
    """What the record's numbers depend on beyond its cell, one text per IDENTITY kind. Hashes are cut to their start."""
    made, missing, device = flatten(machine(record), lang), lang("facts.missing"), record.cell["device"]
    cores = made["machine.cores"]
    hardware = [made["machine.cpu"], lang("facts.cores", count=cores) if cores else None, made["machine.accelerators"]]
    code, artifact = str(record.provenance.get("code_sha256") or ""), str(record.artifact.get("sha256") or "")
    return {
        "machine": ", ".join(str(part) for part in hardware if part) or missing,
        "device": ", ".join(str(device[key]) for key in ("torch_device", "compute_dtype") if key in device) or missing,
        "torch": str(made["torch"] or missing),
        "code": f"sha256 {code[:_HASH_SHOWN]}" if code else missing,
        "artifact": f"sha256 {artifact[:_HASH_SHOWN]}" if artifact else missing,
    }


def identities(records: Iterable[Record], lang: Language) -> list[Fact]:
    """One Fact per IDENTITY kind, by its name in the language."""
    return [replace(fact, key=lang.field(fact.key)) for fact in fold((identity(record, lang) for record in records), lang)]


def differences(records: Iterable[Record], lang: Language) -> list[Fact]:
    """The IDENTITY kinds in which the records disagree."""
    return [fact for fact in identities(records, lang) if fact.differs]
