"""A model's numbers between the three places that hold them: a config.json, the engine's config object, and the header of a VQF file.

Why a header is not enough: it says nothing of how a mixture weighs its chosen experts (`norm_topk_prob`), so a mixture's config.json must lie beside the
file, and where one does it is compared with the header. Multimodal RoPE is carried over as it is; in text all three positions are equal, which makes it plain
RoPE (`lab.models.transformer.rope`). The head is a matrix of its own in every VQF file, also where the model ties it to the embedding.
What it does not prove: that a config.json beside the file came with it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.artifacts.vqf_header import Arch
from lab.errors import LabError
from lab.models.fields import Fields
from lab.models.transformer.config import TransformerConfig
from lab.models.transformer.rope import Rope

MAX_SEQ_LEN = 8192
"""The converter clamps the context to this."""

_COMPOSITE = ("qwen3_vl", "qwen3_vl_moe")
_WORDS = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "max_seq_len": "max_position_embeddings",
    "bos_id": "bos_token_id",
    "eos_id": "eos_token_id",
    "n_experts": "num_experts",
    "moe_ffn": "moe_intermediate_size",
    "top_k": "num_experts_per_tok",
}
"""Header field -> config.json field, of those that mean the same. A mixture's ffn_dim is a product there and no field of its own."""


def arch_of_fields(config: Mapping[str, Any], where: str = "config", vision: bool = False) -> Arch:
    """The header's numbers from a parsed config.json, with its vision tower if `vision`. Raises LabError naming the field."""
    kind = config.get("model_type")
    text = config.get("text_config") if kind in _COMPOSITE else config
    if not isinstance(text, dict):
        raise LabError(f"{where}: field text_config is missing or no object")
    fields = Fields(text, where)
    whole = fields.whole
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise fields.refuse(f"field rope_scaling: {rope!r} is not an object of fields")
    sections = rope.get("mrope_section") or []
    if not isinstance(sections, list) or len(sections) > 4 or not all(isinstance(s, int) and 0 <= s < 1 << 31 for s in sections):
        raise fields.refuse(f"rope_scaling field mrope_section: {sections!r} is not a list of at most 4 counts")
    mixture = "moe" in str(kind)
    experts, width = (whole("num_experts"), whole("moe_intermediate_size")) if mixture else (0, 0)
    found: dict[str, Any] = {
        "dim": whole("hidden_size"),
        "n_layers": whole("num_hidden_layers"),
        "n_heads": whole("num_attention_heads"),
        "n_kv_heads": whole("num_key_value_heads"),
        "head_dim": whole("head_dim"),
        "ffn_dim": experts * width if mixture else whole("intermediate_size"),
        "vocab_size": whole("vocab_size"),
        "max_seq_len": min(whole("max_position_embeddings", MAX_SEQ_LEN), MAX_SEQ_LEN),
        "rope_theta": fields.positive("rope_theta", 1e4, rope),
        "norm_eps": fields.positive("rms_norm_eps", 1e-6),
        "head_dim_full": whole("head_dim"),
        "bos_id": whole("bos_token_id", 0, least=0),
        "eos_id": _first(fields, "eos_token_id"),
        "has_mrope": int(bool(sections)),
        "mrope_n_sec": len(sections),
        "mrope_sections": tuple(sections + [0] * (4 - len(sections))),
        "n_experts": experts,
        "moe_ffn": width,
        "top_k": whole("num_experts_per_tok") if mixture else 0,
    }
    return Arch(**found, **(_vision(config, where) if vision else {}))


def _first(fields: Fields, key: str) -> int:
    """An id, the first of a list of ids, or 0 where the config has none."""
    value = fields.data.get(key)
    return Fields({key: value[0] if isinstance(value, list) and value else value}, fields.where).whole(key, 0, least=0)


def _vision(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    inner = config.get("vision_config")
    if not isinstance(inner, dict):
        raise LabError(f"{where}: field vision_config is missing or no object")
    fields = Fields(inner, f"{where}: vision_config")
    stack = inner.get("deepstack_visual_indexes") or []
    if not isinstance(stack, list) or len(stack) > 4:
        raise fields.refuse(f"field deepstack_visual_indexes: {stack!r} is not a list of at most 4 layers")
    words = {
        "vis_depth": "depth",
        "vis_hidden": "hidden_size",
        "vis_heads": "num_heads",
        "vis_ffn": "intermediate_size",
        "vis_patch": "patch_size",
        "vis_temporal": "temporal_patch_size",
        "vis_merge": "spatial_merge_size",
        "vis_out_dim": "out_hidden_size",
        "vis_in_chan": "in_channels",
        "vis_max_pos": "num_position_embeddings",
    }
    found: dict[str, Any] = {word: fields.whole(name, 3 if word == "vis_in_chan" else None) for word, name in words.items()}
    return {**found, "has_vision": 1, "vis_ds_count": len(stack), "vis_ds_idx": tuple(stack + [0] * (4 - len(stack)))}


def arch_of_config(config: TransformerConfig, bos_id: int = 0) -> Arch:
    """The header's numbers from the engine's own config. Raises LabError for a model that the format cannot describe."""
    mixture = bool(config.num_experts)
    if not config.qk_norm:
        raise LabError("--to vqf: the model has no q_norm and k_norm; the lab writes the qwen3 family only")
    if mixture and not all(config.is_sparse):
        raise LabError(f"--to vqf: layer {config.is_sparse.index(False)} of a mixture has no experts; in a VQF file every layer has them")
    if config.rope != Rope(config.rope.theta):
        raise LabError(f"--to vqf: the format cannot say RoPE of type {config.rope.kind!r} with factors; only the default type")
    return Arch(
        dim=config.hidden_size,
        n_layers=config.num_layers,
        n_heads=config.num_heads,
        n_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ffn_dim=config.num_experts * config.expert_width if mixture else config.mlp_width,
        vocab_size=config.vocab_size,
        max_seq_len=MAX_SEQ_LEN,
        rope_theta=config.rope.theta,
        norm_eps=config.rms_norm_eps,
        bos_id=bos_id,
        eos_id=config.eos_token_id,
        head_dim_full=config.head_dim,
        n_experts=config.num_experts,
        moe_ffn=config.expert_width,
        top_k=config.experts_per_token,
    )


def fields_of_arch(path: Path, arch: Arch, beside: Mapping[str, Any] | None) -> dict[str, Any]:
    """The text model's config.json in Hugging Face's words; `beside` is the parsed one that lies beside the file, if any.

    Raises LabError where the two disagree, and for a header that is not of the qwen3 family.
    """
    if not arch.has_q_norm:
        raise LabError(f"{path}: the header says no q_norm; the lab reads the qwen3 family only")
    mixture = bool(arch.n_experts)
    found = {word: getattr(arch, field) for field, word in _WORDS.items() if mixture or field not in ("n_experts", "moe_ffn", "top_k")}
    found |= {
        "model_type": "qwen3_moe" if mixture else "qwen3",
        "rope_theta": _shortest(arch.rope_theta),
        "rms_norm_eps": _shortest(arch.norm_eps),
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    if not mixture:
        found["intermediate_size"] = arch.ffn_dim
    text = (beside.get("text_config") if beside.get("model_type") in _COMPOSITE else beside) if beside is not None else None
    if isinstance(text, dict):
        for word in ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "num_experts"):
            if word in found and text.get(word, found[word]) != found[word]:
                raise LabError(f"{path}: the header has {word} {found[word]}, config.json beside it {text[word]!r}; they do not belong together")
    if mixture:
        rule = text.get("norm_topk_prob") if isinstance(text, dict) else None
        if not isinstance(rule, bool):
            raise LabError(f"{path}: norm_topk_prob is not in a VQF header; put the model's config.json with it beside the file")
        found["norm_topk_prob"] = rule
    return found


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-6 and not 9.999999974752427e-07."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if _as_f32(short) == value:
            return short
    return value


def _as_f32(value: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", value))[0])
