"""The decode step of plain transformers against their forward code: same logits token by token, with kernels and in plain torch, several sequences at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

pytest.importorskip("triton", reason="triton is not installed")

from lab.artifacts import Checkpoint, HfWeights
from lab.cell import ComponentPlan
from lab.counters import Counters
from lab.engines.graphs import Graphs
from lab.engines.path_binder import PathBinder
from lab.kernels.trunk import Int8Linear
from lab.models.transformer.config import from_dict
from lab.models.transformer.model import Transformer
from lab.models.transformer.step import KERNELS, PLAIN, Between, TransformerStep
from lab.ops_gpu_blocks import JoinedLinear
from tests.models.test_step import KernelBinder, relative
from tests.models.transformers_tiny import one_thread, saved_config, text_ids, tiny  # noqa: F401

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="too slow in the interpreter")
PACKED = {name: ComponentPlan(codec=codec) for name, codec in (("trunk", "vqf:Q4_0"), ("head", "vqf:Q8_0"), ("experts", "vqf:Q4_0"))}
INT8 = {name: ComponentPlan(codec="int8_g128") for name in ("trunk", "head")}


def aligned(mixture: bool) -> hf.PreTrainedModel:
    """A random model whose sizes every kernel takes, as small as can be: the interpreter needs a tenth of a second for eight rows of a matrix."""
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"vocab_size": 24, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    sizes |= {"intermediate_size": 64, "eos_token_id": 5, "tie_word_embeddings": False}
    if mixture:
        return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True))
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**sizes))


def bound(folder: Path, plan: dict[str, ComponentPlan], dtype: torch.dtype, binder: type[PathBinder]) -> tuple[Transformer, Counters]:
    counters = Counters()
    with torch.no_grad():
        weights = HfWeights(Checkpoint(folder))
        return Transformer(from_dict(saved_config(folder), "config.json"), binder(weights, plan, DEVICE, dtype, counters)), counters


@torch.no_grad()
def compared(
    plain: Transformer, fast: Transformer, dtype: torch.dtype, batch: int, prompt: int, steps: int, tolerance: float, between: Between | None = None
) -> TransformerStep:
    """Feeds both the same text, `fast` through its step; what lies behind the position is poison."""
    ids = text_ids(batch, prompt + steps).to(DEVICE) % plain.config.vocab_size
    states = [model.new_state(batch, 70, DEVICE, kind) for model, kind in ((plain, torch.float32), (fast, dtype))]
    for model, state in zip((plain, fast), states, strict=True):
        state.cache.fill_(torch.nan)
        if prompt:
            model.logits(ids[:, :prompt], state)
    step = TransformerStep(fast, DEVICE, dtype, between)
    for at in range(prompt, prompt + steps):
        want = plain.logits(ids[:, at : at + 1], states[0])
        got = step(ids[:, at : at + 1], states[1], torch.tensor([at], dtype=torch.int32, device=DEVICE))
        assert got.shape == want.shape and got.dtype == dtype
        assert relative(got, want) < tolerance, f"token {at}"
    filled = prompt + steps
    assert relative(states[1].cache[..., :filled, :], states[0].cache[..., :filled, :]) < tolerance
    assert bool(states[1].cache[..., filled:, :].isnan().all()), "written behind the position"
    return step


@pytest.mark.parametrize("case", ["llama_llama3_one_key_head", "qwen3", "qwen3_moe_mixed"])
@pytest.mark.parametrize(("batch", "prompt"), [(1, 0), (3, 9)])
def test_plain_steps_equal_the_forward_code(tmp_path: Path, case: str, batch: int, prompt: int) -> None:
    """As the step is where there is no GPU, or heads have a size that no kernel takes."""
    tiny(case, seed=4).save_pretrained(tmp_path)
    model = bound(tmp_path, {}, torch.float32, PathBinder)[0]
    compared(model, model, torch.float32, batch, prompt, 6, 1e-5, PLAIN)


@pytest.mark.parametrize(
    ("plan", "mixture", "batch"),
    [(PACKED, False, 1), *(pytest.param(*case, marks=needs_gpu) for case in ((PACKED, False, 8), (PACKED, True, 4), (INT8, False, 1), ({}, False, 2)))],
    ids=["blocks", "blocks of 8 sequences", "experts", "int8", "bf16"],
)
def test_steps_of_kernels_equal_the_forward_code(tmp_path: Path, plan: dict[str, ComponentPlan], mixture: bool, batch: int) -> None:
    aligned(mixture).to(torch.bfloat16).save_pretrained(tmp_path)
    plans = {name: part for name, part in plan.items() if mixture or name != "experts"}
    plain, counted = bound(tmp_path, plans, torch.float32, PathBinder)
    fast, counters = bound(tmp_path, plans, torch.float16, KernelBinder)
    step = compared(plain, fast, torch.float16, batch, 0, 2, 2e-2)
    assert step.between is KERNELS
    project = step.layers[0].attention.project
    if plan:
        assert isinstance(project.whole if plan is INT8 else project.blocks, Int8Linear | JoinedLinear), "queries, keys and values are one launch"
    assert [(t["layer"], t["component"], t["op"], t["rows"]) for t in counters.as_list()] == [
        (t["layer"], t["component"], t["op"], t["rows"]) for t in counted.as_list()
    ], "a step must count what the forward code counts"


@needs_gpu
@pytest.mark.parametrize("batch", [1, 2, 4, 8])
@torch.no_grad()
def test_captured_steps_and_prompts_equal_the_forward_code(tmp_path: Path, batch: int) -> None:
    aligned(mixture=False).to(torch.bfloat16).save_pretrained(tmp_path)
    plans = {name: part for name, part in PACKED.items() if name != "experts"}
    model, counters = bound(tmp_path, plans, torch.bfloat16, KernelBinder)
    graphs = Graphs(model, DEVICE, torch.bfloat16, counters, "auto")
    assert graphs.reason is None
    ids = text_ids(batch, 30).to(DEVICE) % 24
    for run in range(3):  # as it is, captured, and replayed on a state that is used again
        plain, state = model.new_state(batch, 40, DEVICE, torch.bfloat16), graphs.new_state(batch, 40)
        first = graphs.logits(ids[:, :20], state, True)
        assert first is not None and relative(first, model.logits(ids[:, :20], plain, True)) < 2e-2
        for at in range(20, 30):
            got = graphs.logits(ids[:, at : at + 1], state, True)
            assert got is not None and relative(got, model.logits(ids[:, at : at + 1], plain)) < 2e-2, f"run {run}, token {at}"
        del state
    assert graphs.evidence()["prompts"] == [[batch, 20]] and len(graphs._held[batch, 40]) == 1
