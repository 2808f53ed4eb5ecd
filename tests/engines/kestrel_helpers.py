"""A project with a small real Qwen3 model, dense or a mixture, as safetensors and as VQF files: for tests of `path=kestrel_vqf` from command line to record."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from lab.artifacts.vqf_convert import run
from lab.project import Project
from tests.artifacts.test_vqf_writer import arguments
from tests.runner_helpers import ROOT

_SIZES: dict[str, Any] = {
    **{"vocab_size": 2560, "hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32},
    **{"intermediate_size": 160, "eos_token_id": 0, "bos_token_id": 0, "rope_parameters": {"rope_theta": 5e5}, "tie_word_embeddings": False},
}
_MIXED: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


def small_model(mixture: bool, seed: int) -> Any:
    """A random model of nano's vocabulary, three layers deep."""
    torch.manual_seed(seed)
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**_SIZES, **_MIXED)) if mixture else hf.Qwen3ForCausalLM(hf.Qwen3Config(**_SIZES))


def kestrel_project(folder: Path, mixture: bool = False, seed: int = 11, **options: Any) -> tuple[Project, Path]:
    """(a project, its models/m.vqf); `options` of the conversion, q4 by default. models/hf is the same model before, and its sizes are those that the
    configuration names for qwen3_2b (qwen3_30b_a3b)."""
    shutil.copytree(ROOT / "conf", folder / "conf")
    (folder / "experiments").mkdir()
    (folder / "experiments" / "nano").symlink_to(ROOT / "experiments" / "nano")
    source = folder / "models" / "hf"
    small_model(mixture, seed).to(torch.bfloat16).save_pretrained(source)
    shutil.copy(ROOT / "experiments" / "nano" / "tokenizer.json", source / "tokenizer.json")
    shutil.copy(source / "config.json", folder / "conf" / "geometry" / f"{'qwen3_30b_a3b' if mixture else 'qwen3_2b'}.json")
    file = folder / "models" / "m.vqf"
    run(source, file, arguments(**{"wmode": "q4", **options}))
    return Project(root=folder, runs=folder / "runs"), file
