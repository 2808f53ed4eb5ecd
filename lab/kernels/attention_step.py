"""Attention of one new token over a cache of any length, without a shape that depends on the position: prepare, attend in pieces, combine.

Why: in a captured step the length is a number on the device. The grid covers the whole capacity; a program whose keys lie beyond the length leaves at
once, so time follows the length, and the pieces' partial softmaxes are joined in a fixed order (as in flash decoding). A block mask from the indexer, if
there is one, hides blocks of keys (lab.kernels.indexer_step). Definition: lab.models.qwen4_exp.sparse_attention.
What it does not prove: anything of the selection, which it takes as given.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.backend import chain_ptx, inputs_ready, interpreted, jit, launch_options, let_next_start, require, require_gpu
from lab.kernels.cache_step import joined
from lab.kernels.quads import quad_place

_TILE = 32  # keys per step of one program
_PIECES = 32  # most programs per sequence and key head


@jit
def normed_rotated(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor, D: tl.constexpr, ROTARY: tl.constexpr, EPS: tl.constexpr
) -> tl.tensor:
    """rms norm times (1 + w), then rotary embedding of the first ROTARY places; rounded to x's dtype after the norm, as the plain code does."""
    place = tl.arange(0, D)
    half: tl.constexpr = ROTARY // 2
    x = tl.load(x_ptr + place)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / D + EPS)
    turned = place < ROTARY
    other = tl.where(turned, tl.where(place < half, place + half, place - half), place)
    value = (wide * scale * (1.0 + tl.load(weight_ptr + place))).to(x.dtype).to(tl.float32)
    partner = (tl.load(x_ptr + other).to(tl.float32) * scale * (1.0 + tl.load(weight_ptr + other))).to(x.dtype).to(tl.float32)
    cos = tl.load(cos_ptr + place, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + place, mask=turned, other=0.0).to(tl.float32)
    return value * cos + tl.where(place < half, -partner, partner) * sin


@jit
def _prepare_kernel(
    mixed_ptr: tl.tensor, index_ptr: tl.tensor, position_ptr: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor, q_norm_ptr: tl.tensor, k_norm_ptr: tl.tensor,
    query_ptr: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor, index_keys_ptr: tl.tensor, capacity: tl.tensor,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, DI: tl.constexpr, INDEX: tl.constexpr, ROTARY: tl.constexpr, EPS: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (unit, sequence): a query head, a key head, a value head or the index key, in that order."""
    unit, sequence = tl.program_id(0), tl.program_id(1)
    let_next_start(PTX)
    inputs_ready(PTX)
    position = tl.load(position_ptr)
    place = tl.arange(0, D)
    mixed = mixed_ptr + sequence * (HEADS * 2 * D + 2 * KV * D)
    cos, sin = cos_ptr + position * ROTARY, sin_ptr + position * ROTARY
    kind: tl.constexpr = query_ptr.dtype.element_ty
    cached = (sequence * capacity + position).to(tl.int64)
    if unit < HEADS:
        q = normed_rotated(mixed + unit * 2 * D, q_norm_ptr, cos, sin, D, ROTARY, EPS)
        tl.store(query_ptr + (sequence * HEADS + unit) * D + place, q.to(kind))
    elif unit < HEADS + KV:
        head = unit - HEADS
        k = normed_rotated(mixed + HEADS * 2 * D + head * D, k_norm_ptr, cos, sin, D, ROTARY, EPS)
        tl.store(keys_ptr + (cached * KV + head) * D + place, k.to(kind))
    elif unit < HEADS + 2 * KV:
        head = unit - HEADS - KV
        tl.store(values_ptr + (cached * KV + head) * D + place, tl.load(mixed + (HEADS * 2 + KV + head) * D + place))
    else:
        column = tl.arange(0, DI)
        tl.store(index_keys_ptr + cached * DI + column, tl.load(index_ptr + sequence * (INDEX + DI) + INDEX + column))


@jit
def _attend_kernel(
    query_ptr: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor, chosen_ptr: tl.tensor, position_ptr: tl.tensor, part_ptr: tl.tensor, stat_ptr: tl.tensor,
    capacity: tl.tensor, blocks: tl.tensor, piece: tl.tensor,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr, SELECT: tl.constexpr,
    BLOCK: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (piece, key head, sequence): its keys for the head's query group. part [B, HEADS, PIECES, D], stat [B, HEADS, PIECES, 2]: maximum and sum."""
    number, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    SHARE: tl.constexpr = HEADS // KV
    let_next_start(PTX)
    inputs_ready(PTX)
    length = tl.load(position_ptr) + 1
    start, end = number * piece, tl.minimum((number + 1) * piece, length)
    member, place = tl.arange(0, GROUP), tl.arange(0, D)
    held = member < SHARE
    at = (sequence * HEADS + head * SHARE + member) * PIECES + number
    top = tl.full([GROUP], float("-inf"), dtype=tl.float32)
    total = tl.zeros([GROUP], dtype=tl.float32)
    read = tl.zeros([GROUP, D], dtype=tl.float32)
    if start < end:
        q = tl.load(query_ptr + (sequence * HEADS + head * SHARE + member)[:, None] * D + place[None, :], mask=held[:, None], other=0).to(KIND)
        for first in range(start, end, TILE):
            token = first + tl.arange(0, TILE)
            visible = token < end
            if SELECT:
                block = token // BLOCK
                chosen = tl.load(chosen_ptr + sequence * blocks + block, mask=visible & (block < blocks), other=0) != 0
                visible = visible & (chosen | (token >= length // BLOCK * BLOCK))
            row = ((sequence * capacity + token).to(tl.int64) * KV + head)[:, None] * D + place[None, :]
            k = tl.load(keys_ptr + row, mask=visible[:, None], other=0).to(KIND)
            v = tl.load(values_ptr + row, mask=visible[:, None], other=0).to(KIND)
            logits = tl.where(visible[None, :], tl.dot(q, tl.trans(k), input_precision="ieee") * (D**-0.5), float("-inf"))
            grown = tl.maximum(top, tl.max(logits, axis=1))
            safe = tl.where(grown == float("-inf"), 0.0, grown)  # a tile may be hidden whole
            weight = tl.exp(logits - safe[:, None])
            faded = tl.exp(top - safe)
            total = total * faded + tl.sum(weight, axis=1)
            read = read * faded[:, None] + tl.dot(weight.to(KIND), v, input_precision="ieee")
            top = grown
        tl.store(part_ptr + at[:, None] * D + place[None, :], read, mask=held[:, None])
    tl.store(stat_ptr + at * 2, top, mask=held)
    tl.store(stat_ptr + at * 2 + 1, total, mask=held)


@jit
def _combine_kernel(
    part_ptr: tl.tensor, stat_ptr: tl.tensor, mixed_ptr: tl.tensor, out_ptr: tl.tensor,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, PIECES: tl.constexpr, QUADS: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (head, sequence): joins the pieces and applies the head's output gate, out [B, HEADS * D], where QUADS float16 in quad order. Pieces beyond
    the length wrote no part."""
    head, sequence = tl.program_id(0), tl.program_id(1)
    let_next_start(PTX)
    inputs_ready(PTX)
    number, place = tl.arange(0, PIECES), tl.arange(0, D)
    at = (sequence * HEADS + head) * PIECES + number
    read = joined(part_ptr, stat_ptr, at, place, D)
    gate = tl.load(mixed_ptr + sequence * (HEADS * 2 * D + 2 * KV * D) + head * 2 * D + D + place).to(tl.float32)
    kind: tl.constexpr = mixed_ptr.dtype.element_ty
    value = (read.to(kind).to(tl.float32) * (1.0 / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)).to(kind)
    if QUADS:
        tl.store(out_ptr + sequence * (HEADS * D) + quad_place(head * D + place, HEADS * D), value.to(tl.float32).to(tl.float16))
    else:
        tl.store(out_ptr + (sequence * HEADS + head) * D + place, value)


def refused(heads: int, kv: int, d: int, di: int) -> str | None:
    """Why these kernels cannot serve heads of these sizes, or None."""
    powers = all(n & (n - 1) == 0 for n in (d, di))
    return None if powers and d >= 16 and heads // kv <= 64 else f"attention step: heads of {d} and {di} are no powers of two"


def prepare(
    mixed: Tensor, index: Tensor, position: Tensor, tables: tuple[Tensor, Tensor], norms: tuple[Tensor, Tensor], heads: int, eps: float,
    keys: Tensor, values: Tensor, index_keys: Tensor,
) -> Tensor:  # fmt: skip
    """mixed [B, heads * (query | gate) | keys | values], index [B, index queries | index key], position int32 [1] -> rotated queries [B, heads, d].

    keys, values [B, capacity, kv, d] and index_keys [B, capacity, di] get the token's entries at `position`. `tables`: cos and sin [capacity, rotary].
    """
    batch, capacity, kv, d = keys.shape
    di, rotary = index_keys.shape[-1], tables[0].shape[-1]
    require(mixed.shape == (batch, 2 * d * (heads + kv)) and mixed.is_contiguous() and index.is_contiguous(), "attention step", f"mixed {list(mixed.shape)}")
    require((reason := refused(heads, kv, d, di)) is None, "attention step", reason or "")
    require_gpu("attention step", mixed, index, keys)
    query = torch.empty(batch, heads, d, dtype=mixed.dtype, device=mixed.device)
    _prepare_kernel[(heads + 2 * kv + 1, batch)](
        mixed, index, position, *tables, *norms, query, keys, values, index_keys, capacity, heads, kv, d, di, index.shape[1] - di, rotary, eps, chain_ptx(),
        num_warps=1, **launch_options(),
    )  # fmt: skip
    return query


def attend(
    query: Tensor, keys: Tensor, values: Tensor, position: Tensor, mixed: Tensor, chosen: Tensor | None = None, block: int = 1, tile: int = _TILE,
    quads: bool = False,
) -> Tensor:  # fmt: skip
    """query [B, heads, d] over the cache up to and with `position`, gated by mixed's second halves -> [B, heads * d], where `quads` float16 in quad order.

    `chosen` uint8 [B, blocks]: which complete blocks of `block` keys may be seen; the incomplete one always may."""
    batch, capacity, kv, d = keys.shape
    heads = query.shape[1]
    piece = max(2 * tile, triton.cdiv(triton.cdiv(capacity, _PIECES), tile) * tile)
    pieces = triton.next_power_of_2(triton.cdiv(capacity, piece))
    part = torch.empty(batch, heads, pieces, d, dtype=torch.float32, device=query.device)
    stat = torch.empty(batch, heads, pieces, 2, dtype=torch.float32, device=query.device)
    kind = tl.float32 if interpreted() or query.dtype == torch.float32 else tl.bfloat16 if query.dtype == torch.bfloat16 else tl.float16
    _attend_kernel[(pieces, kv, batch)](
        query, keys, values, query if chosen is None else chosen, position, part, stat, capacity, 0 if chosen is None else chosen.shape[1], piece,
        heads, kv, d, max(16, triton.next_power_of_2(heads // kv)), pieces, tile, chosen is not None, block, kind, chain_ptx(), num_warps=4, **launch_options(),
    )  # fmt: skip
    out = torch.empty(batch, heads * d, dtype=torch.float16 if quads else query.dtype, device=query.device)
    _combine_kernel[(heads, batch)](part, stat, mixed, out, heads, kv, d, pieces, quads, chain_ptx(), num_warps=4, **launch_options())
    return out
