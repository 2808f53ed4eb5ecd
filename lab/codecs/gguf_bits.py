"""How GGUF blocks pack small integers, in plain torch: halves of bytes, quarters, bits, and codes that index a table.

Why tables of whole words: a gather costs the same for one byte as for eight, so codes that lie side by side are looked up several at a time as one
int32 or int64 whose bytes are the answers. Everything works on uint8 [n, ...] of any device and keeps n first.
What it does not prove: any layout; which bytes mean what is said in `gguf_simple`, `gguf_k` and `gguf_grid`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


class Terms(NamedTuple):
    """A batch of blocks as integers and scales: w[n, g, i] = codes[n, g, i] * scale[n, g] (+ offset[n, g])."""

    codes: Tensor  # int8 or uint8 [n, groups, weights per group]
    scale: Tensor  # float32 [n, groups], or [n, 1] for all groups
    offset: Tensor | None = None  # float32 [n, groups]


def numbers(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [..., k] -> little-endian numbers [..., k / size]. Copied: a view would need to begin at a multiple of the size, which fields do not."""
    return packed.clone(memory_format=torch.contiguous_format).view(dtype)


def half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block, as float32 [n, 1]."""
    return numbers(blocks[:, at : at + 2], torch.float16).to(torch.float32)


def nibbles(packed: Tensor, dim: int = -2) -> Tensor:
    """uint8 [..., k] -> [..., 2, k]: all low halves, then all high halves; `dim=-1` gives [..., k, 2], halves side by side."""
    return torch.stack((packed & 15, packed >> 4), dim=dim)


def crumbs(packed: Tensor, dim: int = -2) -> Tensor:
    """uint8 [..., k] -> [..., 4, k]: 2-bit codes, lowest bits first; `dim=-1` gives [..., k, 4]."""
    return torch.stack((packed & 3, (packed >> 2) & 3, (packed >> 4) & 3, packed >> 6), dim=dim)


def bit_planes(packed: Tensor, place: int) -> Tensor:
    """uint8 [n, k] -> [n, 8, k]: bit i of each byte, moved to bit `place`."""
    return torch.stack([(packed << (place - i) if i < place else packed >> (i - place)) & (1 << place) for i in range(8)], dim=1)


def spread_bits(packed: Tensor, clear: int, value: int) -> Tensor:
    """uint8 [..., k] -> int8 [..., 8 k]: bit i of byte j gives weight 8 j + i, `value` where set and `clear` where not."""
    return lookup(packed, _bit_table(clear, value, packed.device)).flatten(-2)


def spread_crumbs(packed: Tensor, levels: tuple[int, ...]) -> Tensor:
    """uint8 [..., k] -> int8 [..., 4 k]: the 2-bit codes of each byte, lowest bits first, as `levels`."""
    return lookup(packed, _crumb_table(levels, packed.device)).flatten(-2)


def level_codes(codes: Tensor, levels: tuple[int, ...]) -> Tensor:
    """uint8 codes 0..15 [..., 2 k] (contiguous) -> int8 `levels` of the same shape, two codes per lookup."""
    return lookup(codes.view(torch.int16), _pair_table(levels, codes.device)).view(codes.shape)


def lookup(index: Tensor, table: Tensor) -> Tensor:
    """Integers [...] into a table of int16, int32 or int64 words -> int8 [..., bytes per word]."""
    flat = index.reshape(-1).to(torch.int32)
    return table.index_select(0, flat).view(torch.int8).view(*index.shape, table.element_size())


def words(rows: Tensor | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Rows of 2, 4 or 8 small integers -> one int16, int32 or int64 per row whose bytes are those integers (little endian)."""
    entries = torch.as_tensor(rows, dtype=torch.int8, device=device).contiguous()
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[entries.shape[1]]
    return entries.view(kind)[:, 0]


@cache
def _bit_table(clear: int, value: int, device: torch.device) -> Tensor:
    return words([[value if byte >> i & 1 else clear for i in range(8)] for byte in range(256)], device)


@cache
def _crumb_table(levels: tuple[int, ...], device: torch.device) -> Tensor:
    return words([[levels[byte >> shift & 3] for shift in (0, 2, 4, 6)] for byte in range(256)], device)


@cache
def _pair_table(levels: tuple[int, ...], device: torch.device) -> Tensor:
    """By first code + 256 * second code. Entries whose first part is above 15 are never asked for."""
    return words([[levels[pair & 15], levels[pair >> 8]] for pair in range(15 * 256 + 16)], device)
