"""Routed experts for many tokens: slots sorted by expert on the device, then one tile kernel per product that decodes weights on the way to the matrix units.

Why: a prompt sends a few dozen tokens to every expert, so each expert's weights are read and decoded once per tile of tokens and never written out. Nothing
is read back to the host: the grid covers the worst case and programs without a tile leave at once. bf16 stacks go through torch's grouped product.
What it does not prove: the best tile for a very uneven router, where one expert takes many tiles and decodes its weights in each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear, silu

from lab.kernels.backend import interpreted, jit, require
from lab.kernels.chunk import group_scale
from lab.kernels.experts import LowBitExperts
from lab.kernels.experts_bf16 import Bf16Experts
from lab.kernels.planes import CHUNK, Planes

FEW_TOKENS = 8
"""Up to how many tokens a program per slot is used (lab.kernels.experts)."""
_TILE_N = 64


@dataclass(frozen=True)
class Groups:
    """Slots in the order of their experts. `order` int64 [slots]: slot number by place; `ends` int32 [E]: places up to and with each expert;
    `tile_ends` int32 [E]: tiles of `block` places up to and with each expert; `tiles`: the most there can be."""

    order: Tensor
    ends: Tensor
    tile_ends: Tensor
    block: int
    tiles: int


def group_slots(ids: Tensor, experts: int) -> Groups:
    """ids integer [T, k], all in 0..experts-1 -> Groups, without waiting for the device."""
    flat = ids.flatten()
    slots = flat.numel()
    block = min(128, max(16, triton.next_power_of_2(-(-3 * slots // (2 * experts)))))
    order = flat.argsort(stable=True)
    counts = torch.zeros(experts, dtype=torch.int32, device=ids.device).scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int32))
    tile_ends = ((counts + block - 1) // block).cumsum(0).to(torch.int32)
    return Groups(order, counts.cumsum(0).to(torch.int32), tile_ends, block, min(slots, -(-slots // block) + experts))


@jit
def _low_shift(position: tl.tensor) -> tl.tensor:
    """First bit of the low code at positions 0..15 of its word, as planes.code_bits."""
    pair = position // 2
    return 4 * (4 * (pair % 4 // 2) + pair % 2 + 2 * (position % 2)) + 2 * (pair // 4)


@jit
def _high_shift(position: tl.tensor) -> tl.tensor:
    """Bit of the third code bit at positions 0..31, as planes.code_bits."""
    return 4 * (4 * (position // 2 % 4 // 2) + position // 2 % 2 + 2 * (position % 2)) + 2 * (position // 16) + position // 2 % 8 // 4


@jit
def _weights(
    words_ptr: tl.tensor, scale_ptr: tl.tensor, start: tl.tensor, used: tl.tensor, lut_low: tl.tensor, lut_high: tl.tensor,
    CHUNKS: tl.constexpr, GROUP_CHUNKS: tl.constexpr, BITS: tl.constexpr, N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """float32 [N, 128]: four chunks from `start` of N rows, level times scale. `words_ptr`, `scale_ptr` [N] point to each row's first word and scale."""
    plane: tl.constexpr = CHUNKS * 16
    word = tl.arange(0, 8)
    mask = used[:, None] & ((start + word // 2) < CHUNKS)[None, :]
    low = tl.load(words_ptr[:, None] + ((word % 2) * plane + (start + word // 2) * 16)[None, :], mask=mask, other=0)
    code = (low[:, :, None] >> _low_shift(tl.arange(0, 16))[None, None, :]) & 3
    code = code.reshape([N, 4, 32])
    chunk = start + tl.arange(0, 4)
    inside = used[:, None] & (chunk < CHUNKS)[None, :]
    if BITS == 3:
        high = tl.load(words_ptr[:, None] + (2 * plane + chunk * 16)[None, :], mask=inside, other=0)
        code = code | (((high[:, :, None] >> _high_shift(tl.arange(0, 32))[None, None, :]) & 1) << 2)
        byte = (tl.where(code < 4, lut_low, lut_high) >> ((code & 3) * 8)) & 0xFF
    else:
        byte = (lut_low >> (code * 8)) & 0xFF
    level = (byte << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    scale = group_scale(scale_ptr[:, None] + (chunk // GROUP_CHUNKS * 16)[None, :], inside)
    return (level * scale[:, :, None]).reshape([N, 128])


@jit
def _tile(tile: tl.tensor, ends_ptr: tl.tensor, tile_ends_ptr: tl.tensor, EXPERTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """(expert, first place, end place) of a tile; expert EXPERTS where the tile does not exist."""
    numbers = tl.arange(0, WIDTH)
    tile_ends = tl.load(tile_ends_ptr + numbers, mask=numbers < EXPERTS, other=2147483647)
    expert = tl.sum((tile_ends <= tile).to(tl.int32), axis=0)
    held = expert < EXPERTS
    first_tile = tl.load(tile_ends_ptr + expert - 1, mask=held & (expert > 0), other=0)
    first = tl.load(ends_ptr + expert - 1, mask=held & (expert > 0), other=0)
    end = tl.load(ends_ptr + expert, mask=held, other=0)
    return expert, first + (tile - first_tile) * BLOCK, end


@jit
def _gate_up_kernel(
    x_ptr: tl.tensor, order_ptr: tl.tensor, ends_ptr: tl.tensor, tile_ends_ptr: tl.tensor,
    words_ptr: tl.tensor, scale_ptr: tl.tensor, unit_ptr: tl.tensor, out_ptr: tl.tensor, lut_low: tl.tensor, lut_high: tl.tensor,
    TOPK: tl.constexpr, EXPERTS: tl.constexpr, EXPERTS_WIDTH: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr,
    GROUP_CHUNKS: tl.constexpr, BITS: tl.constexpr, N: tl.constexpr, M: tl.constexpr, KIND: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row block, tile): N gate and up rows of the tile's expert for M places -> silu(gate) * up, out [places, WIDTH]."""
    expert, first, end = _tile(tl.program_id(1), ends_ptr, tile_ends_ptr, EXPERTS, EXPERTS_WIDTH, M)
    if expert < EXPERTS:
        place = first + tl.arange(0, M)
        held = place < end
        token = tl.load(order_ptr + place, mask=held, other=0) // TOPK
        row = tl.program_id(0) * N + tl.arange(0, N)
        used = row // 16 < BLOCKS
        groups: tl.constexpr = (CHUNKS + GROUP_CHUNKS - 1) // GROUP_CHUNKS
        block = expert.to(tl.int64) * (2 * BLOCKS) + row // 16
        words_row = words_ptr + block * (BITS * CHUNKS * 16) + row % 16
        scale_row = scale_ptr + block * (groups * 16) + row % 16
        x_row = x_ptr + token * (CHUNKS * 32)
        gate = tl.zeros([M, N], dtype=tl.float32)
        up = tl.zeros([M, N], dtype=tl.float32)
        for start in range(0, CHUNKS, 4):
            column = start * 32 + tl.arange(0, 128)
            x = tl.load(x_row[:, None] + column[None, :], mask=held[:, None] & (column < CHUNKS * 32)[None, :], other=0).to(KIND)
            w = _weights(words_row, scale_row, start, used, lut_low, lut_high, CHUNKS, GROUP_CHUNKS, BITS, N)
            gate += tl.dot(x, tl.trans(w.to(KIND)))
            w = _weights(
                words_row + BLOCKS * BITS * CHUNKS * 16, scale_row + BLOCKS * groups * 16, start, used, lut_low, lut_high, CHUNKS, GROUP_CHUNKS, BITS, N
            )
            up += tl.dot(x, tl.trans(w.to(KIND)))
        unit = tl.load(unit_ptr + expert)
        gate *= unit
        value = gate / (1.0 + tl.exp(-gate)) * (up * unit)
        where = out_ptr + place.to(tl.int64)[:, None] * WIDTH + row[None, :]
        tl.store(where, value.to(out_ptr.dtype.element_ty), mask=held[:, None] & (row < WIDTH)[None, :])


@jit
def _down_kernel(
    h_ptr: tl.tensor, order_ptr: tl.tensor, weights_ptr: tl.tensor, ends_ptr: tl.tensor, tile_ends_ptr: tl.tensor,
    words_ptr: tl.tensor, scale_ptr: tl.tensor, unit_ptr: tl.tensor, out_ptr: tl.tensor, lut_low: tl.tensor, lut_high: tl.tensor,
    EXPERTS: tl.constexpr, EXPERTS_WIDTH: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr,
    GROUP_CHUNKS: tl.constexpr, BITS: tl.constexpr, N: tl.constexpr, M: tl.constexpr, KIND: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row block, tile): N outputs for M places times the slots' weights, out [slots, WIDTH] at the slots' own numbers."""
    expert, first, end = _tile(tl.program_id(1), ends_ptr, tile_ends_ptr, EXPERTS, EXPERTS_WIDTH, M)
    if expert < EXPERTS:
        place = first + tl.arange(0, M)
        held = place < end
        slot = tl.load(order_ptr + place, mask=held, other=0)
        row = tl.program_id(0) * N + tl.arange(0, N)
        used = row // 16 < BLOCKS
        groups: tl.constexpr = (CHUNKS + GROUP_CHUNKS - 1) // GROUP_CHUNKS
        block = expert.to(tl.int64) * BLOCKS + row // 16
        words_row = words_ptr + block * (BITS * CHUNKS * 16) + row % 16
        scale_row = scale_ptr + block * (groups * 16) + row % 16
        h_row = h_ptr + place.to(tl.int64) * (CHUNKS * 32)
        total = tl.zeros([M, N], dtype=tl.float32)
        for start in range(0, CHUNKS, 4):
            column = start * 32 + tl.arange(0, 128)
            h = tl.load(h_row[:, None] + column[None, :], mask=held[:, None] & (column < CHUNKS * 32)[None, :], other=0).to(KIND)
            w = _weights(words_row, scale_row, start, used, lut_low, lut_high, CHUNKS, GROUP_CHUNKS, BITS, N)
            total += tl.dot(h, tl.trans(w.to(KIND)))
        share = tl.load(weights_ptr + slot, mask=held, other=0).to(tl.float32) * tl.load(unit_ptr + expert)
        where = out_ptr + slot[:, None] * WIDTH + row[None, :]
        tl.store(where, (total * share[:, None]).to(out_ptr.dtype.element_ty), mask=held[:, None] & (row < WIDTH)[None, :])


def grouped_experts(experts: LowBitExperts | Bf16Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """x [T, hidden] 16-bit, ids integer [T, k] in 0..E-1, weights [T, k] -> weighted sum over the slots, [T, hidden] in x's dtype."""
    if isinstance(experts, Bf16Experts):
        return _grouped_bf16(experts, x, ids, weights)
    first, second = experts.gate_up_planes, experts.down_planes
    require(x.ndim == 2 and x.shape[1] == first.cols and x.element_size() == 2, "experts prefill", f"x is {x.dtype} {list(x.shape)}")
    groups = group_slots(ids, len(first.words))
    kind = tl.float32 if interpreted() else tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16
    h = torch.empty(ids.numel(), first.rows, dtype=x.dtype, device=x.device)
    y = torch.empty(ids.numel(), second.rows, dtype=x.dtype, device=x.device)
    warps = 8 if groups.block >= 64 else 4
    placed = groups.ends, groups.tile_ends
    _gate_up_kernel[(triton.cdiv(first.rows, _TILE_N), groups.tiles)](
        x.contiguous(), groups.order, *placed, first.words, first.scale, first.unit, h, *first.lut_words(), ids.shape[1], *_sizes(first), _TILE_N,
        groups.block, kind, num_warps=warps, num_stages=2,
    )  # fmt: skip
    _down_kernel[(triton.cdiv(second.rows, _TILE_N), groups.tiles)](
        h, groups.order, weights.contiguous(), *placed, second.words, second.scale, second.unit, y, *second.lut_words(), *_sizes(second), _TILE_N,
        groups.block, kind, num_warps=warps, num_stages=2,
    )  # fmt: skip
    return y.view(*ids.shape, -1).sum(1)


def _sizes(planes: Planes) -> tuple[int, ...]:
    """EXPERTS, EXPERTS_WIDTH, WIDTH, BLOCKS, CHUNKS, GROUP_CHUNKS, BITS."""
    count = len(planes.words)
    return count, triton.next_power_of_2(count), planes.rows, planes.words.shape[2], planes.cols // CHUNK, planes.group // CHUNK, planes.bits


def _grouped_bf16(experts: Bf16Experts, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """bf16 stacks through torch's grouped product; one product per expert where torch has none for this device."""
    count = len(experts.down_weight)
    groups = group_slots(ids, count)
    sorted_x = x[groups.order // ids.shape[1]]
    grouped = getattr(torch, "_grouped_mm", None)
    y = torch.empty(ids.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    if grouped is not None and x.is_cuda and x.dtype == torch.bfloat16:
        gate, up = grouped(sorted_x, experts.gate_up_weight.transpose(1, 2), offs=groups.ends).chunk(2, -1)
        y[groups.order] = grouped(silu(gate) * up, experts.down_weight.transpose(1, 2), offs=groups.ends)
    else:
        start = 0
        for expert, end in enumerate(groups.ends.tolist()):
            gate, up = linear(sorted_x[start:end], experts.gate_up_weight[expert].to(x.dtype)).chunk(2, -1)
            y[groups.order[start:end]] = linear(silu(gate) * up, experts.down_weight[expert].to(x.dtype))
            start = end
    return (y.view(*ids.shape, -1) * weights.to(x.dtype).unsqueeze(-1)).sum(1)
