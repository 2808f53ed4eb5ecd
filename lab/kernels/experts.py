"""Routed experts at decode (a few tokens) with 2-, 3- and 4-bit weights: gate, up and SiLU in one kernel, down and the weighted sum in a second.

Why without sorting: at 1 to 8 tokens, 10 of 512 experts almost never coincide, so each (token, expert) slot is its own set of programs and nothing depends
on counts: both launches replay in a CUDA graph. A shared expert of the same codec may be one more expert with one more slot. The down kernel treats a
token's slots as one long row, so each output is summed in one program in a fixed order, without atomics.
What it does not prove: speed beyond 8 tokens, where slots share experts and a sorted tile kernel reads less.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor
from torch.nn.functional import silu

from lab.kernels.backend import jit, launch_options, require, require_gpu, silu_mul, use_ptx, wait_for_inputs
from lab.kernels.chunk import chunk_dot, group_scale, load_words
from lab.kernels.planes import CHUNK, ROWS, Planes

_ACTIVATIONS = {torch.float16: False, torch.bfloat16: True}  # value: whether kernels read bfloat16

Tile = tuple[int, int, int, int]
"""(rows per program, chunks per step, steps unrolled, warps)."""

GATE_UP_TILE: Tile = (16, 16, 1, 2)
"""The launch shape that won on H200 at 1, 4 and 8 tokens (experiments/kernel_log.md)."""


def down_tile(tokens: int) -> Tile:
    """The winners of the second kernel: few tokens need smaller programs to reach every multiprocessor."""
    if tokens <= 2:
        return 8, 64, 4, 4
    return (16, 64, 4, 8) if tokens <= 4 else (16, 32, 7, 4)


@jit
def _gate_up_kernel(
    x_ptr: tl.tensor, ids_ptr: tl.tensor, words_ptr: tl.tensor, scale_ptr: tl.tensor, unit_ptr: tl.tensor, out_ptr: tl.tensor,
    lut_low: tl.tensor, lut_high: tl.tensor, TOPK: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, GROUP_CHUNKS: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, UNROLL: tl.constexpr, PTX: tl.constexpr, BF16: tl.constexpr,
) -> None:  # fmt: skip
    """Program (rows, slot): ROWS gate and up rows of the slot's expert -> silu(gate) * up, out [slots, WIDTH]. Expert -1 writes zeros."""
    wait_for_inputs(PTX)
    slot = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.load(ids_ptr + slot).to(tl.int64)
    plane: tl.constexpr = CHUNKS * 16
    groups: tl.constexpr = (CHUNKS + GROUP_CHUNKS - 1) // GROUP_CHUNKS
    block = tl.maximum(expert, 0) * 2 * BLOCKS + row // 16
    words_row = words_ptr + (block * (BITS * plane) + row % 16)[None, :]
    scale_row = scale_ptr + (block * (groups * 16) + row % 16)[None, :]
    x_row = x_ptr + (slot // TOPK) * (CHUNKS * 8)
    used = ((row // 16 < BLOCKS)[None, :] & (expert >= 0)) != 0  # the comparison changes nothing but the interpreter's dtype
    chunk = tl.arange(0, STEP)[:, None]
    gate_words = load_words(words_row + chunk * 16, plane, (chunk < CHUNKS) & used, BITS)
    up_words = load_words(words_row + BLOCKS * BITS * plane + chunk * 16, plane, (chunk < CHUNKS) & used, BITS)
    gate = tl.zeros([STEP, ROWS], dtype=tl.float32)
    up = tl.zeros([STEP, ROWS], dtype=tl.float32)
    for start in tl.range(0, CHUNKS, STEP, loop_unroll_factor=UNROLL):
        chunk = start + tl.arange(0, STEP)[:, None]
        inside, follows = chunk < CHUNKS, (chunk + STEP < CHUNKS) & used
        next_gate = load_words(words_row + (chunk + STEP) * 16, plane, follows, BITS)
        next_up = load_words(words_row + BLOCKS * BITS * plane + (chunk + STEP) * 16, plane, follows, BITS)
        scale = scale_row + chunk // GROUP_CHUNKS * 16
        x = x_row + chunk * 8
        gate += chunk_dot(gate_words, x, inside, lut_low, lut_high, BITS, PTX, BF16) * group_scale(scale, inside & used)
        up += chunk_dot(up_words, x, inside, lut_low, lut_high, BITS, PTX, BF16) * group_scale(scale + BLOCKS * groups * 16, inside & used)
        gate_words, up_words = next_gate, next_up
    unit = tl.load(unit_ptr + tl.maximum(expert, 0))
    value = silu_mul(tl.sum(gate, axis=0) * unit, tl.sum(up, axis=0) * unit)
    tl.store(out_ptr + slot * WIDTH + row, value.to(out_ptr.dtype.element_ty), mask=row < WIDTH)


@jit
def _down_kernel(
    h_ptr: tl.tensor, ids_ptr: tl.tensor, weights_ptr: tl.tensor, words_ptr: tl.tensor, scale_ptr: tl.tensor, unit_ptr: tl.tensor, out_ptr: tl.tensor,
    lut_low: tl.tensor, lut_high: tl.tensor, TOPK: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, GROUP_CHUNKS: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, UNROLL: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (rows, token): ROWS outputs, summed over the token's slots and chunks seen as one row of TOPK * CHUNKS, out [tokens, WIDTH]."""
    wait_for_inputs(PTX)
    token = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = (row // 16 < BLOCKS)[None, :]
    plane: tl.constexpr = CHUNKS * 16
    groups: tl.constexpr = (CHUNKS + GROUP_CHUNKS - 1) // GROUP_CHUNKS
    total = tl.zeros([STEP, ROWS], dtype=tl.float32)
    for start in tl.range(0, TOPK * CHUNKS, STEP, loop_unroll_factor=UNROLL):
        place = (start + tl.arange(0, STEP))[:, None]
        slot, chunk = token * TOPK + place // CHUNKS, place % CHUNKS
        inside = place < TOPK * CHUNKS
        expert = tl.load(ids_ptr + slot, mask=inside, other=-1).to(tl.int64)
        held = expert >= 0
        block = tl.maximum(expert, 0) * BLOCKS + row[None, :] // 16
        words = load_words(words_ptr + block * (BITS * plane) + chunk * 16 + row[None, :] % 16, plane, held & used, BITS)
        part = chunk_dot(words, h_ptr + slot * (CHUNKS * 8) + chunk * 8, held, lut_low, lut_high, BITS, PTX, False)
        scale = group_scale(scale_ptr + (block * groups + chunk // GROUP_CHUNKS) * 16 + row[None, :] % 16, held & used)
        # The weight is read even where there is no expert: a router's NaN must reach the sum.
        weight = tl.load(weights_ptr + slot, mask=inside, other=0).to(tl.float32) * tl.load(unit_ptr + tl.maximum(expert, 0), mask=held, other=0)
        total += part * scale * weight
    tl.store(out_ptr + token * WIDTH + row, tl.sum(total, axis=0).to(out_ptr.dtype.element_ty), mask=row < WIDTH)


class LowBitExperts:
    """The routed experts of one layer from two repacked stacks: gate_up (halves=2, [E, 2 width, hidden]) and down (halves=1, [E, hidden, width])."""

    def __init__(self, gate_up: Planes, down: Planes) -> None:
        """Raises LabError where the stacks do not belong together."""
        fits = gate_up.halves == 2 and down.halves == 1 and gate_up.rows == down.cols and gate_up.cols == down.rows
        require(fits and len(gate_up.words) == len(down.words), "experts", f"gate_up {list(gate_up.words.shape)} and down {list(down.words.shape)} do not fit")
        self.gate_up_planes, self.down_planes = gate_up, down

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden] float16 or bfloat16, ids integer [T, k] (-1: no expert), weights [T, k] -> weighted sum over the slots, [T, hidden] in x's dtype."""
        return self.down(self.gate_up(x, ids), ids, weights, x.dtype)

    def gate_up(self, x: Tensor, ids: Tensor, tile: Tile | None = None) -> Tensor:
        """x [T, hidden], ids [T, k] -> silu(gate) * up as float16 [T, k, width]. Raises LabError on shapes or dtypes that do not fit."""
        planes, tile = self.gate_up_planes, tile or GATE_UP_TILE
        require(
            x.ndim == 2 and x.shape[1] == planes.cols and x.dtype in _ACTIVATIONS, "experts", f"x is {x.dtype} {list(x.shape)}, not 16-bit, {planes.cols} wide"
        )
        require(ids.ndim == 2 and len(ids) == len(x), "experts", f"ids {list(ids.shape)} are not [{len(x)}, k]")
        require_gpu("experts", x, ids, planes.words)
        out = torch.empty(*ids.shape, planes.rows, dtype=torch.float16, device=x.device)
        _gate_up_kernel[_grid(planes, tile, ids.numel())](
            x.contiguous().view(torch.int64), ids.contiguous(), planes.words, planes.scale, planes.unit, out, *planes.lut_words(), ids.shape[1],
            *_sizes(planes), *tile[:3], use_ptx(), _ACTIVATIONS[x.dtype], num_warps=tile[3], **launch_options(),
        )  # fmt: skip
        return out

    def down(self, h: Tensor, ids: Tensor, weights: Tensor, dtype: torch.dtype, tile: Tile | None = None) -> Tensor:
        """h float16 [T, k, width], ids and weights [T, k] -> sum over k of weight * (down h), [T, hidden] in `dtype`. Raises LabError as `gate_up`."""
        planes, tile = self.down_planes, tile or down_tile(len(h))
        require(
            h.dtype == torch.float16 and h.shape == (*ids.shape, planes.cols), "experts", f"h is {h.dtype} {list(h.shape)}, not float16, {planes.cols} wide"
        )
        require(weights.shape == ids.shape, "experts", f"weights {list(weights.shape)} and ids {list(ids.shape)} differ")
        require_gpu("experts", h, ids, weights, planes.words)
        out = torch.empty(len(h), planes.rows, dtype=dtype, device=h.device)
        _down_kernel[_grid(planes, tile, len(h))](
            h.contiguous().view(torch.int64), ids.contiguous(), weights.contiguous(), planes.words, planes.scale, planes.unit, out, *planes.lut_words(),
            ids.shape[1], *_sizes(planes), *tile[:3], use_ptx(), num_warps=tile[3], **launch_options(),
        )  # fmt: skip
        return out


def _grid(planes: Planes, tile: Tile, second: int) -> tuple[int, int]:
    return -(-planes.words.shape[2] * ROWS // tile[0]), second


def _sizes(planes: Planes) -> tuple[int, int, int, int, int]:
    """WIDTH, BLOCKS, CHUNKS, GROUP_CHUNKS, BITS of the kernels."""
    return planes.rows, planes.words.shape[2], planes.cols // CHUNK, planes.group // CHUNK, planes.bits


def reference_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """The same in plain torch and float32 from decoded stacks [E, 2 width, hidden] and [E, hidden, width]; what both kernels are compared with."""
    out = torch.zeros(len(x), down.shape[1], dtype=torch.float32, device=x.device)
    for token, (row, chosen) in enumerate(zip(ids.tolist(), weights.float(), strict=True)):
        for slot, expert in enumerate(row):
            if expert >= 0:
                gate, up = (gate_up[expert] @ x[token].float()).chunk(2)
                out[token] += chosen[slot] * (down[expert] @ (silu(gate) * up))
    return out
