"""int8 projections of a chained decode step: with small 16-bit rows of the same input beside them, or with the result written back to the streams.

Why: at one token a projection waits longer than it computes. Here every program asks for its weights before the kernel ahead has ended, activations come
in quad order (lab.kernels.quads), and what would be launches of its own rides along: decay and gate rows, the indexer, the write-back of a block's output
with what the next mixer's norm needs. What it does not prove: speed beyond 8 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.backend import chain_ptx, inputs_ready, jit, launch_options, let_next_start, require, require_gpu, use_ptx
from lab.kernels.mixer_step import Streams
from lab.kernels.planes import CHUNK, ROWS, Planes
from lab.kernels.quads import ask, norms_of, products, small_rows, streams_at, write_back

_SMALL_ROWS = 2


@dataclass(frozen=True)
class Shape:
    """How a projection is cut: rows per program, chunks per step, steps held before the wait, warps, and registers per thread at most (0: any)."""

    rows: int
    step: int
    held: int
    warps: int
    registers: int = 0

    def options(self) -> dict[str, int]:
        """Launch keywords."""
        return {"num_warps": self.warps} | ({"maxnreg": self.registers} if self.registers and use_ptx() else {})


def shape_for(rows: int, chunks: int, tokens: int) -> Shape:
    """Launch shapes for the H200; what was measured is in experiments/kernel_log.md. Registers are bounded where more would halve the programs in flight."""
    few = rows <= 4096
    step = min(64 if few else 16, triton.next_power_of_2(chunks))
    steps = triton.cdiv(chunks, step)
    if few:
        return Shape(8, step, min(3 if tokens <= 2 else 1, steps), max(1, step * 8 // 128), 0 if tokens <= 2 else 128)
    return Shape(16, step, min(2 if tokens <= 2 else 1, steps), max(1, step * 16 // 128), 0 if tokens <= 2 else 168)


@jit
def _project_kernel(
    x_ptr: tl.tensor, words_ptr: tl.tensor, scale_ptr: tl.tensor, unit_ptr: tl.tensor, out_ptr: tl.tensor, rows: tl.tensor,
    natural_ptr: tl.tensor, small_ptr: tl.tensor, small_out_ptr: tl.tensor, small: tl.tensor,
    M: tl.constexpr, CHUNKS: tl.constexpr, GROUP_CHUNKS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, HELD: tl.constexpr,
    SMALL_PROGRAMS: tl.constexpr, SMALL_ROWS: tl.constexpr, SMALL_STEP: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """The first programs: SMALL_ROWS small rows each; then ROWS rows of the projection each, out [M, rows]."""
    let_next_start(PTX)
    program = tl.program_id(0)
    if SMALL_PROGRAMS > 0 and program < SMALL_PROGRAMS:
        small_rows(natural_ptr, small_ptr, small_out_ptr, program * SMALL_ROWS, small, M, CHUNKS * 32, SMALL_ROWS, SMALL_STEP, PTX)
    else:
        first = (program - SMALL_PROGRAMS) * ROWS
        unit = tl.load(unit_ptr)
        held = ask(words_ptr, scale_ptr, first, CHUNKS, GROUP_CHUNKS, ROWS, STEP, 0, HELD)
        inputs_ready(PTX)
        found = products(held, x_ptr, words_ptr, scale_ptr, first, M, CHUNKS, GROUP_CHUNKS, ROWS, STEP, HELD, PTX)
        row = first + tl.arange(0, ROWS)
        for m in tl.static_range(M):
            tl.store(out_ptr + m * rows + row, (found[m] * unit).to(out_ptr.dtype.element_ty), mask=row < rows)


@jit
def _back_kernel(
    x_ptr: tl.tensor, words_ptr: tl.tensor, scale_ptr: tl.tensor, unit_ptr: tl.tensor, norm_ptr: tl.tensor,
    streams_ptr: tl.tensor, given_ptr: tl.tensor, scaled_ptr: tl.tensor, square_ptr: tl.tensor,
    M: tl.constexpr, CHUNKS: tl.constexpr, GROUP_CHUNKS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, HELD: tl.constexpr,
    COUNT: tl.constexpr, HIDDEN: tl.constexpr, PARTS: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (ROWS places): that part of the block's output, written back to the streams."""
    let_next_start(PTX)
    first = tl.program_id(0) * ROWS
    place = first + tl.arange(0, ROWS)
    norms = norms_of(norm_ptr, place, COUNT, HIDDEN)
    unit = tl.load(unit_ptr)
    held = ask(words_ptr, scale_ptr, first, CHUNKS, GROUP_CHUNKS, ROWS, STEP, 0, HELD)
    inputs_ready(PTX)
    known = streams_at(streams_ptr, given_ptr, place, M, 0, COUNT, HIDDEN)
    found = products(held, x_ptr, words_ptr, scale_ptr, first, M, CHUNKS, GROUP_CHUNKS, ROWS, STEP, HELD, PTX)
    for m in tl.static_range(M):
        value, gate = known[2 * m], known[2 * m + 1]
        write_back(found[m] * unit, value, gate, norms, m, place, tl.program_id(0), streams_ptr, scaled_ptr, square_ptr, COUNT, HIDDEN, PARTS)


def refused(planes: Planes) -> str | None:
    """Why a matrix cannot be projected here, or None."""
    fits = planes.bits == 8 and len(planes.words) == 1 and planes.halves == 1 and planes.cols % CHUNK == 0
    return None if fits else f"project step: needs one int8_g128 matrix with a multiple of {CHUNK} columns"


def project(quads: Tensor, planes: Planes, dtype: torch.dtype, small: tuple[Tensor, Tensor] | None = None, shape: Shape | None = None) -> tuple[Tensor, Tensor]:
    """quads float16 [B, in] in quad order; `small`: (the same natural [B, in], a 16-bit matrix [n, in]) -> ([B, out] in `dtype`, [B, n] in x's dtype).
    Raises LabError on widths that do not fit."""
    batch = len(quads)
    require(quads.shape == (batch, planes.cols) and quads.dtype == torch.float16 and quads.is_contiguous(), "project step", f"quads {list(quads.shape)}")
    require_gpu("project step", quads, planes.words)
    chunks = planes.cols // CHUNK
    shape = shape or shape_for(planes.rows, chunks, batch)
    natural, weight = small or (quads, quads)
    count = 0 if small is None else len(weight)
    require(weight.shape[-1] == planes.cols and weight.is_contiguous() and natural.is_contiguous(), "project step", f"small rows {list(weight.shape)}")
    out = torch.empty(batch, planes.rows, dtype=dtype, device=quads.device)
    beside = torch.empty(batch, count, dtype=natural.dtype, device=quads.device)
    programs = triton.cdiv(count, _SMALL_ROWS)
    step = min(32 * 8 * shape.warps, triton.next_power_of_2(planes.cols))
    _project_kernel[(programs + planes.words.shape[2] * ROWS // shape.rows,)](
        quads.view(torch.int64), planes.words, planes.scale, planes.unit, out, planes.rows, natural, weight, beside, count,
        batch, chunks, planes.group // CHUNK, shape.rows, shape.step, shape.held, programs, _SMALL_ROWS, step, chain_ptx(),
        **shape.options(), **launch_options(),
    )  # fmt: skip
    return out, beside


def project_back(quads: Tensor, planes: Planes, streams: Streams, given: Tensor, norm: Tensor, shape: Shape | None = None) -> Streams:
    """The projection [H, in] of quads float16 [B, in], in quad order, written back to the streams in place with the injection logits `given` [B, C], ready
    for the mixer with `norm` float32 [C * H]. Raises LabError on widths that do not fit."""
    batch, count, hidden = streams.raw.shape
    require(quads.shape == (batch, planes.cols) and quads.dtype == torch.float16 and quads.is_contiguous(), "project step", f"quads {list(quads.shape)}")
    require(planes.rows == hidden, "project step", f"{planes.rows} rows for streams of {hidden}")
    require_gpu("project step", quads, planes.words)
    chunks = planes.cols // CHUNK
    shape = shape or shape_for(planes.rows, chunks, batch)
    parts = planes.words.shape[2] * ROWS // shape.rows
    square = torch.empty(batch, count, parts, dtype=torch.float32, device=quads.device)
    _back_kernel[(parts,)](
        quads.view(torch.int64), planes.words, planes.scale, planes.unit, norm, streams.raw, given, streams.scaled, square,
        batch, chunks, planes.group // CHUNK, shape.rows, shape.step, shape.held, count, hidden, parts, chain_ptx(),
        **shape.options(), **launch_options(),
    )  # fmt: skip
    return Streams(streams.raw, streams.scaled, square)
