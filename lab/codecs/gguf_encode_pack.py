"""Small integers into bytes as GGUF blocks hold them: the inverses of `nibbles`, `crumbs`, `bit_planes` and `numbers` in `gguf_bits`.

Why beside the unpacking and not in it: reading needs none of this. Inputs are uint8 with values that fit, of any device.
What it does not prove: any layout; which fields go where is said by the encoders.
"""

from __future__ import annotations

import torch
from torch import Tensor


def join_nibbles(halves: Tensor, dim: int = -2) -> Tensor:
    """uint8 below 16 with a dimension `dim` of 2 -> bytes without it: the first in the low half."""
    low, high = halves.unbind(dim)
    return low | (high << 4)


def join_crumbs(quarters: Tensor, dim: int = -2) -> Tensor:
    """uint8 below 4 with a dimension `dim` of 4 -> bytes without it: the first in the lowest bits."""
    first, second, third, fourth = quarters.unbind(dim)
    return first | (second << 2) | (third << 4) | (fourth << 6)


def join_bits(bits: Tensor, dim: int = -1) -> Tensor:
    """uint8 or bool below 2 with a dimension `dim` of 8 -> bytes without it: the first in the lowest bit."""
    planes = bits.to(torch.uint8).unbind(dim)
    packed = planes[0].clone()
    for place, plane in enumerate(planes[1:], start=1):
        packed |= plane << place
    return packed


def little_endian(values: Tensor, nbytes: int) -> Tensor:
    """Integers [n, ...] -> uint8 [n, bytes], the lowest `nbytes` (1, 2 or 4) of each, in order."""
    return values.to(torch.int64).contiguous().view(torch.uint8).unflatten(-1, (-1, 8))[..., :nbytes].flatten(1)
