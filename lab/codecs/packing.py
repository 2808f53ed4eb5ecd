"""Codes of 2 and 3 bits to bytes and back, and the lookup tables that decode whole bytes at once.

Why tables: the plain-torch engine decodes at every matmul; a gather of 4 values per table entry is several times faster than shifts per code.
2 bits: code i in byte i // 4, bits 2 (i % 4), least significant first. 3 bits: see `pack3` and the two code orders.
What it does not prove: that a closed vendor format packs this way. The 3-bit orders are the two readings of "32 codes in 3 uint32".
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

CODE_ORDERS = ("straight", "10_10_10_2")


def pack2(codes: Tensor) -> Tensor:
    """uint8 codes 0..3 [..., 4 n] -> uint8 bytes [..., n]."""
    c = codes.unflatten(-1, (-1, 4))
    return c[..., 0] | (c[..., 1] << 2) | (c[..., 2] << 4) | (c[..., 3] << 6)


def pack3(codes: Tensor, order: str) -> Tensor:
    """uint8 codes 0..7 [..., 32 n] -> uint8 bytes [..., 12 n]; view as int32 for the 3 little-endian words per 32 codes.

    "straight": code i is bits 3i .. 3i+2 of the 96-bit little-endian string (code 10 straddles words 0 and 1).
    "10_10_10_2": word w holds codes 10w .. 10w+9 at bits 3 (i - 10w); bits 30-31 of words 0, 1, 2 are bits 0-1, 2-3, 4-5 of a 6-bit number
    whose low 3 bits are code 30 and high 3 bits code 31.
    """
    if order == "straight":
        c = codes.unflatten(-1, (-1, 8)).to(torch.int32)
        bits = sum((c[..., i] << (3 * i) for i in range(1, 8)), c[..., 0])  # 24 bits: 8 codes are exactly 3 bytes
        return torch.stack((bits & 255, (bits >> 8) & 255, bits >> 16), dim=-1).to(torch.uint8).flatten(-2)
    c = codes.unflatten(-1, (-1, 32)).to(torch.int64)
    spare = c[..., 30] | (c[..., 31] << 3)
    words = []
    for w in range(3):
        word = sum((c[..., 10 * w + k] << (3 * k) for k in range(1, 10)), c[..., 10 * w])
        words.append(word | (((spare >> (2 * w)) & 3) << 30))
    word = torch.stack(words, dim=-1)
    return torch.stack([(word >> (8 * b)) & 255 for b in range(4)], dim=-1).to(torch.uint8).flatten(-3)


@cache
def _table(levels: tuple[float, ...], bits: int, device: torch.device) -> Tensor:
    """[2^(4 bits)] entries that each hold the float32 level values of 4 codes, packed least significant first.

    The entries are typed complex128 only because a gather of 16-byte scalars is three times faster on a CPU than one of
    rows of floats; they are viewed as float32 afterwards and no complex arithmetic happens. One copy per device, kept for good: a captured
    CUDA graph may read it. The first decode on a device must happen outside a capture.
    """
    packed = torch.arange(1 << (4 * bits), device=device)
    shifts = torch.arange(4, device=device) * bits
    values = torch.tensor(levels, dtype=torch.float32, device=device)[(packed[:, None] >> shifts) & ((1 << bits) - 1)]
    return values.view(torch.complex128)[:, 0]


def _gather(levels: tuple[float, ...], bits: int, index: Tensor) -> Tensor:
    """int32 packed codes [n] -> float32 level values [4 n]."""
    return _table(levels, bits, index.device).index_select(0, index).view(torch.float32)


def unpack2(packed: Tensor, levels: tuple[float, ...]) -> Tensor:
    """uint8 [..., n] -> float32 level values [..., 4 n]; `levels` by code."""
    return _gather(levels, 2, packed.reshape(-1).to(torch.int32)).view(*packed.shape[:-1], packed.shape[-1] * 4)


def unpack3(packed: Tensor, levels: tuple[float, ...], order: str) -> Tensor:
    """uint8 [..., 12 n] -> float32 level values [..., 32 n]; inverse of `pack3`, `levels` by code."""
    shape = (*packed.shape[:-1], packed.shape[-1] // 12 * 32)
    if order == "straight":
        triples = packed.reshape(-1, 3)
        middle = triples[:, 1].to(torch.int32)
        halves = torch.empty(len(triples), 2, dtype=torch.int32, device=packed.device)  # two 12-bit numbers of 4 codes
        torch.bitwise_or(triples[:, 0].to(torch.int32), (middle & 15) << 8, out=halves[:, 0])
        torch.bitwise_or(middle >> 4, triples[:, 2].to(torch.int32) << 4, out=halves[:, 1])
        return _gather(levels, 3, halves.view(-1)).view(shape)
    a, b, c = packed.reshape(-1, 4).contiguous().view(torch.int32).view(-1, 3).unbind(-1)
    top = ((a >> 30) & 3) | (((b >> 30) & 3) << 2) | (((c >> 30) & 3) << 4)  # codes 30 and 31
    index = torch.empty(len(a), 8, dtype=torch.int32, device=packed.device)  # column k: codes 4k .. 4k+3
    index[:, 0], index[:, 1], index[:, 2] = a & 0xFFF, (a >> 12) & 0xFFF, ((a >> 24) & 0x3F) | ((b & 0x3F) << 6)
    index[:, 3], index[:, 4] = (b >> 6) & 0xFFF, (b >> 18) & 0xFFF
    index[:, 5], index[:, 6], index[:, 7] = c & 0xFFF, (c >> 12) & 0xFFF, ((c >> 24) & 0x3F) | (top << 6)
    return _gather(levels, 3, index.view(-1)).view(shape)
