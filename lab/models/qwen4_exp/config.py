"""The sizes of a `qwen4_exp` checkpoint, read from its `config.json` and checked.

Nothing in the engine is tied to one size. Field names are those of Hugging Face's `Qwen4ExpTextConfig` (transformers 5.24.0), whose class
defaults are used only where the released files leave a field out (`norm_topk_prob`, `seed`). What the engine cannot compute exactly as
defined (another rotary type, an unknown activation) is refused by name rather than approximated.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lab.errors import LabError
from lab.models.fields import Fields, config_json
from lab.models.qwen4_exp.table_rows import DEFAULT_BASE

LINEAR = "linear_attention"
_MOST_LAYERS = 4096
"""Far above any model; a larger number is a damaged file, and one list entry for each would take minutes."""
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
    return from_dict(config_json(path), str(path))


def from_dict(data: dict[str, Any], where: str = "config") -> Qwen4ExpConfig:
    """Sizes from a parsed `config.json` (text model alone, or with a `text_config`). Raises LabError naming the field."""
    if not isinstance(data, dict) or not isinstance(data.get("text_config", {}), dict):
        raise LabError(f"{where}: expected an object of fields")
    if data.get("model_type") not in MODEL_TYPES:
        raise LabError(f"{where}: model_type {data.get('model_type')!r} is not one of {', '.join(MODEL_TYPES)}")
    inherited = {k: v for k, v in data.items() if k in ("eos_token_id", "tie_word_embeddings")}
    text = {**inherited, **data.get("text_config", data)}
    if isinstance(text.get("eos_token_id"), list):  # the first of several stands for all, as in the source
        text["eos_token_id"] = next(iter(text["eos_token_id"]), None)
    fields = Fields(text, where)
    whole = fields.whole
    layers = whole("num_hidden_layers", most=_MOST_LAYERS)
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(rope, dict) or (rope_type := rope.get("rope_type", rope.get("type", "default"))) != "default":
        raise fields.refuse(f"rope_type {rope_type if isinstance(rope, dict) else rope!r} is not supported; only 'default'")
    if text.get("attention_bias"):
        raise fields.refuse("attention_bias true is not supported")
    activation = fields.one_of("hidden_act", "silu", ("silu",))
    head_dim = whole("head_dim")
    ple_ids = text.get("ple_layer_ids") or []
    if not isinstance(ple_ids, list) or len(ple_ids) > 1 or not all(isinstance(i, int) for i in ple_ids):
        raise fields.refuse(f"ple_layer_ids {ple_ids}: expected a list of one layer number; more than one PLE layer is not supported")
    config = Qwen4ExpConfig(
        vocab_size=whole("vocab_size"),
        hidden_size=whole("hidden_size"),
        num_layers=layers,
        is_sparse=_sparse_layers(fields, layers),
        rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(text.get("tie_word_embeddings", False)),
        num_heads=whole("num_attention_heads"),
        num_kv_heads=whole("num_key_value_heads"),
        head_dim=head_dim,
        rotary_dim=int(head_dim * fields.positive("partial_rotary_factor", 1.0, rope)),
        rope_theta=fields.positive("rope_theta", 1e7, rope),
        linear_num_key_heads=whole("linear_num_key_heads"),
        linear_num_value_heads=whole("linear_num_value_heads"),
        linear_key_head_dim=whole("linear_key_head_dim"),
        linear_value_head_dim=whole("linear_value_head_dim"),
        linear_conv_kernel=whole("linear_conv_kernel_dim"),
        linear_gate=fields.one_of("output_gate_type", activation, ("sigmoid", "silu")),
        num_experts=whole("num_experts"),
        experts_per_token=whole("num_experts_per_tok"),
        expert_width=whole("moe_intermediate_size"),
        shared_width=whole("shared_expert_intermediate_size"),
        norm_topk_prob=bool(text.get("norm_topk_prob", True)),
        hc_count=whole("hc_count"),
        hc_lowrank=whole("hc_lowrank"),
        indexer_heads=whole("indexer_n_heads"),
        indexer_head_dim=whole("indexer_head_dim"),
        indexer_budget=whole("indexer_budget"),
        indexer_block=whole("indexer_compress_ratio"),
        ple_layer=ple_ids[0] - 1 if ple_ids else None,
        ple_embed_dim=whole("ple_embed_dim", whole("hidden_size")),
        ple_conv_kernel=whole("ple_conv_kernel_size", 4),
        ngram_size=whole("ngram_size", 3),
        heads_per_ngram=whole("heads_per_ngram", 8),
        ngram_vocab_base=whole("ngram_vocab_size_base", DEFAULT_BASE),
        ngram_vocab_divisor=whole("make_ngram_vocab_size_divisible_by", 128),
        ngram_shards=whole("split_ngram_parts", 512),
        ngram_seed=whole("seed", 1234, least=0),
        eos_token_id=whole("eos_token_id", least=0),
    )
    _check(config, where)
    return config


def _sparse_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    types = fields.data.get("layer_types")
    if types is None:
        interval = fields.whole("full_attention_interval", 4)
        return tuple((i + 1) % interval == 0 for i in range(layers))
    unknown = sorted({str(kind) for kind in types} - {LINEAR, *SPARSE_ALIASES}) if isinstance(types, list) else [types]
    if unknown or len(types) < layers:
        raise fields.refuse(f"layer_types has {len(types)} entries for {layers} layers, unknown: {unknown or 'none'}")
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
