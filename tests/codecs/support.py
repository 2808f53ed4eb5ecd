"""Weights and codec variants that the codec tests share.

Why one list: every general property must hold for every option that changes bytes or arithmetic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("bf16", {}),
    ("e4m3", {}),
    ("e4m3", {"scale": "block128"}),
    ("int8_g128", {}),
    ("w3_levels", {}),
    ("w3_levels", {"code_order": "10_10_10_2", "code_numbering": "sign_magnitude"}),
    ("w3_levels", {"scale_meaning": "div64", "scale": "absmax"}),
    ("q2_levels", {}),
    ("q2_levels", {"levels": (-5, -1, 1, 8), "scale": "search", "scale_dtype": "bfloat16"}),
    ("q2_g32", {"scale_dtype": "bfloat16"}),
    ("q2_g32", {"scale_dtype": "e4m3", "levels": [-3, -1, 1, 3]}),
    ("q2_rows", {}),
]
IDS = [f"{name}-{'-'.join(map(str, options.values()))}" if options else name for name, options in VARIANTS]


def gaussian(*shape: int, seed: int = 0, std: float = 0.02) -> Tensor:
    """float32 normal weights."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std


def student(*shape: int, seed: int = 0, std: float = 0.02) -> Tensor:
    """float32 Student-t weights with 5 degrees of freedom: the heavy tails of trained matrices."""
    generator = torch.Generator().manual_seed(seed)
    chi = torch.randn(*shape, 5, generator=generator).square().mean(-1).sqrt()
    return torch.randn(*shape, generator=generator) / chi * std
