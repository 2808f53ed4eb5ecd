"""GGUF blocks that index a codebook of 4 or 8 weights: IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S. 256 weights a block.

Layouts are facts of ggml (block_iq* in ggml-common.h, dequantize_row_iq* in ggml-quants.c). The codebooks themselves are data of ggml and are taken
from the `gguf` package when first needed. An entry's weights and its signs are the bytes of one word, so a lookup gives 4 or 8 weights.
What it does not do: encode. Finding the best entries is a search with importances that llama-quantize has.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lab.codecs.gguf_bits import Terms, crumbs, half, lookup, nibbles, numbers, spread_bits, words
from lab.codecs.gguf_package import grid


def iq2_xxs(blocks: Tensor) -> Terms:
    """f16 d, 8 groups of 32: 4 entry bytes, then 32 bits of four 7-bit sign numbers and a 4-bit scale. w = d (0.5 + scale) / 4 entry sign."""
    groups = blocks[:, 2:].unflatten(1, (8, 8))
    codes = lookup(groups[..., :4], _entries("IQ2_XXS", blocks.device))
    signs, scale = _signs_and_scale(groups[..., 4:])
    return Terms((codes * signs).flatten(2), half(blocks, 0) * (0.5 + scale) * 0.25)


def iq2_xs(blocks: Tensor) -> Terms:
    """f16 d, 32 16-bit words (9-bit entry, 7-bit sign number), 8 bytes of scales, 2 per byte. Groups of 16; value as in IQ2_XXS."""
    codes = lookup(_words16(blocks[:, 2:66]), _signed_entries("IQ2_XS", blocks.device)).view(-1, 16, 16)
    return Terms(codes, half(blocks, 0) * (0.5 + nibbles(blocks[:, 66:], dim=-1).flatten(1)) * 0.25)


def iq2_s(blocks: Tensor) -> Terms:
    """f16 d, 32 bytes of low entry bits, 32 bytes of signs, 8 bytes of high entry bits (2 each), 8 bytes of scales. Value as in IQ2_XXS."""
    entry = blocks[:, 2:34].to(torch.int32) | (crumbs(blocks[:, 66:74], dim=-1).flatten(1).to(torch.int32) << 8)
    codes = lookup(entry, _entries("IQ2_S", blocks.device)).flatten(1) * spread_bits(blocks[:, 34:66], 1, -1)
    return Terms(codes.view(-1, 16, 16), half(blocks, 0) * (0.5 + nibbles(blocks[:, 74:], dim=-1).flatten(1)) * 0.25)


def iq3_xxs(blocks: Tensor) -> Terms:
    """f16 d, 64 entry bytes (4 weights each), 8 words of signs and scale as in IQ2_XXS. w = d (0.5 + scale) / 2 entry sign."""
    codes = lookup(blocks[:, 2:66], _entries("IQ3_XXS", blocks.device)).view(-1, 8, 32)
    signs, scale = _signs_and_scale(blocks[:, 66:].unflatten(1, (8, 4)))
    return Terms(codes * signs.flatten(2), half(blocks, 0) * (0.5 + scale) * 0.5)


def iq3_s(blocks: Tensor) -> Terms:
    """f16 d, 64 bytes of low entry bits, 8 bytes of ninth bits, 32 bytes of signs, 4 bytes of scales. w = d (1 + 2 scale) entry sign."""
    ninth = spread_bits(blocks[:, 66:74], 0, 1).to(torch.int32) << 8
    codes = lookup(blocks[:, 2:66] | ninth, _entries("IQ3_S", blocks.device)).flatten(1) * spread_bits(blocks[:, 74:106], 1, -1)
    return Terms(codes.view(-1, 8, 32), half(blocks, 0) * (1 + 2 * nibbles(blocks[:, 106:], dim=-1).flatten(1)))


def iq1_s(blocks: Tensor) -> Terms:
    """f16 d, 32 bytes of low entry bits, 8 16-bit words: four times 3 high entry bits, 3-bit scale, sign of the shift.

    w = d (2 scale + 1) (entry -+ 1/8), entry weights -1, 0, 1. Kept as eighths, so that they are integers.
    """
    word = _words16(blocks[:, 34:])
    shift = torch.tensor([0, 3, 6, 9], dtype=torch.int32, device=blocks.device)
    high = ((word[..., None] >> shift) & 7).flatten(1) << 8
    lowered = ((word >> 15) << 11)[..., None].expand(-1, -1, 4).flatten(1)
    codes = lookup(blocks[:, 2:34] | high | lowered, _eighths(blocks.device))
    return Terms(codes.view(-1, 8, 32), half(blocks, 0) * (2 * ((word >> 12) & 7) + 1) * 0.125)


def iq1_m(blocks: Tensor) -> Terms:
    """32 bytes of low entry bits, 16 bytes of halves (3 high entry bits, sign of the shift), 4 16-bit words: four 3-bit scales and 4 bits of the f16 d.

    Value as in IQ1_S, groups of 16.
    """
    word = _words16(blocks[:, 48:])
    nibble = torch.tensor([0, 4, 8, 12], dtype=torch.int32, device=blocks.device)
    d = ((word >> 12) << nibble).sum(1, keepdim=True).to(torch.int16).view(torch.float16).to(torch.float32)
    scale = ((word[..., None] >> torch.tensor([0, 3, 6, 9], dtype=torch.int32, device=blocks.device)) & 7).flatten(1)
    entry = blocks[:, :32].to(torch.int32) | (nibbles(blocks[:, 32:48], dim=-1).flatten(1).to(torch.int32) << 8)
    codes = lookup(entry, _eighths(blocks.device))
    return Terms(codes.view(-1, 16, 16), d * (2 * scale + 1) * 0.125)


def _words16(packed: Tensor) -> Tensor:
    """uint8 [n, 2 k] -> little-endian 16-bit numbers as int32 [n, k]."""
    return numbers(packed, torch.int16).to(torch.int32) & 0xFFFF


def _signs_and_scale(packed: Tensor) -> tuple[Tensor, Tensor]:
    """uint8 [n, g, 4] -> signs int8 [n, g, 4, 8] and 4-bit scale [n, g] of the 32-bit words."""
    word = numbers(packed, torch.int32)
    number = (word >> torch.tensor([0, 7, 14, 21], dtype=torch.int32, device=packed.device)) & 127
    return lookup(number, _sign_words(packed.device)), (word[..., 0] >> 28) & 15


@cache
def _sign_words(device: torch.device) -> Tensor:
    """128 words of eight signs: bits 0-6 of the number, and an eighth that makes the count of minus signs even (ksigns_iq2xs)."""
    masks = [number | (number.bit_count() & 1) << 7 for number in range(128)]
    return words([[-1 if mask >> i & 1 else 1 for i in range(8)] for mask in masks], device)


@cache
def _entries(name: str, device: torch.device) -> Tensor:
    return words(grid(name), device)


@cache
def _signed_entries(name: str, device: torch.device) -> Tensor:
    """Entry and sign number in one table (65,536 words for IQ2_XS), by entry + count of entries * sign number."""
    entries = grid(name).to(device)
    signs = _sign_words(device)[:, None].view(torch.int8)
    return words((signs[:, None] * entries[None]).flatten(0, 1), device)


@cache
def _eighths(device: torch.device) -> Tensor:
    """Eight times (entry + 1/8), then eight times (entry - 1/8): the 2,048 entries that IQ1_S and IQ1_M share, by the sign of the shift."""
    entries = 8 * grid("IQ1_S").to(device)
    return words(torch.cat((entries + 1, entries - 1)), device)
