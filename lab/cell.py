"""A cell: one fully specified point of the matrix, typed, frozen and hashed.

The composed Hydra config becomes a `Cell`; from there on nothing reads Hydra or the command line. Two cells with the same hash ask for
the same measurement. The hash says nothing about code or file contents: those join it in the resume key (`lab.provenance`).
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

COMPONENTS = ("experts", "trunk", "ple", "head")
"""Weight groups a path chooses a codec and placement for. Everything else (norms, router, token embedding rows) keeps its source precision."""


PREFILL_SIZES = (512, 2048, 4096)
"""Prompt lengths that there are metrics for (`lab.metrics`)."""
DECODE_DEPTHS = (0, 512, 4096)
"""Tokens of context before the decoded ones that there are metrics for."""
SYNTHETIC = "synthetic"
"""`model.artifact` of weights that exist nowhere: random codes at the model's sizes (lab.artifacts.synthetic)."""


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSpec(_Frozen):
    """A model and its files. Paths are relative to the project root unless absolute."""

    name: str
    arch: str
    artifact: str
    corpus: str
    trained_depths: tuple[int, ...] = ()
    geometry: str = ""
    """A config.json with the model's sizes, for planning where the artifact is not at hand; the artifact's own counts when it is there."""
    source: str = ""
    """The artifact that divergence is measured against, where it is another one than `artifact`: the model before it was converted."""
    table_rows: int | None = Field(default=None, ge=1)
    """Of a synthetic model: rows of a smaller n-gram table than the sizes give (lab.models.qwen4_exp.table_rows); None: its true size."""


class ComponentPlan(_Frozen):
    """How one weight group is stored (`codec`, or `source` for as in the file) and where it lives and is computed."""

    codec: str
    placement: Literal["device", "host", "tiered", "cpu_cold"] = "device"
    options: dict[str, Any] = Field(default_factory=dict)
    assumed: str = ""
    """For planning: the codec that stands in for `source` where the file is not at hand."""
    assumed_down: str = ""
    """The same for the experts' down matrices, whose short rows some types do not fit."""


class EvidenceRule(_Frozen):
    """What must have happened: every op of `component` in every selected layer was `op`, on the cell's device, with this share resident."""

    component: str
    op: str
    residency: float = Field(default=1.0, ge=0.0, le=1.0)


class ServerSpec(_Frozen):
    """For engine=server: an OpenAI-compatible endpoint, and the command that starts it (none: it runs already, and is left running)."""

    url: str = "http://127.0.0.1:8000/v1"
    model: str = ""
    """The model name sent in requests; empty: the first one that the server lists."""
    command: tuple[str, ...] = ()
    """The start command as words; {artifact}, {layers}, {port}, {threads} and {python} (the one that runs the lab) are filled in. Never through a shell."""
    environment: dict[str, str] = Field(default_factory=dict)
    health: str = "/health"
    """Path, from the server's root, that answers 200 when requests can be sent."""
    start_timeout_s: float = Field(default=600.0, gt=0)
    request_timeout_s: float = Field(default=120.0, gt=0)
    lossy: tuple[str, ...] = ()
    """Switches of this stack that trade quality for speed, by name: they stand beside every number."""


class PathSpec(_Frozen):
    """A migration path: a codec and a placement per component, and the evidence that it ran. `unsupported` says why it cannot run yet."""

    name: str
    title: str
    components: dict[str, ComponentPlan]
    evidence: tuple[EvidenceRule, ...] = ()
    reference: bool = False
    unsupported: str | None = None
    server: ServerSpec | None = None
    format: Literal["gguf", "vqf"] | None = None
    """The kind of file that this path runs; None: any that the engine reads."""


class BenchSpec(_Frozen):
    """How much to measure. PP, TG and batch sizes are part of the metric names (pp512, tg128, agg4) and so are fixed."""

    name: str
    ppl_context: int = Field(gt=1)
    ppl_stride: int = Field(gt=0)
    ppl_windows: int = Field(gt=0)
    warmup: int = Field(ge=1)
    repeats: int = Field(ge=5)
    timeout_s: float = Field(gt=0)
    llama_half_chunks: int = Field(default=0, ge=0)
    """Chunks of `ppl/llama-half@1` (lab.measure.llama_half); 0: not measured."""
    llama_half_context: int = Field(default=512, gt=3)
    prefill_tokens: tuple[int, ...] = ()
    """Prompt lengths, of PREFILL_SIZES, measured for `wide_lanes` sequences (lab.measure.wide); 512 for one sequence is always measured."""
    decode_depths: tuple[int, ...] = ()
    """Contexts to decode from, of DECODE_DEPTHS, for `wide_lanes` sequences; 512 is always measured, for one and for four."""
    wide_lanes: tuple[Literal[1, 4], ...] = (1, 4)
    segment_layers: tuple[int, ...] = ()
    """Cells of these depths also measure which component takes which share of the time (lab.measure.segments)."""

    @field_validator("prefill_tokens", "decode_depths")
    @classmethod
    def _has_metrics(cls, sizes: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        known = PREFILL_SIZES if info.field_name == "prefill_tokens" else DECODE_DEPTHS
        if unknown := [size for size in sizes if size not in known]:
            raise ValueError(f"bench.{info.field_name}: {unknown[0]} is not measured; choose from {', '.join(map(str, known))}")
        return sizes

    @model_validator(mode="after")
    def _windows_overlap(self) -> Self:
        # The first token of a window has nothing before it and is not scored; a later window must overlap to score it.
        if self.ppl_stride >= self.ppl_context:
            raise ValueError(f"bench.ppl_stride={self.ppl_stride} must be below bench.ppl_context={self.ppl_context}")
        return self


class DeviceSpec(_Frozen):
    """Where it runs: a torch device string, the activation dtype, and the CPU threads used (0: all cores, or as many as lab.engines.threads finds soonest)."""

    name: str
    torch_device: str
    compute_dtype: Literal["float32", "bfloat16"]
    threads: int = Field(default=0, ge=0)
    title: str = ""
    expect: str | None = None
    """A regular expression that the name of the accelerator must contain: numbers of another card must not be stored under this name."""
    memory_bytes: int | None = Field(default=None, gt=0)
    read_bytes_s: float | None = Field(default=None, gt=0)
    flops_s: float | None = Field(default=None, gt=0)
    bus_bytes_s: float | None = Field(default=None, gt=0)
    source: str = ""
    """Where the four figures come from. They serve planning; a measured roofline uses what the machine itself reached."""


class Placement(_Frozen):
    """How much of the model may lie where, for the paths that move weights: one limit or several, null = the path's own choice."""

    slots: int | None = Field(default=None, ge=1)
    """Experts kept on the device per layer."""
    resident_layers: int | None = Field(default=None, ge=0)
    """Layers whose experts stay on the device whole."""
    host_budget_mb: int | None = Field(default=None, ge=1)
    device_budget_mb: int | None = Field(default=None, ge=1)


class Cell(_Frozen):
    """One point of the matrix. `layers` keeps the first N layers of the model."""

    model: ModelSpec
    path: PathSpec
    layers: int = Field(ge=1)
    engine: str = "local"
    device: DeviceSpec
    bench: BenchSpec
    placement: Placement = Placement()
    mode: Literal["auto", "graph", "eager"] = "auto"
    """How decoding is launched: one captured graph per step, or operation by operation; auto leaves it to the engine."""
    disable: Literal["kernels", "graph", "pinned"] | None = None
    """Made to fail on purpose, to see that it is noticed: the GPU kernels, capturing a step, or page-locked host memory. A key of the cell and part of its
    id, so that it can neither be left on nor be taken for the path."""

    def identity(self) -> dict[str, Any]:
        """The fields that define the measurement: no titles, no time allowed, no figures for planning.

        Fields that came later (`placement`, `mode`, `path.server`, ...) count only when set, so that cells measured before keep their hash.
        """
        data = self.model_dump(mode="json")
        data["path"].pop("title")
        if self.path.server is None:
            data["path"].pop("server")
        data["bench"].pop("timeout_s")
        if self.model.artifact != SYNTHETIC:  # whose sizes are all there is
            data["model"].pop("geometry")
        data["device"] = {key: data["device"][key] for key in ("name", "torch_device", "compute_dtype", "threads")}
        if self.placement == Placement():
            data.pop("placement")
        if self.mode == "auto":
            data.pop("mode")
        if self.disable is None:
            data.pop("disable")
        if not self.model.source:
            data["model"].pop("source")
        if self.model.table_rows is None:
            data["model"].pop("table_rows")
        if self.path.format is None:
            data["path"].pop("format")
        if not self.bench.llama_half_chunks:
            data["bench"].pop("llama_half_chunks")
            data["bench"].pop("llama_half_context")
        for field in ("prefill_tokens", "decode_depths", "segment_layers"):
            if not data["bench"][field]:
                data["bench"].pop(field)
        if self.bench.wide_lanes == BenchSpec.model_fields["wide_lanes"].default:
            data["bench"].pop("wide_lanes")
        for component in data["path"]["components"].values():
            component.pop("assumed")
            component.pop("assumed_down")
        return data

    @property
    def hash(self) -> str:
        """sha256 (hex) of the canonical JSON of `identity()`."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def id(self) -> str:
        """Short readable name, unique per hash: folder name in `runs/`, MLflow run name, report row."""
        engine = "" if self.engine in ("local", "server") else f"-{self.engine}"
        engine += f"-without_{self.disable}" if self.disable else ""
        return f"{self.model.name}-{self.path.name}-L{self.layers}-{self.device.name}-{self.bench.name}{engine}-{self.hash[:8]}"
