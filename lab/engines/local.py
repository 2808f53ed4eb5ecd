"""The lab's own engine: a checkpoint loaded along a path, ready to score, prefill and decode.

It holds one model and its counters. Device differences end here: synchronisation and peak memory have a branch for CUDA/ROCm and one for the CPU.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.artifacts import SyntheticArtifact, Weights, open_model
from lab.artifacts.weights import Artifact
from lab.cell import Cell, ComponentPlan
from lab.codecs import create
from lab.counters import Counters
from lab.engines.graphs import Graphs
from lab.engines.path_binder import PathBinder
from lab.engines.strip_limits import strip_limits
from lab.engines.strips import StripCache
from lab.engines.threads import TRIED_TOKENS, Threads
from lab.errors import GapError, LabError
from lab.kernels import native
from lab.models import State, build
from lab.placement.kinds import kind_of
from lab.placement.pinned import PinnedMemory, never
from lab.placement.tiers import Tiers
from lab.record import Status


class LocalEngine:
    """A loaded model. `load_s` is the wall time from opening the files to the last encoded tensor."""

    def __init__(self, cell: Cell, root: Path, plan: dict[str, ComponentPlan] | None = None, artifact: str | None = None) -> None:
        """Loads the cell's first `layers` layers along its path (or along `plan`, from `artifact`). Raises LabError when the artifact does not fit."""
        self.device, self.dtype = usable_device(cell.device.torch_device), getattr(torch, cell.device.compute_dtype)
        self.threads = Threads.of(cell.device)
        torch.set_num_threads(self.threads.most)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        native.unavailable()  # compiled at the first use on a machine, which is no part of loading a model
        started = time.perf_counter()
        opened = open_model(root, cell.model, artifact)
        self.config = opened.config().truncated(cell.layers)
        self.counters = Counters()
        components = cell.path.components if plan is None else plan
        self.pinned = PinnedMemory(self.device, never if cell.disable == "pinned" else None)
        weights = _weights(opened, cell.layers, components, self.pinned)
        limits = strip_limits(cell) if plan is None else ()
        self.strips = StripCache(limits, self.device, self.counters) if limits else None
        kind = kind_of(components)
        self.tiers = None if kind is None else Tiers(kind, cell.placement, self.config, self.device, self.dtype, self.counters, self.pinned)
        self.binder = PathBinder(weights, components, self.device, self.dtype, self.counters, self.strips, self.tiers, cell.disable, self.pinned)
        with torch.no_grad():
            self.model = build(self.config, self.binder)
        self.graphs = Graphs(self.model, self.device, self.dtype, self.counters, cell.mode, cell.disable)
        if self.tiers is not None:
            self.graphs.reason = self.graphs.reason or self.tiers.graph_reason
            self.graphs.prompt_reason = self.tiers.prompt_reason
        self.synchronise()
        self.load_s = time.perf_counter() - started

    def new_state(self, batch: int, capacity: int) -> State:
        """An empty state on the engine's device, with its captured step where there is one. Raises GapError where experts' slots are too few for so many."""
        if self.tiers is not None:
            self.tiers.refuse(batch)
            self.tiers.settle()
        with torch.no_grad():
            return self.graphs.new_state(batch, capacity)

    @torch.no_grad()
    def logits(self, ids: Tensor, state: State | None = None, last_only: bool = False) -> Tensor:
        """ids int64 [B, T] (any device) -> logits [B, T or 1, V] on the engine's device, in the compute dtype."""
        replayed = self.graphs.logits(ids, state, last_only)
        return self.plain_logits(ids, state, last_only) if replayed is None else replayed

    def plain_logits(self, ids: Tensor, state: State | None = None, last_only: bool = False) -> Tensor:
        """As `logits`, operation by operation and never as a graph: what a trace can look into."""
        self.threads.use(ids.shape[1])
        return self.model.logits(ids.to(self.device), state, last_only)

    @torch.no_grad()
    def scores(self, ids: Tensor) -> Tensor:
        """ids int64 [B, T] -> logits [B, T, V], the head's product in float32: rounded to bf16, steps between large logits would hide small divergences."""
        self.threads.use(ids.shape[1])
        return self.model.head(self.model.hidden(ids.to(self.device)).float())

    @torch.no_grad()
    def settle_threads(self) -> dict[str, Any] | None:
        """Finds the numbers of threads that are soonest, and says what was tried. None where they are fixed, and where weights are moved or built again
        while running. What runs for it is counted for no token."""
        if self.threads.fixed or self.tiers is not None or self.strips is not None:
            return None
        ids = torch.arange(TRIED_TOKENS)[None] % self.config.vocab_size
        state = self.model.new_state(1, TRIED_TOKENS + 1, self.device, self.dtype)

        def step() -> None:
            state.length = TRIED_TOKENS  # the same place is written every time
            self.model.logits(ids[:, :1], state, True)

        with self.counters.recording():
            self.threads.settle(lambda: self.model.logits(ids, None, True), step)
        return self.threads.facts()

    @property
    def vector_bytes(self) -> int:
        """Bytes of the small float32 parameters, which every forward pass reads."""
        return sum(entry["bytes"] for entry in self.binder.resident() if entry["component"] == "vectors")

    def synchronise(self) -> None:
        """Waits for the device, so that a clock read after it is honest."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def free_cached(self) -> None:
        """Gives back what the allocator keeps, after an allocation failed."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def peak_memory_bytes(self) -> int:
        """Peak bytes so far: allocated on the GPU, or resident in this process on the CPU (everything, Python included)."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return peak_resident_bytes()


def _weights(artifact: Artifact | SyntheticArtifact, layers: int, components: dict[str, ComponentPlan], pinned: PinnedMemory) -> Weights:
    """The file's; or random ones in the codecs that the path asks for, so that nothing has to be encoded, and on the host where they stay."""
    if not isinstance(artifact, SyntheticArtifact):
        return artifact.weights()
    chosen = {name: (plan.codec if plan.codec != "source" else plan.assumed, plan.options) for name, plan in components.items()}
    codecs = {name: create(codec, options) for name, (codec, options) in chosen.items() if codec}
    host = frozenset(name for name, plan in components.items() if plan.placement == "host")
    return artifact.weights(layers, codecs, pinned.device, host, pinned.or_plain)


def peak_resident_bytes() -> int:
    """The most memory this process itself has held. Not `ru_maxrss`: Linux hands that down from the parent, so it would be at least the lab's own peak."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:"))


def usable_device(name: str) -> torch.device:
    """The torch device `name`. Raises LabError for no device name, GapError (UNSUPPORTED) for one this machine does not have."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise LabError(f"device.torch_device={name!r} is no torch device; use cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise LabError(f"device.torch_device={name!r}: the local engine runs on cpu and cuda (which ROCm builds of PyTorch call their GPU)")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise GapError(Status.UNSUPPORTED, f"device {name}: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs here")
    return device


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch has a class for the GPU's, and only a sentence for the CPU's."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator: can't allocate memory" in str(error)
