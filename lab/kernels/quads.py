"""What the kernels of a chained decode step share: activations in quad order, int8 products that ask for weights before they wait, small rows, write-back.

Why quad order: a thread multiplies chunks of 32 weights with 32 activations, four at a time. In natural order the lanes of a warp read 8 bytes each 64
bytes apart; in quad order, places (chunk, quad, i) stored as (quad, chunk, i), the same read is one line. Producers write float16 in that order once.
Why before the wait: weights depend on no other kernel, so a product asks for them while the kernel before it still runs (see backend.let_next_start).
What it does not prove: speed beyond 8 tokens.
"""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from lab.kernels.backend import inputs_ready, jit
from lab.kernels.chunk import chunk_dot, group_scale, load_words
from lab.kernels.planes import CHUNK

SHRINK = 0.0625
"""Streams go to the mixers as float16 times this, so that numbers up to a million are in range and none near a usual rms loses bits."""
_SHRINK = tl.constexpr(SHRINK)


def quad_order(x: Tensor) -> Tensor:
    """[..., n] in natural order -> the same in quad order; n a multiple of 32."""
    return x.unflatten(-1, (-1, 8, 4)).transpose(-3, -2).flatten(-3)


def natural_order(x: Tensor) -> Tensor:
    """The inverse of `quad_order`."""
    return x.unflatten(-1, (8, x.shape[-1] // CHUNK, 4)).transpose(-3, -2).flatten(-3)


@jit
def quad_place(place: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """Where the element of natural place `place` of WIDTH lies in quad order."""
    return place % 32 // 4 * (WIDTH // 8) + place // 32 * 4 + place % 4


@jit
def exists(chunk: tl.tensor, CHUNKS: tl.constexpr, STEP: tl.constexpr) -> tl.tensor:
    """Mask of the chunks there are; a constant where steps divide the matrix, so that loads have none."""
    if CHUNKS % STEP == 0:
        return tl.full(chunk.shape, True, tl.int1)
    else:
        return chunk < CHUNKS


@jit
def row_base(row: tl.tensor, PLANES: tl.constexpr, CHUNKS: tl.constexpr) -> tl.tensor:
    """int64 [1, rows]: where the first word (or scale) of each row lies, in matrices of PLANES * CHUNKS words per row, 16 rows side by side."""
    return ((row // 16).to(tl.int64) * (PLANES * CHUNKS * 16) + row % 16)[None, :]


@jit
def _add2(a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    return a + c, b + d


@jit
def _add4(
    a: tl.tensor, b: tl.tensor, c: tl.tensor, d: tl.tensor, e: tl.tensor, f: tl.tensor, g: tl.tensor, h: tl.tensor
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    return a + e, b + f, c + g, d + h


@jit
def sums(totals: tl.tensor, AXIS: tl.constexpr, N: tl.constexpr, PTX: tl.constexpr) -> tl.tensor:
    """Each of a tuple of N tiles summed over an axis, several at once, so that they share the way through shared memory and its barriers."""
    found = ()
    if PTX and N % 4 == 0:
        for i in tl.static_range(N // 4):
            four = tl.reduce((totals[4 * i], totals[4 * i + 1], totals[4 * i + 2], totals[4 * i + 3]), AXIS, _add4)
            found = found + (four[0], four[1], four[2], four[3])  # type: ignore[assignment]  # noqa: RUF005 (unknown to Triton)
    elif PTX and N % 2 == 0:
        for i in tl.static_range(N // 2):
            two = tl.reduce((totals[2 * i], totals[2 * i + 1]), AXIS, _add2)
            found = found + (two[0], two[1])  # type: ignore[assignment]  # noqa: RUF005
    else:
        for i in tl.static_range(N):
            found = found + (tl.sum(totals[i], axis=AXIS),)  # type: ignore[assignment]  # noqa: RUF005
    return found


@jit
def ask(
    words_ptr: tl.tensor, scale_ptr: tl.tensor, first: tl.tensor, CHUNKS: tl.constexpr, GROUP_CHUNKS: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, START: tl.constexpr, END: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Words and scales of int8 rows from `first` (whole blocks are stored, so all can be read): of steps START to END of STEP chunks, a flat tuple."""
    row = first + tl.arange(0, ROWS)
    GROUPS: tl.constexpr = (CHUNKS + GROUP_CHUNKS - 1) // GROUP_CHUNKS
    words_row = words_ptr + row_base(row, 8, CHUNKS)
    scale_row = scale_ptr + row_base(row, GROUPS, 1)
    held = ()
    for s in tl.static_range(START, END):
        chunk = (s * STEP + tl.arange(0, STEP))[:, None]
        inside = exists(chunk, CHUNKS, STEP)
        words = load_words(words_row + chunk * 16, CHUNKS * 16, inside, 8)
        held = held + (words, group_scale(scale_row + chunk // GROUP_CHUNKS * 16, inside))  # type: ignore[assignment]  # noqa: RUF005
    return held


@jit
def products(
    held: tl.tensor, x_ptr: tl.tensor, words_ptr: tl.tensor, scale_ptr: tl.tensor, first: tl.tensor, M: tl.constexpr, CHUNKS: tl.constexpr,
    GROUP_CHUNKS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, HELD: tl.constexpr, PTX: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """float32 [ROWS] of each of M tokens in a tuple: rows from `first` times x float16 [M, CHUNKS * 32] in quad order, before the matrix' unit. `held`: the
    first HELD steps as `ask` gives them; later ones are asked for HELD steps ahead."""
    STEPS: tl.constexpr = (CHUNKS + STEP - 1) // STEP
    total = (tl.zeros([STEP, ROWS], dtype=tl.float32),) * M
    for s in tl.static_range(STEPS):
        if s + HELD < STEPS:
            held = held + ask(words_ptr, scale_ptr, first, CHUNKS, GROUP_CHUNKS, ROWS, STEP, s + HELD, s + HELD + 1)
        chunk = (s * STEP + tl.arange(0, STEP))[:, None]
        inside = exists(chunk, CHUNKS, STEP)
        grown = ()
        for m in tl.static_range(M):
            part = chunk_dot(held[2 * s], x_ptr + m * (CHUNKS * 8) + chunk, inside, 0, 0, 8, PTX, False, CHUNKS)
            grown = grown + (total[m] + held[2 * s + 1] * part,)  # type: ignore[assignment]  # noqa: RUF005
        total = grown
    return sums(total, 0, M, PTX)


@jit
def small_rows(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, out_ptr: tl.tensor, first: tl.tensor, rows: tl.tensor,
    M: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """ROWS rows from `first` of a 16-bit matrix [rows, COLUMNS] times x [M, COLUMNS] in natural order, out [M, rows]; weights are asked for before the wait.
    Rows are vectors of their own, so that each thread converts an activation once for all of them."""
    STEPS: tl.constexpr = (COLUMNS + STEP - 1) // STEP
    held = ()
    for s in tl.static_range(STEPS):
        column = s * STEP + tl.arange(0, STEP)
        for r in tl.static_range(ROWS):
            row = tl.minimum(first + r, rows - 1).to(tl.int64)  # past the end the last row is computed again, and not stored
            held = held + (tl.load(weight_ptr + row * COLUMNS + column, mask=exists(column, COLUMNS, STEP), other=0),)  # type: ignore[assignment]  # noqa: RUF005
    inputs_ready(PTX)
    for m in tl.static_range(M):
        totals = (tl.zeros([STEP], dtype=tl.float32),) * ROWS
        for s in tl.static_range(STEPS):
            column = s * STEP + tl.arange(0, STEP)
            x = tl.load(x_ptr + m * COLUMNS + column, mask=exists(column, COLUMNS, STEP), other=0).to(tl.float32)
            grown = ()
            for r in tl.static_range(ROWS):
                grown = grown + (totals[r] + held[s * ROWS + r].to(tl.float32) * x,)  # type: ignore[assignment]  # noqa: RUF005
            totals = grown
        found = sums(totals, 0, ROWS, PTX)
        for r in tl.static_range(ROWS):
            tl.store(out_ptr + m * rows + first + r, found[r].to(out_ptr.dtype.element_ty), mask=first + r < rows)


@jit
def norms_of(norm_ptr: tl.tensor, place: tl.tensor, COUNT: tl.constexpr, HIDDEN: tl.constexpr) -> tl.tensor:
    """1 + w of the next mixer's norm at `place` of each stream, float32 [COUNT, places]."""
    return 1.0 + tl.load(norm_ptr + tl.arange(0, COUNT)[:, None] * HIDDEN + place[None, :], mask=place[None, :] < HIDDEN, other=0)


@jit
def streams_at(
    streams_ptr: tl.tensor, given_ptr: tl.tensor, place: tl.tensor, M: tl.constexpr, first: tl.tensor, COUNT: tl.constexpr, HIDDEN: tl.constexpr
) -> tl.tensor:
    """Of each of M tokens from `first`: its streams at `place` [COUNT, places], and how much of a block's output each takes in [COUNT, 1]; a flat tuple, read
    before the block's output is computed. given [tokens, COUNT]: injection logits."""
    stream = tl.arange(0, COUNT)[:, None]
    found = ()
    for m in tl.static_range(M):
        token = first + m
        value = tl.load(streams_ptr + (token * COUNT + stream) * HIDDEN + place[None, :], mask=place[None, :] < HIDDEN, other=0)
        gate = 2.0 / (1.0 + tl.exp(-tl.load(given_ptr + token * COUNT + stream) / COUNT))
        found = found + (value, gate)  # type: ignore[assignment]  # noqa: RUF005 (unknown to Triton)
    return found


@jit
def write_back(
    y: tl.tensor, value: tl.tensor, gate: tl.tensor, norms: tl.tensor, token: tl.tensor, place: tl.tensor, part: tl.tensor,
    streams_ptr: tl.tensor, scaled_ptr: tl.tensor, square_ptr: tl.tensor, COUNT: tl.constexpr, HIDDEN: tl.constexpr, PARTS: tl.constexpr,
) -> None:  # fmt: skip
    """Adds a block's output y float32 at `place` of one token to its streams, and leaves what the next mixer reads: the streams times (1 + w) * SHRINK as
    float16 in quad order, and this program's share of the sums of their squares, [tokens, COUNT, PARTS]. `value` and `gate` as `streams_at` gives them."""
    stream = tl.arange(0, COUNT)
    here = ((token * COUNT + stream) * HIDDEN)[:, None]
    inside = place[None, :] < HIDDEN
    kind: tl.constexpr = streams_ptr.dtype.element_ty
    value = (value.to(tl.float32) + y[None, :] * gate).to(kind)
    tl.store(streams_ptr + here + place[None, :], value, mask=inside)
    wide = tl.where(inside, value.to(tl.float32), 0.0)
    tl.store(scaled_ptr + here + quad_place(place, HIDDEN)[None, :], (wide * norms * _SHRINK).to(tl.float16), mask=inside)
    tl.store(square_ptr + (token * COUNT + stream) * PARTS + part, tl.sum(wide * wide, axis=1))
