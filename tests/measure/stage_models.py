"""A small random Qwen3 made and written by transformers, with a tokenizer and a text, and the cell that loads it."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
import transformers as hf

from lab.cell import BenchSpec, Cell, DeviceSpec, ModelSpec, PathSpec
from lab.engines.local import LocalEngine
from lab.measure.reference import SOURCE_PLAN
from lab.measure.text import Corpus

NANO = Path(__file__).parents[2] / "experiments" / "nano"
LAYERS = 2


def hf_qwen3(seed: int = 0) -> Any:
    """Random weights exact in bfloat16, logits far enough apart for a clear best id; sizes that no codec needs."""
    config = hf.Qwen3Config(
        vocab_size=2560,
        hidden_size=72,
        num_hidden_layers=LAYERS,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=20,
        intermediate_size=88,
        eos_token_id=0,
        tie_word_embeddings=False,
    )
    torch.manual_seed(seed)
    model = hf.Qwen3ForCausalLM(config).eval()
    model.set_attn_implementation("eager")
    for name, parameter in model.named_parameters():
        scale = 0.3 if parameter.ndim < 2 else 1.0 if "embed" in name else parameter.shape[-1] ** -0.5
        parameter.data = (torch.randn_like(parameter) * scale + (parameter.ndim < 2)).bfloat16().float()
    return model


def write(model: Any, folder: Path) -> None:
    """The checkpoint in bfloat16, nano's tokenizer and 40 kB of its held-out text."""
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)  # a copy: the rotary frequencies would be rounded with the weights
    shutil.copyfile(NANO / "tokenizer.json", folder / "tokenizer.json")
    (folder / "text.txt").write_text((NANO / "heldout.txt").read_text(encoding="utf-8")[:40_000], encoding="utf-8")


def cell(folder: Path, dtype: Literal["float32", "bfloat16"] = "float32") -> Cell:
    """The source-precision cell of the files in `folder` on one thread of the CPU."""
    return Cell(
        model=ModelSpec(name="tiny", arch="qwen3", artifact=str(folder), corpus=str(folder / "text.txt")),
        path=PathSpec(name="reference", title="", components=SOURCE_PLAN, reference=True),
        layers=LAYERS,
        device=DeviceSpec(name="cpu", torch_device="cpu", compute_dtype=dtype, threads=1),
        bench=BenchSpec(name="test", ppl_context=64, ppl_stride=32, ppl_windows=2, warmup=1, repeats=5, timeout_s=60),
    )


def engine(folder: Path, dtype: Literal["float32", "bfloat16"] = "float32") -> LocalEngine:
    """The lab's engine over those files."""
    return LocalEngine(cell(folder, dtype), folder)


def random_corpus(tokens: int = 900, seed: int = 5) -> Corpus:
    """A text of random ids."""
    ids = torch.randint(0, 2560, (tokens,), generator=torch.Generator().manual_seed(seed))
    return Corpus(ids, None, {"name": "random", "sha256": "0", "tokens": tokens})
