"""Encoders of VQF's plain blocks: float32 rows to bytes, by the rules of Kestrel's converter so that its bytes come out, code by code.

Why not GGUF's encoders: the frames are those of Q8_0 and Q4_0, but the rounding is the writer's own: codes from the scale before it is rounded to
float16, ties away from zero, an embedding whose float16 is cut and not rounded. Facts: vqf_convert (quant_kernels.c), as put down in the project's notes on
VQF, section 1.5; their two golden blocks are in the tests.
What it does not prove: equality with a file of the converter on every input; no such file is public.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lab.codecs.base import divided
from lab.codecs.vqf_tiles import BLOCK

Encoder = Callable[[Tensor], Tensor]
"""float32 [n, cols], finite, cols a multiple of the codec's -> uint8 [n, bytes a row]."""

GROUP = 256
"""Weights that share a scale in G256."""

_LEAST_MAX = 1e-10  # the largest magnitude of a block counts as at least this, so that 1 / scale is finite
_LEAST_NORMAL_F16 = 2.0**-14


def f32(rows: Tensor) -> Tensor:
    """As it is."""
    return rows.contiguous().view(torch.uint8)


def f16_cut(rows: Tensor) -> Tensor:
    """float16 with the mantissa cut off and subnormals as signed zeros. Magnitudes from 65536 become infinite and are the caller's to refuse."""
    bits = rows.contiguous().view(torch.int32)
    cut = (bits & ~0x1FFF).view(torch.float32)  # the 10 highest of 23 mantissa bits; exact in float16 from here on
    flushed = torch.where(cut.abs() < _LEAST_NORMAL_F16, torch.copysign(torch.zeros_like(cut), cut), cut)
    return flushed.to(torch.float16).view(torch.uint8)


def q8_0(rows: Tensor) -> Tensor:
    """34 bytes per 32: float16 d = max |w| / 127, int8 codes from the d that is not rounded yet."""
    return _signed_frames(*_scaled(rows, BLOCK), rows.shape[0])


def g256(rows: Tensor) -> Tensor:
    """The frames of `q8_0` with one scale per 256 weights, repeated in each of its eight frames."""
    return _signed_frames(*_scaled(rows, GROUP), rows.shape[0])


def q4_0(rows: Tensor) -> Tensor:
    """18 bytes per 32: float16 d, then byte j holds the codes of weight j (low) and weight 16 + j (high); a weight is (code - 8) d."""
    codes, scale = _four_bit(rows)
    half = BLOCK // 2
    return torch.cat((_f16(scale), codes[:, :half] | (codes[:, half:] << 4)), dim=1).view(rows.shape[0], -1)


def q4i(rows: Tensor) -> Tensor:
    """The codes of `q4_0`, less 8, as int8 in the frames of `q8_0`."""
    codes, scale = _four_bit(rows)
    return _signed_frames(codes.view(torch.int8) - 8, scale, rows.shape[0])


def _scaled(rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """(int8 codes [blocks, 32], float32 scales [blocks, 1]) with one scale per `group` weights."""
    groups = rows.reshape(-1, group)
    scale = divided(groups.abs().amax(dim=1, keepdim=True).clamp_min(_LEAST_MAX), 127)
    codes = _rounded(groups * (1 / scale)).clamp_(-127, 127).to(torch.int8)
    return codes.view(-1, BLOCK), scale.repeat_interleave(group // BLOCK, dim=0)


def _four_bit(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(uint8 codes 0..15 [blocks, 32], float32 scales [blocks, 1]). The element of largest magnitude, the first of equals, becomes code 0."""
    blocks = rows.reshape(-1, BLOCK)
    size = blocks.abs()
    place = torch.arange(BLOCK, device=rows.device)
    first = torch.where(size == size.amax(dim=1, keepdim=True), place, BLOCK).amin(dim=1, keepdim=True)
    scale = blocks.gather(1, first) / -8
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    shifted = torch.nan_to_num(blocks * (1 / scale), nan=0.0) + 8.5  # NaN: 0 times the infinite inverse of a scale below 2**-128
    return shifted.clamp_(0, 15).to(torch.uint8), scale


def _rounded(values: Tensor) -> Tensor:
    """Nearest integers, halves away from zero, exactly: adding 0.5 first would round 0.49999997 up."""
    whole = values.trunc()
    return torch.where((values - whole).abs() >= 0.5, whole + values.sign(), whole)


def _signed_frames(codes: Tensor, scale: Tensor, rows: int) -> Tensor:
    return torch.cat((_f16(scale), codes.view(torch.uint8)), dim=1).view(rows, -1)


def _f16(scale: Tensor) -> Tensor:
    """Scales are rounded to nearest even and may be subnormal."""
    return scale.to(torch.float16).view(torch.uint8)


ENCODERS: dict[str, Encoder] = {"F32": f32, "F16": f16_cut, "Q8_0": q8_0, "G256": g256, "Q4_0": q4_0, "Q4I": q4i}
"""By the name of the plain type."""


def encoded(plain: str, rows: Tensor) -> Tensor:
    """float32 [n, cols], finite -> uint8 [n, bytes a row] of the plain type: natively where that is there, which gives the same bytes, else by ENCODERS."""
    from lab.kernels.native import vqf as native  # here, because the kernels' package imports this one

    found = native.encode(plain, rows)
    return ENCODERS[plain](rows) if found is None else found
