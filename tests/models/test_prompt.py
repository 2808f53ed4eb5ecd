"""The fused pass over prompts against the plain forward code on random models: logits, state and counts, a prompt continued past the indexer's budget."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from lab.cell import ComponentPlan
from lab.engines.graphs import Graphs
from lab.engines.path_binder import PathBinder
from lab.errors import LabError
from lab.models.qwen4_exp.delta import DeltaState
from lab.models.qwen4_exp.prompt import PromptPass
from lab.models.qwen4_exp.sparse_attention import AttentionState
from tests.models.test_step import DEVICE, INT8, SIZES, KernelBinder, model_of, relative
from tests.models.tiny import text_ids, tiny_model, write_checkpoint


@pytest.mark.parametrize("plan", [{}, INT8], ids=["plain", "kernels"])
@torch.no_grad()
def test_the_pass_equals_the_forward_code(tmp_path: Path, plan: dict[str, ComponentPlan]) -> None:
    # The n-gram module before the first layer, where streams begin, or later, where an output is pending.
    layers, changes = (2, {"ple_layer_ids": [1], "num_experts": 4, "num_experts_per_tok": 2}) if plan else (3, {"indexer_budget": 8})
    write_checkpoint(tmp_path / "m", tiny_model(layers, **SIZES, **changes, full_attention_interval=layers), "fused")
    plain, counted = model_of(tmp_path / "m", plan, torch.float32, PathBinder)  # the same weights in float32
    fast, counters = model_of(tmp_path / "m", plan, torch.float16, KernelBinder)
    fast.prompt = PromptPass(fast, DEVICE, torch.float16)
    # In the interpreter every program takes a tenth of a second: one sequence, and with kernels one prompt, the shortest that is grouped by expert.
    slow = DEVICE.type == "cpu"
    batch, cuts = 1 if slow else 2, (0, 9) if plan and slow else (0, 9, 18)
    ids = text_ids(batch, cuts[-1]).to(DEVICE)
    states = [model.new_state(batch, cuts[-1] + 3, DEVICE, kind) for model, kind in ((plain, torch.float32), (fast, torch.float16))]
    for start, end in pairwise(cuts):
        want, got = (model.logits(ids[:, start:end], state) for model, state in zip((plain, fast), states, strict=True))
        assert relative(got, want) < 2e-2, f"tokens {start} to {end}"
    assert states[1].length == cuts[-1]
    for own, its in zip(states[1].layers, states[0].layers, strict=True):
        if isinstance(own, DeltaState) and isinstance(its, DeltaState):
            assert relative(own.memory, its.memory) < 2e-2 and relative(own.conv, its.conv) < 2e-2
        elif isinstance(own, AttentionState) and isinstance(its, AttentionState):
            assert all(relative(getattr(own, name)[:, : cuts[-1]], getattr(its, name)[:, : cuts[-1]]) < 2e-2 for name in ("keys", "values", "index_keys"))
    assert [(t["layer"], t["component"], t["op"], t["rows"]) for t in counters.as_list()] == [
        (t["layer"], t["component"], t["op"], t["rows"]) for t in counted.as_list()
    ], "the pass must count what the forward code counts"
    assert fast.prompt.evidence()["delta_rule"].startswith("fla-core" if DEVICE.type == "cuda" else "plain scan")


def test_a_model_without_a_pass_says_why(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", tiny_model(2, **SIZES), "fused")
    model, counters = model_of(tmp_path / "m", {}, torch.float32, PathBinder)
    with pytest.raises(LabError, match="16-bit activations, not float32"):
        PromptPass(model, DEVICE, torch.float32)
    told = Graphs(model, torch.device("cpu"), torch.float16, counters, "eager").evidence()["prompt_pass"]
    assert told == {"plain": "kernels need a GPU, not cpu"} and model.prompt is None
