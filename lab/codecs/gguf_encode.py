"""Encoders for the GGUF types, in one table: the `gguf` package's own where it has one, searches of least squared error for the rest.

Why a search of our own: the package has no IQ4_NL, and ggml's reference for Q2_0 takes d = max|w|, which never uses the code for +2 and reads
as ternary. Here a block's scale, of either sign, has the least squared error found by `lab.codecs.fit`, after rounding to float16. The types whose
blocks hold 256 weights are in `gguf_encode_levels`, `gguf_encode_affine`, `gguf_encode_grid` and `gguf_encode_ternary`.
What it does not do: weigh errors by activations, or match tuned writers bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lab.codecs.fit import SortedGroups, nearest_codes
from lab.codecs.gguf_encode_affine import AFFINE_ENCODERS
from lab.codecs.gguf_encode_grid import GRID_ENCODERS
from lab.codecs.gguf_encode_levels import LEVEL_ENCODERS
from lab.codecs.gguf_encode_ternary import TERNARY_ENCODERS
from lab.codecs.gguf_package import quantize
from lab.codecs.gguf_simple import IQ4_LEVELS, Q2_0_LEVELS
from lab.codecs.packing import pack2

Encoder = Callable[[Tensor], Tensor]
"""float32 [n, cols] -> uint8 [n, row bytes]."""

_GROUPS = 4096  # groups searched at a time: the search holds some hundred candidates per group and level


def _halves(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 [n, 32] -> bytes [n, 16], weights 0-15 in the low halves."""
    return codes[:, :16] | (codes[:, 16:] << 4)


def _searched(rows: Tensor, block: int, levels: Sequence[float], pack: Callable[[Tensor], Tensor]) -> Tensor:
    """Blocks of a float16 scale and codes of increasing `levels`; the levels are lopsided, so a negative scale is tried too."""
    packed = [_searched_groups(groups, levels, pack) for groups in rows.view(-1, block).split(_GROUPS)]
    return torch.cat(packed).view(len(rows), -1)


def _searched_groups(groups: Tensor, levels: Sequence[float], pack: Callable[[Tensor], Tensor]) -> Tensor:
    fits = [SortedGroups(groups * sign, levels) for sign in (1.0, -1.0)]
    scales = [fit.best_scale().to(torch.float16) for fit in fits]
    errors = [fit.error(scale.to(torch.float32)[:, None])[:, 0] for fit, scale in zip(fits, scales, strict=True)]
    negative = errors[1] < errors[0]
    scale = torch.where(negative, -scales[1], scales[0])
    turned = torch.where(negative[:, None], -groups, groups)
    codes = nearest_codes(turned, scale.abs().to(torch.float32), levels)
    return torch.cat((scale[:, None].view(torch.uint8), pack(codes)), dim=1)


ENCODERS: dict[str, Encoder] = {
    "F32": lambda rows: rows.contiguous().view(torch.uint8),
    "F16": lambda rows: rows.to(torch.float16).view(torch.uint8),
    "BF16": lambda rows: rows.to(torch.bfloat16).view(torch.uint8),
    "IQ4_NL": partial(_searched, block=32, levels=IQ4_LEVELS, pack=_halves),
    "Q2_0": partial(_searched, block=64, levels=Q2_0_LEVELS, pack=pack2),
    **{name: partial(quantize, name) for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")},
    **LEVEL_ENCODERS,
    **AFFINE_ENCODERS,
    **GRID_ENCODERS,
    **TERNARY_ENCODERS,
}
"""By type name. A type that is not here is read, not written."""
