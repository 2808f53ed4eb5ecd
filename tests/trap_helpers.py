"""What the tests of known traps share: sweeps with a fake worker, invented evidence, an engine on a scripted clock, one real attempt on nano's first layer.

The evidence is invented but consistent, so that a rule fires for the one thing a test changes. The attempt on nano is the real engine without its two
child processes (bandwidth, reference), which no trap here is about.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from lab.cell import Cell
from lab.counters import Counters
from lab.engines import local_attempt
from lab.errors import GapError
from lab.models.qwen4_exp.model import ModelState
from lab.project import Project
from lab.record import Record, Status, WorkerResult
from lab.store import Store
from lab.sweep import run_cells
from tests.fake_lab import inspect
from tests.fake_lab import runner as fake_runner
from tests.runner_helpers import ROOT, cell_of

TOKENS = 100
WEIGHTS = 10


def sweep(project: Project, *words: str) -> int:
    """Run a sweep in this process, each cell with a fake worker as its child; the exit code."""
    return run_cells(project, [*words, "device=cpu"], True, None, runner=fake_runner(project), inspect=inspect)


def records(project: Project) -> list[Record]:
    """The stored records, in the order in which they were made."""
    return sorted((one.record for one in Store(project.runs).records()), key=lambda record: record.started_at)


def codecs_of(cell: Cell) -> dict[str, str]:
    """The operation that each component of the cell's path claims; source precision is bf16 here."""
    return {name: "bf16" if plan.codec == "source" else plan.codec for name, plan in cell.path.components.items()}


def counted(cell: Cell, ran: Mapping[str, str], resident: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A worker's evidence when the operations `ran` computed the components, with weights resident as the codecs `resident` (the same, unless given)."""
    layers = list(range(cell.layers))
    places: dict[str, list[int | None]] = {"experts": [*layers], "trunk": [*layers], "ple": [layers[-1]], "head": [None]}
    held = ran if resident is None else resident
    return {
        "ops": [
            {"layer": layer, "component": name, "op": ran[name], "device": "cpu", "calls": 1, "rows": TOKENS} for name, at in places.items() for layer in at
        ],
        "resident": [{"component": name, "codec": held[name], "device": "cpu", "bytes": WEIGHTS, "weights": WEIGHTS} for name in places],
        "component_layers": places,
        "layers": cell.layers,
        "source_codecs": {name: ["bf16"] for name in places},
        "weights": dict.fromkeys(places, WEIGHTS),
        "rows_per_token": [[layer, name, 1] for name, at in places.items() for layer in at],
        "tokens_forwarded": TOKENS,
        "vocab_size": 4096,
    }


class SlowPrefill:
    """An engine on a device that works in the background, by a clock of its own: a prefill takes `prefill_s`, a step `step_s`, both done when waited for."""

    vector_bytes = 0

    def __init__(self, prefill_s: float, step_s: float) -> None:
        self.counters, self.prefill_s, self.step_s = Counters(), prefill_s, step_s
        self.now = self.queued = 0.0
        self.device = torch.device("cuda")

    def new_state(self, batch: int, capacity: int) -> ModelState:
        return cast(ModelState, SimpleNamespace(read_bytes=lambda: 1.0))

    def logits(self, ids: Tensor, state: ModelState | None = None, last_only: bool = False) -> Tensor:
        self.counters.add((None, "embed", "bf16", "cpu"), ids.numel(), 1, 1)
        self.queued += self.step_s if ids.shape[1] == 1 else self.prefill_s
        return torch.zeros(len(ids), 1, 2)

    def synchronise(self) -> None:
        self.now, self.queued = self.now + self.queued, 0.0


def nano_attempt(runs: Path, *words: str) -> WorkerResult:
    """One attempt at nano's first layer in source precision, in this process, with the shortest bench; `words` are further overrides."""
    bench = ("bench.ppl_windows=1", "bench.ppl_context=32", "bench.ppl_stride=16", "bench.warmup=1", "bench.repeats=5", "device.threads=1")
    cell = cell_of(Project(ROOT, runs), "path=reference", "layers=1", *bench, *words)
    events = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lab.measure.machine.machine_bounds", _left_out)
        patch.setattr(local_attempt, "load_reference", _left_out)
        local_attempt.LocalAttempt(cell, ROOT, runs / "cache", events).run()
    last = json.loads(events.getvalue().splitlines()[-1])
    return WorkerResult.model_validate_json(json.dumps(last["result"]))


def _left_out(*_: object) -> None:
    raise GapError(Status.NOT_RUN, "left out of this test")
