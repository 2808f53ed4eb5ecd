"""Sizes of a `qwen4_exp` model, asked from its own forward code: the inventory binder lists the tensors, states on the meta device their bytes.

So the ledger cannot drift from what the engine asks for. Imports torch, and therefore runs in the ledger's own process only.
"""

from __future__ import annotations

from typing import Any

import torch

from lab.capacity.sizes import Kind, ModelSizes, Weight
from lab.models import inventory
from lab.models.qwen4_exp.config import from_dict
from lab.models.qwen4_exp.model import ModelState


def qwen4_exp_sizes(data: dict[str, Any], where: str, layers: int, dtype: torch.dtype) -> ModelSizes:
    """Sizes from a parsed config.json, for the first `layers` layers and states in `dtype`. Raises LabError naming the field."""
    config = from_dict(data, where).truncated(layers)
    found = inventory(config)
    weights: list[Weight] = []

    def add(name: str, component: str, kind: Kind, shape: tuple[int, ...], of: str = "") -> None:
        weights.append(Weight(name, component, kind, shape, found.layer_of[of or name]))

    for name, (shape, component) in found.linears.items():
        add(name, component, "matrix", shape)
    for prefix, (count, width, hidden) in found.expert_stacks.items():
        add(f"{prefix}.gate_up", "experts", "experts", (count, 2 * width, hidden), prefix)
        add(f"{prefix}.down", "experts", "experts", (count, hidden, width), prefix)
    for name, shape in found.tables.items():
        add(name, "ple", "table", shape)
    for name, shape in found.embeddings.items():
        add(name, "embed", "embedding", shape)
    for name, sizes in found.vectors.items():
        add(name, "vectors", "vector", sizes)
    return ModelSizes(
        weights=tuple(weights),
        layers=layers,
        vocab_size=config.vocab_size,
        widest=max(config.streams_width, 2 * config.key_dim + config.value_dim, 2 * config.num_heads * config.head_dim),
        state_bytes=lambda batch, tokens: ModelState(config, batch, tokens, torch.device("meta"), dtype).nbytes(),
        experts_per_token=config.experts_per_token,
        table_rows=config.ngram_heads,
        released=_released(data),
    )


def _released(data: dict[str, Any]) -> dict[str, tuple[str, dict[str, str]]]:
    """What `source` means beyond 16 bits: the FP8 release says so in its config.json, the experts in blocks, the table with one scale."""
    text = data.get("text_config", data)
    quantised = data.get("quantization_config") or text.get("quantization_config") or {}
    found: dict[str, tuple[str, dict[str, str]]] = {}
    if isinstance(quantised, dict) and quantised.get("quant_method") == "fp8":
        found["experts"] = ("e4m3", {"scale": "block128"})
    if text.get("ple_embedding_dtype") == "float8_e4m3fn":
        found["ple"] = ("e4m3", {"scale": "global"})
    return found
