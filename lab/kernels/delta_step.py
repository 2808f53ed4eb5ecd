"""One token through Gated DeltaNet in one launch: gate projections, convolution, normed queries and keys, the delta rule, gated norm of the output.

Why: the memory of a head (64 KiB at 128 x 128) is read and written once and everything around it is small, so each value head is one program that
holds its memory in registers. What does not depend on the token (memory, taps, gate rows) is asked for before the kernel ahead has finished. The past
inputs of the convolution are a ring by position, so that heads which share a key head may read it while one of them writes its new place.
Definition: lab.models.qwen4_exp.delta. What it does not prove: speed where few heads leave most of a GPU idle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import softplus

from lab.kernels.backend import chain_ptx, inputs_ready, jit, launch_options, let_next_start, require, require_gpu
from lab.kernels.quads import quad_place, sums

WARPS = 8
"""Of one head's program: more wait longer for each other, fewer hold too much of the memory each."""


@jit
def _past(
    ring_ptr: tl.tensor, taps_ptr: tl.tensor, channel: tl.tensor, position: tl.tensor, WIDE: tl.constexpr, KERNEL: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The past inputs' share of the causal convolution at the current token, float32, and the current input's tap.

    A tile of [KERNEL, channels] and a sum over it, not a loop over taps: from a loop the compiler makes every thread load all its rows' taps anew, 128
    scattered loads for queries and keys."""
    tap = tl.arange(0, KERNEL)[:, None]
    here = channel[None, :]
    past = tl.load(ring_ptr + (position + 1 + tap) % KERNEL * WIDE + here, mask=(tap < KERNEL - 1) & (here >= 0), other=0).to(tl.float32)
    return tl.sum(tl.load(taps_ptr + tap * WIDE + here) * past, axis=0), tl.load(taps_ptr + (KERNEL - 1) * WIDE + channel)


@jit
def _convolved(
    ring_ptr: tl.tensor, current_ptr: tl.tensor, past: tl.tensor, tap: tl.tensor, channel: tl.tensor, position: tl.tensor, keep: tl.tensor,
    WIDE: tl.constexpr, KERNEL: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """silu of the convolution, float32; the current input goes into the ring where `keep`."""
    current = tl.load(current_ptr + channel)
    tl.store(ring_ptr + position % KERNEL * WIDE + channel, current, mask=channel < tl.where(keep, WIDE, 0))
    rounded = (past + tap * current.to(tl.float32)).to(current.dtype).to(tl.float32)
    return (rounded / (1.0 + tl.exp(-rounded))).to(current.dtype).to(tl.float32)


@jit
def _delta_kernel(
    x_ptr: tl.tensor, mixed_ptr: tl.tensor, position_ptr: tl.tensor, ring_ptr: tl.tensor, memory_ptr: tl.tensor, gates_ptr: tl.tensor, taps_ptr: tl.tensor,
    a_log_ptr: tl.tensor, bias_ptr: tl.tensor, norm_ptr: tl.tensor, out_ptr: tl.tensor, EPS: tl.constexpr,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, SHARE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KERNEL: tl.constexpr,
    SIGMOID: tl.constexpr, CHAINED: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (value head, sequence). mixed [B, qkv | z]; ring [B, KERNEL, qkv]; memory [B, HEADS, DK, DV]; gates [2 HEADS, HIDDEN], decay rows first, or
    where CHAINED their products x [B, 2 HEADS]; out natural, or where CHAINED float16 in quad order. State and position were written by an earlier step."""
    let_next_start(PTX)
    head, sequence = tl.program_id(0), tl.program_id(1)
    KEYS: tl.constexpr = HEADS // SHARE * DK
    WIDE: tl.constexpr = 2 * KEYS + HEADS * DV
    dk, dv = tl.arange(0, DK), tl.arange(0, DV)
    here = memory_ptr + (sequence * HEADS + head).to(tl.int64) * (DK * DV) + dk[:, None] * DV + dv[None, :]
    memory = tl.load(here)
    ring, current = ring_ptr + sequence * (KERNEL * WIDE), mixed_ptr + sequence * (WIDE + HEADS * DV)
    position = tl.load(position_ptr)
    key = head // SHARE * DK + dk
    q_past, q_tap = _past(ring, taps_ptr, key, position, WIDE, KERNEL)
    k_past, k_tap = _past(ring, taps_ptr, KEYS + key, position, WIDE, KERNEL)
    v_past, v_tap = _past(ring, taps_ptr, 2 * KEYS + head * DV + dv, position, WIDE, KERNEL)
    rate = -tl.exp(tl.load(a_log_ptr + head))
    bias = tl.load(bias_ptr + head)
    weight = tl.load(norm_ptr + dv)
    kind: tl.constexpr = mixed_ptr.dtype.element_ty
    if CHAINED:
        inputs_ready(PTX)
        a = tl.load(x_ptr + sequence * (2 * HEADS) + head).to(tl.float32)
        b = tl.load(x_ptr + sequence * (2 * HEADS) + HEADS + head).to(tl.float32)
    else:
        column = tl.arange(0, BLOCK)
        inside = column < HIDDEN
        decay_row = tl.load(gates_ptr + head * HIDDEN + column, mask=inside, other=0)
        beta_row = tl.load(gates_ptr + (HEADS + head) * HIDDEN + column, mask=inside, other=0)
        inputs_ready(PTX)
        x = tl.load(x_ptr + sequence * HIDDEN + column, mask=inside, other=0)
        a = tl.sum(decay_row.to(tl.float32) * x.to(tl.float32), axis=0).to(kind).to(tl.float32)
        b = tl.sum(beta_row.to(tl.float32) * x.to(tl.float32), axis=0).to(kind).to(tl.float32)
    a += bias
    beta = 1.0 / (1.0 + tl.exp(-b))
    decay = tl.exp(rate * tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(a))))  # torch's softplus switches at 20
    first = head % SHARE == 0
    q = _convolved(ring, current, q_past, q_tap, key, position, first, WIDE, KERNEL)
    k = _convolved(ring, current, k_past, k_tap, KEYS + key, position, first, WIDE, KERNEL)
    v = _convolved(ring, current, v_past, v_tap, 2 * KEYS + head * DV + dv, position, head >= 0, WIDE, KERNEL)
    z = tl.load(current + WIDE + head * DV + dv).to(tl.float32)
    # What the new memory gives for q is what the old one gives, decayed, and (k . q) times the correction: so one pass over the old one serves both.
    square = sums((q * q, k * k, q * k, q * 0.0), 0, 4, PTX)
    seen = sums((memory * k[:, None], memory * q[:, None]), 0, 2, PTX)
    q_rate, k_rate = tl.rsqrt(square[0] + 1e-6) * (DK**-0.5), tl.rsqrt(square[1] + 1e-6)
    error = beta * (v - decay * k_rate * seen[0])
    tl.store(here, memory * decay + (k * k_rate)[:, None] * error[None, :])
    read = (decay * q_rate * seen[1] + q_rate * k_rate * square[2] * error).to(kind).to(tl.float32)
    normed = (read * tl.rsqrt(tl.sum(read * read, axis=0) / DV + EPS)).to(kind).to(tl.float32) * weight
    gate = 1.0 / (1.0 + tl.exp(-z))
    if not SIGMOID:
        gate *= z
    value = (normed * gate).to(kind)
    place = head * DV + dv
    if CHAINED:
        tl.store(out_ptr + sequence * (HEADS * DV) + quad_place(place, HEADS * DV), value.to(tl.float32).to(tl.float16))
    else:
        tl.store(out_ptr + sequence * (HEADS * DV) + place, value)


@dataclass(frozen=True)
class DeltaWeights:
    """The small parameters of one block: gates [2 heads, hidden] (rows of in_proj_a, then of in_proj_b), taps float32 [kernel, qkv], a_log and dt_bias [heads],
    norm [dv], float32; `eps` of the output norm, `gate` its activation: sigmoid or silu."""

    gates: Tensor
    taps: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    eps: float
    gate: str


def refused(key_heads: int, heads: int, dk: int, dv: int, kernel: int) -> str | None:
    """Why this kernel cannot serve heads of these sizes, or None."""
    powers = all(n & (n - 1) == 0 for n in (dk, dv, kernel))
    fits = dk * dv <= 1 << 14 and kernel >= 2 and heads % key_heads == 0
    return None if powers and fits else f"delta step: heads of {dk} x {dv} and {kernel} taps are no powers of two up to 128 x 128"


def delta_step(x: Tensor, mixed: Tensor, position: Tensor, ring: Tensor, memory: Tensor, weights: DeltaWeights, chained: bool = False) -> Tensor:
    """x [B, hidden] (the block's input), mixed [B, qkv + z] (its projections), position int32 [1] -> gated output [B, heads * dv] in x's dtype.

    `chained`: x is [B, 2 heads], the gates' products, and the output is float16 in quad order. Position and state must be written before the chain of
    overlapping launches that this one is part of. ring [B, kernel, qkv] in x's dtype and memory float32 [B, heads, dk, dv] are advanced in place. Raises
    LabError on shapes that do not fit.
    """
    batch, heads, dk, dv = memory.shape
    kernel, wide = ring.shape[1:]
    key_heads = (wide - heads * dv) // (2 * dk)
    require(mixed.shape == (batch, wide + heads * dv) and mixed.dtype == ring.dtype == x.dtype, "delta step", f"mixed {list(mixed.shape)} {mixed.dtype}")
    require(all(t.is_contiguous() for t in (x, mixed, ring, memory, weights.gates, weights.taps)), "delta step", "needs contiguous tensors")
    require((reason := refused(key_heads, heads, dk, dv, kernel)) is None, "delta step", reason or "")
    require_gpu("delta step", x, mixed, ring, memory)
    require(not chained or (x.shape == (batch, 2 * heads) and heads * dv % 32 == 0), "delta step", f"gates {list(x.shape)} or heads of {dv} in a chain")
    out = torch.empty(batch, heads * dv, dtype=torch.float16 if chained else x.dtype, device=x.device)
    _delta_kernel[(heads, batch)](
        x, mixed, position, ring, memory, weights.gates, weights.taps, weights.a_log, weights.dt_bias, weights.norm, out, weights.eps,
        x.shape[1], triton.next_power_of_2(x.shape[1]), heads, heads // key_heads, dk, dv, kernel, weights.gate == "sigmoid", chained, chain_ptx(),
        num_warps=WARPS if dk * dv > 4096 else 4, **launch_options(),
    )  # fmt: skip
    return out


def reference_delta(x: Tensor, mixed: Tensor, position: int, ring: Tensor, memory: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor]:
    """The same in plain torch and float32: (output, new memory)."""
    batch, heads, dk, dv = memory.shape
    kernel, wide = ring.shape[1:]
    keys = (wide - heads * dv) // 2
    current, z = mixed.float().split([wide, heads * dv], -1)
    history = torch.stack([ring[:, (position - back) % kernel].float() for back in range(kernel - 1, 0, -1)] + [current], 1)
    convolved = torch.nn.functional.silu((history * weights.taps).sum(1))
    q, k, v = convolved.split([keys, keys, heads * dv], -1)
    share = heads // (keys // dk)
    q, k = (t.view(batch, -1, dk).repeat_interleave(share, 1) for t in (q, k))
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    a, b = (x.float() @ weights.gates.float().T).chunk(2, -1)
    new = memory * torch.exp(-torch.exp(weights.a_log) * softplus(a + weights.dt_bias))[..., None, None]
    error = torch.sigmoid(b).unsqueeze(-1) * (v.view(batch, heads, dv) - (k.unsqueeze(-2) @ new).squeeze(-2))
    new = new + k.unsqueeze(-1) * error.unsqueeze(-2)
    read = (q.unsqueeze(-2) @ new).squeeze(-2) * dk**-0.5
    normed = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + weights.eps) * weights.norm
    gate = torch.sigmoid(z) if weights.gate == "sigmoid" else torch.nn.functional.silu(z)
    return normed.flatten(1) * gate, new
