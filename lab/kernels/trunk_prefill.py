"""An int8_g128 matrix decoded to 16 bits where a prompt's product with the vendor's library needs it beside other rows.

Why apart from lab.kernels.trunk: that decodes for one product of its own; the mixer's narrow projection shares its product with the injection weights, so the
matrix is decoded into the first rows of a larger one. What it does not prove: that decoding per call beats a product that decodes on the way.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.backend import jit, require
from lab.kernels.planes import CHUNK, Planes


@jit
def _decode_kernel(
    words_ptr: tl.tensor, scale_ptr: tl.tensor, unit_ptr: tl.tensor, out_ptr: tl.tensor, rows: tl.tensor, blocks: tl.tensor,
    CHUNKS: tl.constexpr, GROUP_CHUNKS: tl.constexpr, N: tl.constexpr,
) -> None:  # fmt: skip
    """Program (rows, four chunks): N rows of 128 decoded weights."""
    row = tl.program_id(0) * N + tl.arange(0, N)
    first = tl.program_id(1) * 4
    word = tl.arange(0, 32)  # 4 chunks x 8 planes of 4 columns
    chunk = first + word // 8
    inside = (row // 16 < blocks)[:, None] & (chunk < CHUNKS)[None, :]
    here = (row // 16).to(tl.int64) * (8 * CHUNKS * 16) + row % 16
    packed = tl.load(words_ptr + here[:, None] + ((word % 8) * (CHUNKS * 16) + chunk * 16)[None, :], mask=inside, other=0)
    groups: tl.constexpr = (CHUNKS + GROUP_CHUNKS - 1) // GROUP_CHUNKS
    scale = tl.load(scale_ptr + ((row // 16) * (groups * 16) + row % 16)[:, None] + (chunk // GROUP_CHUNKS * 16)[None, :], mask=inside, other=0)
    factor = scale.to(tl.float32) * (tl.load(unit_ptr) * 0.0078125)
    # A byte under the exponent of 2^23 is the float 2^23 + byte: no conversion.
    w0 = ((packed & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    w1 = (((packed >> 8) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    w2 = (((packed >> 16) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    w3 = (((packed >> 24) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    value = tl.join(tl.join(w0 * factor, w2 * factor), tl.join(w1 * factor, w3 * factor)).reshape([N, 128])
    column = first * 32 + tl.arange(0, 128)
    where = out_ptr + row[:, None].to(tl.int64) * (CHUNKS * 32) + column[None, :]
    tl.store(where, value.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (column < CHUNKS * 32)[None, :])


def decode_into(planes: Planes, out: Tensor) -> None:
    """Decodes an 8-bit matrix into the first rows of `out` [at least rows, cols], contiguous, 16 or 32 bits. Raises LabError where they do not fit."""
    fits = planes.bits == 8 and len(planes.words) == 1 and planes.halves == 1 and out.is_contiguous() and out.shape[1] == planes.cols
    require(fits and len(out) >= planes.rows, "trunk prefill", f"out is {list(out.shape)}")
    chunks = planes.cols // CHUNK
    _decode_kernel[(triton.cdiv(planes.rows, 32), triton.cdiv(chunks, 4))](
        planes.words, planes.scale, planes.unit, out, planes.rows, planes.words.shape[2], chunks, planes.group // CHUNK, 32, num_warps=4
    )
