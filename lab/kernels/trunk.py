"""y = x W^T with 8-bit weights (int8_g128) from one repacked copy: inner products for a few tokens, a matrix-unit kernel for more, decoding for many.

Why three: at 1 to 8 tokens what counts is bytes in flight, so each program takes some rows whole; above, the weights are the left operand of `tl.dot` and
the tokens the right one, with each group's scale applied to the sum of its 128 exact products; for a prompt, decoding the matrix once to 16 bits and
calling the vendor's library wins, because the product then costs more than the extra pass. What it does not prove: 8-bit activations (W8A8).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from lab.kernels.backend import interpreted, jit, launch_options, require, require_gpu, use_ptx, wait_for_inputs
from lab.kernels.chunk import chunk_dot, group_scale, load_words
from lab.kernels.planes import CHUNK, ROWS, Planes

GEMV_TOKENS, TILE_TOKENS = 8, 64
"""Up to how many tokens the first and the second kernel are used; from the measurements in experiments/kernel_log.md."""
MANY_ROWS = 4096
"""More rows than this give every multiprocessor of an H200 several programs; fewer need their columns spread over more warps."""
GemvShape = tuple[int, int, int, int, int]
"""(rows per program, chunks per step, steps unrolled, steps that words are asked for ahead: 0 or 1, warps)."""
TileShape = tuple[int, int, int, int]
"""(rows per tile, tokens per tile, warps, pipeline stages)."""


@jit
def _gemv_kernel(
    x_ptr: tl.tensor, words_ptr: tl.tensor, scale_ptr: tl.tensor, unit_ptr: tl.tensor, out_ptr: tl.tensor, rows: tl.tensor, blocks: tl.tensor,
    M: tl.constexpr, CHUNKS: tl.constexpr, GROUP_CHUNKS: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, UNROLL: tl.constexpr, AHEAD: tl.constexpr, PTX: tl.constexpr, BF16: tl.constexpr,
) -> None:  # fmt: skip
    """Program (rows): ROWS rows for all M tokens, out [M, rows]."""
    wait_for_inputs(PTX)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = (row // 16).to(tl.int64)
    plane: tl.constexpr = CHUNKS * 16
    groups: tl.constexpr = (CHUNKS + GROUP_CHUNKS - 1) // GROUP_CHUNKS
    words_row = words_ptr + (block * (8 * plane) + row % 16)[None, :]
    scale_row = scale_ptr + (block * (groups * 16) + row % 16)[None, :]
    used = (row // 16 < blocks)[None, :]
    chunk = tl.arange(0, STEP)[:, None]
    words = load_words(words_row + chunk * 16, plane, (chunk < CHUNKS) & used, 8)  # not used where AHEAD is 0, and then dropped by the compiler
    total = (tl.zeros([STEP, ROWS], dtype=tl.float32),) * M
    for start in tl.range(0, CHUNKS, STEP, loop_unroll_factor=UNROLL):
        chunk = (start + tl.arange(0, STEP))[:, None]
        inside = chunk < CHUNKS
        asked = chunk + STEP * AHEAD
        loaded = load_words(words_row + asked * 16, plane, (asked < CHUNKS) & used, 8)
        if AHEAD == 0:
            words = loaded
        scale = group_scale(scale_row + chunk // GROUP_CHUNKS * 16, inside & used)
        grown = (total[0] + scale * chunk_dot(words, x_ptr + chunk * 8, inside, 0, 0, 8, PTX, BF16),)
        for m in tl.static_range(1, M):
            part = chunk_dot(words, x_ptr + m * (CHUNKS * 8) + chunk * 8, inside, 0, 0, 8, PTX, BF16)
            grown = grown + (total[m] + scale * part,)  # type: ignore[assignment]  # noqa: RUF005 (unknown to Triton)
        total, words = grown, loaded
    unit = tl.load(unit_ptr)
    for m in tl.static_range(M):
        tl.store(out_ptr + m * rows + row, (tl.sum(total[m], axis=0) * unit).to(out_ptr.dtype.element_ty), mask=row < rows)


@jit
def _group_codes(words_ptr: tl.tensor, row: tl.tensor, group: tl.tensor, blocks: tl.tensor, CHUNKS: tl.constexpr, N: tl.constexpr) -> tl.tensor:
    """int8 [N, 128]: one scale group of the rows `row`; where the row or the columns end, anything."""
    word = tl.arange(0, 32)  # 4 chunks x 8 planes of 4 columns
    first = words_ptr + (row // 16).to(tl.int64) * (8 * CHUNKS * 16) + row % 16
    offset = (word % 8) * (CHUNKS * 16) + (group * 4 + word // 8) * 16
    # Whole blocks of 16 rows are stored; a mask per row would split the 16-byte loads.
    packed = tl.load(first[:, None] + offset[None, :], mask=(row // 16 < blocks)[:, None] & (group * 4 + word // 8 < CHUNKS)[None, :], other=0)
    even = tl.join(packed.to(tl.int8), (packed >> 16).to(tl.int8))
    odd = tl.join((packed >> 8).to(tl.int8), (packed >> 24).to(tl.int8))
    return tl.join(even, odd).reshape([N, 128]) ^ -128


@jit
def _group_scales(scale_ptr: tl.tensor, row: tl.tensor, group: tl.tensor, blocks: tl.tensor, GROUPS: tl.constexpr) -> tl.tensor:
    """float32 [rows]: the group's scales."""
    return tl.load(scale_ptr + (row // 16) * (GROUPS * 16) + group * 16 + row % 16, mask=row // 16 < blocks, other=0).to(tl.float32)


@jit
def _tile_kernel(
    x_ptr: tl.tensor, words_ptr: tl.tensor, scale_ptr: tl.tensor, unit_ptr: tl.tensor, out_ptr: tl.tensor,
    tokens: tl.tensor, rows: tl.tensor, blocks: tl.tensor,
    CHUNKS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, KIND: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row tile, token tile): [BLOCK_N, 128] weights x [128, BLOCK_M] tokens per scale group, out [tokens, rows]. KIND: dtype of the product."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    x_column = x_ptr + token[None, :].to(tl.int64) * (CHUNKS * 32)
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    for group in range(GROUPS):
        column = (group * 128 + tl.arange(0, 128))[:, None]
        x = tl.load(x_column + column, mask=(column < CHUNKS * 32) & (token < tokens)[None, :], other=0)
        codes = _group_codes(words_ptr, row, group, blocks, CHUNKS, BLOCK_N)
        total += tl.dot(codes.to(KIND), x.to(KIND)) * _group_scales(scale_ptr, row, group, blocks, GROUPS)[:, None]
    total *= tl.load(unit_ptr) * 0.0078125
    where = out_ptr + token[None, :].to(tl.int64) * rows + row[:, None]
    tl.store(where, total.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (token < tokens)[None, :])


@jit
def _decode_kernel(
    words_ptr: tl.tensor, scale_ptr: tl.tensor, unit_ptr: tl.tensor, out_ptr: tl.tensor, rows: tl.tensor, blocks: tl.tensor,
    CHUNKS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_N: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row tile, group): decoded weights, out [rows, columns]."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    group = tl.program_id(1)
    column = group * 128 + tl.arange(0, 128)
    scale = _group_scales(scale_ptr, row, group, blocks, GROUPS) * (tl.load(unit_ptr) * 0.0078125)
    value = _group_codes(words_ptr, row, group, blocks, CHUNKS, BLOCK_N).to(tl.float32) * scale[:, None]
    where = out_ptr + row[:, None].to(tl.int64) * (CHUNKS * 32) + column[None, :]
    tl.store(where, value.to(out_ptr.dtype.element_ty), mask=(row < rows)[:, None] & (column < CHUNKS * 32)[None, :])


class Int8Linear:
    """y = x W^T for a repacked int8_g128 matrix [out, in]."""

    def __init__(self, planes: Planes) -> None:
        """Raises LabError unless `planes` is one 8-bit matrix."""
        require(planes.bits == 8 and len(planes.words) == 1 and planes.halves == 1, "int8 trunk", "needs one int8_g128 matrix, repacked")
        self.planes = planes
        self.sizes = (planes.rows, planes.words.shape[2])

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] float16 or bfloat16 -> [..., out] in x's dtype. Raises LabError on another dtype or width."""
        require(x.shape[-1] == self.planes.cols and x.dtype in (torch.float16, torch.bfloat16), "int8 trunk", f"x is {x.dtype} {list(x.shape)}")
        require_gpu("int8 trunk", x, self.planes.words)
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        if len(flat) <= GEMV_TOKENS:
            out = self.inner(flat)
        else:
            out = self.tiled(flat) if len(flat) <= TILE_TOKENS and self.planes.rows > MANY_ROWS else self.decoded(flat)
        return out.view(*x.shape[:-1], -1)

    def inner(self, x: Tensor, shape: GemvShape | None = None) -> Tensor:
        """x [M, in], M small -> [M, out] by inner products."""
        p = self.planes
        out = torch.empty(len(x), p.rows, dtype=x.dtype, device=x.device)
        shape = shape or gemv_shape(len(x), p.rows)
        overlap = launch_options() if len(x) <= 2 else {}  # longer kernels lose by it: 15.1 us against 13.5 at 4 tokens
        _gemv_kernel[(triton.cdiv(p.words.shape[2] * ROWS, shape[0]),)](
            x.view(torch.int64), p.words, p.scale, p.unit, out, *self.sizes,
            len(x), p.cols // CHUNK, p.group // CHUNK, *shape[:4], use_ptx(), x.dtype == torch.bfloat16, num_warps=shape[4], **overlap,
        )  # fmt: skip
        return out

    def tiled(self, x: Tensor, shape: TileShape | None = None) -> Tensor:
        """x [M, in] -> [M, out] on the matrix units."""
        p = self.planes
        out = torch.empty(len(x), p.rows, dtype=x.dtype, device=x.device)
        block_n, block_m, warps, stages = shape or (32, min(64, max(16, triton.next_power_of_2(len(x)))), 2, 4)
        _tile_kernel[(triton.cdiv(p.rows, block_n), triton.cdiv(len(x), block_m))](
            x, p.words, p.scale, p.unit, out, len(x), *self.sizes, p.cols // CHUNK, p.scale.shape[3], block_n, block_m, _dot_kind(x.dtype),
            num_warps=warps, num_stages=stages,
        )  # fmt: skip
        return out

    def decoded(self, x: Tensor) -> Tensor:
        """x [M, in] -> [M, out] by decoding the matrix to x's dtype and the vendor's product."""
        p = self.planes
        weight = torch.empty(p.rows, p.cols, dtype=x.dtype, device=x.device)
        groups = p.scale.shape[3]
        _decode_kernel[(triton.cdiv(p.rows, 32), groups)](p.words, p.scale, p.unit, weight, *self.sizes, p.cols // CHUNK, groups, 32, num_warps=4)
        return linear(x, weight)


def gemv_shape(tokens: int, rows: int) -> GemvShape:
    """The launch shapes that won on H200. One token waits for its words alone; more compute long enough to hide the next ones."""
    if rows <= MANY_ROWS:
        return 8, 64, 2, int(tokens > 1), 4
    # A head's matrix, 15 times the others, streams best with words asked for ahead even for one token: 151 us, not 183.
    return (16, 32, 3, int(tokens > 1 or rows > 1 << 17), 4) if tokens <= 2 else (16, 16, 1, 0, 2)


def _dot_kind(dtype: torch.dtype) -> tl.dtype:
    """What `tl.dot` multiplies in: the activations' dtype; float32 in the interpreter, whose bfloat16 is wrong."""
    if interpreted():
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


def reference_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] times decoded float32 W [out, in] in float32: what every way is compared with."""
    return x.float() @ weight.T
