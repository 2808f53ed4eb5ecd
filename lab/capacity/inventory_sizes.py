"""Sizes of a model asked from its own forward code: the inventory binder lists the tensors, states on the meta device their bytes.

So the ledger cannot drift from what the engine asks for; and where the weights lie in one file of known types, from what that file holds. Imports torch, and
therefore runs in the ledger's own process only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from lab.artifacts import Stored as InFile
from lab.artifacts import Weights, open_artifact
from lab.capacity.sizes import Kind, ModelSizes, Weight
from lab.capacity.storage import Encoding
from lab.models import ModelConfig, build
from lab.models.inventory import InventoryBinder
from lab.models.qwen4_exp.config import Qwen4ExpConfig
from lab.models.transformer.config import TransformerConfig


@dataclass(frozen=True)
class FileEncoding:
    """The types a file has for one tensor, and their bytes."""

    name: str
    shape: tuple[int, ...]
    size: int

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a part of the tensor: its share of all rows."""
        return self.size * prod(shape) // prod(self.shape)


def inventory_sizes(config: ModelConfig, dtype: torch.dtype, released: dict[str, tuple[str, dict[str, str]]] | None = None) -> ModelSizes:
    """Sizes of a model of this configuration, states in `dtype`; `released` as in `ModelSizes`."""
    found = InventoryBinder()
    model = build(config, found)
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
        layers=config.num_layers,
        vocab_size=config.vocab_size,
        widest=_widest(config),
        state_bytes=lambda batch, tokens: model.new_state(batch, tokens, torch.device("meta"), dtype).nbytes(),
        experts_per_token=config.experts_per_token,
        table_rows=config.ngram_heads,
        released=released or {},
    )


def file_sizes(file: Path, arch: str, layers: int, dtype: torch.dtype) -> tuple[ModelSizes, dict[str, Encoding]]:
    """Sizes of the model in one file, cut to its first layers, and by the name of a weight how the file stores it. Raises LabError."""
    artifact = open_artifact(file, arch)
    sizes = inventory_sizes(artifact.config().truncated(layers), dtype)
    weights = artifact.weights()
    listed = [part for one in sizes.weights for part in _as_filed(weights, one)]
    return replace(sizes, weights=tuple(one for one, _ in listed)), {one.name: encoding for one, encoding in listed if encoding is not None}


def _as_filed(weights: Weights, one: Weight) -> list[tuple[Weight, Encoding | None]]:
    """The weight with the file's encoding; gate and up as two where the file has them apart."""
    if one.kind == "vector":
        return [(one, None)]
    blocks = _blocks(weights, one)
    if one.kind != "experts" or len(blocks) == 1:
        return [(one, _encoding(blocks, one))]
    prefix, halves = one.name.rpartition(".")[0], zip(("gate", "up"), blocks, strict=True)
    parts = [(replace(one, name=f"{prefix}.{which}", shape=tuple(block.shape)), block) for which, block in halves]
    return [(part, _encoding([block], part)) for part, block in parts]


def _encoding(blocks: Sequence[InFile], one: Weight) -> Encoding:
    names = dict.fromkeys(block.codec.name for block in blocks)
    return FileEncoding(" + ".join(names), one.shape, sum(block.codec.nbytes(block.shape) for block in blocks))


def _blocks(weights: Weights, one: Weight) -> Sequence[InFile]:
    if one.kind == "experts":
        prefix, _, which = one.name.rpartition(".")
        return weights.experts(prefix, one.shape[0])[0 if which == "gate_up" else 1]
    if one.kind == "table":
        return [weights.table_shard(one.name, index) for index in range(weights.table_shards(one.name))]
    return weights.matrix(one.name)


def _widest(config: ModelConfig) -> int:
    """The widest row of activations."""
    if isinstance(config, Qwen4ExpConfig):
        return max(config.streams_width, 2 * config.key_dim + config.value_dim, 2 * config.num_heads * config.head_dim)
    assert isinstance(config, TransformerConfig)
    return max(config.hidden_size, config.num_heads * config.head_dim, config.mlp_width, config.expert_width)
