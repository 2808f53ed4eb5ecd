"""Routed experts at decode with bfloat16 weights as released: the reference path's kernel, slots and reduction as in lab.kernels.experts.

Why apart: 16 bits a weight leave four instructions for every byte-pair, so plain Triton on the canonical order is near memory speed and nothing is
repacked. What it does not prove: anything about few bits, where instructions and not bytes are the limit.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from lab.kernels.backend import jit, require, require_gpu, silu_mul


@jit
def _gate_up_kernel(
    x_ptr: tl.tensor, ids_ptr: tl.tensor, weight_ptr: tl.tensor, out_ptr: tl.tensor,
    TOPK: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row block, slot): ROWS gate and up rows of the slot's expert -> silu(gate) * up. Expert -1 writes zeros."""
    slot = tl.program_id(1)
    expert = tl.load(ids_ptr + slot).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    gate = tl.zeros([ROWS, STEP], dtype=tl.float32)
    up = tl.zeros([ROWS, STEP], dtype=tl.float32)
    first = weight_ptr + tl.maximum(expert, 0) * (2 * WIDTH * COLUMNS) + row[:, None] * COLUMNS
    used = row < tl.where(expert >= 0, WIDTH, 0)
    same = tl.zeros([ROWS, 1], dtype=tl.int32)
    for start in range(0, COLUMNS, STEP):
        column = start + tl.arange(0, STEP)
        mask = used[:, None] & (column < COLUMNS)[None, :]
        # As a tile, every row the same: a vector would pass through shared memory, with barriers in every turn of the loop.
        x = tl.load(x_ptr + (slot // TOPK) * COLUMNS + column[None, :] + same, mask=mask, other=0).to(tl.float32)
        gate += tl.load(first + column[None, :], mask=mask, other=0).to(tl.float32) * x
        up += tl.load(first + (WIDTH * COLUMNS) + column[None, :], mask=mask, other=0).to(tl.float32) * x
    tl.store(out_ptr + slot * WIDTH + row, silu_mul(tl.sum(gate, axis=1), tl.sum(up, axis=1)), mask=row < WIDTH)


@jit
def _down_kernel(
    h_ptr: tl.tensor, ids_ptr: tl.tensor, weights_ptr: tl.tensor, weight_ptr: tl.tensor, out_ptr: tl.tensor,
    TOPK: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row block, token): ROWS outputs summed over the token's slots in order."""
    token = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS, STEP], dtype=tl.float32)
    same = tl.zeros([ROWS, 1], dtype=tl.int32)
    for place in tl.static_range(TOPK):  # unrolled, so that one slot's weights are asked for while another's are on their way
        slot = token * TOPK + place
        expert = tl.load(ids_ptr + slot).to(tl.int64)
        share = tl.load(weights_ptr + slot).to(tl.float32)
        first = weight_ptr + tl.maximum(expert, 0) * (WIDTH * COLUMNS) + row[:, None] * COLUMNS
        used = row < tl.where(expert >= 0, WIDTH, 0)
        for start in tl.static_range(0, COLUMNS, STEP):
            column = start + tl.arange(0, STEP)
            mask = used[:, None] & (column < COLUMNS)[None, :]
            h = tl.load(h_ptr + slot * COLUMNS + column[None, :] + same, mask=mask, other=0)
            total += tl.load(first + column[None, :], mask=mask, other=0).to(tl.float32) * (h * share)
    tl.store(out_ptr + token * WIDTH + row, tl.sum(total, axis=1).to(out_ptr.dtype.element_ty), mask=row < WIDTH)


class Bf16Experts:
    """The routed experts of one layer from stacks gate_up [E, 2 width, hidden] (gate rows first) and down [E, hidden, width], bfloat16."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        """Raises LabError where the stacks do not belong together or are not contiguous bfloat16."""
        fits = gate_up.ndim == down.ndim == 3 and gate_up.shape == (len(down), 2 * down.shape[2], down.shape[1])
        require(fits, "experts bf16", f"gate_up {list(gate_up.shape)} and down {list(down.shape)} do not fit")
        for stack in (gate_up, down):
            require(stack.dtype == torch.bfloat16 and stack.is_contiguous(), "experts bf16", f"needs contiguous bfloat16, not {stack.dtype}")
        self.gate_up_weight, self.down_weight = gate_up, down

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden], ids integer [T, k] (-1: no expert), weights [T, k] -> weighted sum over the slots, [T, hidden] in x's dtype."""
        return self.down(self.gate_up(x, ids), ids, weights, x.dtype)

    def gate_up(self, x: Tensor, ids: Tensor) -> Tensor:
        """x [T, hidden], ids [T, k] -> silu(gate) * up as float32 [T, k, width]. Raises LabError on shapes that do not fit."""
        _, rows, hidden = self.gate_up_weight.shape
        require(x.ndim == 2 and x.shape[1] == hidden and ids.ndim == 2 and len(ids) == len(x), "experts bf16", f"x {list(x.shape)} or ids {list(ids.shape)}")
        require_gpu("experts bf16", x, ids, self.gate_up_weight)
        out = torch.empty(*ids.shape, rows // 2, dtype=torch.float32, device=x.device)
        grid = (-(-rows // 2 // 8), ids.numel())
        _gate_up_kernel[grid](x.contiguous(), ids.contiguous(), self.gate_up_weight, out, ids.shape[1], rows // 2, hidden, 8, 256, num_warps=4)
        return out

    def down(self, h: Tensor, ids: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """h float32 [T, k, width], ids and weights [T, k] -> sum over k of weight * (down h), [T, hidden] in `dtype`. Raises LabError as `gate_up`."""
        _, rows, width = self.down_weight.shape
        require(h.shape == (*ids.shape, width) and weights.shape == ids.shape, "experts bf16", f"h {list(h.shape)} or weights {list(weights.shape)}")
        require_gpu("experts bf16", h, ids, weights, self.down_weight)
        out = torch.empty(len(h), rows, dtype=dtype, device=h.device)
        grid = (-(-rows // 8), len(h))
        _down_kernel[grid](h.contiguous(), ids.contiguous(), weights.contiguous(), self.down_weight, out, ids.shape[1], rows, width, 8, 128, num_warps=2)
        return out
