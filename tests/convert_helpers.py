"""A small random checkpoint that can be written as GGUF, and every tensor of a model read out as float32 by Hugging Face name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.artifacts.weights import Stored, Weights
from lab.models import inventory
from lab.models.qwen4_exp.config import Qwen4ExpConfig
from tests.models.tiny import tiny_model, write_checkpoint

NANO = Path(__file__).resolve().parent.parent / "experiments" / "nano"


def small_checkpoint(folder: Path, layers: int = 4, layout: str = "fused", **changes: Any) -> Path:
    """A random model with nano's tokenizer; three key heads and six value heads, so that no order is its own inverse."""
    sizes = {"vocab_size": 2560, "ple_embed_dim": 64, "eos_token_id": 0, "linear_num_key_heads": 3, "pad_token_id": None, "bos_token_id": 0}
    write_checkpoint(folder, tiny_model(layers, **{**sizes, **changes}), layout)
    shutil.copy(NANO / "tokenizer.json", folder / "tokenizer.json")
    return folder


def dense(stored: Stored) -> Tensor:
    """A block as float32."""
    return stored.codec.decode(stored.parts, stored.shape[-1])


def matrices(config: Qwen4ExpConfig, weights: Weights) -> dict[str, Tensor]:
    """Every matrix, expert stack and table in the model's own order of rows and columns."""
    wanted, found = inventory(config), dict[str, Tensor]()
    for name in (*wanted.linears, *wanted.embeddings):
        rows = torch.cat([dense(block) for block in weights.matrix(name)])
        order = weights.column_order(name)
        if order is not None:  # column c of the file multiplies input order[c]
            moved = torch.full_like(rows, torch.nan)
            moved[:, order] = rows
            rows = moved
        found[name] = rows
    for prefix, (count, _, _) in wanted.expert_stacks.items():
        gate_up, down = weights.experts(prefix, count)
        found[f"{prefix}.gate_up"] = torch.cat([dense(block) for block in gate_up], dim=1)
        found[f"{prefix}.down"] = dense(down[0])
    for prefix in wanted.tables:
        found[prefix] = torch.cat([dense(weights.table_shard(prefix, i)) for i in range(weights.table_shards(prefix))])
    return found
