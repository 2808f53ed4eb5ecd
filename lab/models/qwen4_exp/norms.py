"""The three normalisations of `qwen4_exp`, in float32 whatever the activation dtype.

Two of them multiply by (1 + w): weights are stored zero-centred. Only the Gated DeltaNet's output norm multiplies by plain w. Mixing the two up
still gives fluent text, which is why they are separate functions. Source: transformers 5.24.0, `Qwen4ExpTextRMSNorm` and `...RMSNormGated`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _scaled(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * (1 + weight) over the last axis; returns x's dtype."""
    return (_scaled(x.float(), eps) * (1.0 + weight)).to(x.dtype)


def grouped_rms_norm(x: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """As `rms_norm`, but each of `groups` equal parts of the last axis has its own rms; weight spans the whole axis."""
    parts = _scaled(x.float().unflatten(-1, (groups, -1)), eps).flatten(-2)
    return (parts * (1.0 + weight)).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str) -> Tensor:
    """x / rms(x) * weight * activation(gate): plain weight, no +1. The normed value is rounded to x's dtype before the weight, as in the source."""
    act = torch.sigmoid if activation == "sigmoid" else torch.nn.functional.silu
    normed = weight * _scaled(x.float(), eps).to(x.dtype)
    return (normed * act(gate.float())).to(x.dtype)


def l2_normalise(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum x^2 + eps) over the last axis, float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
