"""The indexer of a prompt: pooled block keys, block scores of every query, and each query's best blocks as bits, one launch each.

Why: in torch the scores of 4,096 tokens pass through memory four times in float32 and a stable sort of every row follows. Here heads are summed before
anything is written, and the budget's threshold is found by bisection on the bits of non-negative floats. Equal scores go to the earlier block, as on
every GPU (lab.models.qwen4_exp.sparse_attention). What it does not prove: the same choice as another order of summation would make on near ties.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.backend import interpreted, jit, require, require_gpu

MOST_BLOCKS = 8192
"""Blocks of which one program still holds all scores."""


@jit
def pooled_keys(
    raw_ptr: tl.tensor, weight_ptr: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor, block: tl.tensor, held: tl.tensor, kind: tl.constexpr,
    BLOCK: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, M: tl.constexpr, EPS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Keys float32 [M, D] of blocks `block` [M] where `held`: mean of BLOCK raw keys, rms norm times (1 + w), rotated to the block's first position; rounded
    to `kind` where the plain code rounds."""
    place = tl.arange(0, D)
    half: tl.constexpr = ROTARY // 2
    turned = place < ROTARY
    other = tl.where(turned, tl.where(place < half, place + half, place - half), place)
    row = raw_ptr + (block * (BLOCK * D))[:, None]
    x = tl.zeros([M, D], dtype=tl.float32)
    partner = tl.zeros([M, D], dtype=tl.float32)
    for i in tl.static_range(BLOCK):
        x += tl.load(row + i * D + place[None, :], mask=held[:, None], other=0).to(tl.float32)
        partner += tl.load(row + i * D + other[None, :], mask=held[:, None], other=0).to(tl.float32)
    x = (x / BLOCK).to(kind).to(tl.float32)
    partner = (partner / BLOCK).to(kind).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=1) / D + EPS)[:, None]
    x = (x * scale * (1.0 + tl.load(weight_ptr + place))[None, :]).to(kind).to(tl.float32)
    partner = (partner * scale * (1.0 + tl.load(weight_ptr + other))[None, :]).to(kind).to(tl.float32)
    angle = block[:, None] * (BLOCK * ROTARY) + place[None, :]
    cos = tl.load(cos_ptr + angle, mask=held[:, None] & turned[None, :], other=1.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle, mask=held[:, None] & turned[None, :], other=0.0).to(tl.float32)
    return (x * cos + tl.where((place < half)[None, :], -partner, partner) * sin).to(kind).to(tl.float32)


@jit
def best_blocks(scores_ptr: tl.tensor, complete: tl.tensor, BUDGET: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Which of blocks 0 .. WIDTH - 1 are the BUDGET best of the first `complete`, earlier ones first among equals; all of those where there are no more. Scores
    are not negative, so their bits are ordered as they are: the threshold is found bit by bit."""
    block = tl.arange(0, WIDTH)
    ready = block < complete
    chosen = ready
    if complete > BUDGET:
        score = tl.load(scores_ptr + block, mask=ready, other=0).to(tl.int32, bitcast=True) & 0x7FFFFFFF  # of -0.0 the sign, too
        score = tl.where(ready, score, -1)
        threshold = complete * 0
        for i in range(31):
            tried = threshold | (1 << (30 - i))
            threshold = tl.where(tl.sum((score >= tried).to(tl.int32), axis=0) >= BUDGET, tried, threshold)
        above = score > threshold
        equal = (score == threshold) & ready
        left = BUDGET - tl.sum(above.to(tl.int32), axis=0)
        chosen = above | (equal & (tl.cumsum(equal.to(tl.int32), axis=0) <= left))
    return chosen


@jit
def _pool_kernel(
    raw_ptr: tl.tensor, weight_ptr: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor, out_ptr: tl.tensor, blocks: tl.tensor, raw_batch: tl.tensor,
    BLOCK: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, M: tl.constexpr, EPS: tl.constexpr,
) -> None:  # fmt: skip
    """Program (blocks, sequence): `pooled_keys` of its M blocks."""
    block = tl.program_id(0) * M + tl.arange(0, M)
    sequence = tl.program_id(1).to(tl.int64)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    value = pooled_keys(raw_ptr + sequence * raw_batch, weight_ptr, cos_ptr, sin_ptr, block, block < blocks, kind, BLOCK, D, ROTARY, M, EPS)
    place = tl.arange(0, D)
    tl.store(out_ptr + (sequence * blocks + block)[:, None] * D + place[None, :], value.to(kind), mask=(block < blocks)[:, None])


@jit
def _scores_kernel(
    q_ptr: tl.tensor, keys_ptr: tl.tensor, out_ptr: tl.tensor, tokens: tl.tensor, start: tl.tensor, blocks: tl.tensor,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr,
) -> None:  # fmt: skip
    """Program (tokens, blocks, sequence): sum over heads of relu(q . key) / sqrt(D), float32. Tiles of blocks that no query has complete are not written."""
    first, sequence = tl.program_id(1) * N, tl.program_id(2).to(tl.int64)
    if first < (start + tl.program_id(0) * M + M) // BLOCK:
        lane = tl.arange(0, M * HEADS)
        token = tl.program_id(0) * M + lane // HEADS
        block = first + tl.arange(0, N)
        place = tl.arange(0, D)
        row = (sequence * tokens + token) * HEADS + lane % HEADS
        q = tl.load(q_ptr + row[:, None] * D + place[None, :], mask=(token < tokens)[:, None], other=0).to(KIND)
        key = tl.load(keys_ptr + (sequence * blocks + block)[:, None] * D + place[None, :], mask=(block < blocks)[:, None], other=0).to(KIND)
        found = tl.maximum(tl.dot(q, tl.trans(key), input_precision="ieee"), 0.0).reshape([M, HEADS, N])
        query = tl.program_id(0) * M + tl.arange(0, M)
        where = (sequence * tokens + query)[:, None] * blocks + block[None, :]
        tl.store(out_ptr + where, tl.sum(found, axis=1) * (D**-0.5), mask=(query < tokens)[:, None] & (block < blocks)[None, :])


@jit
def _choose_kernel(
    scores_ptr: tl.tensor, bits_ptr: tl.tensor, start: tl.tensor, blocks: tl.tensor, words: tl.tensor, BUDGET: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Program (token, sequence): the query's `best_blocks` as bits."""
    row = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    chosen = best_blocks(scores_ptr + row * blocks, (start + tl.program_id(0) + 1) // BLOCK, BUDGET, WIDTH)
    packed = tl.sum((chosen.to(tl.int32) << (tl.arange(0, WIDTH) % 32)).reshape([WIDTH // 32, 32]), axis=1)
    word = tl.arange(0, WIDTH // 32)
    tl.store(bits_ptr + row * words + word, packed, mask=word < words)


def choice_launch(blocks: int) -> tuple[int, int]:
    """(places, warps) of a program that holds the scores of so many blocks."""
    width = max(32, triton.next_power_of_2(blocks))
    return width, min(8, max(1, width // 512))


def block_keys(raw: Tensor, count: int, weight: Tensor, tables: tuple[Tensor, Tensor], block: int, eps: float) -> Tensor:
    """raw index keys [B, capacity, D], tables cos and sin [positions, rotary] from position 0 -> keys of the first `count` blocks [B, count, D]."""
    batch, _, d = raw.shape
    require(raw.stride(1) == d and d & (d - 1) == 0 and len(tables[0]) >= (count - 1) * block + 1, "indexer prefill", f"raw keys {list(raw.shape)}")
    require_gpu("indexer prefill", raw)
    out = torch.empty(batch, count, d, dtype=raw.dtype, device=raw.device)
    _pool_kernel[(triton.cdiv(count, 16), batch)](raw, weight, *tables, out, count, raw.stride(0), block, d, tables[0].shape[1], 16, eps, num_warps=4)
    return out


def block_scores(q: Tensor, keys: Tensor, start: int, block: int) -> Tensor:
    """q [B, T, heads, D] contiguous (normed, rotated) at positions start.., keys [B, blocks, D] -> scores float32 [B, T, blocks]; entries of blocks that are
    not complete for their query may be left as they were."""
    batch, tokens, heads, d = q.shape
    require(q.is_contiguous() and keys.is_contiguous() and heads & (heads - 1) == 0, "indexer prefill", f"q {list(q.shape)}")
    out = torch.empty(batch, tokens, keys.shape[1], dtype=torch.float32, device=q.device)
    kind = tl.float32 if interpreted() else tl.bfloat16 if q.dtype == torch.bfloat16 else tl.float16
    m = max(1, 128 // heads)
    grid = triton.cdiv(tokens, m), triton.cdiv(keys.shape[1], 64), batch
    _scores_kernel[grid](q, keys, out, tokens, start, keys.shape[1], heads, d, block, m, 64, kind, num_warps=4, num_stages=1)
    return out


def choose_blocks(scores: Tensor, start: int, block: int, budget: int) -> Tensor:
    """scores float32 [B, T, blocks], not negative, of queries at positions start.. -> int32 [B, T, words]: a bit per block, lowest first; set for the
    `budget` best of each query's complete blocks. Raises LabError beyond MOST_BLOCKS."""
    batch, tokens, blocks = scores.shape
    require(blocks <= MOST_BLOCKS, "indexer prefill", f"{blocks} blocks; at most {MOST_BLOCKS}")
    words, (width, warps) = triton.cdiv(blocks, 32), choice_launch(blocks)
    bits = torch.empty(batch, tokens, words, dtype=torch.int32, device=scores.device)
    _choose_kernel[(tokens, batch)](scores, bits, start, blocks, words, budget, block, width, num_warps=warps)
    return bits
