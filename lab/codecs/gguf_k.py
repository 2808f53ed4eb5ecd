"""GGUF K blocks, Q2_K .. Q6_K: 256 weights in groups of 16 or 32 whose scales are small integers times one or two float16.

Layouts are facts of ggml (block_q*_K in ggml-common.h, dequantize_row_q*_K in ggml-quants.c). As in `gguf_simple`, each function says a batch of
blocks, uint8 [n, bytes per block], as integers, scales and offsets. Rows that are no multiple of 256 cannot be stored so; nothing is padded.
What it does not do: encode. A good K encoder searches scales with importances; llama-quantize has one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lab.codecs.gguf_bits import Terms, bit_planes, crumbs, half, nibbles


def q2_k(blocks: Tensor) -> Terms:
    """16 bytes of scale and minimum (4 bits each), 64 bytes of 2-bit codes, f16 d, f16 dmin. w = q (d scale) - dmin minimum, groups of 16."""
    scales = blocks[:, :16]
    codes = crumbs(blocks[:, 16:80].unflatten(1, (2, 32))).view(-1, 16, 16)
    return Terms(codes, half(blocks, 80) * (scales & 15), -(half(blocks, 82) * (scales >> 4)))


def q3_k(blocks: Tensor) -> Terms:
    """32 bytes of high bits, 64 bytes of low 2 bits, 12 bytes of 6-bit scales, f16 d. w = (q - 4) d (scale - 32), groups of 16."""
    low = crumbs(blocks[:, 32:96].unflatten(1, (2, 32))).flatten(1)
    codes = ((low | bit_planes(blocks[:, :32], 2).flatten(1)) - 4).view(torch.int8)
    scale = nibbles(blocks[:, 96:104]).flatten(1) | (crumbs(blocks[:, 104:108]).flatten(1) << 4)
    return Terms(codes.view(-1, 16, 16), half(blocks, 108) * (scale - 32).view(torch.int8))


def _scales_and_minima(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """f16 d, f16 dmin and 12 bytes of eight 6-bit scales and minima -> float32 d scale [n, 8] and -dmin minimum [n, 8]."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), dim=1)
    minimum = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), dim=1)
    return half(blocks, 0) * scale, -(half(blocks, 2) * minimum)


def q4_k(blocks: Tensor) -> Terms:
    """Scales and minima, 128 bytes: per 32 bytes the low halves are one group of 32, the high halves the next. w = q (d scale) - dmin minimum."""
    codes = nibbles(blocks[:, 16:].unflatten(1, (4, 32))).view(-1, 8, 32)
    return Terms(codes, *_scales_and_minima(blocks))


def q5_k(blocks: Tensor) -> Terms:
    """As Q4_K, with 32 bytes before the halves whose bit g is the fifth bit of group g's weights."""
    codes = nibbles(blocks[:, 48:].unflatten(1, (4, 32))).view(-1, 8, 32) | bit_planes(blocks[:, 16:48], 4)
    return Terms(codes, *_scales_and_minima(blocks))


def q6_k(blocks: Tensor) -> Terms:
    """128 bytes of low halves, 64 bytes of high 2 bits, 16 int8 scales, f16 d. w = (q - 32) (d scale), groups of 16."""
    low = nibbles(blocks[:, :128].unflatten(1, (2, 64))).flatten(1)
    high = crumbs(blocks[:, 128:192].unflatten(1, (2, 32))).flatten(1)
    codes = ((low | (high << 4)) - 32).view(torch.int8)
    return Terms(codes.view(-1, 16, 16), half(blocks, 208) * blocks[:, 192:208].view(torch.int8))
