"""Codes of 2, 3, 4 and 8 bits in the order the decode kernels read: planes of words over chunks of 32 codes, 16 rows side by side. Made once at load.

Why: the canonical order (lab/codecs/packing.py) is for files. In it a 3-bit code straddles words and every code costs shifts; here the low two bits of 32
codes are two words, the third bits one word, and codes sit so that one mask gives eight selectors for a byte permute and the activations need no
reordering (pairs of neighbours). At 4 bits one mask gives the two codes of a pair where a 16-bit float has its last bits, and no table is needed. 16 rows lie
side by side, so that a thread loads four rows' words in 16 bytes and one activation serves all four. Bytes stay the codec's own: 2, 3, 4 or 8 bits per
weight, scales as stored. What it does not prove: that the order suits another GPU's cache lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.codecs import Codec, Parts
from lab.codecs.gguf import PART
from lab.codecs.packing import unpack2, unpack3
from lab.codecs.plain import Int8G128
from lab.codecs.q2 import Q2G32, Q2Levels
from lab.codecs.w3 import W3Levels
from lab.kernels.backend import require

CHUNK = 32
"""Codes per chunk: as many words as a code has bits; the unit of one float16 partial sum."""
ROWS = 16
"""Rows side by side in one block."""
LEVEL_ERROR = 5e-4
"""Largest relative error of a level as float8_e5m2 times a factor: a quarter of bfloat16's rounding, in which the plain engine multiplies."""
NIBBLES = "gguf:Q4_0"
"""The codec of 4 bits: blocks of a float16 scale and 32 codes, weight = (code - 8) * scale."""
_BLOCK_BYTES = 2 + CHUNK // 2
_STACK = 8  # matrices repacked at a time, so that temporaries stay small beside a layer's experts


@dataclass(frozen=True)
class Planes:
    """A stack [E, halves * rows, cols] of one codec, repacked. All tensors on one device.

    words int32 [E, halves, blocks, bits, chunks, 16]. 2 and 3 bits: planes 0 and 1 the low two bits of chunk positions 0-15 and 16-31, plane 2 the third
    bits, see `code_bits`. 4 bits: plane p holds positions 8p .. 8p+7, see `nibble_bit`. 8 bits: plane p holds positions 4p .. 4p+3, each code + 128 in a
    byte, first code lowest.
    scale [E, halves, blocks, ceil(cols / group), 16] as stored (uint8 holds e4m3 bits), or, at one scale a row, float32 [E, halves, blocks, 1, 16].
    unit float32 [E]: weight = level * scale * unit, level = lut[code] or, at 4 bits, code / 8 - 1, at 8 bits code / 128. lut: float8_e5m2 bits by code in a
    64-bit number.
    """

    words: Tensor
    scale: Tensor
    unit: Tensor
    lut: int
    bits: int
    group: int
    rows: int
    cols: int

    @property
    def halves(self) -> int:
        """1, or 2 where gate and up rows are stacked."""
        return int(self.words.shape[1])

    def lut_words(self) -> tuple[int, int]:
        """The table's two halves as signed 32-bit numbers, as kernels take them."""
        low, high = self.lut & 0xFFFFFFFF, self.lut >> 32
        return low - ((low >> 31) << 32), high - ((high >> 31) << 32)

    def nbytes(self) -> int:
        """Bytes resident, padding rows included."""
        return self.words.nbytes + self.scale.nbytes + self.unit.nbytes

    def bytes_per_matrix(self) -> int:
        """Bytes a kernel reads of one matrix."""
        return self.nbytes() // self.words.shape[0]


def level_table(levels: tuple[float, ...]) -> tuple[int, float]:
    """Levels by code -> (64-bit table of their float8_e5m2 bytes, factor) with level = e5m2 * factor, the largest magnitude in 1/2 .. 1.

    e5m2 is the high byte of a float16 whose low byte is zero, which is why a byte permute can look up float16 levels. Raises LabError where no factor
    brings every level within `LEVEL_ERROR`. The integer levels of w3_levels are exact; the Lloyd-Max pair (ratio 3.3348) is 10 : 3 within 2.2e-4.
    """
    exact = torch.tensor(levels, dtype=torch.float64)
    top = exact.abs().max()
    best_error, best = float("inf"), (exact, 1.0)
    for anchor in (0.5, 0.625, 0.75, 0.875, 1.0):  # the largest level on each e5m2 mantissa in turn
        stored = (exact / top * anchor).to(torch.float8_e5m2).to(torch.float64)
        factor = float((stored * exact).sum() / (stored * stored).sum())
        for tried in (float(top) / anchor, factor):
            error = float(((stored * tried - exact).abs() / exact.abs().clamp_min(1e-30)).max())
            if error < best_error:
                best_error, best = error, (stored, tried)
    require(best_error <= LEVEL_ERROR, "low-bit", f"levels {list(levels)} are not float8_e5m2 values times one factor (error {best_error:.1e})")
    stored, factor = best
    table = stored.to(torch.float8_e5m2).view(torch.uint8).tolist()
    return sum(byte << (8 * code) for code, byte in enumerate(table)), factor


def repack(codec: Codec, parts: Parts, cols: int, halves: int = 1) -> Planes:
    """Canonical parts of a matrix [rows, cols] or a stack [E, halves * rows, cols] -> Planes; a matrix becomes a stack of one.

    `halves=2` keeps two equal halves of the rows (gate and up) in separate blocks, so that a program can read both at one offset.
    Raises LabError on a codec without such a kernel or a shape that does not fit.
    """
    known = isinstance(codec, W3Levels | Q2Levels | Q2G32 | Int8G128) or codec.name == NIBBLES
    require(known, codec.name, f"has no plane kernel; use w3_levels, q2_levels, q2_g32, {NIBBLES} or int8_g128")
    require(cols % CHUNK == 0, codec.name, f"{cols} columns: the kernel needs a multiple of {CHUNK}")
    key = PART if codec.name == NIBBLES else "weight" if isinstance(codec, Int8G128) else "codes"
    if parts[key].ndim == 2:
        parts = {name: part[None] for name, part in parts.items()}
    packed = parts[key]
    require(packed.ndim == 3 and packed.shape[1] % halves == 0, codec.name, f"{key} {list(packed.shape)} is not a stack of {halves} equal halves")
    if codec.name == NIBBLES:
        return repack_nibbles(packed.unflatten(1, (halves, -1)).unbind(1), cols)
    bits, group, lut, factor = _numbers(codec, cols)
    experts, rows, device = packed.shape[0], packed.shape[1] // halves, packed.device
    unit, scale = torch.full((experts,), factor, dtype=torch.float32, device=device), parts["scale"]
    if "factor" in parts:
        unit = unit * parts["factor"][:, 0]
    if group == cols:
        scale = scale.to(torch.float32)
    elif scale.dtype == torch.float8_e4m3fn:
        scale = scale.view(torch.uint8)
    blocks = -(-rows // ROWS)
    words = torch.empty(experts, halves, blocks, bits, cols // CHUNK, ROWS, dtype=torch.int32, device=device)
    scales = torch.zeros(experts, halves, blocks, scale.shape[-1], ROWS, dtype=scale.dtype, device=device)
    for start in range(0, experts, _STACK):
        which = slice(start, start + _STACK)
        words[which] = _plane_words(_codes(codec, packed[which]).unflatten(1, (halves, rows)), bits)
        scales[which] = _blocked(scale[which].unflatten(1, (halves, rows))).transpose(-1, -2)
    return Planes(words, scales, unit, lut, bits, group, rows, cols)


def repack_nibbles(halves: Sequence[Tensor], cols: int) -> Planes:
    """Q4_0 blocks uint8 [E, rows, cols / 32 * 18], one stack (down) or two (gate and up), -> Planes of 4 bits. Raises LabError where they differ in shape."""
    experts, rows, width = halves[0].shape
    fits = cols % CHUNK == 0 and width * CHUNK == cols * _BLOCK_BYTES and all(half.shape == halves[0].shape for half in halves)
    require(fits, NIBBLES, f"stacks {[list(half.shape) for half in halves]} are not equal ones of blocks of {cols} columns")
    blocks, chunks, device = -(-rows // ROWS), cols // CHUNK, halves[0].device
    words = torch.empty(experts, len(halves), blocks, 4, chunks, ROWS, dtype=torch.int32, device=device)
    scales = torch.empty(experts, len(halves), blocks, chunks, ROWS, dtype=torch.float16, device=device)
    for number, half in enumerate(halves):
        for start in range(0, experts, _STACK):
            which = slice(start, start + _STACK)
            raw = half[which].unflatten(-1, (chunks, _BLOCK_BYTES))
            scales[which, number] = _blocked(raw[..., :2].contiguous().view(torch.float16).squeeze(-1)).transpose(-1, -2)
            words[which, number] = _nibble_words(raw[..., 2:])
    return Planes(words, scales, torch.full((experts,), 8.0, device=device), 0, 4, CHUNK, rows, cols)


def _numbers(codec: Codec, cols: int) -> tuple[int, int, int, float]:
    """(bits, weights per scale, level table, what a scale of 1 stands for)."""
    if isinstance(codec, Int8G128):
        return 8, codec.group, 0, 128.0
    assert isinstance(codec, W3Levels | Q2Levels | Q2G32)
    lut, factor = level_table(codec.levels)
    return (3, codec.group, lut, factor / codec.divisor) if isinstance(codec, W3Levels) else (2, codec.group or cols, lut, factor)


def _codes(codec: Codec, packed: Tensor) -> Tensor:
    """Canonical storage [..., n] -> code numbers uint8 [..., weights]; int8 biased by 128."""
    numbers = tuple(float(i) for i in range(8))
    if isinstance(codec, Int8G128):
        return packed.view(torch.uint8) ^ 0x80
    wide = unpack3(packed, numbers, codec.options["code_order"]) if isinstance(codec, W3Levels) else unpack2(packed, numbers[:4])
    return wide.to(torch.uint8)


def _blocked(rows: Tensor) -> Tensor:
    """[..., rows, n] -> [..., blocks, 16, n], zero rows at the end."""
    return torch.nn.functional.pad(rows, (0, 0, 0, -rows.shape[-2] % ROWS)).unflatten(-2, (-1, ROWS))


def _plane_words(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [..., rows, cols] -> int32 [..., blocks, bits, chunks, 16]."""
    chunks = _blocked(codes).unflatten(-1, (-1, CHUNK))  # [..., blocks, 16, chunks, 32]
    if bits == 8:
        words = chunks.contiguous().view(torch.int32)  # [..., blocks, 16, chunks, 8]
        return words.movedim(-1, -3).transpose(-1, -2)
    wide = chunks.to(torch.int64)
    low, high = zip(*(code_bits(i) for i in range(CHUNK)), strict=True)
    planes = [_sum([(wide[..., i] & 3) << low[i] for i in range(half, half + 16)]) for half in (0, 16)]
    if bits == 3:
        planes.append(_sum([(wide[..., i] >> 2) << high[i] for i in range(CHUNK)]))
    words = torch.stack(planes, dim=-3)  # [..., blocks, bits, 16, chunks]
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).transpose(-1, -2)


def _nibble_words(packed: Tensor) -> Tensor:
    """Q4_0's 16 bytes of a block, uint8 [..., rows, chunks, 16], the first 16 codes in the low halves -> int32 [..., blocks, 4, chunks, 16]."""
    codes = torch.cat([packed & 15, packed >> 4], -1).unflatten(-1, (4, 8))
    order = torch.tensor([i for _, i in sorted((nibble_bit(i), i) for i in range(8))], device=packed.device)  # from the lowest bits up
    ordered = codes[..., order]
    words = (ordered[..., 0::2] | (ordered[..., 1::2] << 4)).contiguous().view(torch.int32).flatten(-3)  # [..., rows, chunks * 4]
    return _blocked(words).unflatten(-1, (-1, 4)).movedim(-1, -3).transpose(-1, -2)


def _sum(terms: list[Tensor]) -> Tensor:
    return torch.stack(terms).sum(0)


def code_bits(position: int) -> tuple[int, int]:
    """Where code `position` (0..31) of a chunk lies: (first bit in its low word `position // 16`, bit in the high word).

    Pair j = position // 2 multiplies activations 2j and 2j + 1. Its word j // 8 is read in two steps s (shift by 2 s), each giving eight selector nibbles in
    two halves of 16 bits; a permute turns a half's four nibbles into four bytes, of which (0, 2) and (1, 3) become the two pairs of that half.
    """
    pair, second = divmod(position, 2)
    word, rest = divmod(pair, 8)
    step, rest = divmod(rest, 4)
    half, odd = divmod(rest, 2)
    nibble = 4 * half + odd + 2 * second
    return 4 * nibble + 2 * step, 4 * nibble + 2 * word + step


def nibble_bit(position: int) -> int:
    """First bit of code `position` (0..31) of a chunk in its word `position // 8` at 4 bits: the two codes of a pair are 16 bits apart."""
    pair, second = divmod(position % 8, 2)
    return 4 * pair + 16 * second


def unpack_planes(planes: Planes) -> Tensor:
    """Planes -> float32 weights [E, halves * rows, cols]: the reference of the kernels' decode, one code at a time."""
    words = planes.words.to(torch.int64) & 0xFFFFFFFF  # [E, halves, blocks, bits, chunks, 16]
    levels = torch.stack([_level(planes, words, position) for position in range(CHUNK)], dim=-2).flatten(-3, -2)  # [..., blocks, cols, 16]
    scale = planes.scale.view(torch.float8_e4m3fn) if planes.scale.dtype == torch.uint8 else planes.scale
    wide = scale.to(torch.float32).repeat_interleave(planes.group, dim=-2)[..., : planes.cols, :]
    weight = levels * wide * planes.unit.view(-1, 1, 1, 1, 1)
    return weight.transpose(-1, -2).flatten(2, 3)[:, :, : planes.rows].flatten(1, 2)


def _level(planes: Planes, words: Tensor, position: int) -> Tensor:
    """float32 level of one chunk position, [E, halves, blocks, chunks, 16]."""
    if planes.bits == 8:
        return (((words[..., position // 4, :, :] >> (8 * (position % 4))) & 255) - 128).to(torch.float32) / 128
    if planes.bits == 4:
        return (((words[..., position // 8, :, :] >> nibble_bit(position)) & 15) - 8).to(torch.float32) / 8
    low, high = code_bits(position)
    code = (words[..., position // 16, :, :] >> low) & 3
    if planes.bits == 3:
        code = code | (((words[..., 2, :, :] >> high) & 1) << 2)
    table = torch.tensor([(planes.lut >> (8 * number)) & 255 for number in range(8)], dtype=torch.uint8, device=words.device)
    return table.view(torch.float8_e5m2).to(torch.float32)[code]
