"""The metadata of a `qwen4exp` GGUF from the sizes of a model: what llama.cpp reads before it builds the graph.

Why refusals: llama.cpp's graph fixes what the checkpoint's config leaves open (a sigmoid gate, renormalised routing, one width for keys and values of the
linear layers). A model that differs would load there and compute something else. Keys and rules: llama.cpp's src/models/qwen4exp.cpp.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lab.artifacts import gguf_names_qwen4exp as names
from lab.artifacts.gguf_writer import MetaValue
from lab.artifacts.weights import Weights
from lab.errors import LabError
from lab.models.fields import Fields
from lab.models.qwen4_exp.config import Qwen4ExpConfig

_MROPE_SECTION = [11, 11, 10]
"""transformers' default; for text all sections have the same position."""


def keys(c: Qwen4ExpConfig, text: dict[str, Any], weights: Weights, where: str) -> dict[str, MetaValue]:
    """The `qwen4exp.` keys. `text` are the fields of config.json, for those that the engine does not need. Raises LabError."""
    _check(c, where)
    whole = Fields(text, where).whole
    counts = {
        "block_count": c.num_layers,
        "context_length": whole("max_position_embeddings", 262144),
        "embedding_length": c.hidden_size,
        "attention.head_count": c.num_heads,
        "attention.head_count_kv": c.num_kv_heads,
        "attention.key_length": c.head_dim,
        "attention.value_length": c.head_dim,
        "rope.dimension_count": c.rotary_dim,
        "full_attention_interval": whole("full_attention_interval", 4),
        "expert_count": c.num_experts,
        "expert_used_count": c.experts_per_token,
        "expert_feed_forward_length": c.expert_width,
        "expert_shared_feed_forward_length": c.shared_width,
        "hyper_connection.count": c.hc_count,
        "hyper_connection.low_rank": c.hc_lowrank,
        "attention.indexer.head_count": c.indexer_heads,
        "attention.indexer.key_length": c.indexer_head_dim,
        "attention.indexer.top_k": c.indexer_budget,
        "ssm.conv_kernel": c.linear_conv_kernel,
        "ssm.group_count": c.linear_num_key_heads,
        "ssm.inner_size": c.value_dim,
        "ssm.state_size": c.linear_key_head_dim,
        "ssm.time_step_rank": c.linear_num_value_heads,
    }
    found: dict[str, MetaValue] = {key: np.uint32(value) for key, value in counts.items()}
    found["attention.layer_norm_rms_epsilon"] = np.float32(c.rms_norm_eps)
    found["rope.freq_base"] = np.float32(c.rope_theta)
    found["rope.dimension_sections"] = np.array(_sections(text), dtype=np.int32)
    found["attention.recurrent_layers"] = np.array([not sparse for sparse in c.is_sparse])
    found["attention.compress_ratios"] = np.array([c.indexer_block if sparse else 0 for sparse in c.is_sparse], dtype=np.int32)
    if c.ple_layer is not None:
        found |= _ple(c, text, weights)
    return {f"{names.ARCH}.{key}": value for key, value in found.items()} | {names.SEED_KEY: np.uint64(c.ngram_seed)}


def _ple(c: Qwen4ExpConfig, text: dict[str, Any], weights: Weights) -> dict[str, MetaValue]:
    counts = {
        "ple.ngram_size": c.ngram_size,
        "ple.heads_per_ngram": c.heads_per_ngram,
        "ple.conv_kernel": c.ple_conv_kernel,
        "ple.eos_token_id": c.eos_token_id,
        "embedding_length_per_layer_input": c.ple_embed_dim // c.ngram_heads,
    }
    if isinstance(image := text.get("image_token_id"), int):
        counts["ple.image_token_id"] = image
    found: dict[str, MetaValue] = {key: np.uint32(value) for key, value in counts.items()}
    found["ple.layers"] = np.array([c.ple_layer], dtype=np.int32)
    for suffix, key in names.CONSTANTS.items():
        found[key.removeprefix(".")] = weights.integers(f"layers.{c.ple_layer}.{suffix}").numpy().astype(np.uint64)
    return found


def _sections(text: dict[str, Any]) -> list[int]:
    """Four widths in frequencies: time, height, width, and one that is not used."""
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    given = rope.get("mrope_section") if isinstance(rope, dict) else None
    sections = [int(each) for each in given] if isinstance(given, list) and all(isinstance(each, int) for each in given) else _MROPE_SECTION
    return (sections + [0] * 4)[:4]


def _check(c: Qwen4ExpConfig, where: str) -> None:
    rules = (
        (c.linear_gate == "sigmoid", f"output_gate_type {c.linear_gate!r}: llama.cpp computes a sigmoid"),
        (c.norm_topk_prob, "norm_topk_prob false: llama.cpp renormalises"),
        (c.linear_key_head_dim == c.linear_value_head_dim, "linear_key_head_dim and linear_value_head_dim differ: the format has one size for both"),
        (c.ple_layer is None or c.ple_embed_dim == c.hidden_size, "ple_embed_dim is not hidden_size: llama.cpp has one size for both"),
        (c.ple_layer is None or not c.is_sparse[c.ple_layer], "ple_layer_ids names a full attention layer: llama.cpp keeps its state in a linear one"),
    )
    for holds, message in rules:
        if not holds:
            raise LabError(f"{where}: {message}; this model cannot be written as {names.ARCH}")
