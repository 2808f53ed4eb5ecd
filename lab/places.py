"""Paths of this machine in what a record keeps: replaced by what they are, so that a record can be shown to others as it is.

A record names its files relative to the project. What programs print - commands, tracebacks, error messages - has whole paths in it, and with them user
names. They are replaced when the record is made, never later: a record is known by its content. The cell and its fill command stay, which must work as
they are. What this does not do: find a path that begins anywhere else, or a name in free text.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.record import Record

_LEAST = 4
"""Characters of a place worth replacing: `/` and the like would be found everywhere."""
_AS_IT_IS = ("fill",)


def known_places() -> dict[str, str]:
    """Folders of this machine and what stands for them, longest first."""
    root = os.environ.get("LAB_ROOT") or Path(__file__).resolve().parents[1]
    named = {"runs": os.environ.get("LAB_RUNS"), ".": root, "PYTHON": sys.prefix, "BASE_PYTHON": sys.base_prefix, "~": Path.home()}
    found = {str(Path(place).absolute()): name for name, place in named.items() if place}
    return {place: found[place] for place in sorted(found, key=len, reverse=True) if len(place) >= _LEAST}


def without_places(record: Record, places: dict[str, str] | None = None) -> Record:
    """The record with `places` replaced in its provenance, evidence, notes and reasons."""
    known = known_places() if places is None else places
    if not known:
        return record
    # At the end of a folder's name only: /home/a is no part of /home/ab.
    pattern = re.compile("|".join(rf"{re.escape(place)}(?![A-Za-z0-9_.-])" for place in known))
    hide = _Hide(pattern, known)
    kept = {key: record.provenance[key] for key in _AS_IT_IS if key in record.provenance}
    changed = {
        "provenance": hide(record.provenance) | kept,
        "evidence": hide(record.evidence),
        "notes": hide(record.notes),
        "reason": hide(record.reason),
        "gaps": {name: gap.model_copy(update={"reason": hide(gap.reason)}) for name, gap in record.gaps.items()},
        "gates": [gate.model_copy(update={"detail": hide(gate.detail)}) for gate in record.gates],
    }
    return record.model_copy(update=changed)


class _Hide:
    """Replaces in every text of a value as JSON has it."""

    def __init__(self, pattern: re.Pattern[str], places: dict[str, str]) -> None:
        self.pattern, self.places = pattern, places

    def __call__(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.pattern.sub(lambda match: self.places[match[0]], value)
        if isinstance(value, dict):
            return {key: self(item) for key, item in value.items()}
        return [self(item) for item in value] if isinstance(value, list | tuple) else value


def absolute_paths(value: Any) -> Iterator[str]:
    """Every path in the texts of `value` that begins in a folder where users or projects live."""
    if isinstance(value, str):
        yield from re.findall(r"(?<![A-Za-z0-9_.~/-])/(?:home|root|Users|work|mnt|data|opt|srv|var/tmp|tmp)/[^\s'\",;:)\]]+", value)
    elif isinstance(value, dict):
        for item in value.values():
            yield from absolute_paths(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from absolute_paths(item)
