"""What one attempt at a cell left behind: statuses, measurements, gaps and the record itself.

The record is the truth; MLflow and the reports are made from it. A metric is either in `metrics` (a finite number with its protocol and
samples) or in `gaps` (a status, a reason and the command that would fill it), never in both and never as 0, NaN or infinity.
A record says what was measured and how; it does not prove that the measured path is the claimed one - `lab.evidence` judges that.
"""

from __future__ import annotations

import math
import statistics
from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

RECORD_SCHEMA = 1


class Status(StrEnum):
    """How a cell, or one metric of it, ended. A closed list; only OK carries a number into a headline."""

    OK = "OK"
    NOT_RUN = "NOT_RUN"
    UNSUPPORTED = "UNSUPPORTED"
    DEAD_END = "DEAD_END"
    ARTIFACT_REFUSED = "ARTIFACT_REFUSED"
    OOM_PREDICTED = "OOM_PREDICTED"
    OOM = "OOM"
    LOAD_FAILED = "LOAD_FAILED"
    PATH_NOT_EXECUTED = "PATH_NOT_EXECUTED"
    DEGRADED = "DEGRADED"
    NUMERIC_INVALID = "NUMERIC_INVALID"
    IMPLAUSIBLE = "IMPLAUSIBLE"
    PARITY_FAILED = "PARITY_FAILED"
    TIMEOUT = "TIMEOUT"
    CRASHED = "CRASHED"
    INFRA = "INFRA"
    INVALIDATED = "INVALIDATED"
    SUPERSEDED = "SUPERSEDED"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class Measurement(_Strict):
    """A measured value. With repeats, `value` is the median of `samples`; `roofline_pct` is the share of the physical bound, in percent."""

    value: float
    unit: str
    protocol: str
    samples: list[float] = Field(default_factory=list)
    median: float | None = None
    min: float | None = None
    max: float | None = None
    stderr: float | None = None
    roofline_pct: float | None = None
    details: dict[str, Any] = Field(default_factory=dict)

    @classmethod
    def from_samples(cls, samples: list[float], unit: str, protocol: str, **rest: Any) -> Self:
        """The measurement of a repeated quantity: value = median, with min and max. Raises ValueError on an empty or non-finite list."""
        if not samples or not all(math.isfinite(s) for s in samples):
            raise ValueError(f"a measurement needs finite samples, got {samples!r}")
        middle = statistics.median(samples)
        return cls(value=middle, unit=unit, protocol=protocol, samples=samples, median=middle, min=min(samples), max=max(samples), **rest)


class Gap(_Strict):
    """A metric without an admissible value: why, and the exact command that would fill it."""

    status: Status
    reason: str
    fill: str

    @model_validator(mode="after")
    def _explains(self) -> Self:
        if self.status is Status.OK or not self.reason.strip():
            raise ValueError("a gap needs a status other than OK and a reason")
        return self


class GateResult(_Strict):
    """One gate of admission (`lab.gates`): passed, partly (some metrics refused), stopped here, forced past, not checked, or not reached."""

    gate: str
    outcome: Literal["passed", "partly", "stopped", "forced", "not_checked", "not_reached"]
    detail: str = ""


class WorkerResult(_Strict):
    """What the child process hands to the parent: raw findings, before admission. `status` OK means only that it ran to the end."""

    status: Status
    reason: str = ""
    metrics: dict[str, Measurement] = Field(default_factory=dict)
    gaps: dict[str, tuple[Status, str]] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)
    evidence: dict[str, Any] = Field(default_factory=dict)
    artifact: dict[str, Any] = Field(default_factory=dict)
    environment: dict[str, Any] = Field(default_factory=dict)


class Record(_Strict):
    """One attempt at one cell, complete. `cell` is the frozen configuration; `resume_key` names everything that would move the numbers."""

    schema_version: int = RECORD_SCHEMA
    cell_id: str
    cell_hash: str
    attempt: int
    status: Status
    reason: str = ""
    cell: dict[str, Any]
    metrics: dict[str, Measurement] = Field(default_factory=dict)
    gaps: dict[str, Gap] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)
    gates: list[GateResult] = Field(default_factory=list)
    evidence: dict[str, Any] = Field(default_factory=dict)
    artifact: dict[str, Any] = Field(default_factory=dict)
    provenance: dict[str, Any] = Field(default_factory=dict)
    resume_key: str
    started_at: str
    finished_at: str
    elapsed_s: float

    @model_validator(mode="before")
    @classmethod
    def _of_this_schema(cls, data: Any) -> Any:
        schema = data.get("schema_version", RECORD_SCHEMA) if isinstance(data, dict) else RECORD_SCHEMA
        if schema != RECORD_SCHEMA:
            raise ValueError(f"schema_version {schema} is not {RECORD_SCHEMA}: written by another version of the lab")
        return data

    @model_validator(mode="after")
    def _one_place_each(self) -> Self:
        both = sorted(self.metrics.keys() & self.gaps.keys())
        if both:
            raise ValueError(f"metric both measured and a gap: {', '.join(both)}")
        if self.status is not Status.OK and self.metrics:
            raise ValueError(f"a record with status {self.status} must not carry headline metrics")
        if self.status is not Status.OK and not self.reason.strip():
            raise ValueError(f"a record with status {self.status} needs a reason")
        return self
