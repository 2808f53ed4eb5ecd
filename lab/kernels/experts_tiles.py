"""The two tile kernels of grouped experts: an expert's gate and up rows, or its down rows, for the places of one tile.

Why: weights are the left operand, decoded in the registers the matrix units read (lab.kernels.fragments), tokens the right one, so that a tile may be as
narrow as 16 places. A tile's places are one or two powers of two (64 + 32), because an expert's weights should be decoded for all its tokens once and empty
places cost as much as full ones. The first kernel stores its result with the columns already in the order the second one's operand wants.
What it does not prove: anything about how slots came to be in this order (lab.kernels.moe_prefill).
"""

from __future__ import annotations

import triton.language as tl

from lab.kernels.backend import jit
from lab.kernels.fragments import load_scales, operand


@jit
def _silu_mul(gate: tl.tensor, up: tl.tensor, PTX: tl.constexpr) -> tl.tensor:
    """silu(gate) * up. PTX: with the fast exponential and reciprocal (2 units in the last place), a sixth of the instructions."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 e; mul.f32 e, $1, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 e, e; "
            "mul.f32 e, e, $1; mul.f32 $0, e, $2; }",
            "=f,f,f", [gate, up], dtype=tl.float32, is_pure=True, pack=1,
        )  # fmt: skip
    return gate / (1.0 + tl.exp(-gate)) * up


@jit
def _high_words(words_ptr: tl.tensor, word0: tl.tensor, word1: tl.tensor, plane: tl.constexpr, mask: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """What `operand` decodes the first and the second half of each chunk with, beside their words; at 2 bits nothing, and what is returned is not read."""
    if BITS == 3:
        high = tl.load(words_ptr + 2 * plane, mask=mask, other=0)
        return high, high
    elif BITS == 4:
        return tl.load(words_ptr + plane, mask=mask, other=0), tl.load(words_ptr + 3 * plane, mask=mask, other=0)
    else:
        return word0, word1


@jit
def _columns(row_ptr: tl.tensor, held: tl.tensor, start: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """Two tiles KIND [64, places]: columns start .. start + 127 of arranged rows."""
    column = start + tl.arange(0, 64)
    first = tl.load(row_ptr[:, None] + column[None, :], mask=held[:, None], other=0).to(KIND)
    second = tl.load(row_ptr[:, None] + column[None, :] + 64, mask=held[:, None], other=0).to(KIND)
    return tl.trans(first), tl.trans(second)


@jit
def _store_arranged(
    out_ptr: tl.tensor, place: tl.tensor, held: tl.tensor, value: tl.tensor, position: tl.tensor, WIDTH: tl.constexpr, RUN: tl.constexpr
) -> None:
    """value [N, places], rows in runs of 16 from each of four chunks, to out [places, WIDTH] at arranged positions from `position`."""
    N: tl.constexpr = value.shape[0]
    M: tl.constexpr = value.shape[1]
    wide = tl.trans(value.to(out_ptr.dtype.element_ty)).reshape([M, N // 64, 4, 16 // RUN, RUN])
    wide = tl.permute(wide, (0, 1, 3, 2, 4)).reshape([M, N])
    column = position + tl.arange(0, N)
    tl.store(out_ptr + place.to(tl.int64)[:, None] * WIDTH + column[None, :], wide, mask=held[:, None] & (column < WIDTH)[None, :])


@jit
def gate_up_kernel(
    x_ptr: tl.tensor, order_ptr: tl.tensor, tiles_ptr: tl.tensor, words_ptr: tl.tensor, scale_ptr: tl.tensor, shift_ptr: tl.tensor, unit_ptr: tl.tensor,
    out_ptr: tl.tensor, TOPK: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, GROUP_CHUNKS: tl.constexpr, BITS: tl.constexpr,
    STORED: tl.constexpr, LUT: tl.constexpr, ASM0: tl.constexpr, ASM1: tl.constexpr, GAIN: tl.constexpr, N: tl.constexpr, M: tl.constexpr, EXTRA: tl.constexpr,
    RUN: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row block, tile): N gate and up rows of the tile's expert for M + EXTRA places -> silu(gate) * up, out [places, WIDTH], columns arranged."""
    expert = tl.load(tiles_ptr + tl.program_id(1) * 4)
    if expert >= 0:
        begin = tl.load(tiles_ptr + tl.program_id(1) * 4 + 1)
        end = tl.load(tiles_ptr + tl.program_id(1) * 4 + 2)
        place = begin + tl.arange(0, M)
        held = place < end
        K: tl.constexpr = (CHUNKS + 3) // 4 * 128
        x_row = x_ptr + (tl.load(order_ptr + place, mask=held, other=0) // TOPK).to(tl.int64) * K
        position = tl.program_id(0) * N
        # Runs of 16 rows of the position's block of 128, one from each chunk, so that what is stored lies together.
        lane = tl.arange(0, N)
        here = position + lane // 64 * 64
        group = here // 128 * 8 + here % 128 // 64 + lane % 64 // 16 * 2
        plane: tl.constexpr = CHUNKS * 16
        SECOND: tl.constexpr = (2 if BITS == 4 else 1) * plane  # from the word of a chunk's first half to that of its second
        PER: tl.constexpr = 32 // STORED if STORED > 0 else 2
        step: tl.constexpr = 16 // PER  # words of scales from group to group
        groups: tl.constexpr = (CHUNKS + GROUP_CHUNKS - 1) // GROUP_CHUNKS
        UP: tl.constexpr = BLOCKS * BITS * plane
        block = expert.to(tl.int64) * (2 * BLOCKS)
        c = tl.arange(0, 4)
        words = words_ptr + block * (BITS * plane) + (group * (BITS * plane) + lane % 16)[:, None] + (c * 16)[None, :]
        scale = scale_ptr + block * (groups * step) + (group * (groups * step) + lane % 16 // PER)[:, None]
        shift = tl.load(shift_ptr + lane % PER)[:, None]
        gate = tl.zeros([N, M], dtype=tl.float32)
        up = tl.zeros([N, M], dtype=tl.float32)
        if EXTRA > 0:
            more = begin + M + tl.arange(0, EXTRA)
            held_more = more < end
            x_more = x_ptr + (tl.load(order_ptr + more, mask=held_more, other=0) // TOPK).to(tl.int64) * K
            gate_more = tl.zeros([N, EXTRA], dtype=tl.float32)
            up_more = tl.zeros([N, EXTRA], dtype=tl.float32)
        for start in range(0, CHUNKS, 4):
            x0, x1 = _columns(x_row, held, start * 32, KIND)
            inside = (group < BLOCKS)[:, None] & (start + c < CHUNKS)[None, :]
            grouped = scale + ((start + c) // GROUP_CHUNKS * step)[None, :]
            gate0 = tl.load(words + start * 16, mask=inside, other=0)
            gate1 = tl.load(words + (start * 16 + SECOND), mask=inside, other=0)
            up0 = tl.load(words + (start * 16 + UP), mask=inside, other=0)
            up1 = tl.load(words + (start * 16 + UP + SECOND), mask=inside, other=0)
            gate_scale = load_scales(grouped, shift, inside, STORED)
            up_scale = load_scales(grouped + BLOCKS * groups * step, shift, inside, STORED)
            gate_high = _high_words(words + start * 16, gate0, gate1, plane, inside, BITS)
            up_high = _high_words(words + (start * 16 + UP), up0, up1, plane, inside, BITS)
            w_gate0 = operand(gate0, gate_high[0], gate_scale, ASM0, 0, BITS, LUT, N, RUN, KIND, PTX)
            w_up0 = operand(up0, up_high[0], up_scale, ASM0, 0, BITS, LUT, N, RUN, KIND, PTX)
            w_gate1 = operand(gate1, gate_high[1], gate_scale, ASM1, 1, BITS, LUT, N, RUN, KIND, PTX)
            w_up1 = operand(up1, up_high[1], up_scale, ASM1, 1, BITS, LUT, N, RUN, KIND, PTX)
            if EXTRA > 0:
                y0, y1 = _columns(x_more, held_more, start * 32, KIND)
                gate = tl.dot(w_gate0, x0, gate)
                gate_more = tl.dot(w_gate0, y0, gate_more)
                up = tl.dot(w_up0, x0, up)
                up_more = tl.dot(w_up0, y0, up_more)
                gate = tl.dot(w_gate1, x1, gate)
                gate_more = tl.dot(w_gate1, y1, gate_more)
                up = tl.dot(w_up1, x1, up)
                up_more = tl.dot(w_up1, y1, up_more)
            else:
                gate = tl.dot(w_gate0, x0, gate)
                up = tl.dot(w_up0, x0, up)
                gate = tl.dot(w_gate1, x1, gate)
                up = tl.dot(w_up1, x1, up)
        unit = tl.load(unit_ptr + expert) * GAIN
        _store_arranged(out_ptr, place, held, _silu_mul(gate * unit, up * unit, PTX), position, WIDTH, RUN)
        if EXTRA > 0:
            _store_arranged(out_ptr, more, held_more, _silu_mul(gate_more * unit, up_more * unit, PTX), position, WIDTH, RUN)


@jit
def _store_slots(out_ptr: tl.tensor, slot: tl.tensor, held: tl.tensor, value: tl.tensor, row: tl.tensor, WIDTH: tl.constexpr) -> None:
    """value [rows, places] to out [slots, WIDTH]."""
    where = out_ptr + slot.to(tl.int64)[:, None] * WIDTH + row[None, :]
    tl.store(where, tl.trans(value.to(out_ptr.dtype.element_ty)), mask=held[:, None] & (row < WIDTH)[None, :])


@jit
def down_kernel(
    h_ptr: tl.tensor, order_ptr: tl.tensor, weights_ptr: tl.tensor, tiles_ptr: tl.tensor, words_ptr: tl.tensor, scale_ptr: tl.tensor, shift_ptr: tl.tensor,
    unit_ptr: tl.tensor, out_ptr: tl.tensor, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, GROUP_CHUNKS: tl.constexpr, BITS: tl.constexpr,
    STORED: tl.constexpr, LUT: tl.constexpr, ASM0: tl.constexpr, ASM1: tl.constexpr, GAIN: tl.constexpr, N: tl.constexpr, PASSES: tl.constexpr, M: tl.constexpr,
    EXTRA: tl.constexpr, RUN: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row blocks, tile): PASSES times N outputs for M + EXTRA places times the slots' weights, out [slots, WIDTH] at the slots' own numbers. The
    passes and the columns are one loop, so that a pass's first words are asked for during the one before it."""
    expert = tl.load(tiles_ptr + tl.program_id(1) * 4)
    if expert >= 0:
        begin = tl.load(tiles_ptr + tl.program_id(1) * 4 + 1)
        end = tl.load(tiles_ptr + tl.program_id(1) * 4 + 2)
        place = begin + tl.arange(0, M)
        held = place < end
        K: tl.constexpr = (CHUNKS + 3) // 4 * 128
        h_row = h_ptr + place.to(tl.int64) * K
        slot = tl.load(order_ptr + place, mask=held, other=0)
        unit = tl.load(unit_ptr + expert) * GAIN
        share = tl.load(weights_ptr + slot, mask=held, other=0).to(tl.float32) * unit
        lane = tl.arange(0, N)
        plane: tl.constexpr = CHUNKS * 16
        SECOND: tl.constexpr = (2 if BITS == 4 else 1) * plane  # from the word of a chunk's first half to that of its second
        PER: tl.constexpr = 32 // STORED if STORED > 0 else 2
        step: tl.constexpr = 16 // PER
        groups: tl.constexpr = (CHUNKS + GROUP_CHUNKS - 1) // GROUP_CHUNKS
        block = expert.to(tl.int64) * BLOCKS + tl.program_id(0) * (PASSES * N // 16)
        c = tl.arange(0, 4)
        words = words_ptr + block * (BITS * plane) + (lane // 16 * (BITS * plane) + lane % 16)[:, None] + (c * 16)[None, :]
        scale = scale_ptr + block * (groups * step) + (lane // 16 * (groups * step) + lane % 16 // PER)[:, None]
        shift = tl.load(shift_ptr + lane % PER)[:, None]
        if EXTRA > 0:
            more = begin + M + tl.arange(0, EXTRA)
            held_more = more < end
            h_more = h_ptr + more.to(tl.int64) * K
            slot_more = tl.load(order_ptr + more, mask=held_more, other=0)
            share_more = tl.load(weights_ptr + slot_more, mask=held_more, other=0).to(tl.float32) * unit
        for number in tl.range(0, PASSES, flatten=True):
            group = (tl.program_id(0) * PASSES + number) * (N // 16) + lane // 16
            total = tl.zeros([N, M], dtype=tl.float32)
            if EXTRA > 0:
                total_more = tl.zeros([N, EXTRA], dtype=tl.float32)
            for start in range(0, CHUNKS, 4):
                h0, h1 = _columns(h_row, held, start * 32, KIND)
                inside = (group < BLOCKS)[:, None] & (start + c < CHUNKS)[None, :]
                here = words + (number * (N // 16 * BITS * plane) + start * 16)
                word0 = tl.load(here, mask=inside, other=0)
                word1 = tl.load(here + SECOND, mask=inside, other=0)
                grouped = scale + (number * (N // 16 * groups * step) + (start + c) // GROUP_CHUNKS * step)[None, :]
                scales = load_scales(grouped, shift, inside, STORED)
                high = _high_words(here, word0, word1, plane, inside, BITS)
                w0 = operand(word0, high[0], scales, ASM0, 0, BITS, LUT, N, RUN, KIND, PTX)
                w1 = operand(word1, high[1], scales, ASM1, 1, BITS, LUT, N, RUN, KIND, PTX)
                if EXTRA > 0:
                    y0, y1 = _columns(h_more, held_more, start * 32, KIND)
                    total = tl.dot(w0, h0, total)
                    total_more = tl.dot(w0, y0, total_more)
                    total = tl.dot(w1, h1, total)
                    total_more = tl.dot(w1, y1, total_more)
                else:
                    total = tl.dot(w0, h0, total)
                    total = tl.dot(w1, h1, total)
            row = (tl.program_id(0) * PASSES + number) * N + lane
            _store_slots(out_ptr, slot, held, total * share[None, :], row, WIDTH)
            if EXTRA > 0:
                _store_slots(out_ptr, slot_more, held_more, total_more * share_more[None, :], row, WIDTH)
