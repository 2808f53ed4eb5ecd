"""Tiny checkpoints on disk and cells for tests of engine=transformers: a short bench, bounds and reference made in this process."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lab.cell import Cell
from lab.engines import local_attempt
from lab.engines.hf.attempt import HfAttempt
from lab.measure import throughput
from lab.measure.reference import _read, make_reference
from lab.record import WorkerResult
from tests.models.tiny import tiny_model, write_tokenizer
from tests.models.transformers_tiny import CASES

BOUNDS = {"read_bytes_s": 1e12, "flops_s": 1e15}


def checkpoint(folder: Path, arch: str, layers: int = 4, **changes: Any) -> Path:
    """A folder that both engines read, and the text beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    if arch == "qwen4_exp":
        model = tiny_model(layers, **changes)
    else:
        made, config = CASES[arch]
        torch.manual_seed(0)
        model = made(config).eval()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16).float()
    tensors = {name: value if value.dtype == torch.int64 else value.to(torch.bfloat16).contiguous() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(model.config.to_dict(), default=str))
    write_tokenizer(folder, model.config.vocab_size)
    random = torch.Generator().manual_seed(1)
    words = torch.randint(6, model.config.vocab_size, (600,), generator=random).tolist()
    (folder / "text.txt").write_text(" ".join(f"w{word}" for word in words))
    return folder


def cell_for(folder: Path, arch: str, layers: int, engine: str = "transformers", **model: Any) -> Cell:
    """The cell of the reference path on the CPU."""
    components = {name: {"codec": "source"} for name in ("experts", "trunk", "ple", "head")}
    return Cell.model_validate({
        "model": {"name": "tiny", "arch": arch, "artifact": str(folder), "corpus": str(folder / "text.txt")} | model,
        "path": {"name": "reference", "title": "Reference", "components": components, "reference": True,
                 "evidence": [{"component": name, "op": "source"} for name in components]},
        "layers": layers,
        "engine": engine,
        "device": {"name": "cpu", "torch_device": "cpu", "compute_dtype": "float32", "threads": 1},
        "bench": {"name": "quick", "ppl_context": 48, "ppl_stride": 24, "ppl_windows": 5, "warmup": 1, "repeats": 5, "timeout_s": 60},
    })  # fmt: skip


def attempt(cell: Cell, root: Path, patch: pytest.MonkeyPatch) -> WorkerResult:
    """Runs the attempt in this process with prompts of 24 and 6 steps; the reference comes from the lab's own engine."""

    def reference(cell: Cell, root: Path, cache: Path, *_: Any) -> Any:
        make_reference(cell, root, cache / "reference.safetensors")
        return _read(cache / "reference.safetensors")

    patch.setattr(local_attempt, "load_reference", reference)
    patch.setattr("lab.measure.machine.machine_bounds", lambda *_: BOUNDS)
    patch.setattr(throughput, "PREFILL", 24)
    patch.setattr(throughput, "DECODE", 6)
    events = io.StringIO()
    HfAttempt(cell, root, root, events).run()
    return WorkerResult.model_validate(json.loads(events.getvalue().splitlines()[-1])["result"])
