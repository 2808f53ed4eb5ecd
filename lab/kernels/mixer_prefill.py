"""The hyper-connection mixer of a prompt: write-back and norm of the residual streams in one kernel, the wide projection with sigmoid and mean in another.

Why: at four streams of 2,560 a mixer of plain operations moves every stream eleven times and a prompt is then bound by memory. Here the streams are read
and written once with the pending block output, the normed ones written once and read twice, and the wide projection's result (as large as the
streams) never leaves the multiprocessor. The narrow projection and the injection weights are one product of the vendor's library between the two.
What it does not prove: speed at a few tokens, which is lab.kernels.hyper_step's business.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.backend import interpreted, jit, require, require_gpu, use_ptx

MixShape = tuple[int, int, int, int]
"""(tokens per program, places of the hidden vector per program, warps, pipeline stages)."""
MIX_SHAPE: MixShape = (128, 64, 8, 3)


@jit
def sigmoid(x: tl.tensor, PTX: tl.constexpr) -> tl.tensor:
    """float32 sigmoid. PTX: by the hardware's tanh, one instruction of the slow unit instead of two; its error of 2^-11 is below bfloat16's rounding."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 t; mul.f32 t, $1, 0f3F000000; tanh.approx.f32 t, t; fma.rn.f32 $0, t, 0f3F000000, 0f3F000000; }",
            "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return 1.0 / (1.0 + tl.exp(-x))


@jit
def _norm_kernel(
    streams_ptr: tl.tensor, y_ptr: tl.tensor, given_ptr: tl.tensor, norm_ptr: tl.tensor, normed_ptr: tl.tensor, stride: tl.tensor, EPS: tl.constexpr,
    COUNT: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, PENDING: tl.constexpr,
) -> None:  # fmt: skip
    """Program (token): all its streams. FIRST: the one stream read is every stream, and written as such. `given`: injection logits, `stride` apart."""
    token = tl.program_id(0).to(tl.int64)
    stream = tl.arange(0, COUNT)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (column < HIDDEN) & (stream >= 0)
    here = token * (COUNT * HIDDEN) + stream * HIDDEN + column
    source = y_ptr + token * HIDDEN + column + stream * 0
    if FIRST:
        value = tl.load(source, mask=inside, other=0).to(tl.float32)
        tl.store(streams_ptr + here, value.to(streams_ptr.dtype.element_ty), mask=inside)
    else:
        value = tl.load(streams_ptr + here, mask=inside, other=0).to(tl.float32)
    if PENDING:
        logit = tl.load(given_ptr + token * stride + stream).to(tl.float32)
        y = tl.load(source, mask=inside, other=0).to(tl.float32)
        rounded = (value + y * (2.0 / (1.0 + tl.exp(-logit / COUNT)))).to(streams_ptr.dtype.element_ty)
        tl.store(streams_ptr + here, rounded, mask=inside)
        value = rounded.to(tl.float32)
    norm = tl.load(norm_ptr + stream * HIDDEN + column, mask=inside, other=0) + 1.0
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / HIDDEN + EPS)
    tl.store(normed_ptr + here, (value * scale[:, None] * norm).to(normed_ptr.dtype.element_ty), mask=inside)


@jit
def _silu_kernel(
    x_ptr: tl.tensor, out_ptr: tl.tensor, tokens: tl.tensor, stride: tl.tensor, DIVISOR: tl.constexpr, RANK: tl.constexpr, TILE: tl.constexpr
) -> None:
    """Program (numbers): silu(x / DIVISOR) of the first RANK of every `stride` numbers, out [tokens, RANK]."""
    number = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = number < tokens * RANK
    x = tl.load(x_ptr + number // RANK * stride + number % RANK, mask=inside, other=0).to(tl.float32) / DIVISOR
    tl.store(out_ptr + number, (x / (1.0 + tl.exp(-x))).to(out_ptr.dtype.element_ty), mask=inside)


@jit
def _mix_kernel(
    u_ptr: tl.tensor, weight_ptr: tl.tensor, normed_ptr: tl.tensor, out_ptr: tl.tensor, tokens: tl.tensor,
    COUNT: tl.constexpr, HIDDEN: tl.constexpr, RANK: tl.constexpr, M: tl.constexpr, N: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (places, tokens): mean over streams of sigmoid(u . row) * normed for N places of M tokens. The tile's columns are the streams' same places."""
    token = tl.program_id(1) * M + tl.arange(0, M)
    lane = tl.arange(0, COUNT * N)
    place = tl.program_id(0) * N + lane % N
    column = lane // N * HIDDEN + place
    held, used = (token < tokens)[:, None], (place < HIDDEN)[None, :]
    u_row = u_ptr + token[:, None].to(tl.int64) * RANK
    w_row = weight_ptr + column[:, None].to(tl.int64) * RANK
    amount = tl.zeros([M, COUNT * N], dtype=tl.float32)
    for start in range(0, RANK, 64):
        k = start + tl.arange(0, 64)
        u = tl.load(u_row + k[None, :], mask=held & (k < RANK)[None, :], other=0).to(KIND)
        w = tl.load(w_row + k[None, :], mask=(place < HIDDEN)[:, None] & (k < RANK)[None, :], other=0).to(KIND)
        amount = tl.dot(u, tl.trans(w), amount)
    normed = tl.load(normed_ptr + token[:, None].to(tl.int64) * (COUNT * HIDDEN) + column[None, :], mask=held & used, other=0).to(tl.float32)
    mixed = tl.sum((sigmoid(amount, PTX) * normed).reshape([M, COUNT, N]), axis=1) / COUNT
    where = tl.program_id(0) * N + tl.arange(0, N)
    tl.store(out_ptr + token[:, None].to(tl.int64) * HIDDEN + where[None, :], mixed.to(out_ptr.dtype.element_ty), mask=held & (where < HIDDEN)[None, :])


def norm_prompt(streams: Tensor, y: Tensor | None, given: Tensor | None, norm: Tensor, eps: float) -> Tensor:
    """streams [T, C, H] contiguous, changed in place; norm float32 [C * H] -> normed [T, C, H].

    With `y` [T, H] and `given` [T, C] (injection logits, any row stride): streams += 2 sigmoid(given / C) y first. With `y` alone: y becomes every stream.
    Raises LabError where a tensor is not as said.
    """
    tokens, count, hidden = streams.shape
    require(streams.is_contiguous() and (y is None or y.is_contiguous()), "mixer prefill", "needs contiguous streams and outputs")
    require(count & (count - 1) == 0 and (given is None or given.stride(-1) == 1), "mixer prefill", f"{count} streams are no power of two")
    require_gpu("mixer prefill", streams, norm)
    normed = torch.empty_like(streams)
    block = triton.next_power_of_2(hidden)
    _norm_kernel[(tokens,)](
        streams, streams if y is None else y, streams if given is None else given, norm, normed, 0 if given is None else given.stride(0),
        eps, count, hidden, block, y is not None and given is None, given is not None, num_warps=min(8, max(1, count * block // 512)),
    )  # fmt: skip
    return normed


def silu_prompt(x: Tensor, rank: int, divisor: int) -> Tensor:
    """x [T, at least rank] -> silu(x / divisor) of the first `rank` columns, [T, rank] contiguous."""
    out = torch.empty(len(x), rank, dtype=x.dtype, device=x.device)
    _silu_kernel[(triton.cdiv(out.numel(), 1024),)](x, out, len(x), x.stride(0), divisor, rank, 1024)
    return out


def mix_prompt(u: Tensor, weight: Tensor, normed: Tensor, shape: MixShape | None = None) -> Tensor:
    """u [T, rank], weight [C * H, rank] in u's dtype, normed [T, C, H] -> mean over streams of sigmoid(weight u) * normed, [T, H]."""
    tokens, count, hidden = normed.shape
    require(u.is_contiguous() and weight.shape == (count * hidden, u.shape[1]) and weight.dtype == u.dtype, "mixer prefill", f"weight {list(weight.shape)}")
    m, n, warps, stages = shape or (MIX_SHAPE if tokens > 512 else (64, 32, 4, 3))
    out = torch.empty(tokens, hidden, dtype=u.dtype, device=u.device)
    kind = tl.float32 if interpreted() else tl.bfloat16 if u.dtype == torch.bfloat16 else tl.float16
    _mix_kernel[(triton.cdiv(hidden, n), triton.cdiv(tokens, m))](
        u, weight, normed, out, tokens, count, hidden, u.shape[1], m, n, kind, use_ptx(), num_warps=warps, num_stages=stages
    )
    return out
