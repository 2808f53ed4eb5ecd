"""Whether a stored record is sound today: its form, and its numbers by the rules of today.

A record is read long after it was written, by a lab that may know better, and it may have come in a file from elsewhere. A form that readers trip over,
or a cell that is not the one it names, makes it unreadable; a number that admission would refuse now is shown as a gap. Soundness shows neither
that a record is true nor that it was not made up with care.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lab.admission import Refusal, decide
from lab.cell import Cell
from lab.metrics import METRICS
from lab.record import Record, WorkerResult

_CELL_ID = re.compile(r"[A-Za-z0-9_][^/\\\0]{0,200}")
"""A cell id becomes a folder's name."""


class _Form(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Provenance(_Form):
    """What readers of `provenance` take for granted about the parts that are there."""

    experiments: dict[str, str] = Field(default_factory=dict)
    worker: dict[str, Any] = Field(default_factory=dict)
    fill: str = ""
    code_sha256: str | None = None
    git: dict[str, Any] | None = None
    machine: dict[str, Any] | None = None
    packages: dict[str, str | None] | None = None
    env: dict[str, str] | None = None
    machine_state: dict[str, Any] | None = None


class _Artifact(_Form):
    sha256: str | None = None


class _Parity(_Form):
    kld_mean: float
    tolerance: float
    tokens: int


class _Evidence(_Form):
    parity: _Parity | None = None


class _Parts(BaseModel):
    cell: Cell
    artifact: _Artifact
    provenance: _Provenance
    evidence: _Evidence


def problems(record: Record) -> Iterator[str]:
    """What the fields of a record may hold and yet cannot be stored, mirrored or compared with: the key, what is wrong with it."""
    if not _CELL_ID.fullmatch(record.cell_id):
        yield f"cell_id: {record.cell_id!r} cannot be a folder's name"
    for name in ("started_at", "finished_at"):
        try:
            datetime.fromisoformat(getattr(record, name))
        except ValueError:
            yield f"{name}: {getattr(record, name)!r} is no time in ISO 8601"
    try:
        # Evidence is read again only beside numbers; that of a failure may hold what could not be computed.
        evidence = record.evidence if record.metrics else {}
        cell = _Parts.model_validate({"cell": record.cell, "artifact": record.artifact, "provenance": record.provenance, "evidence": evidence}).cell
    except ValidationError as error:
        first = error.errors()[0]
        yield f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        return
    for name, own in (("cell_hash", cell.hash), ("cell_id", cell.id)):
        if (said := getattr(record, name)) != own:
            yield f"{name}: {said[:80]!r} is not that of the cell in the record, {own!r}"


def refusals(record: Record) -> dict[str, Refusal]:
    """The metrics of a sound record that admission would refuse today, each with the status and the reason.

    Of a number under another protocol or unit than today's the rules say nothing; whether it counts is `lab.standing`'s business. Nor is the evidence that
    the path ran judged anew: what older records counted has another form.
    """
    today = {name: m for name, m in record.metrics.items() if name in METRICS and (m.protocol, m.unit) == (METRICS[name].protocol, METRICS[name].unit)}
    if not today:
        return {}
    gaps = {name: (gap.status, gap.reason) for name, gap in record.gaps.items()}
    result = WorkerResult(status=record.status, metrics=today, gaps=gaps, evidence=record.evidence, artifact=record.artifact)
    decision = decide(Cell.model_validate(record.cell), result, lambda cell, evidence: [])
    return {name: decision.gaps.get(name, (decision.status, decision.reason)) for name in today if name not in decision.metrics}
