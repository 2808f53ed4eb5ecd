"""A cell: one fully specified point of the matrix, typed, frozen and hashed.

The composed Hydra config becomes a `Cell`; from there on nothing reads Hydra or the command line. Two cells with the same hash ask for
the same measurement. The hash says nothing about code or file contents: those join it in the resume key (`lab.provenance`).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

COMPONENTS = ("experts", "trunk", "ple", "head")
"""Weight groups a path chooses a codec and placement for. Everything else (norms, router, token embedding rows) keeps its source precision."""


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSpec(_Frozen):
    """A model and its files. Paths are relative to the project root unless absolute."""

    name: str
    arch: str
    artifact: str
    corpus: str
    trained_depths: tuple[int, ...] = ()


class ComponentPlan(_Frozen):
    """How one weight group is stored (`codec`, or `source` for as in the file) and where it lives and is computed."""

    codec: str
    placement: Literal["device", "host", "tiered", "cpu_cold"] = "device"
    options: dict[str, Any] = Field(default_factory=dict)


class EvidenceRule(_Frozen):
    """What must have happened: every op of `component` in every selected layer was `op`, on the cell's device, with this share resident."""

    component: str
    op: str
    residency: float = Field(default=1.0, ge=0.0, le=1.0)


class PathSpec(_Frozen):
    """A migration path: a codec and a placement per component, and the evidence that it ran. `unsupported` says why it cannot run yet."""

    name: str
    title: str
    components: dict[str, ComponentPlan]
    evidence: tuple[EvidenceRule, ...] = ()
    reference: bool = False
    unsupported: str | None = None


class BenchSpec(_Frozen):
    """How much to measure. PP, TG and batch sizes are part of the metric names (pp512, tg128, agg4) and so are fixed."""

    name: str
    ppl_context: int = Field(gt=1)
    ppl_stride: int = Field(gt=0)
    ppl_windows: int = Field(gt=0)
    warmup: int = Field(ge=1)
    repeats: int = Field(ge=5)
    timeout_s: float = Field(gt=0)

    @model_validator(mode="after")
    def _windows_overlap(self) -> Self:
        # The first token of a window has nothing before it and is not scored; a later window must overlap to score it.
        if self.ppl_stride >= self.ppl_context:
            raise ValueError(f"bench.ppl_stride={self.ppl_stride} must be below bench.ppl_context={self.ppl_context}")
        return self


class DeviceSpec(_Frozen):
    """Where it runs: a torch device string, the activation dtype, and the CPU threads used (0 = all cores)."""

    name: str
    torch_device: str
    compute_dtype: Literal["float32", "bfloat16"]
    threads: int = Field(default=0, ge=0)


class Cell(_Frozen):
    """One point of the matrix. `layers` keeps the first N layers of the model."""

    model: ModelSpec
    path: PathSpec
    layers: int = Field(ge=1)
    engine: str = "local"
    device: DeviceSpec
    bench: BenchSpec

    def identity(self) -> dict[str, Any]:
        """The fields that define the measurement: everything but titles and the time allowed."""
        data = self.model_dump(mode="json")
        data["path"].pop("title")
        data["bench"].pop("timeout_s")
        return data

    @property
    def hash(self) -> str:
        """sha256 (hex) of the canonical JSON of `identity()`."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def id(self) -> str:
        """Short readable name, unique per hash: folder name in `runs/`, MLflow run name, report row."""
        return f"{self.model.name}-{self.path.name}-L{self.layers}-{self.device.name}-{self.bench.name}-{self.hash[:8]}"
