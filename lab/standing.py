"""How each attempt at a cell stands: which one counts, and why the others do not.

Nothing is deleted and no record is edited. What an attempt is worth follows from the records themselves, the marks beside them, today's protocol
versions and the weights an experiment pins; one function decides it for the matrix, for MLflow and for the report. It judges the books - time, marks,
versions - and never whether a number is right.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from lab.metrics import METRICS
from lab.record import Record, Status


class Mark(BaseModel):
    """Something said about an attempt after its record was final: what, why, when (UTC, ISO 8601) and by whom. Kept beside the record."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    what: Literal["invalidated"]
    reason: str = Field(pattern=r"\S")
    at: str
    by: str


Marks = Mapping[tuple[str, int], tuple[Mark, ...]]
"""Marks by the attempt's address: cell id and attempt number."""
NO_MARKS: Marks = MappingProxyType({})
NO_WEIGHTS: Mapping[str, str] = MappingProxyType({})


class Kind(StrEnum):
    """The ways an attempt can stand. Exactly one attempt of a cell is CURRENT, or none."""

    CURRENT = "CURRENT"
    SUPERSEDED = "SUPERSEDED"
    INVALIDATED = "INVALIDATED"
    STALE_PROTOCOL = "STALE_PROTOCOL"
    OTHER_WEIGHTS = "OTHER_WEIGHTS"


@dataclass(frozen=True)
class Standing:
    """How one attempt stands: `by` is the attempt that took the place of a superseded one, `reason` says why the other kinds do not count."""

    kind: Kind
    reason: str = ""
    by: int | None = None

    @property
    def text(self) -> str:
        """In one line, as the MLflow tag `standing` has it."""
        if self.by is not None:
            return f"{self.kind} by attempt {self.by}"
        return f"{self.kind}: {self.reason}" if self.reason else str(self.kind)


Standings = tuple[tuple[Record, Standing], ...]
"""The attempts at one cell with their standings, oldest first."""


def standings(records: Iterable[Record], marks: Marks = NO_MARKS, metrics: Iterable[str] = METRICS, weights: Mapping[str, str] = NO_WEIGHTS) -> Standings:
    """The standing of each attempt at one cell, oldest first.

    Current is the newest OK attempt against which nothing speaks, else the newest failed one. `metrics` are those whose protocol must be today's;
    `weights` pins the sha256 of a model's files. An invalidated attempt is never current, and neither is one of an older protocol or of other weights.
    """
    names = tuple(metrics)
    judged = [(same[0], _objection(same, marks, names, weights)) for same in with_copies(records)]
    good = [record for record, objection in judged if objection is None and record.status is Status.OK]
    # A failure that a later attempt overcame, if only under an older protocol, no longer describes the cell: then none is current.
    alive = [record for record, objection in judged if objection is None or objection.kind is Kind.STALE_PROTOCOL]
    leader = good[-1] if good else alive[-1] if alive else None
    displaced = Standing(Kind.SUPERSEDED, by=leader.attempt if leader else None)
    return tuple((record, objection or (Standing(Kind.CURRENT) if record is leader else displaced)) for record, objection in judged)


def _objection(same: tuple[Record, ...], marks: Marks, metrics: tuple[str, ...], weights: Mapping[str, str]) -> Standing | None:
    """What keeps this record from counting, whatever the others are; the gravest first. A mark on one of its copies is a mark on the record."""
    record = same[0]
    if said := {mark for one in same for mark in marks.get((one.cell_id, one.attempt), ())}:
        reasons = [mark.reason for mark in sorted(said, key=lambda mark: (mark.at, mark.by, mark.reason))]
        return Standing(Kind.INVALIDATED, "; ".join(dict.fromkeys(reasons)))
    if stale := _stale(record, metrics):
        return Standing(Kind.STALE_PROTOCOL, stale)
    if other := _other_weights(record, weights):
        return Standing(Kind.OTHER_WEIGHTS, other)
    return None


def _stale(record: Record, metrics: tuple[str, ...]) -> str:
    """Why the record's numbers are not today's: another protocol version or unit in one of the metrics. Empty if none."""
    for name in metrics:
        found, now = record.metrics.get(name), METRICS[name]
        if found is not None and (found.protocol, found.unit) != (now.protocol, now.unit):
            was, is_now = f"{found.protocol} in {found.unit}", f"{now.protocol} in {now.unit}"
            return f"attempt {record.attempt} measured {name} under {was}; it is now {is_now}"
    return ""


def _other_weights(record: Record, weights: Mapping[str, str]) -> str:
    """Why the record is not about the pinned weights. A failure that never came to read any is about whichever were meant."""
    model, found = str(record.cell["model"]["name"]), record.artifact.get("sha256")
    pinned = weights.get(model)
    if pinned is None or found == pinned or (found is None and record.status is not Status.OK):
        return ""
    ran = f"weights of sha256 {str(found)[:12]}" if found else "weights without a sha256"
    return f"attempt {record.attempt} ran {ran}; the experiment pins {model} to {pinned[:12]}"


def with_copies(records: Iterable[Record]) -> list[tuple[Record, ...]]:
    """Each record with its copies - the same content under other attempt numbers - the oldest record and in each the lowest number first.

    What is given twice under one number is there once. The order depends on the content alone, not on the order of arrival or on attempt numbers.
    """
    groups: dict[tuple[datetime, str, str, str, str], list[Record]] = defaultdict(list)
    for record in records:
        groups[age(record)].append(record)
    ordered: list[tuple[Record, ...]] = []
    for key in sorted(groups):
        if len(groups[key]) == 1:
            ordered.append((groups[key][0],))
            continue
        # Only where times agree is the whole content looked at: over thousands of records that is the slow part.
        alike: dict[str, dict[int, Record]] = defaultdict(dict)
        for record in groups[key]:
            alike[record_id(record)][record.attempt] = record
        ordered += [tuple(numbered[number] for number in sorted(numbered)) for _, numbered in sorted(alike.items())]
    return ordered


def age(record: Record) -> tuple[datetime, str, str, str, str]:
    """Sort key, oldest first, equal for equal content. Attempt numbers are left out: two machines may both have given out the same."""
    try:
        when = datetime.fromisoformat(record.started_at)
    except ValueError:
        when = datetime.min  # an unknown time never displaces a known one
    moment = when if when.tzinfo else when.replace(tzinfo=UTC)
    return moment, record.started_at, record.finished_at, record.resume_key, record.cell_hash


def record_id(record: Record) -> str:
    """What a record is known by when it travels: sha256 (hex) of its canonical JSON without the attempt number, which every folder gives anew.

    Fields at their default are left out, so that the identity of old records outlasts fields that are added later.
    """
    # By way of its JSON text, so that a record and what is read back from its file are one: a NaN in the evidence, for one, is written as null.
    content = json.loads(record.model_dump_json(exclude={"attempt", "schema_version"}, exclude_defaults=True))
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
