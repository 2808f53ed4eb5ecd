"""The sizes of a plain transformer (llama, qwen3, qwen3_moe and the text models of Qwen3-VL), read from its `config.json` and checked.

Field names and defaults are those of transformers 5.24.0; a default is used only where that library has the same. What the forward code does not compute
exactly as that library does is refused by the name of its field: biases, sliding windows, other activations, scaled or capped scores, unknown RoPE types.
What it does not prove: that tensors of these shapes are in the files.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from lab.errors import LabError
from lab.models.fields import Fields
from lab.models.transformer.rope import Rope, read_rope

_MOST_LAYERS = 4096
_MOST_HEAD_DIM = 1 << 16
"""Both far above any model. A larger number is a damaged file, and lists of that length are made before any tensor is read."""

_COMPOSITE = {"qwen3_vl": "qwen3_vl_text", "qwen3_vl_moe": "qwen3_vl_moe_text"}
"""Model types whose text model is described in `text_config`, and that model's own type."""

_DEFAULT_THETA = {"llama": 1e4, "qwen3": 1e4, "qwen3_moe": 1e4, "qwen3_vl_text": 5e5, "qwen3_vl_moe_text": 5e5}
"""`default_theta` of the configuration classes; the keys are the text models that are read here."""

MODEL_TYPES = (*_DEFAULT_THETA, *_COMPOSITE)

_NOT_COMPUTED: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "qkv_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "pretraining_tp": (1,),
    "qk_layernorm": (False,),
    "use_qk_norm": (False,),
    "attention_multiplier": (),
    "query_pre_attn_scalar": (),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
}
"""Fields of related architectures that change the result, and the values (besides null) with which they do not."""


@dataclass(frozen=True)
class TransformerConfig:
    """Sizes and constants of the text model. `is_sparse` says which layers have routed experts; `experts_per_token` is 0 where the model is dense."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qk_norm: bool
    rope: Rope
    is_sparse: tuple[bool, ...]
    num_experts: int
    experts_per_token: int
    expert_width: int
    norm_topk_prob: bool
    eos_token_id: int

    @property
    def ngram_heads(self) -> int:
        """0: there is no n-gram table."""
        return 0

    def truncated(self, layers: int) -> TransformerConfig:
        """The same model with only its first `layers` layers. Raises LabError outside 1..num_layers."""
        if not 1 <= layers <= self.num_layers:
            raise LabError(f"layers={layers}: the model has {self.num_layers} layers; choose 1 to {self.num_layers}")
        return replace(self, num_layers=layers, is_sparse=self.is_sparse[:layers])


def from_dict(data: dict[str, Any], where: str = "config") -> TransformerConfig:
    """Sizes from a parsed `config.json`; `where` names the file in errors. Besides Hugging Face's fields, `rope_factors` may hold one divisor for each RoPE
    frequency, as GGUF files do. Raises LabError naming the field."""
    text, kind = _text_fields(data, where)
    fields = Fields(text, where)
    whole = fields.whole
    for key, neutral in _NOT_COMPUTED.items():
        if text.get(key) is not None and text[key] not in neutral:
            raise fields.refuse(f"{key} {text[key]!r} is not supported")
    fields.one_of("hidden_act", "silu", ("silu",))
    types = text.get("layer_types")
    if types is not None and (not isinstance(types, list) or any(entry != "full_attention" for entry in types)):
        raise fields.refuse("layer_types: only full_attention is supported")
    hidden, heads, layers = whole("hidden_size"), whole("num_attention_heads"), whole("num_hidden_layers", most=_MOST_LAYERS)
    sparse = _sparse_layers(fields, layers) if "moe" in kind else (False,) * layers
    routed = any(sparse)
    head_dim = _head_dim(fields, kind, hidden, heads)
    config = TransformerConfig(
        vocab_size=whole("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=whole("num_key_value_heads", heads if kind == "llama" else None),
        head_dim=head_dim,
        mlp_width=0 if all(sparse) else whole("intermediate_size"),
        rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
        tie_word_embeddings=_flag(fields, "tie_word_embeddings", False),
        qk_norm=kind != "llama",
        rope=read_rope(fields, head_dim, _DEFAULT_THETA[kind]),
        is_sparse=sparse,
        num_experts=_num_experts(fields) if routed else 0,
        experts_per_token=whole("num_experts_per_tok") if routed else 0,
        expert_width=whole("moe_intermediate_size") if routed else 0,
        norm_topk_prob=_flag(fields, "norm_topk_prob", kind == "qwen3_vl_moe_text"),
        eos_token_id=whole("eos_token_id", least=0),
    )
    _check(config, kind, fields)
    return config


def _text_fields(data: dict[str, Any], where: str) -> tuple[dict[str, Any], str]:
    """(fields of the text model, its model type). Where a composite file states `tie_word_embeddings` itself, that counts: transformers reads no other."""
    if not isinstance(data, dict):
        raise LabError(f"{where}: expected an object of fields")
    kind = data.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        raise LabError(f"{where}: model_type {kind!r} is not one of {', '.join(MODEL_TYPES)}")
    text = data
    if kind in _COMPOSITE:
        inner = data.get("text_config")
        if not isinstance(inner, dict):
            raise LabError(f"{where}: field text_config is missing or no object; model_type {kind} describes its text model there")
        kind = _COMPOSITE[kind]
        if inner.get("model_type", kind) != kind:
            raise LabError(f"{where}: text_config has model_type {inner['model_type']!r}, expected {kind}")
        text = {"eos_token_id": data.get("eos_token_id"), **inner}
        if data.get("tie_word_embeddings") is not None:
            text["tie_word_embeddings"] = data["tie_word_embeddings"]
    if isinstance(text.get("eos_token_id"), list):  # the first of several stands for all
        text = {**text, "eos_token_id": next(iter(text["eos_token_id"]), None)}
    return text, kind


def _flag(fields: Fields, key: str, default: bool) -> bool:
    value = fields.data.get(key)
    if value is not None and not isinstance(value, bool):
        raise fields.refuse(f"field {key}: {value!r} is neither true nor false")
    return default if value is None else value


def _head_dim(fields: Fields, kind: str, hidden: int, heads: int) -> int:
    """As the file says, or hidden_size / num_attention_heads. The dense Qwen3 classes default to 128 instead; their files always state it."""
    stated = fields.data.get("head_dim") is not None or kind in ("qwen3", "qwen3_vl_text")
    if not stated and hidden % heads:
        raise fields.refuse(f"hidden_size {hidden} is no multiple of num_attention_heads {heads}; field head_dim is missing")
    return fields.whole("head_dim", None if stated else hidden // heads, most=_MOST_HEAD_DIM)


def _sparse_layers(fields: Fields, layers: int) -> tuple[bool, ...]:
    """Every `decoder_sparse_step`-th layer has experts, except those of `mlp_only_layers` (counted from 0)."""
    dense = fields.data.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in dense):
        raise fields.refuse(f"field mlp_only_layers: {dense!r} is not a list of layer numbers")
    step, excepted = fields.whole("decoder_sparse_step", 1), frozenset(dense)
    return tuple((i + 1) % step == 0 and i not in excepted for i in range(layers))


def _num_experts(fields: Fields) -> int:
    """`num_experts`, which transformers 5.24 writes as `num_local_experts`."""
    names = [key for key in ("num_experts", "num_local_experts") if fields.data.get(key) is not None] or ["num_experts"]
    found = {fields.whole(key) for key in names}
    if len(found) > 1:
        raise fields.refuse("fields num_experts and num_local_experts contradict each other")
    return found.pop()


def _check(c: TransformerConfig, kind: str, fields: Fields) -> None:
    """Relations the forward pass relies on. Raises LabError with the fields that contradict each other."""
    rules = (
        (c.num_heads % c.num_kv_heads == 0, "num_attention_heads must be a multiple of num_key_value_heads"),
        (c.head_dim % 2 == 0, f"head_dim {c.head_dim} must be even"),
        (c.experts_per_token <= c.num_experts, "num_experts_per_tok must be 1..num_experts"),
        (c.norm_topk_prob or kind != "qwen3_vl_moe_text", "norm_topk_prob false is not supported: qwen3_vl_moe always normalises"),
        (c.eos_token_id < c.vocab_size, f"eos_token_id {c.eos_token_id} must be below vocab_size {c.vocab_size}"),
    )
    for holds, message in rules:
        if not holds:
            raise fields.refuse(message)
