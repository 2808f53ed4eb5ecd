"""The decode step against the plain forward code on random models: same logits token by token, with kernels and without, several sequences, past the budget."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from lab.artifacts import Checkpoint, HfWeights
from lab.cell import ComponentPlan
from lab.counters import Counters
from lab.engines.path_binder import PathBinder
from lab.errors import LabError
from lab.models.qwen4_exp.chain import ChainStep
from lab.models.qwen4_exp.config import from_file
from lab.models.qwen4_exp.model import Qwen4Exp
from lab.models.qwen4_exp.step import DecodeStep
from tests.models.tiny import text_ids, tiny_model, write_checkpoint

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Many indexer heads: with few, relu makes equal scores, which the plain code on a CPU breaks as torch.topk does and the step by position.
SIZES: dict[str, Any] = {"indexer_n_heads": 8, "hidden_size": 64, "hc_lowrank": 32, "shared_expert_intermediate_size": 64, "ple_embed_dim": 64}
INT8 = {name: ComponentPlan(codec="int8_g128") for name in ("trunk", "head")} | {"experts": ComponentPlan(codec="q2_g32")}


class KernelBinder(PathBinder):
    """Takes kernels wherever they exist, on a CPU too, where Triton interprets them."""

    def _fast(self, swap: Any, op: Any) -> Any:
        return swap(op, self.dtype)[0]


def model_of(folder: Path, plan: dict[str, ComponentPlan], dtype: torch.dtype, binder: type[PathBinder]) -> tuple[Qwen4Exp, Counters]:
    counters = Counters()
    return Qwen4Exp(from_file(folder / "config.json"), binder(HfWeights(Checkpoint(folder)), plan, DEVICE, dtype, counters)), counters


@pytest.mark.parametrize(
    ("plan", "dtype", "kinds"),
    [({}, torch.float32, (DecodeStep,)), ({}, torch.float16, (DecodeStep,)), (INT8, torch.float16, (DecodeStep, ChainStep))],
    ids=["plain", "filed", "kernels"],
)
@torch.no_grad()
def test_steps_equal_the_forward_code(tmp_path: Path, plan: dict[str, ComponentPlan], dtype: torch.dtype, kinds: tuple[type[Any], ...]) -> None:
    # Two layers, n-grams before the first and attention in the second, hold every part; the interpreter takes many seconds for each.
    model = tiny_model(4, **SIZES) if dtype == torch.float32 else tiny_model(2, full_attention_interval=2, ple_layer_ids=[1], **SIZES)
    write_checkpoint(tmp_path / "m", model, "fused")
    plain, counted = model_of(tmp_path / "m", plan, torch.float32, PathBinder)  # the same weights in float32
    fast, counters = model_of(tmp_path / "m", plan, dtype, KernelBinder)
    # The interpreter takes many seconds for a step of kernels, so there it is one token, after a prompt of the plain model (test_prompt has the kernels').
    quick = dtype == torch.float32 or DEVICE.type == "cuda"
    batch, prompt, capacity = (2, 19, 32) if quick else (1, 17, 32)
    tokens = prompt + (6 if quick else 1)
    ids = text_ids(batch, tokens).to(DEVICE)
    sides = ((plain, torch.float32), (fast, dtype))
    with nullcontext() if quick else counted.recording():  # counted aside where only this side has a prompt
        prompts = [plain.new_state(batch, prompt, DEVICE, torch.float32)] * 2
        first = plain.logits(ids[:, :prompt], prompts[0])
    if quick:
        prompts = [prompts[0], fast.new_state(batch, prompt, DEVICE, dtype)]
        assert relative(fast.logits(ids[:, :prompt], prompts[1]), first) < (1e-5 if dtype == torch.float32 else 2e-2)
    for step in [kind(fast, DEVICE, dtype) for kind in kinds]:  # both from one prompt, and the second after it joined the first's weights
        states = [side.new_state(batch, capacity, DEVICE, kind) for side, kind in sides]
        for state, after_prompt in zip(states, prompts, strict=True):
            state.take(after_prompt)
        for at in range(prompt, tokens):  # past the indexer's budget of 16 tokens
            want = plain.logits(ids[:, at : at + 1], states[0])
            got = step(ids[:, at : at + 1], states[1], torch.tensor([at], dtype=torch.int32, device=DEVICE))
            assert relative(got, want) < (1e-5 if dtype == torch.float32 else 5e-2), f"{type(step).__name__}, token {at}"
    assert [(t["layer"], t["component"], t["op"], t["rows"]) for t in counters.as_list()] == [
        (t["layer"], t["component"], t["op"], t["rows"]) for t in counted.as_list()
    ], "a step must count what the forward code counts"


@torch.no_grad()
def test_a_chain_refuses_what_it_has_no_kernels_for(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", tiny_model(2, full_attention_interval=2, ple_layer_ids=[1], **SIZES), "fused")
    model, _ = model_of(tmp_path / "m", {}, torch.float16, PathBinder)
    with pytest.raises(LabError, match="float32, not 16-bit"):
        ChainStep(model, DEVICE, torch.float32)
    with pytest.raises(LabError, match="a mixer is PackedLinear, not int8"):
        ChainStep(model, DEVICE, torch.float16)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())
