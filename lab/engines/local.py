"""The lab's own engine: a checkpoint loaded along a path, ready to score, prefill and decode.

It holds one model and its counters. Device differences end here: synchronisation and peak memory have a branch for CUDA/ROCm and one for the CPU.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lab.artifacts import Checkpoint
from lab.cell import Cell, ComponentPlan
from lab.counters import Counters
from lab.engines.path_binder import PathBinder
from lab.models.qwen4_exp.config import from_file
from lab.models.qwen4_exp.model import ModelState, Qwen4Exp

Progress = Callable[[str, str], None]


class LocalEngine:
    """A loaded model. `load_s` is the wall time from opening the files to the last encoded tensor."""

    def __init__(self, cell: Cell, root: Path, plan: dict[str, ComponentPlan] | None = None) -> None:
        """Loads the cell's first `layers` layers along its path (or along `plan`). Raises LabError when the artifact does not fit."""
        torch.set_num_threads(cell.device.threads or os.cpu_count() or 1)
        self.device, self.dtype = torch.device(cell.device.torch_device), getattr(torch, cell.device.compute_dtype)
        started = time.perf_counter()
        folder = root / cell.model.artifact
        self.config = from_file(folder / "config.json").truncated(cell.layers)
        self.counters = Counters()
        components = cell.path.components if plan is None else plan
        self.binder = PathBinder(Checkpoint(folder), components, self.device, self.dtype, self.counters)
        with torch.no_grad():
            self.model = Qwen4Exp(self.config, self.binder)
        self.synchronise()
        self.load_s = time.perf_counter() - started

    def new_state(self, batch: int, capacity: int) -> ModelState:
        """An empty state on the engine's device."""
        return self.model.new_state(batch, capacity, self.device, self.dtype)

    @torch.no_grad()
    def logits(self, ids: Tensor, state: ModelState | None = None, last_only: bool = False) -> Tensor:
        """ids int64 [B, T] (any device) -> logits [B, T or 1, V] on the engine's device, in the compute dtype."""
        return self.model.logits(ids.to(self.device), state, last_only)

    def synchronise(self) -> None:
        """Waits for the device, so that a clock read after it is honest."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_memory_bytes(self) -> int:
        """Peak bytes so far: allocated on the GPU, or resident in this process on the CPU (everything, Python included)."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
