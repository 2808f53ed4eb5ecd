"""The shipped qwen3_small: transformers reads the same files and gives the same logits, whole and step by step, and predicts the held-out text far better
than chance."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers as hf

from lab.artifacts import load_tokenizer
from lab.cell import BenchSpec, Cell, DeviceSpec, ModelSpec, PathSpec
from lab.engines.local import LocalEngine
from lab.measure.reference import SOURCE_PLAN
from lab.measure.text import load_corpus

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "experiments" / "qwen3_small"


def _engine() -> LocalEngine:
    cell = Cell(
        model=ModelSpec(name="qwen3_small", arch="qwen3", artifact="experiments/qwen3_small", corpus="experiments/nano/heldout.txt"),
        path=PathSpec(name="reference", title="", components=SOURCE_PLAN, reference=True),
        layers=6,
        device=DeviceSpec(name="cpu", torch_device="cpu", compute_dtype="float32", threads=1),
        bench=BenchSpec(name="test", ppl_context=64, ppl_stride=32, ppl_windows=2, warmup=1, repeats=5, timeout_s=60),
    )
    return LocalEngine(cell, ROOT)


@torch.no_grad()
def test_logits_are_those_of_transformers() -> None:
    ids = load_corpus(load_tokenizer(FOLDER), ROOT / "experiments/nano/heldout.txt").prompts(1, 300, offset=11)
    expected = hf.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32, attn_implementation="eager").eval()(ids).logits
    engine = _engine()
    torch.testing.assert_close(engine.logits(ids), expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    state = engine.new_state(1, 300)
    steps = torch.cat([engine.logits(ids[:, :250], state), *[engine.logits(ids[:, t : t + 1], state) for t in range(250, 300)]], 1)
    torch.testing.assert_close(steps, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
    loss = float(torch.nn.functional.cross_entropy(expected[0, :-1], ids[0, 1:]))
    assert loss < 0.6 * math.log(2560)


@pytest.mark.parametrize("size", ["vocab_size", "hidden_size", "intermediate_size"])
def test_its_sizes_fit_every_layout_of_a_vqf_file(size: str) -> None:
    assert hf.AutoConfig.from_pretrained(FOLDER).to_dict()[size] % 256 == 0
