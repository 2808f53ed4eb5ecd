"""The projections of a hyper-connection mixer with bfloat16 weights as released, in two launches of one decode step: narrow, then wide with the mix.

Why: through the vendor's products a mixer was nine launches, of which a sum over split columns, a sigmoid, two products and a mean read and wrote vectors of
10,240 numbers; every launch also leaves a gap of a microsecond in a captured step. Each program holds its weights in registers before it waits for the kernel
ahead, as those of lab.kernels.hyper_step do for 8 bits. Sums are float32 and in a fixed order. Definition: lab.models.qwen4_exp.hyper.
What it does not prove: speed beyond a few tokens, each of which reads the weights anew.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.backend import jit, launch_options, require, require_gpu, use_ptx, wait_for_inputs

_ROWS, _STEP = 8, 512
"""Rows of the narrow projection in one program, and columns of one tile."""
_PLACES = 16
"""Of the hidden vector, in one program of the wide projection."""


@jit
def _narrow_kernel(
    normed_ptr: tl.tensor, weight_ptr: tl.tensor, part_ptr: tl.tensor,
    COUNT: tl.constexpr, HIDDEN: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (ROWS rows, stream, token): the stream's share of the rows' products, part [tokens, COUNT, RANK]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    stream, token = tl.program_id(1), tl.program_id(2)
    STEPS: tl.constexpr = (HIDDEN + STEP - 1) // STEP
    column = tl.arange(0, STEP)
    line = row[:, None] * (COUNT * HIDDEN) + stream * HIDDEN
    held = ()
    for s in tl.static_range(STEPS):
        at = s * STEP + column[None, :]
        held = held + (tl.load(weight_ptr + line + at, mask=(row < RANK)[:, None] & (at < HIDDEN), other=0),)  # type: ignore[assignment]  # noqa: RUF005
    wait_for_inputs(PTX)
    total = tl.zeros([ROWS, STEP], dtype=tl.float32)
    for s in tl.static_range(STEPS):
        at = s * STEP + column[None, :] + tl.zeros([ROWS, 1], dtype=tl.int32)  # a tile of equal rows: a vector would pass through shared memory
        total += held[s].to(tl.float32) * tl.load(normed_ptr + (token * COUNT + stream) * HIDDEN + at, mask=at < HIDDEN, other=0).to(tl.float32)
    tl.store(part_ptr + (token * COUNT + stream) * RANK + row, tl.sum(total, axis=1), mask=row < RANK)


@jit
def _wide_kernel(
    part_ptr: tl.tensor, normed_ptr: tl.tensor, weight_ptr: tl.tensor, out_ptr: tl.tensor,
    COUNT: tl.constexpr, HIDDEN: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, PLACES: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (PLACES places, token): their rows of every stream, then the mean of sigmoid(row . silu(sum of parts / COUNT)) * normed, out [tokens, HIDDEN]."""
    place = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    token = tl.program_id(1)
    lane = tl.arange(0, WIDTH)
    inside = (place < HIDDEN)[:, None] & (lane < RANK)[None, :]
    held = ()
    for c in tl.static_range(COUNT):
        row = (c * HIDDEN + place)[:, None] * RANK
        held = held + (tl.load(weight_ptr + row + lane[None, :], mask=inside, other=0),)  # type: ignore[assignment]  # noqa: RUF005
    wait_for_inputs(PTX)
    u = tl.zeros([WIDTH], dtype=tl.float32)
    for c in tl.static_range(COUNT):
        u += tl.load(part_ptr + (token * COUNT + c) * RANK + lane, mask=lane < RANK, other=0)
    u = u / COUNT
    u = u / (1.0 + tl.exp(-u))
    mixed = tl.zeros([PLACES], dtype=tl.float32)
    for c in tl.static_range(COUNT):
        amount = tl.sum(held[c].to(tl.float32) * u[None, :], axis=1)
        normed = tl.load(normed_ptr + (token * COUNT + c) * HIDDEN + place, mask=place < HIDDEN, other=0).to(tl.float32)
        mixed += normed / (1.0 + tl.exp(-amount))
    tl.store(out_ptr + token * HIDDEN + place, (mixed / COUNT).to(out_ptr.dtype.element_ty), mask=place < HIDDEN)


def mix_streams(normed: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """normed [B, C, H]; down [rank, C * H] and up [C * H, rank] 16-bit -> x [B, H] in normed's dtype: mean over streams of
    sigmoid(up(silu(down(normed) / C))) * normed. Raises LabError for shapes that do not fit, or weights that are not contiguous."""
    batch, count, hidden = normed.shape
    rank = len(down)
    fits = down.shape == (rank, count * hidden) and up.shape == (count * hidden, rank) and normed.is_contiguous()
    require(fits and down.is_contiguous() and up.is_contiguous(), "hyper bf16", f"normed {list(normed.shape)}, down {list(down.shape)}, up {list(up.shape)}")
    require_gpu("hyper bf16", normed, down, up)
    part = torch.empty(batch, count, rank, dtype=torch.float32, device=normed.device)
    out = torch.empty(batch, hidden, dtype=normed.dtype, device=normed.device)
    step = min(_STEP, triton.next_power_of_2(hidden))
    _narrow_kernel[(triton.cdiv(rank, _ROWS), count, batch)](
        normed, down, part, count, hidden, rank, _ROWS, step, use_ptx(), num_warps=8, **launch_options()
    )  # fmt: skip
    _wide_kernel[(triton.cdiv(hidden, _PLACES), batch)](
        part, normed, up, out, count, hidden, rank, triton.next_power_of_2(rank), _PLACES, use_ptx(), num_warps=4, **launch_options()
    )
    return out
