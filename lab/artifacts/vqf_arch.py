"""A model's numbers between the three places that hold them: a config.json, the engine's config object, and the header of a VQF file.

Why a header is not enough: it says nothing of how a mixture weighs its chosen experts (`norm_topk_prob`), so a mixture's config.json must lie beside the
file, and where one does it is compared with the header. Sizes are read from a config.json as the engine reads them (`lab.models.transformer.config`). The
sections of multimodal RoPE are carried over; in text all three positions are equal, which makes it plain RoPE (`lab.models.transformer.rope`). The head is a
matrix of its own in every VQF file, also where the model ties it to the embedding.
What it does not prove: that a config.json beside the file came with it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.artifacts.vqf_header import Arch
from lab.errors import LabError
from lab.models.fields import Fields
from lab.models.transformer.config import TransformerConfig, from_dict
from lab.models.transformer.rope import Rope

MAX_SEQ_LEN = 8192
"""The converter clamps the context to this."""

_COMPOSITE = ("qwen3_vl", "qwen3_vl_moe")
_MOST_WORD = (1 << 32) - 1
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


_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "intermediate_size")
_SIZES_OF_MIXTURES = ("num_experts", "moe_intermediate_size", "num_experts_per_tok", "norm_topk_prob")
_NUMBERS = ("rope_theta", "rms_norm_eps")


def arch_of_fields(config: Mapping[str, Any], where: str = "config", vision: bool = False) -> Arch:
    """The header's numbers from a parsed config.json, with its vision tower if `vision`. Raises LabError naming the field."""
    return arch_of_config(from_dict(dict(config), where), config, where, vision)


def arch_of_config(config: TransformerConfig, data: Mapping[str, Any], where: str = "config", vision: bool = False) -> Arch:
    """The same where the config has been read already. `data` are the fields it was read from: context, first token and M-RoPE are in them alone.

    Raises LabError for a model that the format cannot describe.
    """
    mixture = bool(config.num_experts)
    if not config.qk_norm:
        raise LabError(f"{where}: the model has no q_norm and k_norm; --to vqf writes the qwen3 family only")
    if mixture and not all(config.is_sparse):
        raise LabError(f"{where}: layer {config.is_sparse.index(False)} of a mixture has no experts; in a VQF file every layer has them")
    if config.rope != Rope(config.rope.theta):
        raise LabError(f"{where}: a VQF file cannot say RoPE of type {config.rope.kind!r} with factors; only the default type")
    for name in _NUMBERS:
        value = config.rope.theta if name == "rope_theta" else config.rms_norm_eps
        if not 0 < _as_f32(value) < math.inf:
            raise LabError(f"{where}: field {name}: {value} does not fit the 32-bit float of a VQF header")
    text = _text(data)
    fields = Fields(text, where)
    sections = _sections(fields)
    return Arch(
        dim=config.hidden_size,
        n_layers=config.num_layers,
        n_heads=config.num_heads,
        n_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        ffn_dim=config.num_experts * config.expert_width if mixture else config.mlp_width,
        vocab_size=config.vocab_size,
        max_seq_len=min(fields.whole("max_position_embeddings", MAX_SEQ_LEN), MAX_SEQ_LEN),
        rope_theta=config.rope.theta,
        norm_eps=config.rms_norm_eps,
        bos_id=_first(fields, "bos_token_id"),
        eos_id=config.eos_token_id,
        head_dim_full=config.head_dim,
        has_mrope=int(bool(sections)),
        mrope_n_sec=len(sections),
        mrope_sections=tuple(sections + [0] * (4 - len(sections))),
        n_experts=config.num_experts,
        moe_ffn=config.expert_width,
        top_k=config.experts_per_token,
        **(_vision(data, where) if vision else {}),
    )


def _text(data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the text model; what it does not say itself may stand outside of it."""
    inner = data.get("text_config") if data.get("model_type") in _COMPOSITE else None
    return {**data, **inner} if isinstance(inner, dict) else dict(data)


def _sections(fields: Fields) -> list[int]:
    """How many frequencies go by each of the positions of multimodal RoPE; empty without it."""
    rope = fields.data.get("rope_scaling") or fields.data.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise fields.refuse(f"field rope_scaling: {rope!r} is not an object of fields")
    found = rope.get("mrope_section") or []
    if not isinstance(found, list) or len(found) > 4 or not all(isinstance(s, int) and not isinstance(s, bool) and 0 <= s < 1 << 31 for s in found):
        raise fields.refuse(f"rope_scaling field mrope_section: {found!r} is not a list of at most 4 counts")
    return found


def _first(fields: Fields, key: str) -> int:
    """An id, the first of a list of ids, or 0 where the config has none."""
    value = fields.data.get(key)
    return Fields({key: value[0] if isinstance(value, list) and value else value}, fields.where).whole(key, 0, least=0, most=_MOST_WORD)


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


def header_fields(arch: Arch) -> dict[str, Any]:
    """What the header says of the text model, in the words of a config.json."""
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
    if arch.has_mrope:
        found["rope_scaling"] = {"rope_type": "default", "mrope_section": list(arch.mrope_sections[: arch.mrope_n_sec])}
    if not mixture:
        found["intermediate_size"] = arch.ffn_dim
    return found


def fields_of_arch(path: Path, arch: Arch, beside: Mapping[str, Any] | None) -> dict[str, Any]:
    """The text model's config.json in Hugging Face's words; `beside` is the parsed one that lies beside the file, if any.

    Raises LabError where the two disagree, and for a header that is not of the qwen3 family.
    """
    if not arch.has_q_norm:
        raise LabError(f"{path}: the header says no q_norm; the lab reads the qwen3 family only")
    found = header_fields(arch)
    check_beside(path, found, beside)
    if arch.n_experts:
        rule = _text(beside).get("norm_topk_prob") if beside is not None else None
        if not isinstance(rule, bool):
            raise LabError(f"{path}: norm_topk_prob is not in a VQF header; put the model's config.json with it beside the file")
        found["norm_topk_prob"] = rule
    return found


def check_beside(path: Path, found: Mapping[str, Any], beside: Mapping[str, Any] | None) -> None:
    """Raises LabError where the config.json beside the file at `path` contradicts `header_fields`."""
    if beside is not None and (wrong := contradiction(found, beside)) is not None:
        word, ours, theirs = wrong
        raise LabError(f"{path}: the header has {word} {ours}, config.json beside it {theirs!r}; they do not belong together")


def contradiction(ours: Mapping[str, Any], beside: Mapping[str, Any], complete: bool = False) -> tuple[str, Any, Any] | None:
    """(field, value of `ours`, value of `beside`) of the first field that changes the result and differs; None where the two say the same.

    `complete`: sizes that `beside` leaves out differ, too.
    """
    text = _text(beside)
    rope = text.get("rope_scaling") or text.get("rope_parameters")
    stated = {
        "num_experts": text.get("num_local_experts"),
        **text,
        **({"rope_theta": rope["rope_theta"]} if isinstance(rope, dict) and "rope_theta" in rope else {}),
    }
    for word in (*_SIZES, *_SIZES_OF_MIXTURES):
        if word in ours and (complete or stated.get(word) is not None) and stated.get(word) != ours[word]:
            return word, ours[word], stated.get(word)
    for word in _NUMBERS:
        theirs = stated.get(word)
        if word in ours and theirs is not None and (isinstance(theirs, bool) or not isinstance(theirs, int | float) or _as_f32(theirs) != _as_f32(ours[word])):
            return word, ours[word], theirs
    return None


def _shortest(value: float) -> float:
    """The shortest decimal that is this float32: 1e-6 and not 9.999999974752427e-07."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if _as_f32(short) == value:
            return short
    return value


def _as_f32(value: float) -> float:
    """The nearest float32; infinity beyond them."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.inf
