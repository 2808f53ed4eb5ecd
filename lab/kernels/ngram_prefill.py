"""The n-gram module of a prompt after its projections: gates, norms and the dilated convolution, in two kernels that write into the residual streams.

Why: plain operations pass over tensors of every stream some thirty times; once per prompt, but at 4,096 tokens as long as two layers. What the rows are
and the two projections stay with the plain code's operations. Definition: lab.models.qwen4_exp.ngram.
What it does not prove: anything about the table's memory, which may be the host's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.backend import jit, require, require_gpu


@jit
def _gate_kernel(
    key_ptr: tl.tensor, streams_ptr: tl.tensor, value_ptr: tl.tensor, key_norm_ptr: tl.tensor, query_norm_ptr: tl.tensor, conv_norm_ptr: tl.tensor,
    gated_ptr: tl.tensor, normed_ptr: tl.tensor, EPS: tl.constexpr, COUNT: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Program (token): gated [tokens, COUNT, HIDDEN], and the same normed for the convolution. Every norm is per stream, times (1 + w)."""
    token = tl.program_id(0).to(tl.int64)
    stream, column = tl.arange(0, COUNT)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (column < HIDDEN) & (stream >= 0)
    where = stream * HIDDEN + column
    here = token * (COUNT * HIDDEN) + where
    kind: tl.constexpr = gated_ptr.dtype.element_ty
    key = tl.load(key_ptr + here, mask=inside, other=0).to(tl.float32)
    key *= tl.rsqrt(tl.sum(key * key, axis=1) / HIDDEN + EPS)[:, None] * (1.0 + tl.load(key_norm_ptr + where, mask=inside, other=0))
    query = tl.load(streams_ptr + here, mask=inside, other=0).to(tl.float32)
    query *= tl.rsqrt(tl.sum(query * query, axis=1) / HIDDEN + EPS)[:, None] * (1.0 + tl.load(query_norm_ptr + where, mask=inside, other=0))
    match = tl.sum(key.to(kind).to(tl.float32) * query.to(kind).to(tl.float32), axis=1) * (HIDDEN**-0.5)
    size = tl.sqrt(tl.maximum(tl.abs(match), 1e-6))
    gate = 1.0 / (1.0 + tl.exp(-tl.where(match > 0, size, tl.where(match < 0, -size, 0.0))))
    value = tl.load(value_ptr + token * HIDDEN + column + stream * 0, mask=inside, other=0).to(tl.float32)
    gated = (gate[:, None] * value).to(kind).to(tl.float32)
    tl.store(gated_ptr + here, gated.to(kind), mask=inside)
    gated *= tl.rsqrt(tl.sum(gated * gated, axis=1) / HIDDEN + EPS)[:, None] * (1.0 + tl.load(conv_norm_ptr + where, mask=inside, other=0))
    tl.store(normed_ptr + here, gated.to(kind), mask=inside)


@jit
def _inject_kernel(
    normed_ptr: tl.tensor, past_ptr: tl.tensor, gated_ptr: tl.tensor, taps_ptr: tl.tensor, streams_ptr: tl.tensor, tokens: tl.tensor,
    WIDE: tl.constexpr, KERNEL: tl.constexpr, DILATION: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Program (token, columns, sequence): streams += gated + silu(convolution). `past` [B, (KERNEL - 1) * DILATION, WIDE]; taps [KERNEL, WIDE]."""
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < WIDE
    token, sequence = tl.program_id(0), tl.program_id(2).to(tl.int64)
    REACH: tl.constexpr = (KERNEL - 1) * DILATION
    total = tl.zeros([TILE], dtype=tl.float32)
    for tap in tl.static_range(KERNEL):
        source = token + tap * DILATION - REACH
        fresh = tl.load(normed_ptr + (sequence * tokens + source) * WIDE + column, mask=column < tl.where(source >= 0, WIDE, 0), other=0)
        old = tl.load(past_ptr + (sequence * REACH + source + REACH) * WIDE + column, mask=column < tl.where(source < 0, WIDE, 0), other=0)
        total += (fresh.to(tl.float32) + old.to(tl.float32)) * tl.load(taps_ptr + tap * WIDE + column, mask=inside, other=0)
    here = (sequence * tokens + token) * WIDE + column
    added = tl.load(gated_ptr + here, mask=inside, other=0).to(tl.float32) + total / (1.0 + tl.exp(-total))
    value = tl.load(streams_ptr + here, mask=inside, other=0).to(tl.float32) + added
    tl.store(streams_ptr + here, value.to(streams_ptr.dtype.element_ty), mask=inside)


def inject_prompt(
    streams: Tensor, key: Tensor, value: Tensor, norms: list[Tensor], taps: Tensor, past: Tensor, tokens: int, dilation: int, eps: float
) -> Tensor:
    """streams [B * tokens, C, H], changed in place; key [B * tokens, C * H] and value [B * tokens, H] from the module's projections; norms float32 [C * H] of
    key, query and convolution; taps float32 [K, C * H]; past [B, (K - 1) * dilation, C * H]: the convolution's inputs before the first token -> its
    inputs now, [B * tokens, C * H]. Raises LabError where a tensor is not as said."""
    rows, count, hidden = streams.shape
    batch, kernel = rows // tokens, len(taps)
    fits = all(t.is_contiguous() for t in (streams, key, value, past, taps)) and past.shape == (batch, (kernel - 1) * dilation, count * hidden)
    require(fits and count & (count - 1) == 0 and key.shape == (rows, count * hidden), "n-gram prefill", f"key {list(key.shape)}, past {list(past.shape)}")
    require_gpu("n-gram prefill", streams, key, value, past)
    gated, normed = torch.empty_like(key), torch.empty_like(key)
    block = triton.next_power_of_2(hidden)
    _gate_kernel[(rows,)](key, streams, value, *norms, gated, normed, eps, count, hidden, block, num_warps=min(8, max(1, count * block // 512)))
    grid = tokens, triton.cdiv(count * hidden, 1024), batch
    _inject_kernel[grid](normed, past, gated, taps, streams, tokens, count * hidden, kernel, dilation, 1024, num_warps=4)
    return normed
