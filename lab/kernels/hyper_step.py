"""The hyper-connection mixer of one decode step in three launches: write-back and norm, the narrow projection, the wide one with the mix.

Why: a mixer stands before and after every block (97 in Flash-Next) and is a dozen tiny operations in torch. Here a program of the first kernel owns one
stream of one token: it adds the pending block output, norms, and makes its share of the injection weights. The projections keep their own weights in
registers before the kernel ahead has finished, because weights do not depend on it. Sums are float32 and in a fixed order.
What it does not prove: speed beyond 8 tokens; prompts go through the plain code (lab.models.qwen4_exp.hyper).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import silu

from lab.kernels.backend import jit, launch_options, require, require_gpu, use_ptx, wait_for_inputs
from lab.kernels.chunk import chunk_dot, group_scale, load_words
from lab.kernels.planes import CHUNK, Planes

_SPLIT = 64  # chunks of one program of the narrow projection


@jit
def _norm_kernel(
    streams_ptr: tl.tensor, y_ptr: tl.tensor, extra_ptr: tl.tensor, given_ptr: tl.tensor, norm_ptr: tl.tensor, inject_ptr: tl.tensor,
    normed_ptr: tl.tensor, share_ptr: tl.tensor, EPS: tl.constexpr,
    COUNT: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, PENDING: tl.constexpr, EXTRA: tl.constexpr, INJECT: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (token, stream). `given` and `share` [tokens, COUNT (stream it comes from), COUNT]: injection logits before the sum over streams."""
    token, stream = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    norm = tl.load(norm_ptr + stream * HIDDEN + column, mask=inside, other=0) + 1.0
    target = tl.arange(0, COUNT)
    rows = norm[None, :]  # overwritten where there are injection weights
    if INJECT:
        rows = tl.load(inject_ptr + (target[:, None] * COUNT + stream) * HIDDEN + column[None, :], mask=inside[None, :], other=0).to(tl.float32)
    wait_for_inputs(PTX)
    here = streams_ptr + (token * COUNT + stream) * HIDDEN + column
    value = tl.load(here, mask=inside, other=0).to(tl.float32)
    if PENDING:
        logit = tl.sum(tl.load(given_ptr + (token * COUNT + target) * COUNT + stream), axis=0)
        y = tl.load(y_ptr + token * HIDDEN + column, mask=inside, other=0).to(tl.float32)
        if EXTRA:
            y += tl.load(extra_ptr + token * HIDDEN + column, mask=inside, other=0).to(tl.float32)
        value = (value + y * (2.0 / (1.0 + tl.exp(-logit / COUNT)))).to(streams_ptr.dtype.element_ty)
        tl.store(here, value, mask=inside)
        value = value.to(tl.float32)
    normed = (value * tl.rsqrt(tl.sum(value * value, axis=0) / HIDDEN + EPS) * norm).to(normed_ptr.dtype.element_ty)
    tl.store(normed_ptr + (token * COUNT + stream) * HIDDEN + column, normed, mask=inside)
    if INJECT:
        tl.store(share_ptr + (token * COUNT + stream) * COUNT + target, tl.sum(rows * normed.to(tl.float32)[None, :], axis=1))


@jit
def _down_kernel(
    x_ptr: tl.tensor, words_ptr: tl.tensor, scale_ptr: tl.tensor, unit_ptr: tl.tensor, out_ptr: tl.tensor, rows: tl.tensor, blocks: tl.tensor,
    M: tl.constexpr, CHUNKS: tl.constexpr, GROUP_CHUNKS: tl.constexpr, SPLITS: tl.constexpr, STEP: tl.constexpr, ROWS: tl.constexpr,
    PTX: tl.constexpr, BF16: tl.constexpr,
) -> None:  # fmt: skip
    """Program (rows, split): ROWS rows over STEP chunks, out float32 [M, SPLITS, rows]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(1)
    block = (row // 16).to(tl.int64)
    groups: tl.constexpr = (CHUNKS + GROUP_CHUNKS - 1) // GROUP_CHUNKS
    chunk = (split * STEP + tl.arange(0, STEP))[:, None]
    inside = chunk < CHUNKS
    mask = inside & (row // 16 < blocks)[None, :]
    words = load_words(words_ptr + (block * (8 * CHUNKS * 16) + row % 16)[None, :] + chunk * 16, CHUNKS * 16, mask, 8)
    scale = group_scale(scale_ptr + (block * (groups * 16) + row % 16)[None, :] + chunk // GROUP_CHUNKS * 16, mask) * tl.load(unit_ptr)
    wait_for_inputs(PTX)
    for m in tl.static_range(M):
        part = chunk_dot(words, x_ptr + m * (CHUNKS * 8) + chunk * 8, inside, 0, 0, 8, PTX, BF16) * scale
        tl.store(out_ptr + (m * SPLITS + split) * rows + row, tl.sum(part, axis=0), mask=row < rows)


@jit
def _up_kernel(
    part_ptr: tl.tensor, normed_ptr: tl.tensor, words_ptr: tl.tensor, scale_ptr: tl.tensor, unit_ptr: tl.tensor, out_ptr: tl.tensor,
    COUNT: tl.constexpr, HIDDEN: tl.constexpr, RANK: tl.constexpr, SPLITS: tl.constexpr, CHUNKS: tl.constexpr, GROUPS: tl.constexpr,
    GROUP_CHUNKS: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (16 places of the hidden vector, token): their rows of every stream, then the mean of sigmoid(row . u) * normed, out [tokens, HIDDEN]."""
    place = tl.program_id(0) * 16 + tl.arange(0, 16)
    word = tl.arange(0, WIDTH)  # plane * CHUNKS + chunk, as they lie
    plane, chunk = word // CHUNKS, word % CHUNKS
    used = word < 8 * CHUNKS
    mask = used[:, None] & (place < HIDDEN)[None, :]
    inner = tl.arange(0, 16)[None, :]
    unit = tl.load(unit_ptr) * 0.0078125
    held = (unit,)  # words and scales of every stream; packed, so that several programs fit a multiprocessor
    for c in tl.static_range(COUNT):
        block = (c * HIDDEN // 16 + tl.program_id(0)).to(tl.int64)
        words = tl.load(words_ptr + block * (8 * CHUNKS * 16) + word[:, None] * 16 + inner, mask=mask, other=0)
        scale = tl.load(scale_ptr + block * (GROUPS * 16) + (chunk // GROUP_CHUNKS)[:, None] * 16 + inner, mask=mask, other=0)
        held = held + (words, scale)  # type: ignore[assignment]  # noqa: RUF005 (unknown to Triton)
    wait_for_inputs(PTX)
    m = tl.program_id(1)
    lanes = (unit,)
    for byte in tl.static_range(4):
        u = tl.zeros([WIDTH], dtype=tl.float32)
        for split in tl.static_range(SPLITS):
            u += tl.load(part_ptr + (m * SPLITS + split) * RANK + chunk * 32 + plane * 4 + byte, mask=used, other=0)
        u = u / COUNT
        lanes = lanes + (u / (1.0 + tl.exp(-u)),)  # type: ignore[assignment]  # noqa: RUF005 (unknown to Triton)
    mixed = tl.zeros([16], dtype=tl.float32)
    for c in tl.static_range(COUNT):
        total = tl.zeros([WIDTH, 16], dtype=tl.float32)
        for byte in tl.static_range(4):  # a byte under the exponent of 2^23 is the float 2^23 + byte: no conversion
            value = (((held[1 + 2 * c] >> (8 * byte)) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
            total += value * lanes[1 + byte][:, None]
        amount = tl.sum(total * held[2 + 2 * c].to(tl.float32), axis=0) * unit
        normed = tl.load(normed_ptr + (m * COUNT + c) * HIDDEN + place, mask=place < HIDDEN, other=0).to(tl.float32)
        mixed += normed / (1.0 + tl.exp(-amount))
    tl.store(out_ptr + m * HIDDEN + place, (mixed / COUNT).to(out_ptr.dtype.element_ty), mask=place < HIDDEN)


Pending = tuple[Tensor, Tensor | None, Tensor]
"""A block's output still to be added to the streams: y [B, H], a second part of it or None, its injection logits [B, C, C]."""


def norm_streams(streams: Tensor, pending: Pending | None, norm: Tensor, inject: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """streams [B, C, H], changed in place by `pending`; norm float32 [C * H]; inject [C, C * H] or None -> (normed [B, C, H], injection logits [B, C, C]
    by the stream they come from; their sum over dim 1 is the logit). Raises LabError where `streams` is not contiguous."""
    require(streams.is_contiguous() and (inject is None or inject.is_contiguous()), "hyper norm", "needs contiguous streams")
    require_gpu("hyper norm", streams, norm)
    batch, count, hidden = streams.shape
    normed = torch.empty_like(streams)
    share = torch.empty(batch, count, count, dtype=torch.float32, device=streams.device)
    y, extra, given = pending or (streams, None, share)
    block = triton.next_power_of_2(hidden)
    _norm_kernel[(batch, count)](
        streams, y, y if extra is None else extra, given, norm, norm if inject is None else inject, normed, share, eps, count, hidden, block,
        pending is not None, extra is not None, inject is not None, use_ptx(), num_warps=min(16, max(1, block // 256)), **launch_options(),
    )  # fmt: skip
    return normed, share


def mixes(down: Planes, up: Planes, count: int) -> str | None:
    """Why the two fused projections cannot serve these matrices, or None."""
    if down.bits != 8 or up.bits != 8 or up.cols != down.rows:
        return "needs two int8_g128 matrices"
    return None if up.rows // count % 16 == 0 else f"hidden size {up.rows // count} is no multiple of 16"


def mix_streams(normed: Tensor, down: Planes, up: Planes) -> Tensor:
    """normed 16-bit [B, C, H] -> x [B, H]: mean over streams of sigmoid(up(silu(down(normed) / C))) * normed."""
    batch, count, hidden = normed.shape
    require(normed.element_size() == 2 and down.cols == count * hidden, "hyper mix", f"normed is {normed.dtype} {list(normed.shape)}")
    chunks = down.cols // CHUNK
    splits, rows = triton.cdiv(chunks, _SPLIT), 8
    part = torch.empty(batch, splits, down.rows, dtype=torch.float32, device=normed.device)
    _down_kernel[(triton.cdiv(down.rows, rows), splits)](
        normed.view(torch.int64), down.words, down.scale, down.unit, part, down.rows, down.words.shape[2],
        batch, chunks, down.group // CHUNK, splits, _SPLIT, rows, use_ptx(), normed.dtype == torch.bfloat16, num_warps=4, **launch_options(),
    )  # fmt: skip
    out = torch.empty(batch, hidden, dtype=normed.dtype, device=normed.device)
    inner = up.cols // CHUNK
    _up_kernel[(triton.cdiv(hidden, 16), batch)](
        part, normed, up.words, up.scale, up.unit, out, count, hidden, up.cols, splits, inner, up.scale.shape[3], up.group // CHUNK,
        triton.next_power_of_2(8 * inner), use_ptx(), num_warps=8 if inner > 4 else 4, **launch_options(),
    )  # fmt: skip
    return out


def reference_norm(streams: Tensor, pending: Pending | None, norm: Tensor, inject: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The same in plain torch and float32: (streams, normed, summed injection logits)."""
    value = streams.float()
    if pending is not None:
        y, extra, given = pending
        added = y.float() + (0 if extra is None else extra.float())
        value = value + (2 * torch.sigmoid(given.sum(1) / value.shape[1])).unsqueeze(-1) * added.unsqueeze(1)
    normed = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * (1 + norm.view(value.shape[1:]))
    logits = normed.flatten(1) @ inject.float().T if inject is not None else torch.zeros(len(value), value.shape[1], device=value.device)
    return value, normed, logits


def reference_mix(normed: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """The same in plain torch and float32 from decoded matrices."""
    flat, count = normed.float().flatten(1), normed.shape[1]
    amount = torch.sigmoid(silu(flat @ down.T / count) @ up.T)
    return (amount * flat).unflatten(1, (count, -1)).mean(1)
