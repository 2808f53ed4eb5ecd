"""What stands around the delta rule of a prompt: convolution with SiLU and head norms in one kernel, the gates in one, the gated norm of the output in one.

Why: in torch these are thirty small operations per block over tensors of 10,240 columns. The rule itself is fla-core's chunked kernels where they are
installed (`delta_rule`), else the plain scan of lab.models.qwen4_exp.delta. Definition and order of rounding: lab.models.qwen4_exp.delta.
What it does not prove: that the rule in 16-bit products equals the plain scan beyond rounding, which the nano checks measure.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.backend import jit, require, require_gpu

_TOKENS = 16  # tokens of one convolution program


@jit
def _convolve_kernel(
    x_ptr: tl.tensor, past_ptr: tl.tensor, taps_ptr: tl.tensor, ring_ptr: tl.tensor, qk_ptr: tl.tensor, v_ptr: tl.tensor, tokens: tl.tensor, start: tl.tensor,
    stride: tl.tensor, KEYS: tl.constexpr, WIDE: tl.constexpr, D: tl.constexpr, KERNEL: tl.constexpr, M: tl.constexpr, KEEP: tl.constexpr,
) -> None:  # fmt: skip
    """Program (head, tokens, sequence): D channels of M tokens. `past` [B, KERNEL - 1, WIDE]: inputs before the first token. Heads below 2 KEYS / D are
    queries and keys, which are normed to length 1; the others are values. KEEP: the last inputs go into the ring at their positions."""
    sequence = tl.program_id(2).to(tl.int64)
    token = tl.program_id(1) * M + tl.arange(0, M)
    channel = tl.program_id(0) * D + tl.arange(0, D)
    held = (token < tokens)[:, None]
    current = x_ptr + sequence * tokens * stride
    total = tl.zeros([M, D], dtype=tl.float32)
    kind: tl.constexpr = x_ptr.dtype.element_ty
    for tap in tl.static_range(KERNEL):
        source = token + (tap - KERNEL + 1)
        here = tl.load(current + source.to(tl.int64)[:, None] * stride + channel[None, :], mask=held & (source >= 0)[:, None], other=0).to(tl.float32)
        if tap < KERNEL - 1:
            before = past_ptr + (sequence * (KERNEL - 1) + source + (KERNEL - 1))[:, None] * WIDE + channel[None, :]
            here += tl.load(before, mask=held & (source < 0)[:, None], other=0).to(tl.float32)
        elif KEEP:
            place = (sequence * KERNEL + (start + token) % KERNEL)[:, None] * WIDE + channel[None, :]
            tl.store(ring_ptr + place, here.to(kind), mask=held & (token >= tokens - KERNEL)[:, None])
        total += here * tl.load(taps_ptr + tap * WIDE + channel)[None, :]
    rounded = total.to(kind).to(tl.float32)
    value = (rounded / (1.0 + tl.exp(-rounded))).to(kind).to(tl.float32)
    row = sequence * tokens + token
    if tl.program_id(0) * D < 2 * KEYS:
        value *= tl.rsqrt(tl.sum(value * value, axis=1) + 1e-6)[:, None]
        second = channel // KEYS  # 0: queries, 1: keys, a whole tensor behind
        where = (second * tl.num_programs(2) * tokens)[None, :] + row[:, None]
        tl.store(qk_ptr + where * KEYS + (channel % KEYS)[None, :], value.to(kind), mask=held)
    else:
        tl.store(v_ptr + row[:, None] * (WIDE - 2 * KEYS) + (channel - 2 * KEYS)[None, :], value.to(kind), mask=held)


@jit
def _gates_kernel(
    ab_ptr: tl.tensor, a_log_ptr: tl.tensor, bias_ptr: tl.tensor, decay_ptr: tl.tensor, beta_ptr: tl.tensor, numbers: tl.tensor, stride: tl.tensor,
    HEADS: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Program (numbers): log decay -exp(A) softplus(a + bias) and beta sigmoid(b), float32 [tokens, HEADS], from rows [a | b]."""
    number = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = number < numbers
    head = number % HEADS
    row = ab_ptr + number // HEADS * stride + head
    a = tl.load(row, mask=inside, other=0).to(tl.float32) + tl.load(bias_ptr + head)
    b = tl.load(row + HEADS, mask=inside, other=0).to(tl.float32)
    softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(a)))  # torch's switches at 20
    tl.store(decay_ptr + number, -tl.exp(tl.load(a_log_ptr + head)) * softplus, mask=inside)
    tl.store(beta_ptr + number, 1.0 / (1.0 + tl.exp(-b)), mask=inside)


@jit
def _gated_norm_kernel(
    read_ptr: tl.tensor, z_ptr: tl.tensor, norm_ptr: tl.tensor, out_ptr: tl.tensor, rows: tl.tensor, stride: tl.tensor, EPS: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, M: tl.constexpr, SIGMOID: tl.constexpr,
) -> None:  # fmt: skip
    """Program (rows): M heads of tokens, in the order [tokens, HEADS]; z has `stride` numbers a token."""
    row = tl.program_id(0) * M + tl.arange(0, M)
    held = (row < rows)[:, None]
    column = tl.arange(0, D)[None, :]
    where = row[:, None].to(tl.int64) * D + column
    kind: tl.constexpr = read_ptr.dtype.element_ty
    read = tl.load(read_ptr + where, mask=held, other=0).to(tl.float32)
    z = tl.load(z_ptr + (row // HEADS).to(tl.int64)[:, None] * stride + (row % HEADS * D)[:, None] + column, mask=held, other=0).to(tl.float32)
    normed = (read * tl.rsqrt(tl.sum(read * read, axis=1) / D + EPS)[:, None]).to(kind).to(tl.float32) * tl.load(norm_ptr + column)
    gate = 1.0 / (1.0 + tl.exp(-z))
    if not SIGMOID:
        gate *= z
    tl.store(out_ptr + where, (normed * gate).to(kind), mask=held)


def convolve_prompt(x: Tensor, past: Tensor, taps: Tensor, ring: Tensor | None, start: int, keys: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [B, T, wide] (rows may be `x.stride(1)` apart), past [B, K - 1, wide] the inputs before it, taps float32 [K, wide]; `keys` columns of queries, as many
    of keys, the rest values, heads of `d` -> q, k [B, T, keys / d, d] of length 1, v [B, T, heads, d] in x's dtype. `ring` [B, K, wide], if given, takes the
    last K inputs at their positions modulo K, of which x's first is `start`. Raises LabError on sizes that do not fit."""
    batch, tokens, wide = x.shape
    kernel = len(taps)
    fits = d & (d - 1) == 0 and keys % d == 0 and wide % d == 0 and past.shape == (batch, kernel - 1, wide) and past.is_contiguous()
    require(fits and x.stride(2) == 1 and x.stride(0) == tokens * x.stride(1), "delta prefill", f"x is {list(x.shape)}, past {list(past.shape)}, heads of {d}")
    require_gpu("delta prefill", x, past, taps)
    qk = torch.empty(2, batch, tokens, keys // d, d, dtype=x.dtype, device=x.device)
    v = torch.empty(batch, tokens, (wide - 2 * keys) // d, d, dtype=x.dtype, device=x.device)
    _convolve_kernel[(wide // d, triton.cdiv(tokens, _TOKENS), batch)](
        x, past, taps, x if ring is None else ring, qk, v, tokens, start, x.stride(1), keys, wide, d, kernel, _TOKENS, ring is not None, num_warps=4
    )
    return qk[0], qk[1], v


def gates_prompt(ab: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """ab [B, T, at least 2 heads]: rows of in_proj_a, then of in_proj_b -> log decay and beta, float32 [B, T, heads]."""
    heads = len(a_log)
    decay, beta = (torch.empty(*ab.shape[:-1], heads, dtype=torch.float32, device=ab.device) for _ in range(2))
    _gates_kernel[(triton.cdiv(decay.numel(), 1024),)](ab, a_log, dt_bias, decay, beta, decay.numel(), ab.stride(-2), heads, 1024)
    return decay, beta


def gated_norm_prompt(read: Tensor, z: Tensor, norm: Tensor, eps: float, activation: str) -> Tensor:
    """read [B, T, heads, d] contiguous, z [B, T, heads * d] (rows may lie apart) -> norm(read) * activation(z), [B, T, heads * d] in read's dtype."""
    batch, tokens, heads, d = read.shape
    require(read.is_contiguous() and z.stride(-1) == 1 and z.stride(0) == tokens * z.stride(1), "delta prefill", "needs contiguous rows")
    out = torch.empty(batch, tokens, heads * d, dtype=read.dtype, device=read.device)
    rows = batch * tokens * heads
    _gated_norm_kernel[(triton.cdiv(rows, 16),)](read, z, norm, out, rows, z.stride(1), eps, heads, d, 16, activation == "sigmoid", num_warps=4)
    return out
