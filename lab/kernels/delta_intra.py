"""What the chunks of the delta rule need before the memory passes through them: the inverse of each chunk's triangular system, times values and keys.

Why: fla-core's kernel for this inverts four diagonal blocks one after the other, row by row, and takes as long as the rest of the rule. Here the four are
one tensor, so that a row of each is found at once, and products on the matrix units join them: with Y = block diagonal inverse and L the part of the
system between blocks, the joined inverse is Y - Y L Y, first for pairs of 16, then of 32. The inverse also multiplies here, so that it is never stored.
Source of the form: Yang et al. 2024, arXiv 2412.06464 (WY). What it does not prove: more digits than tf32 products of the inverse have.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.backend import interpreted, jit, require, require_gpu

CHUNK = 64
"""Tokens of a chunk: fla-core's."""


@jit
def _joined(wide: tl.tensor, system: tl.tensor, row: tl.tensor, column: tl.tensor, SIZE: tl.constexpr, TF32: tl.constexpr) -> tl.tensor:
    """The inverse of blocks of 2 SIZE from those of SIZE."""
    between = tl.where((row // SIZE == column // SIZE + 1) & (row // SIZE % 2 == 1), system, 0.0)
    return wide - tl.dot(tl.dot(wide, between, input_precision=TF32), wide, input_precision=TF32)


@jit
def _inverse(system: tl.tensor, TF32: tl.constexpr) -> tl.tensor:
    """(I + system)^-1 for float32 [64, 64], strictly lower triangular."""
    row, column = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    number = tl.arange(0, 4)
    same = number[:, None, None, None] == number[None, None, :, None]
    blocks = tl.sum(tl.where(same, system.reshape([4, 16, 4, 16]), 0.0), axis=2)  # the diagonal ones, [4, 16, 16]
    inner = tl.arange(0, 16)
    unit = (inner[:, None] == inner[None, :]).to(tl.float32)
    found = tl.zeros([4, 16, 16], dtype=tl.float32) + unit[None, :, :]
    for i in range(1, 16):
        here = (inner == i)[None, :, None]
        factors = tl.sum(tl.where(here, blocks, 0.0), axis=1)  # row i of every block; zero from its diagonal on
        found = tl.where(here, found - tl.sum(factors[:, :, None] * found, axis=1)[:, None, :], found)
    wide = tl.where(same, found[:, :, None, :] + tl.zeros([4, 16, 4, 16], dtype=tl.float32), 0.0).reshape([64, 64])
    wide = _joined(wide, system, row, column, 16, TF32)
    wide = _joined(wide, system, row, column, 32, TF32)
    return wide


@jit
def _intra_kernel(
    k_ptr: tl.tensor, v_ptr: tl.tensor, decay_ptr: tl.tensor, beta_ptr: tl.tensor, w_ptr: tl.tensor, u_ptr: tl.tensor, total_ptr: tl.tensor, tokens: tl.tensor,
    HEADS: tl.constexpr, SHARE: tl.constexpr, D: tl.constexpr, KIND: tl.constexpr, TF32: tl.constexpr,
) -> None:  # fmt: skip
    """Program (chunk, head, sequence). w, u [B, T, HEADS, D]: the inverse times beta exp(total) k and beta v; total [B, T, HEADS]: summed log2 decay."""
    token = tl.program_id(0) * 64 + tl.arange(0, 64)
    head, sequence = tl.program_id(1), tl.program_id(2).to(tl.int64)
    held = token < tokens
    place = tl.arange(0, D)
    row = (sequence * tokens + token) * HEADS + head
    decay = tl.load(decay_ptr + row, mask=held, other=0)
    beta = tl.load(beta_ptr + row, mask=held, other=0)
    total = tl.cumsum(decay * 1.4426950408889634, axis=0)
    tl.store(total_ptr + row, total, mask=held)
    k_row = (sequence * tokens + token) * (HEADS // SHARE) + head // SHARE
    k = tl.load(k_ptr + k_row[:, None] * D + place[None, :], mask=held[:, None], other=0).to(KIND)
    i, j = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    # Masked before the power, because above the diagonal it would overflow.
    ratio = tl.exp2(tl.where(i > j, total[:, None] - total[None, :], float("-inf")))
    system = tl.dot(k, tl.trans(k), input_precision="ieee") * ratio * beta[:, None]
    inverse = _inverse(system, TF32).to(KIND)
    where = row[:, None] * D + place[None, :]
    scaled = (k.to(tl.float32) * (beta * tl.exp2(total))[:, None]).to(KIND)
    tl.store(w_ptr + where, tl.dot(inverse, scaled, input_precision="ieee").to(w_ptr.dtype.element_ty), mask=held[:, None])
    v = tl.load(v_ptr + where, mask=held[:, None], other=0).to(tl.float32)
    u = tl.dot(inverse, (v * beta[:, None]).to(KIND), input_precision="ieee")
    tl.store(u_ptr + where, u.to(u_ptr.dtype.element_ty), mask=held[:, None])


def intra_chunks(k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """k [B, T, key heads, d], v [B, T, heads, d], log decay and beta float32 [B, T, heads], all contiguous -> (w, u [B, T, heads, d] in k's dtype, decay
    summed within its chunk, in powers of two, float32 [B, T, heads]). Raises LabError on heads of another size than a power of two."""
    batch, tokens, heads, d = v.shape
    fits = all(t.is_contiguous() for t in (k, v, decay, beta)) and k.shape[-1] == d and d & (d - 1) == 0 and d >= 16 and heads % k.shape[2] == 0
    require(fits and decay.dtype == beta.dtype == torch.float32, "delta intra", f"k {list(k.shape)}, v {list(v.shape)}")
    require_gpu("delta intra", k, v, decay, beta)
    w, u, total = torch.empty_like(v), torch.empty_like(v), torch.empty_like(decay)
    kind = tl.float32 if interpreted() else tl.bfloat16 if k.dtype == torch.bfloat16 else tl.float16
    exact = "tf32" if torch.version.hip is None else "ieee"
    grid = triton.cdiv(tokens, CHUNK), heads, batch
    _intra_kernel[grid](k, v, decay, beta, w, u, total, tokens, heads, heads // k.shape[2], d, kind, exact, num_warps=4)
    return w, u, total


def reference_intra(k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same in plain torch and float32."""
    tokens, heads = v.shape[1:3]
    fill = -tokens % CHUNK
    wide = [torch.nn.functional.pad(t.float(), (0, 0, 0, 0, 0, fill)) for t in (k.repeat_interleave(heads // k.shape[2], 2), v)]
    keys, values = (t.unflatten(1, (-1, CHUNK)).movedim(3, 2) for t in wide)  # [B, chunks, heads, 64, d]
    total, share = (torch.nn.functional.pad(t, (0, 0, 0, fill)).unflatten(1, (-1, CHUNK)).transpose(2, 3) for t in (decay, beta))
    total = total.cumsum(-1)
    ratio = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril(-1).exp().tril(-1)
    system = (keys @ keys.transpose(-1, -2)) * ratio * share.unsqueeze(-1)
    right = torch.cat([keys * (share * total.exp()).unsqueeze(-1), values * share.unsqueeze(-1)], -1)
    both = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True).movedim(2, 3).flatten(1, 2)[:, :tokens]
    w, u = both.chunk(2, -1)
    return w, u, total.transpose(2, 3).flatten(1, 2)[:, :tokens] / torch.log(torch.tensor(2.0))
