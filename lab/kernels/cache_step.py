"""Attention of one decode step of a plain transformer, without a shape that depends on the position: norm, rotary embedding and cache entry; then the cache.

Why: in a captured step the length is a number on the device. The grid covers the whole capacity; a program whose keys lie beyond the length leaves at once,
so time follows the length, and the pieces' partial softmaxes are joined in a fixed order (flash decoding). The `qwen4_exp` step has its own kernels
(lab.kernels.attention_step): gates, an indexer, another cache. `reference_*` are the same in plain torch. Definition: lab.models.transformer.attention.
What it does not prove: speed at long contexts, where a program reads its piece of keys for one key head after the other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lab.kernels.backend import interpreted, jit, launch_options, require, require_gpu, use_ptx, wait_for_inputs

_TILE = 32  # keys per step of one program
_PIECES = 32  # most programs per sequence and key head
Tables = tuple[Tensor, Tensor]
"""cos and signed sin [capacity, D], the sine of a head's first half negated (lab.models.transformer.rope)."""


@jit
def _prepare_kernel(
    mixed_ptr: tl.tensor, position_ptr: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor, norm_ptr: tl.tensor,
    query_ptr: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor, capacity: tl.tensor,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (unit, sequence): a query head, a key head or a value head, in that order."""
    unit, sequence = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, D)
    partner_of = tl.where(place < D // 2, place + D // 2, place - D // 2)
    wait_for_inputs(PTX)
    position = tl.load(position_ptr)
    source = mixed_ptr + (sequence * (HEADS + 2 * KV) + unit) * D
    kind: tl.constexpr = query_ptr.dtype.element_ty
    stored = tl.load(source + place)
    if unit < HEADS + KV:
        value, partner = stored.to(tl.float32), tl.load(source + partner_of).to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(value * value, axis=0) / D + EPS)
            value = (value * scale * tl.load(norm_ptr + unit * D + place)).to(kind).to(tl.float32)
            partner = (partner * scale * tl.load(norm_ptr + unit * D + partner_of)).to(kind).to(tl.float32)
        cos = tl.load(cos_ptr + position * D + place).to(tl.float32)
        sin = tl.load(sin_ptr + position * D + place).to(tl.float32)
        turned = (value * cos + partner * sin).to(kind)
        if unit < HEADS:
            tl.store(query_ptr + (sequence * HEADS + unit) * D + place, turned)
        else:
            tl.store(keys_ptr + ((sequence * KV + unit - HEADS).to(tl.int64) * capacity + position) * D + place, turned)
    else:
        tl.store(values_ptr + ((sequence * KV + unit - HEADS - KV).to(tl.int64) * capacity + position) * D + place, stored)


@jit
def _attend_kernel(
    query_ptr: tl.tensor, keys_ptr: tl.tensor, values_ptr: tl.tensor, position_ptr: tl.tensor, part_ptr: tl.tensor, stat_ptr: tl.tensor,
    capacity: tl.tensor, piece: tl.tensor,
    HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr, GROUP: tl.constexpr, PIECES: tl.constexpr, TILE: tl.constexpr,
    KIND: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (piece, key head, sequence): its keys for the head's query group. part [B, HEADS, PIECES, D], stat [B, HEADS, PIECES, 2]: maximum and sum."""
    number, head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    SHARE: tl.constexpr = HEADS // KV
    wait_for_inputs(PTX)
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
        own = (sequence * KV + head).to(tl.int64) * capacity
        for first in range(start, end, TILE):
            token = first + tl.arange(0, TILE)
            visible = token < end
            row = (own + token)[:, None] * D + place[None, :]
            k = tl.load(keys_ptr + row, mask=visible[:, None], other=0).to(KIND)
            v = tl.load(values_ptr + row, mask=visible[:, None], other=0).to(KIND)
            logits = tl.where(visible[None, :], tl.dot(q, tl.trans(k), input_precision="ieee") * (D**-0.5), float("-inf"))
            grown = tl.maximum(top, tl.max(logits, axis=1))  # finite: a tile has at least one key that is visible
            weight = tl.exp(logits - grown[:, None])
            faded = tl.exp(top - grown)
            total = total * faded + tl.sum(weight, axis=1)
            read = read * faded[:, None] + tl.dot(weight.to(KIND), v, input_precision="ieee")
            top = grown
        tl.store(part_ptr + at[:, None] * D + place[None, :], read, mask=held[:, None])
    tl.store(stat_ptr + at * 2, top, mask=held)
    tl.store(stat_ptr + at * 2 + 1, total, mask=held)


@jit
def joined(part_ptr: tl.tensor, stat_ptr: tl.tensor, at: tl.tensor, place: tl.tensor, D: tl.constexpr) -> tl.tensor:
    """float32 [D]: the pieces `at` of one head joined by their maxima and sums. Pieces beyond the length wrote no part, and a sum of zero."""
    top = tl.load(stat_ptr + at * 2)
    total = tl.load(stat_ptr + at * 2 + 1)
    share = tl.where(total > 0, tl.exp(top - tl.max(top, axis=0)), 0.0)
    part = tl.load(part_ptr + at[:, None] * D + place[None, :], mask=(total > 0)[:, None], other=0)
    read = tl.sum(part * share[:, None], axis=0) / tl.sum(total * share, axis=0)
    return read


@jit
def _combine_kernel(
    part_ptr: tl.tensor, stat_ptr: tl.tensor, out_ptr: tl.tensor, HEADS: tl.constexpr, D: tl.constexpr, PIECES: tl.constexpr, PTX: tl.constexpr
) -> None:
    """Program (head, sequence): joins the pieces, out [B, HEADS * D]. Pieces beyond the length wrote no part."""
    row = tl.program_id(1) * HEADS + tl.program_id(0)
    wait_for_inputs(PTX)
    place = tl.arange(0, D)
    at = row * PIECES + tl.arange(0, PIECES)
    read = joined(part_ptr, stat_ptr, at, place, D)
    tl.store(out_ptr + row * D + place, read.to(out_ptr.dtype.element_ty))


def refused(heads: int, kv: int, d: int) -> str | None:
    """Why these kernels cannot serve heads of these sizes, or None."""
    fits = d >= 16 and d & (d - 1) == 0 and heads // kv <= 64
    return None if fits else f"attention step: heads of {d}, {heads // kv} to a key head, have no kernel (a power of two from 16, at most 64)"


def prepare(mixed: Tensor, position: Tensor, tables: Tables, norm: Tensor | None, heads: int, eps: float, keys: Tensor, values: Tensor) -> Tensor:
    """mixed [B, (heads + 2 kv) * D], queries, keys, values side by side; position int32 [1]; norm float32 [heads + kv, D] or None -> queries [B, heads, D],
    normed and rotated. keys, values [B, kv, capacity, D] get the token's entries at `position`. Raises LabError on other shapes."""
    batch, kv, capacity, d = keys.shape
    fits = mixed.shape == (batch, (heads + 2 * kv) * d) and mixed.is_contiguous() and keys.is_contiguous() and values.is_contiguous()
    require(fits, "attention step", f"mixed is {list(mixed.shape)}, keys {list(keys.shape)}; all must be contiguous")
    require((reason := refused(heads, kv, d)) is None, "attention step", reason or "")
    require_gpu("attention step", mixed, keys, position)
    query = torch.empty(batch, heads, d, dtype=mixed.dtype, device=mixed.device)
    _prepare_kernel[(heads + 2 * kv, batch)](
        mixed, position, *tables, mixed if norm is None else norm, query, keys, values, capacity, heads, kv, d, norm is not None, eps, use_ptx(),
        num_warps=1, **launch_options(),
    )  # fmt: skip
    return query


def attend(query: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """query [B, heads, D] over keys, values [B, kv, capacity, D] up to and with `position` -> [B, heads * D]."""
    batch, kv, capacity, d = keys.shape
    heads = query.shape[1]
    piece = max(2 * _TILE, triton.cdiv(triton.cdiv(capacity, _PIECES), _TILE) * _TILE)
    pieces = triton.next_power_of_2(triton.cdiv(capacity, piece))
    part = torch.empty(batch, heads, pieces, d, dtype=torch.float32, device=query.device)
    stat = torch.empty(batch, heads, pieces, 2, dtype=torch.float32, device=query.device)
    kind = tl.float32 if interpreted() or query.dtype == torch.float32 else tl.bfloat16 if query.dtype == torch.bfloat16 else tl.float16
    _attend_kernel[(pieces, kv, batch)](
        query, keys, values, position, part, stat, capacity, piece,
        heads, kv, d, max(16, triton.next_power_of_2(heads // kv)), pieces, _TILE, kind, use_ptx(), num_warps=4, **launch_options(),
    )  # fmt: skip
    out = torch.empty(batch, heads * d, dtype=query.dtype, device=query.device)
    _combine_kernel[(heads, batch)](part, stat, out, heads, d, pieces, use_ptx(), num_warps=4, **launch_options())
    return out


def reference_prepare(mixed: Tensor, position: Tensor, tables: Tables, norm: Tensor | None, heads: int, eps: float, keys: Tensor, values: Tensor) -> Tensor:
    """`prepare` in plain torch, for heads of any even width."""
    batch, kv, _, d = keys.shape
    here = position.long()
    whole = mixed.view(batch, heads + 2 * kv, d)
    both, value = whole.split([heads + kv, kv], 1)
    if norm is not None:
        wide = both.float()
        both = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * norm).to(mixed.dtype)
    cos, sin = (table[here] for table in tables)
    query, key = torch.addcmul(both * cos, both.roll(d // 2, -1), sin).split([heads, kv], 1)
    keys.index_copy_(2, here, key.unsqueeze(2))
    values.index_copy_(2, here, value.unsqueeze(2))
    return query


def reference_attend(query: Tensor, keys: Tensor, values: Tensor, position: Tensor) -> Tensor:
    """`attend` in plain torch over the whole capacity; what lies behind the position is taken out, because a weight of 0 does not hide a NaN."""
    batch, kv, capacity, d = keys.shape
    hidden = torch.arange(capacity, device=keys.device) > position
    k, v = (t.masked_fill(hidden[:, None], 0) for t in (keys, values))
    mask = torch.zeros(1, capacity, dtype=query.dtype, device=query.device).masked_fill(hidden, -torch.inf)
    return scaled_dot_product_attention(query.view(batch, kv, -1, d), k, v, attn_mask=mask).reshape(batch, -1)
