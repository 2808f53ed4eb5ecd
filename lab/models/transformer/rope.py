"""Rotary position embedding (RoPE) of plain transformers: which frequencies a config asks for, and their tables for a run of positions.

Three types are computed: `default`, `linear` and `llama3`, with the formulas of transformers 5.24.0 (`modeling_rope_utils`); any other is refused by
name, because a wrong frequency still gives fluent text. Files may also bring one divisor per frequency (`rope_factors`), which is how GGUF stores llama3
scaling (its tensor `rope_freqs`). Multimodal RoPE (M-RoPE, Qwen3-VL) gives each frequency one of three positions; in text all three are equal, so its
sections and their interleaving change nothing here. What it does not prove: anything about images.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.errors import LabError
from lab.models.fields import Fields

_TYPE_FIELDS = {"default": (), "linear": ("factor",), "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")}
_COMMON_FIELDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved")


@dataclass(frozen=True)
class Rope:
    """`theta` is the base; `factor` and what follows are those of the config's scaling; `factors` divide the frequencies, one each."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: float = 8192.0
    factors: tuple[float, ...] | None = None


def read_rope(fields: Fields, head_dim: int, default_theta: float) -> Rope:
    """RoPE as a config.json states it, in the old words (`rope_scaling` and `rope_theta`) or the new (`rope_parameters`). Raises LabError by field name."""
    rope = fields.data.get("rope_scaling") or fields.data.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise fields.refuse(f"field rope_scaling: {rope!r} is not an object of fields")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in _TYPE_FIELDS:
        raise fields.refuse(f"rope_type {kind!r} is not supported; choose from: {', '.join(_TYPE_FIELDS)}")
    if unknown := sorted(str(key) for key in rope.keys() - {*_COMMON_FIELDS, *_TYPE_FIELDS[kind]} if rope[key] is not None):
        raise fields.refuse(f"rope_scaling field {unknown[0]} is not supported with rope_type {kind!r}")
    partial = fields.positive("partial_rotary_factor", 1.0, rope)
    if partial != 1.0:
        raise fields.refuse(f"partial_rotary_factor {partial} is not supported; only 1")
    values = {"theta": fields.positive("rope_theta", default_theta, rope)}
    for key in _TYPE_FIELDS[kind]:
        if rope.get(key) is None:
            raise fields.refuse(f"rope_scaling field {key} is missing; rope_type {kind!r} needs it")
        values["original_context" if key.startswith("original") else key] = fields.positive(key, 1.0, rope)
    if not all(map(math.isfinite, values.values())):
        raise fields.refuse("rope_theta and the fields of rope_scaling must be finite")
    if kind == "llama3":
        if values["high_freq_factor"] <= values["low_freq_factor"]:
            raise fields.refuse("rope_scaling field high_freq_factor must be greater than low_freq_factor")
        if fields.data.get("original_max_position_embeddings") not in (None, values["original_context"]):
            raise fields.refuse("field original_max_position_embeddings contradicts the one in rope_scaling")
    return Rope(kind=kind, factors=_read_factors(fields, head_dim), **values)


def _read_factors(fields: Fields, head_dim: int) -> tuple[float, ...] | None:
    found: Any = fields.data.get("rope_factors")
    if found is None:
        return None
    if not isinstance(found, list | tuple) or len(found) != head_dim // 2:
        raise fields.refuse(f"field rope_factors: expected {head_dim // 2} numbers, one for each pair of a head's {head_dim} dimensions")
    if not all(isinstance(f, int | float) and not isinstance(f, bool) and 0 < f < math.inf for f in found):
        raise fields.refuse("field rope_factors: every factor must be a positive, finite number")
    return tuple(map(float, found))


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions, float32 [head_dim / 2] on the CPU. Raises LabError where `factors` has another length."""
    inverse = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        inverse = inverse / rope.factor
    elif rope.kind == "llama3":
        inverse = _llama3(inverse, rope)
    if rope.factors is None:
        return inverse
    if len(rope.factors) != len(inverse):
        raise LabError(f"rope_factors: {len(rope.factors)} numbers for {len(inverse)} frequencies; give one for each")
    return inverse / torch.tensor(rope.factors, dtype=torch.float32)


def _llama3(inverse: Tensor, rope: Rope) -> Tensor:
    """Llama 3.1: waves longer than context/low are stretched by `factor`, those shorter than context/high are kept, those between are interpolated by
    how often they fit into the original context."""
    turns = rope.original_context * inverse / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * inverse / rope.factor + kept * inverse


def rotary_tables(inverse: Tensor, start: int, end: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, signed sin), both [T, 1, head_dim] in `dtype` on inverse's device, for positions start..end-1. The sine of the first half of a head is
    negated, so that `rotate` needs no negation of its own. Angles are float32, as in transformers."""
    angles = torch.arange(start, end, dtype=torch.float32, device=inverse.device)[:, None, None] * inverse
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (i, i + d/2) of x [B, T, heads, d] by the angles of `rotary_tables`. Rolling by d/2 swaps the halves."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
