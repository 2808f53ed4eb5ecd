"""Cells and attempts for tests of the llama.cpp engine: a tiny GGUF file, a text of bytes, an attempt run here with the fake or the real module."""

from __future__ import annotations

import io
import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from lab.cell import Cell
from lab.engines.llama_cpp.attempt import LlamaCppAttempt
from lab.record import WorkerResult
from tests.artifacts.gguf_models import LAYERS, hf_model, model_of
from tests.engines.fake_llama_cpp import FakeLlama

COMPONENT = {"codec": "source"}
BOUNDS = {"read_bytes_s": 1e10, "flops_s": 1e11, "device": "made up"}
ARCHES = {"llama": "llama", "qwen3": "qwen3", "qwen3moe": "qwen3_moe"}


def text(characters: int = 2600) -> str:
    """Words in which the small vocabulary has nothing to merge: as many tokens as characters."""
    letters = random.Random(11)
    return " ".join("".join(letters.choices("abcdfgijklm", k=3)) for _ in range(characters // 4))


def write_model(root: Path, arch: str = "llama", kind: Kind = Kind.F32, lies: dict[str, Any] | None = None) -> Path:
    """A random model as `root`/model.gguf."""
    model = model_of(hf_model(arch), arch)
    model.kind_of, model.lies = (lambda name: kind), lies or {}
    return model.write(root / "model.gguf")


def cell_for(device: str = "cpu", layers: int = LAYERS, arch: str = "llama", half: int = 0, threads: int = 1, **bench: Any) -> Cell:
    """A cell of `root`/model.gguf and `root`/text.txt."""
    sizes = {"name": "quick", "ppl_context": 64, "ppl_stride": 32, "ppl_windows": 6, "warmup": 1, "repeats": 5, "timeout_s": 60}
    return Cell.model_validate({
        "model": {"name": "gguf", "arch": arch, "artifact": "model.gguf", "corpus": "text.txt"},
        "path": {"name": "gguf_plugin", "title": "GGUF", "components": {"trunk": COMPONENT, "head": COMPONENT}, "format": "gguf"},
        "layers": layers,
        "engine": "llama_cpp",
        "device": {"name": device, "torch_device": device, "compute_dtype": "float32", "threads": threads},
        "bench": sizes | {"llama_half_chunks": half, "llama_half_context": 48} | bench,
    })  # fmt: skip


def attempt(cell: Cell, root: Path) -> WorkerResult:
    """Runs the attempt in this process. The text is made where `root` holds none."""
    if not (root / "text.txt").exists():
        (root / "text.txt").write_text(text())
    events = io.StringIO()
    LlamaCppAttempt(cell, root, root, events).run()
    last = json.loads(events.getvalue().splitlines()[-1])
    assert last["event"] == "result"
    return WorkerResult.model_validate_json(json.dumps(last["result"]))


def install(monkeypatch: pytest.MonkeyPatch, fake: FakeLlama) -> None:
    """Puts the fake in the module's place, and bounds in that of measuring the machine."""
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr("lab.measure.machine.machine_bounds", lambda *_: dict(BOUNDS))
