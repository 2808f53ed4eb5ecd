"""The sizes of a `qwen4_exp` checkpoint, read from its `config.json` and checked.

Nothing in the engine is tied to one size. Field names are those of Hugging Face's `Qwen4ExpTextConfig` (transformers 5.24.0), whose class
defaults are used only where the released files leave a field out (`norm_topk_prob`, `seed`). What the engine cannot compute exactly as
defined (another rotary type, an unknown activation) is refused by name rather than approximated.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.errors import LabError

LINEAR = "linear_attention"
SPARSE_ALIASES = ("full_attention", "indexed_attention", "qwen_sparse_attention")
MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text", "qwen3_8_flash_next", "qwen3_8_flash_next_text")


@dataclass(frozen=True)
class Qwen4ExpConfig:
    """Sizes and constants of the text model. `ple_layer` is 0-based (the file's `ple_layer_ids` counts from 1), None without PLE."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    is_sparse: tuple[bool, ...]
    rms_norm_eps: float
    tie_word_embeddings: bool
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel: int
    linear_gate: str
    num_experts: int
    experts_per_token: int
    expert_width: int
    shared_width: int
    norm_topk_prob: bool
    hc_count: int
    hc_lowrank: int
    indexer_heads: int
    indexer_head_dim: int
    indexer_budget: int
    indexer_block: int
    ple_layer: int | None
    ple_embed_dim: int
    ple_conv_kernel: int
    ngram_size: int
    heads_per_ngram: int
    ngram_vocab_base: int
    ngram_vocab_divisor: int
    ngram_shards: int
    ngram_seed: int
    eos_token_id: int

    @property
    def streams_width(self) -> int:
        """Width of the stacked residual streams, hc_count * hidden_size."""
        return self.hc_count * self.hidden_size

    @property
    def key_dim(self) -> int:
        """Gated DeltaNet: width of all key heads."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Gated DeltaNet: width of all value heads."""
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def ngram_heads(self) -> int:
        """Hashed heads of the n-gram table: heads_per_ngram for each order 2..ngram_size."""
        return (self.ngram_size - 1) * self.heads_per_ngram

    def truncated(self, layers: int) -> Qwen4ExpConfig:
        """The same model with only its first `layers` layers. Raises LabError outside 1..num_layers."""
        if not 1 <= layers <= self.num_layers:
            raise LabError(f"layers={layers}: the model has {self.num_layers} layers; choose 1 to {self.num_layers}")
        ple = self.ple_layer if self.ple_layer is not None and self.ple_layer < layers else None
        return replace(self, num_layers=layers, is_sparse=self.is_sparse[:layers], ple_layer=ple)


def from_file(path: Path) -> Qwen4ExpConfig:
    """Reads `config.json`. Raises LabError naming the file and the field that is missing or not supported."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LabError(f"{path}: no such file; an artifact folder needs the checkpoint's config.json") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise LabError(f"{path}: not valid JSON ({error})") from None
    return from_dict(data, str(path))


def from_dict(data: dict[str, Any], where: str = "config") -> Qwen4ExpConfig:
    """Sizes from a parsed `config.json` (text model alone, or with a `text_config`). Raises LabError naming the field."""
    if data.get("model_type") not in MODEL_TYPES:
        raise LabError(f"{where}: model_type {data.get('model_type')!r} is not one of {', '.join(MODEL_TYPES)}")
    text = {**{k: v for k, v in data.items() if k in ("eos_token_id", "tie_word_embeddings")}, **data.get("text_config", data)}

    def need(key: str) -> Any:
        if text.get(key) is None:
            raise LabError(f"{where}: field {key} is missing")
        return text[key]

    layers = int(need("num_hidden_layers"))
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if (rope_type := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise LabError(f"{where}: rope_type {rope_type!r} is not supported; only 'default'")
    if text.get("attention_bias"):
        raise LabError(f"{where}: attention_bias true is not supported")
    if (activation := text.get("hidden_act", "silu")) != "silu":
        raise LabError(f"{where}: hidden_act {activation!r} is not supported; only 'silu'")
    gate = text.get("output_gate_type") or activation
    if gate not in ("sigmoid", "silu"):
        raise LabError(f"{where}: output_gate_type {gate!r} is not one of sigmoid, silu")
    head_dim = int(need("head_dim"))
    ple_ids = list(text.get("ple_layer_ids") or [])
    if len(ple_ids) > 1:
        raise LabError(f"{where}: ple_layer_ids {ple_ids}: more than one PLE layer is not supported")
    eos = need("eos_token_id")
    config = Qwen4ExpConfig(
        vocab_size=int(need("vocab_size")),
        hidden_size=int(need("hidden_size")),
        num_layers=layers,
        is_sparse=_sparse_layers(text, layers, where),
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(text.get("tie_word_embeddings", False)),
        num_heads=int(need("num_attention_heads")),
        num_kv_heads=int(need("num_key_value_heads")),
        head_dim=head_dim,
        rotary_dim=int(head_dim * float(rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0)))),
        rope_theta=float(rope.get("rope_theta", text.get("rope_theta", 1e7))),
        linear_num_key_heads=int(need("linear_num_key_heads")),
        linear_num_value_heads=int(need("linear_num_value_heads")),
        linear_key_head_dim=int(need("linear_key_head_dim")),
        linear_value_head_dim=int(need("linear_value_head_dim")),
        linear_conv_kernel=int(need("linear_conv_kernel_dim")),
        linear_gate=gate,
        num_experts=int(need("num_experts")),
        experts_per_token=int(need("num_experts_per_tok")),
        expert_width=int(need("moe_intermediate_size")),
        shared_width=int(need("shared_expert_intermediate_size")),
        norm_topk_prob=bool(text.get("norm_topk_prob", True)),
        hc_count=int(need("hc_count")),
        hc_lowrank=int(need("hc_lowrank")),
        indexer_heads=int(need("indexer_n_heads")),
        indexer_head_dim=int(need("indexer_head_dim")),
        indexer_budget=int(need("indexer_budget")),
        indexer_block=int(need("indexer_compress_ratio")),
        ple_layer=int(ple_ids[0]) - 1 if ple_ids else None,
        ple_embed_dim=int(text.get("ple_embed_dim") or text["hidden_size"]),
        ple_conv_kernel=int(text.get("ple_conv_kernel_size", 4)),
        ngram_size=int(text.get("ngram_size", 3)),
        heads_per_ngram=int(text.get("heads_per_ngram", 8)),
        ngram_vocab_base=int(text.get("ngram_vocab_size_base", 20_000_000)),
        ngram_vocab_divisor=int(text.get("make_ngram_vocab_size_divisible_by", 128)),
        ngram_shards=int(text.get("split_ngram_parts", 512)),
        ngram_seed=int(text.get("seed", 1234)),
        eos_token_id=int(eos[0] if isinstance(eos, list) else eos),
    )
    _check(config, where)
    return config


def _sparse_layers(text: dict[str, Any], layers: int, where: str) -> tuple[bool, ...]:
    types = text.get("layer_types")
    if types is None:
        interval = int(text.get("full_attention_interval", 4))
        return tuple((i + 1) % interval == 0 for i in range(layers))
    unknown = sorted(set(types) - {LINEAR, *SPARSE_ALIASES})
    if unknown or len(types) < layers:
        raise LabError(f"{where}: layer_types has {len(types)} entries for {layers} layers, unknown: {unknown or 'none'}")
    return tuple(kind != LINEAR for kind in types[:layers])


def _check(c: Qwen4ExpConfig, where: str) -> None:
    """Relations the forward pass relies on. Raises LabError with the fields that contradict each other."""
    rules = (
        (c.num_heads % c.num_kv_heads == 0, "num_attention_heads must be a multiple of num_key_value_heads"),
        (c.linear_num_value_heads % c.linear_num_key_heads == 0, "linear_num_value_heads must be a multiple of linear_num_key_heads"),
        (c.rotary_dim % 2 == 0 and 0 < c.rotary_dim <= min(c.head_dim, c.indexer_head_dim), "rotary width must be even and fit both heads"),
        (0 < c.experts_per_token <= c.num_experts, "num_experts_per_tok must be 1..num_experts"),
        (c.indexer_budget % c.indexer_block == 0, "indexer_budget must be a multiple of indexer_compress_ratio"),
        (c.ple_embed_dim % c.ngram_heads == 0, "ple_embed_dim must be a multiple of the number of n-gram heads"),
        (c.ple_layer is None or 0 <= c.ple_layer < c.num_layers, "ple_layer_ids must lie in 1..num_hidden_layers"),
    )
    for holds, message in rules:
        if not holds:
            raise LabError(f"{where}: {message}")
