"""GGUF blocks with one scale, or one per small group, and no codebook: Q1_0, Q2_0, Q4_0 .. Q8_0, IQ4_NL, IQ4_XS, MXFP4, NVFP4.

Layouts are facts of ggml (block structs in ggml-common.h, dequantize_row_* in ggml-quants.c). Each function takes uint8 [n, bytes per block] and
says the block as integers times scales; products happen in one place (`lab.codecs.gguf`), in float32 and in ggml's order, so values are bit-equal.
What it does not do: NVFP4's extra float32 scale per tensor, which a model file keeps in a tensor of its own, is the model's to apply.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lab.codecs.gguf_bits import Terms, crumbs, half, level_codes, nibbles, spread_bits, spread_crumbs

IQ4_LEVELS = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""kvalues_iq4nl of ggml-common.h."""

Q2_0_LEVELS = (-1, 0, 1, 2)

_E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the 4-bit floats of the OCP Microscaling specification v1.0 (kvalues_mxfp4); the scales below are halved to match."""


def q1_0(blocks: Tensor) -> Terms:
    """f16 d, 16 bytes of bits: weight j is bit j % 8 of byte j / 8, set = +d, clear = -d."""
    return Terms(spread_bits(blocks[:, 2:], -1, 1)[:, None], half(blocks, 0))


def q2_0(blocks: Tensor) -> Terms:
    """f16 d, 4 codes a byte, lowest bits first: w = (code - 1) d. For 64 weights in 18 bytes and for 128 in 34."""
    return Terms(spread_crumbs(blocks[:, 2:], Q2_0_LEVELS)[:, None], half(blocks, 0))


def q4_0(blocks: Tensor) -> Terms:
    """f16 d, 16 bytes: low halves are weights 0-15, high halves 16-31. w = (q - 8) d."""
    return Terms((nibbles(blocks[:, 2:]) - 8).view(torch.int8).flatten(1)[:, None], half(blocks, 0))


def q4_1(blocks: Tensor) -> Terms:
    """f16 d, f16 m, codes as in Q4_0. w = q d + m."""
    return Terms(nibbles(blocks[:, 4:]).flatten(1)[:, None], half(blocks, 0), half(blocks, 2))


def _five_bits(high: Tensor, low: Tensor) -> Tensor:
    """4 bytes of fifth bits (bit j of the 32-bit word is weight j's) and 16 bytes of halves -> uint8 codes [n, 32]."""
    return nibbles(low).flatten(1) | spread_bits(high, 0, 16).view(torch.uint8)


def q5_0(blocks: Tensor) -> Terms:
    """f16 d, 4 bytes of high bits, 16 bytes of halves. w = (q - 16) d."""
    return Terms((_five_bits(blocks[:, 2:6], blocks[:, 6:]) - 16).view(torch.int8)[:, None], half(blocks, 0))


def q5_1(blocks: Tensor) -> Terms:
    """f16 d, f16 m, then as Q5_0. w = q d + m."""
    return Terms(_five_bits(blocks[:, 4:8], blocks[:, 8:])[:, None], half(blocks, 0), half(blocks, 2))


def q8_0(blocks: Tensor) -> Terms:
    """f16 d, 32 int8."""
    return Terms(blocks[:, 2:].view(torch.int8)[:, None], half(blocks, 0))


def iq4_nl(blocks: Tensor) -> Terms:
    """f16 d, halves as in Q4_0 that index IQ4_LEVELS."""
    return Terms(level_codes(nibbles(blocks[:, 2:]).flatten(1), IQ4_LEVELS)[:, None], half(blocks, 0))


def iq4_xs(blocks: Tensor) -> Terms:
    """f16 d, 16 bits of high scale bits (2 per group), 4 bytes of low scale bits, 8 groups of 32 as in IQ4_NL. w = level (scale - 32) d."""
    high, low = crumbs(blocks[:, 2:4], dim=-1).flatten(1), nibbles(blocks[:, 4:8], dim=-1).flatten(1)
    scale = ((low | (high << 4)) - 32).view(torch.int8).to(torch.float32)
    codes = nibbles(blocks[:, 8:].unflatten(1, (8, 16))).flatten(2)
    return Terms(level_codes(codes, IQ4_LEVELS), half(blocks, 0) * scale)


def mxfp4(blocks: Tensor) -> Terms:
    """One E8M0 byte e (scale 2^(e - 127)), 16 bytes of E2M1 halves placed as in Q4_0."""
    return Terms(level_codes(nibbles(blocks[:, 1:]).flatten(1), _E2M1_DOUBLED)[:, None], _e8m0_halved(blocks.device)[blocks[:, :1].to(torch.int32)])


def nvfp4(blocks: Tensor) -> Terms:
    """4 unsigned E4M3 scales, 4 groups of 8 bytes: low halves are weights 0-7 of the group, high halves 8-15."""
    codes = nibbles(blocks[:, 4:].unflatten(1, (4, 8))).flatten(2)
    return Terms(level_codes(codes, _E2M1_DOUBLED), _ue4m3_halved(blocks.device)[blocks[:, :4].to(torch.int32)])


@cache
def _e8m0_halved(device: torch.device) -> Tensor:
    """float32 [256]: 2^(e - 128), as subnormals for e < 2; 255 is no NaN in ggml (ggml_e8m0_to_fp32_half)."""
    bits = [0x00200000 << e if e < 2 else (e - 1) << 23 for e in range(256)]
    return torch.tensor(bits, dtype=torch.int32, device=device).view(torch.float32)


@cache
def _ue4m3_halved(device: torch.device) -> Tensor:
    """float32 [256]: half of the unsigned E4M3 value (bias 7, bit 7 ignored); 0x7F is 0 in ggml (ggml_ue4m3_to_fp32)."""
    values = []
    for byte in range(256):
        exponent, mantissa = byte >> 3 & 15, byte & 7
        value = mantissa * 2.0**-10 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 8)
        values.append(0.0 if byte == 0x7F else value)
    return torch.tensor(values, dtype=torch.float32, device=device)
