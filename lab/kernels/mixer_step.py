"""The hyper-connection mixer of a chained decode step in two launches: norm with the narrow projection, then the wide projection with the mix.

Why two: whatever wrote the streams last has left them times (1 + w) and the sums of their squares (lab.kernels.quads.write_back), so that a program of the
narrow projection norms what it reads by itself. It takes its rows whole, so that the wide one reads a finished vector. Both hold all their weights
before they wait. What it does not prove: speed beyond 8 tokens; prompts go through the plain code (lab.models.qwen4_exp.hyper).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.backend import chain_ptx, inputs_ready, jit, launch_options, let_next_start, require, require_gpu
from lab.kernels.chunk import chunk_dot, group_scale, load_words
from lab.kernels.planes import CHUNK, Planes
from lab.kernels.quads import _SHRINK, SHRINK, ask, exists, norms_of, quad_order, quad_place, row_base, streams_at, sums, write_back

_ROWS = 4
"""Rows of the narrow projection in one program: few, because each takes 10,240 columns."""


_PLACES = 8
"""Of the wide projection in one program: with 16 there are 160 programs, and 28 of 132 multiprocessors have two where the others have one."""


@dataclass
class Streams:
    """The residual streams between two blocks: raw [B, C, H] in the compute dtype; scaled float16, raw times (1 + w) of the next mixer's norm and
    SHRINK, in quad order; square float32 [B, C, parts], shares of the sums of squares of raw."""

    raw: Tensor
    scaled: Tensor
    square: Tensor


@jit
def _rates(
    square_ptr: tl.tensor, parts: tl.tensor, EPS: tl.constexpr, M: tl.constexpr, COUNT: tl.constexpr, HIDDEN: tl.constexpr, ROOM: tl.constexpr,
    PTX: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """1 / rms of each token's streams, a tuple of float32 [COUNT]."""
    part = tl.arange(0, ROOM)[None, :]
    line = tl.arange(0, COUNT)[:, None] * parts
    squares = ()
    for m in tl.static_range(M):
        squares = squares + (tl.load(square_ptr + m * COUNT * parts + line + part, mask=(part < parts) & (line >= 0), other=0),)  # type: ignore[assignment]  # noqa: RUF005
    found = ()
    squares = sums(squares, 1, M, PTX)
    for m in tl.static_range(M):
        found = found + (tl.rsqrt(squares[m] / HIDDEN + EPS),)  # type: ignore[assignment]  # noqa: RUF005 (unknown to Triton)
    return found


@jit
def _logits(
    scaled_ptr: tl.tensor, square_ptr: tl.tensor, inject_ptr: tl.tensor, given_ptr: tl.tensor, target: tl.tensor,
    parts: tl.tensor, EPS: tl.constexpr, M: tl.constexpr, COUNT: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """One row of injection logits, of all tokens."""
    place = tl.arange(0, COUNT)[:, None] * HIDDEN + tl.arange(0, BLOCK)[None, :]
    inside = (tl.arange(0, BLOCK) < HIDDEN)[None, :] & (place >= 0)
    row = tl.load(inject_ptr + target * (COUNT * HIDDEN) + place, mask=inside, other=0)
    inputs_ready(PTX)
    rates = _rates(square_ptr, parts, EPS, M, COUNT, HIDDEN, ROOM, PTX)
    totals = ()
    for m in tl.static_range(M):
        scaled = tl.load(scaled_ptr + m * (COUNT * HIDDEN) + place, mask=inside, other=0).to(tl.float32)
        totals = totals + (row.to(tl.float32) * scaled,)  # type: ignore[assignment]  # noqa: RUF005 (unknown to Triton)
    totals = sums(totals, 1, M, PTX)
    for m in tl.static_range(M):
        tl.store(given_ptr + m * COUNT + target, tl.sum(totals[m] * rates[m], axis=0) / _SHRINK)


@jit
def _narrow_kernel(
    scaled_ptr: tl.tensor, quads_ptr: tl.tensor, square_ptr: tl.tensor, words_ptr: tl.tensor, scale_ptr: tl.tensor, unit_ptr: tl.tensor,
    inject_ptr: tl.tensor, inner_ptr: tl.tensor, rate_ptr: tl.tensor, given_ptr: tl.tensor, parts: tl.tensor, EPS: tl.constexpr,
    M: tl.constexpr, COUNT: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, RANK: tl.constexpr, GROUP_CHUNKS: tl.constexpr,
    ROOM: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, INJECT: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Programs 0 .. COUNT - 1 where INJECT: one row of injection logits each; then ROWS rows of the projection each, inner = silu(row . normed / COUNT)
    float16 [M, RANK] in quad order. The first of them leaves the norms' factors, rate [M, COUNT]."""
    let_next_start(PTX)
    CHUNKS: tl.constexpr = COUNT * HIDDEN // 32
    STEPS: tl.constexpr = (CHUNKS + STEP - 1) // STEP
    program = tl.program_id(0)
    if INJECT and program < COUNT:
        _logits(scaled_ptr, square_ptr, inject_ptr, given_ptr, program, parts, EPS, M, COUNT, HIDDEN, BLOCK, ROOM, PTX)
    else:
        first = (program - COUNT * INJECT) * ROWS
        row = first + tl.arange(0, ROWS)
        held = ask(words_ptr, scale_ptr, first, CHUNKS, GROUP_CHUNKS, ROWS, STEP, 0, STEPS)
        unit = tl.load(unit_ptr)
        inputs_ready(PTX)
        rates = _rates(square_ptr, parts, EPS, M, COUNT, HIDDEN, ROOM, PTX)
        each = tl.arange(0, COUNT)
        totals = ()
        for m in tl.static_range(M):
            if first == 0:
                tl.store(rate_ptr + m * COUNT + each, rates[m])
            total = tl.zeros([STEP, ROWS], dtype=tl.float32)
            for s in tl.static_range(STEPS):
                chunk = (s * STEP + tl.arange(0, STEP))[:, None]
                stream = chunk // (HIDDEN // 32)
                own = tl.sum(tl.where(stream == each[None, :], rates[m][None, :], 0.0), axis=1)[:, None]
                inside = exists(chunk, CHUNKS, STEP)
                x = quads_ptr + (m * COUNT + stream) * (HIDDEN // 4) + chunk % (HIDDEN // 32)
                total += held[2 * s + 1] * own * chunk_dot(held[2 * s], x, inside, 0, 0, 8, PTX, False, HIDDEN // 32)
            totals = totals + (total,)  # type: ignore[assignment]  # noqa: RUF005
        found = sums(totals, 0, M, PTX)
        for m in tl.static_range(M):
            value = found[m] * unit / (COUNT * _SHRINK)
            value = value / (1.0 + tl.exp(-value))
            tl.store(inner_ptr + m * RANK + quad_place(row, RANK), value.to(tl.float16), mask=row < RANK)


@jit
def _wide_kernel(
    inner_ptr: tl.tensor, rate_ptr: tl.tensor, scaled_ptr: tl.tensor, words_ptr: tl.tensor, scale_ptr: tl.tensor, unit_ptr: tl.tensor,
    x_ptr: tl.tensor, quads_ptr: tl.tensor, M: tl.constexpr, COUNT: tl.constexpr, HIDDEN: tl.constexpr, CHUNKS: tl.constexpr, GROUP_CHUNKS: tl.constexpr,
    PLACES: tl.constexpr, STEP: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (PLACES places): their rows of every stream, then x = mean of sigmoid(row . inner) * normed, natural [M, HIDDEN] and float16 in quad order."""
    let_next_start(PTX)
    GROUPS: tl.constexpr = (CHUNKS + GROUP_CHUNKS - 1) // GROUP_CHUNKS
    number = tl.arange(0, COUNT * PLACES)
    stream, place = number // PLACES, tl.program_id(0) * PLACES + number % PLACES
    row = stream * HIDDEN + place
    chunk = tl.arange(0, STEP)[:, None]
    inside = exists(chunk, CHUNKS, STEP)
    words = load_words(words_ptr + row_base(row, 8, CHUNKS) + chunk * 16, CHUNKS * 16, inside, 8)
    scale = group_scale(scale_ptr + row_base(row, GROUPS, 1) + chunk // GROUP_CHUNKS * 16, inside)
    unit = tl.load(unit_ptr)
    inputs_ready(PTX)
    one = tl.program_id(0) * PLACES + tl.arange(0, PLACES)
    for m in tl.static_range(M):
        dot = chunk_dot(words, inner_ptr + m * (CHUNKS * 8) + chunk, inside, 0, 0, 8, PTX, False, CHUNKS)
        amount = tl.sum(dot * scale, axis=0) * unit
        rate = tl.load(rate_ptr + m * COUNT + stream)
        value = tl.load(scaled_ptr + (m * COUNT + stream) * HIDDEN + quad_place(place, HIDDEN))
        normed = value.to(tl.float32) * (rate / _SHRINK)
        mixed = tl.sum((normed / (1.0 + tl.exp(-amount))).reshape(COUNT, PLACES), axis=0) / COUNT
        x = mixed.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + m * HIDDEN + one, x)
        tl.store(quads_ptr + m * HIDDEN + quad_place(one, HIDDEN), x.to(tl.float32).to(tl.float16))


@jit
def _add_kernel(
    source_ptr: tl.tensor, ids_ptr: tl.tensor, extra_ptr: tl.tensor, streams_ptr: tl.tensor, given_ptr: tl.tensor, norm_ptr: tl.tensor,
    scaled_ptr: tl.tensor, square_ptr: tl.tensor, COUNT: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr,
    START: tl.constexpr, EXTRA: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (token): START: its row of a table to every stream; else a block's output (and a second part of it) written back."""
    let_next_start(PTX)
    token = tl.program_id(0)
    place = tl.arange(0, BLOCK)
    inside = place < HIDDEN
    norms = norms_of(norm_ptr, place, COUNT, HIDDEN)
    inputs_ready(PTX)
    if START:
        row = tl.load(ids_ptr + token).to(tl.int64)
        y = tl.load(source_ptr + row * HIDDEN + place, mask=inside, other=0).to(tl.float32)
        nothing, one = tl.zeros([COUNT, BLOCK], dtype=tl.float32), tl.full([COUNT, 1], 1.0, dtype=tl.float32)
        write_back(y, nothing, one, norms, token, place, 0, streams_ptr, scaled_ptr, square_ptr, COUNT, HIDDEN, 1)
    else:
        y = tl.load(source_ptr + token * HIDDEN + place, mask=inside, other=0).to(tl.float32)
        if EXTRA:
            y += tl.load(extra_ptr + token * HIDDEN + place, mask=inside, other=0).to(tl.float32)
        known = streams_at(streams_ptr, given_ptr, place, 1, token, COUNT, HIDDEN)
        write_back(y, known[0], known[1], norms, token, place, 0, streams_ptr, scaled_ptr, square_ptr, COUNT, HIDDEN, 1)


def refused(hidden: int, count: int, down: Planes, up: Planes) -> str | None:
    """Why the mixer's kernels cannot serve these matrices, or None."""
    if down.bits != 8 or up.bits != 8 or up.cols != down.rows or down.cols != count * hidden or up.rows != count * hidden:
        return "mixer step: needs two int8_g128 matrices that fit"
    fits = hidden % CHUNK == 0 and down.rows % CHUNK == 0 and count & (count - 1) == 0
    return None if fits else f"mixer step: {hidden} x {count} streams or rank {down.rows} are no multiples of {CHUNK}, or {count} no power of two"


def narrow(streams: Streams, down: Planes, inject: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`inject` 16-bit [C, C * H], each stream's columns in quad order, or None -> (inner float16 [B, rank] in quad order, rate float32 [B, C], injection
    logits float32 [B, C])."""
    batch, count, hidden = streams.raw.shape
    require(streams.scaled.is_contiguous() and (inject is None or inject.is_contiguous()), "mixer step", "needs contiguous streams")
    require_gpu("mixer step", streams.scaled, down.words)
    inner = torch.empty(batch, down.rows, dtype=torch.float16, device=streams.raw.device)
    rate = torch.empty(batch, count, dtype=torch.float32, device=streams.raw.device)
    given = torch.empty(batch, count, dtype=torch.float32, device=streams.raw.device)
    parts, chunks = streams.square.shape[-1], down.cols // CHUNK
    room = triton.next_power_of_2(max(8, triton.cdiv(hidden, 8)))  # a program that writes back has 8 rows at least
    require(parts <= room, "mixer step", f"{parts} shares of the sums of squares")
    step = min(128, triton.next_power_of_2(chunks))
    _narrow_kernel[(triton.cdiv(down.rows, _ROWS) + count * (inject is not None),)](
        streams.scaled, streams.scaled.view(torch.int64), streams.square, down.words, down.scale, down.unit, streams.scaled if inject is None else inject,
        inner, rate, given, parts, eps, batch, count, hidden, triton.next_power_of_2(hidden), down.rows, down.group // CHUNK,
        room, _ROWS, step, inject is not None, chain_ptx(), num_warps=max(1, step // 32), **launch_options(),
    )  # fmt: skip
    return inner, rate, given


def wide(streams: Streams, inner: Tensor, rate: Tensor, up: Planes) -> tuple[Tensor, Tensor]:
    """-> the block's input x [B, H]: natural in the streams' dtype, and float16 in quad order."""
    batch, count, hidden = streams.raw.shape
    x = torch.empty(batch, hidden, dtype=streams.raw.dtype, device=streams.raw.device)
    quads = torch.empty(batch, hidden, dtype=torch.float16, device=streams.raw.device)
    chunks = up.cols // CHUNK
    step = triton.next_power_of_2(chunks)
    _wide_kernel[(hidden // _PLACES,)](
        inner.view(torch.int64), rate, streams.scaled, up.words, up.scale, up.unit, x, quads, batch, count, hidden, chunks, up.group // CHUNK,
        _PLACES, step, chain_ptx(), num_warps=max(1, step * count * _PLACES // 128), **launch_options(),
    )  # fmt: skip
    return x, quads


def start(table: Tensor, ids: Tensor, count: int, norm: Tensor) -> Streams:
    """Rows `ids` int64 [B] of a table [V, H] to `count` streams each; norm float32 [C * H] of the first mixer. Waits for everything before it."""
    batch, hidden = len(ids), table.shape[1]
    raw = torch.empty(batch, count, hidden, dtype=table.dtype, device=table.device)
    scaled = torch.empty(batch, count, hidden, dtype=torch.float16, device=table.device)
    found = Streams(raw, scaled, torch.empty(batch, count, 1, dtype=torch.float32, device=table.device))
    block = triton.next_power_of_2(hidden)
    _add_kernel[(batch,)](
        table, ids, table, raw, found.square, norm, found.scaled, found.square, count, hidden, block, True, False, False, num_warps=_warps(block)
    )
    return found


def add(streams: Streams, y: Tensor, extra: Tensor | None, given: Tensor, norm: Tensor) -> Streams:
    """Writes y [B, H] (and a second part of it) back to the streams in place, ready for the mixer with `norm`."""
    batch, count, hidden = streams.raw.shape
    block = triton.next_power_of_2(hidden)
    square = torch.empty(batch, count, 1, dtype=torch.float32, device=y.device)
    _add_kernel[(batch,)](
        y, y, y if extra is None else extra, streams.raw, given, norm, streams.scaled, square, count, hidden, block, False, extra is not None, chain_ptx(),
        num_warps=_warps(block), **launch_options(),
    )  # fmt: skip
    return Streams(streams.raw, streams.scaled, square)


def _warps(block: int) -> int:
    return min(16, max(1, block // 256))


def streams_of(raw: Tensor, norm: Tensor, parts: int = 1) -> Streams:
    """`Streams` of raw [B, C, H] in plain torch, with so many shares of the squares: what the kernels are compared with."""
    wide = raw.float()
    scaled = quad_order(wide * (1 + norm.view(raw.shape[1:])) * SHRINK).to(torch.float16)
    return Streams(raw, scaled, wide.square().unflatten(-1, (parts, -1)).sum(-1))
