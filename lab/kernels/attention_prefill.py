"""Attention of a prompt: norm with rotary embedding, and causal attention in tiles with the indexer's choice as a bit per block and the output gate.

Why: the plain code holds a number for every pair of tokens and head (1.6 GB a layer at 4,096 tokens). Here the scores of a tile live in registers (online
softmax, Dao et al. 2022, arXiv 2205.14135). Chosen blocks are spread over the whole past, so every tile of keys up to the diagonal is computed and a bit
mask hides what was not chosen. Definition: lab.models.qwen4_exp.sparse_attention; the choice itself: lab.kernels.indexer_prefill.
What it does not prove: that skipping keys would not be faster at lengths far above the budget.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.backend import interpreted, jit, require, require_gpu

AttendShape = tuple[int, int, int, int]
"""(queries per program, keys per step, warps, pipeline stages)."""
ATTEND_SHAPE: AttendShape = (128, 64, 8, 2)


@jit
def _norm_rotate_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor, out_ptr: tl.tensor, tokens: tl.tensor, x_stride: tl.tensor,
    out_stride: tl.tensor, out_batch: tl.tensor, HEAD_STRIDE: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, M: tl.constexpr, EPS: tl.constexpr,
) -> None:  # fmt: skip
    """Program (tokens, head, sequence): rms norm times (1 + w), then rotary embedding of the first ROTARY places. cos, sin [T, ROTARY]."""
    token = tl.program_id(0) * M + tl.arange(0, M)
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    held = (token < tokens)[:, None]
    place = tl.arange(0, D)
    half: tl.constexpr = ROTARY // 2
    kind: tl.constexpr = out_ptr.dtype.element_ty
    row = x_ptr + ((sequence * tokens + token) * x_stride + head * HEAD_STRIDE)[:, None]
    turned = place < ROTARY
    other = tl.where(turned, tl.where(place < half, place + half, place - half), place)
    x = tl.load(row + place[None, :], mask=held, other=0).to(tl.float32)
    partner = tl.load(row + other[None, :], mask=held, other=0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + EPS)[:, None]
    x = (x * scale * (1.0 + tl.load(weight_ptr + place))[None, :]).to(kind).to(tl.float32)
    partner = (partner * scale * (1.0 + tl.load(weight_ptr + other))[None, :]).to(kind).to(tl.float32)
    angle = token[:, None] * ROTARY + place[None, :]
    cos = tl.load(cos_ptr + angle, mask=held & turned[None, :], other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=held & turned[None, :], other=0.0).to(tl.float32)
    value = x * cos + tl.where((place < half)[None, :], -partner, partner) * sin
    where = sequence * out_batch + token.to(tl.int64) * out_stride + head * D
    tl.store(out_ptr + where[:, None] + place[None, :], value.to(kind), mask=held)


@jit
def _tile(
    q: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, bits_ptr: tl.tensor, first: tl.tensor, position: tl.tensor, end: tl.tensor, held: tl.tensor,
    acc: tl.tensor, top: tl.tensor, total: tl.tensor,
    SCALE: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, SELECT: tl.constexpr, MASK: tl.constexpr, KIND: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """One step over N keys from `first`; SCALE is log2(e) / sqrt(D)."""
    key = first + tl.arange(0, N)
    place = tl.arange(0, D)
    here = tl.arange(0, N)[:, None] * ROW + place[None, :]
    inside = (key < end)[:, None]
    k = tl.load(k_ptr + first * ROW + here, mask=inside, other=0).to(KIND)
    scores = tl.dot(q, tl.trans(k)) * SCALE
    if MASK:
        visible = key[None, :] <= position[:, None]
        if SELECT:
            word = tl.load(bits_ptr + first // (32 * BLOCK), mask=held, other=0)
            chosen = ((word[:, None] >> (key // BLOCK % 32)[None, :]) & 1) != 0
            visible = visible & (chosen | (key[None, :] >= ((position + 1) // BLOCK * BLOCK)[:, None]))
        scores = tl.where(visible, scores, float("-inf"))
    high = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(high == float("-inf"), 0.0, high)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    v = tl.load(v_ptr + first * ROW + here, mask=inside, other=0).to(KIND)
    acc = tl.dot(weights.to(KIND), v, acc * shrink[:, None])
    return acc, high, total * shrink + tl.sum(weights, axis=1)


@jit
def _attend_kernel(
    q_ptr: tl.tensor, k_ptr: tl.tensor, v_ptr: tl.tensor, gate_ptr: tl.tensor, bits_ptr: tl.tensor, out_ptr: tl.tensor, tokens: tl.tensor, start: tl.tensor,
    kv_batch: tl.tensor, gate_stride: tl.tensor, words: tl.tensor, SCALE: tl.constexpr, HEADS: tl.constexpr, KV: tl.constexpr, D: tl.constexpr,
    GATE_STRIDE: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, SELECT: tl.constexpr, KIND: tl.constexpr,
) -> None:  # fmt: skip
    """Program (queries from the last, head, sequence): M queries at positions start + ... over all keys up to theirs."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    token = tile * M + tl.arange(0, M)
    held = token < tokens
    position = start + token
    place = tl.arange(0, D)
    row = (sequence * tokens + token) * HEADS + head
    q = tl.load(q_ptr + row[:, None] * D + place[None, :], mask=held[:, None], other=0).to(KIND)
    ROW: tl.constexpr = KV * D
    kv = sequence * kv_batch + head // (HEADS // KV) * D
    bits = bits_ptr + (sequence * tokens + token) * words
    end = start + tokens
    acc = tl.zeros([M, D], dtype=tl.float32)
    top = tl.full([M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    below = (start + tile * M + 1) // N * N  # keys below this are in the past of every query
    last = tl.minimum(start + tile * M + M, end)
    for first in range(0, below, N):
        acc, top, total = _tile(q, k_ptr + kv, v_ptr + kv, bits, first, position, end, held, acc, top, total, SCALE, D, ROW, N, BLOCK, SELECT, SELECT, KIND)
    for first in range(below, last, N):
        acc, top, total = _tile(q, k_ptr + kv, v_ptr + kv, bits, first, position, end, held, acc, top, total, SCALE, D, ROW, N, BLOCK, SELECT, True, KIND)
    gate = tl.load(gate_ptr + ((sequence * tokens + token) * gate_stride + head * GATE_STRIDE)[:, None] + place[None, :], mask=held[:, None], other=0)
    read = acc / total[:, None] / (1.0 + tl.exp(-gate.to(tl.float32)))
    tl.store(out_ptr + row[:, None] * D + place[None, :], read.to(out_ptr.dtype.element_ty), mask=held[:, None])


def norm_rotate(x: Tensor, weight: Tensor, tables: tuple[Tensor, Tensor], eps: float, out: Tensor | None = None) -> Tensor:
    """x [B, T, heads, D] (D numbers together, heads and tokens may lie apart), tables cos and sin [T, rotary] -> rms norm times (1 + weight), rotated;
    into `out` [B, T, heads, D] if given, whose heads lie together. Raises LabError on other strides or a D that is no power of two."""
    batch, tokens, heads, d = x.shape
    out = torch.empty(batch, tokens, heads, d, dtype=x.dtype, device=x.device) if out is None else out
    fits = x.stride(3) == 1 and (batch == 1 or x.stride(0) == tokens * x.stride(1)) and out.stride(2) == d and d & (d - 1) == 0
    require(fits and all(table.is_contiguous() for table in tables), "attention prefill", f"x {list(x.shape)} has strides {list(x.stride())}")
    require_gpu("attention prefill", x, out)
    places = 16
    _norm_rotate_kernel[(triton.cdiv(tokens, places), heads, batch)](
        x, weight, *tables, out, tokens, x.stride(1), out.stride(1), out.stride(0), x.stride(2), d, tables[0].shape[1], places, eps, num_warps=4
    )
    return out


def attend_prompt(
    q: Tensor, keys: Tensor, values: Tensor, gate: Tensor, start: int, bits: Tensor | None = None, block: int = 1, shape: AttendShape | None = None
) -> Tensor:
    """q [B, T, heads, D] contiguous at positions start..; keys, values [B, capacity, kv, D] filled up to start + T; gate [B, T, heads, D] (heads and tokens
    may lie apart) -> softmax(q k / sqrt(D)) v * sigmoid(gate), [B, T, heads * D]. `bits` int32 [B, T, words]: which blocks of `block` keys may be
    seen, lowest bit first; the incomplete block of a query always may. Raises LabError on shapes that do not fit."""
    batch, tokens, heads, d = q.shape
    fits = q.is_contiguous() and keys.shape == values.shape and keys.stride() == values.stride() and keys.stride(1) == keys.shape[2] * d
    fits = fits and gate.stride(3) == 1 and (batch == 1 or gate.stride(0) == tokens * gate.stride(1))
    require(fits and keys.shape[1] >= start + tokens and d & (d - 1) == 0, "attention prefill", f"q {list(q.shape)}, keys {list(keys.shape)}")
    require_gpu("attention prefill", q, keys, values, gate)
    m, n, warps, stages = shape or ATTEND_SHAPE
    n = n if bits is None else min(n, 32 * block)
    require(bits is None or 32 * block % n == 0, "attention prefill", f"blocks of {block} keys do not fit steps of {n}")
    kind = tl.float32 if interpreted() else tl.bfloat16 if q.dtype == torch.bfloat16 else tl.float16
    out = torch.empty(batch, tokens, heads * d, dtype=q.dtype, device=q.device)
    _attend_kernel[(triton.cdiv(tokens, m), heads, batch)](
        q, keys, values, gate, q if bits is None else bits, out, tokens, start, keys.stride(0), gate.stride(1), 0 if bits is None else bits.shape[2],
        d**-0.5 * 1.4426950408889634, heads, keys.shape[2], d, gate.stride(2), m, n, block, bits is not None, kind, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
