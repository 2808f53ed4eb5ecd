"""The experts of a chained decode step in four launches: router with the shared expert's first half, choice with its second, gate and up, down.

Why: the router's rows and the shared expert's gate and up read the same input, the choice and the shared expert's down projection the same launch before
them, so each pair is one launch and nothing needs a second stream. The routed down projection knows its experts one launch early: it asks for their
weights while gate and up compute, and writes the sum back to the streams. Activations are in quad order (lab.kernels.quads).
What it does not prove: speed beyond 8 tokens, where slots share experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.backend import chain_ptx, inputs_ready, jit, launch_options, let_next_start, require, require_gpu, silu_mul, use_ptx
from lab.kernels.chunk import chunk_dot, group_scale, load_words
from lab.kernels.mixer_step import Streams
from lab.kernels.planes import CHUNK, ROWS, Planes
from lab.kernels.quads import ask, exists, norms_of, products, quad_place, row_base, small_rows, streams_at, sums, write_back

_SMALL_ROWS = 4


@jit
def _router_kernel(
    x_ptr: tl.tensor, natural_ptr: tl.tensor, small_ptr: tl.tensor, logits_ptr: tl.tensor, small: tl.tensor,
    words_ptr: tl.tensor, scale_ptr: tl.tensor, unit_ptr: tl.tensor, inner_ptr: tl.tensor, rows: tl.tensor,
    M: tl.constexpr, CHUNKS: tl.constexpr, GROUP_CHUNKS: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    SMALL_PROGRAMS: tl.constexpr, SMALL_ROWS: tl.constexpr, SMALL_STEP: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """The first programs: router rows, logits [M, small]; then ROWS gate and up rows of the shared expert each, inner float16 [M, WIDTH] in quad order."""
    let_next_start(PTX)
    program = tl.program_id(0)
    if program < SMALL_PROGRAMS:
        small_rows(natural_ptr, small_ptr, logits_ptr, program * SMALL_ROWS, small, M, CHUNKS * 32, SMALL_ROWS, SMALL_STEP, PTX)
    else:
        first = (program - SMALL_PROGRAMS) * ROWS
        row = first + tl.arange(0, ROWS)
        STEPS: tl.constexpr = (CHUNKS + STEP - 1) // STEP
        held = ask(words_ptr, scale_ptr, first, CHUNKS, GROUP_CHUNKS, ROWS, STEP, 0, STEPS)
        above = ask(words_ptr, scale_ptr, first + BLOCKS * 16, CHUNKS, GROUP_CHUNKS, ROWS, STEP, 0, STEPS)
        unit = tl.load(unit_ptr)
        inputs_ready(PTX)
        totals = ()
        for m in tl.static_range(M):
            gate = tl.zeros([STEP, ROWS], dtype=tl.float32)
            up = tl.zeros([STEP, ROWS], dtype=tl.float32)
            for s in tl.static_range(STEPS):
                chunk = (s * STEP + tl.arange(0, STEP))[:, None]
                inside = exists(chunk, CHUNKS, STEP)
                x = x_ptr + m * (CHUNKS * 8) + chunk
                gate += held[2 * s + 1] * chunk_dot(held[2 * s], x, inside, 0, 0, 8, PTX, False, CHUNKS)
                up += above[2 * s + 1] * chunk_dot(above[2 * s], x, inside, 0, 0, 8, PTX, False, CHUNKS)
            totals = totals + (gate, up)  # type: ignore[assignment]  # noqa: RUF005 (unknown to Triton)
        found = sums(totals, 0, 2 * M, PTX)
        for m in tl.static_range(M):
            value = silu_mul(found[2 * m] * unit, found[2 * m + 1] * unit)
            tl.store(inner_ptr + m * WIDTH + quad_place(row, WIDTH), value.to(tl.float16), mask=row < WIDTH)


@jit
def _choose_kernel(
    logits_ptr: tl.tensor, ids_ptr: tl.tensor, weights_ptr: tl.tensor, share_ptr: tl.tensor,
    inner_ptr: tl.tensor, words_ptr: tl.tensor, scale_ptr: tl.tensor, unit_ptr: tl.tensor, out_ptr: tl.tensor, rows: tl.tensor,
    M: tl.constexpr, EXPERTS: tl.constexpr, TOPK: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr, NORMALISE: tl.constexpr,
    CHUNKS: tl.constexpr, GROUP_CHUNKS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Programs 0 .. M - 1: a token's TOPK largest of EXPERTS logits, their softmax weights, and the sigmoid of the logit after them; then ROWS rows of the
    shared expert's down projection each, times that share, out float32 [M, rows]."""
    let_next_start(PTX)
    program = tl.program_id(0)
    if program < M:
        inputs_ready(PTX)
        expert = tl.arange(0, WIDTH)
        stored = tl.load(logits_ptr + program * (EXPERTS + 1) + expert, mask=expert < EXPERTS, other=float("-inf"))
        kind: tl.constexpr = stored.dtype
        bits = stored.to(tl.int16, bitcast=True).to(tl.int32)
        # A 16-bit float orders like its bits once a negative one's other bits are turned over; below them the expert's number, turned over too.
        key = tl.where(expert < EXPERTS, ((bits ^ tl.where(bits < 0, 0x7FFF, 0)) << 16) | (0xFFFF - expert), -2147483648)
        place = tl.arange(0, PLACES)
        keys = tl.full([PLACES], -2147483648, dtype=tl.int32)
        for i in tl.static_range(TOPK):
            best = tl.max(key, axis=0)
            keys = tl.where(place == i, best, keys)
            key = tl.where(key == best, -2147483648, key)
        high = keys >> 16
        chosen = (high ^ tl.where(high < 0, 0x7FFF, 0)).to(tl.int16).to(kind, bitcast=True).to(tl.float32)
        value = stored.to(tl.float32)
        top = tl.max(value, axis=0)
        full = tl.sum(tl.where(expert < EXPERTS, tl.exp(value - top), 0.0), axis=0)
        weight = tl.where(place < TOPK, tl.exp(chosen - top), 0.0)
        total = tl.sum(weight, axis=0) + 0.0 * full if NORMALISE else full  # `full` carries any logit's NaN
        tl.store(ids_ptr + program * TOPK + place, 0xFFFF - (keys & 0xFFFF), mask=place < TOPK)
        tl.store(weights_ptr + program * TOPK + place, weight / total, mask=place < TOPK)
        tl.store(share_ptr + program, 1.0 / (1.0 + tl.exp(-tl.load(logits_ptr + program * (EXPERTS + 1) + EXPERTS).to(tl.float32))))
    else:
        first = (program - M) * ROWS
        unit = tl.load(unit_ptr)
        STEPS: tl.constexpr = (CHUNKS + STEP - 1) // STEP
        held = ask(words_ptr, scale_ptr, first, CHUNKS, GROUP_CHUNKS, ROWS, STEP, 0, STEPS)
        inputs_ready(PTX)
        found = products(held, inner_ptr, words_ptr, scale_ptr, first, M, CHUNKS, GROUP_CHUNKS, ROWS, STEP, STEPS, PTX)
        row = first + tl.arange(0, ROWS)
        for m in tl.static_range(M):
            share = unit / (1.0 + tl.exp(-tl.load(logits_ptr + m * (EXPERTS + 1) + EXPERTS).to(tl.float32)))
            tl.store(out_ptr + m * rows + row, found[m] * share, mask=row < rows)


@jit
def _gate_up_kernel(
    x_ptr: tl.tensor, ids_ptr: tl.tensor, words_ptr: tl.tensor, scale_ptr: tl.tensor, unit_ptr: tl.tensor, out_ptr: tl.tensor,
    lut_low: tl.tensor, lut_high: tl.tensor, TOPK: tl.constexpr, WIDTH: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, GROUP_CHUNKS: tl.constexpr,
    BITS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, HELD: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (rows, slot): ROWS gate and up rows of the slot's expert -> silu(gate) * up, out float16 [slots, WIDTH] in quad order."""
    inputs_ready(PTX)
    let_next_start(PTX)  # not earlier: the down projection reads the experts' numbers without waiting
    slot = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.load(ids_ptr + slot).to(tl.int64)
    GROUPS: tl.constexpr = (CHUNKS + GROUP_CHUNKS - 1) // GROUP_CHUNKS
    STEPS: tl.constexpr = (CHUNKS + STEP - 1) // STEP
    words_row = words_ptr + expert * (2 * BLOCKS * BITS * CHUNKS * 16) + row_base(row, BITS, CHUNKS)
    scale_row = scale_ptr + expert * (2 * BLOCKS * GROUPS * 16) + row_base(row, GROUPS, 1)
    x_row = x_ptr + slot // TOPK * (CHUNKS * 8)
    unit = tl.load(unit_ptr + expert)
    held = ()
    scales = ()
    gate = tl.zeros([STEP, ROWS], dtype=tl.float32)
    up = tl.zeros([STEP, ROWS], dtype=tl.float32)
    for s in tl.static_range(STEPS + HELD):
        if s == STEPS and HELD == STEPS and PTX:
            tl.debug_barrier()  # or the assembler moves loads down to where they are used, and few are in flight
        if s < STEPS:
            chunk = (s * STEP + tl.arange(0, STEP))[:, None]
            inside = exists(chunk, CHUNKS, STEP)
            for half in tl.static_range(2):
                words = load_words(words_row + half * (BLOCKS * BITS * CHUNKS * 16) + chunk * 16, CHUNKS * 16, inside, BITS)
                held = held + (words,)  # type: ignore[assignment]  # noqa: RUF005
                scale_at = scale_row + half * (BLOCKS * GROUPS * 16) + chunk // GROUP_CHUNKS * 16
                scales = scales + (group_scale(scale_at, inside),)  # type: ignore[assignment]  # noqa: RUF005
        if s >= HELD:
            chunk = ((s - HELD) * STEP + tl.arange(0, STEP))[:, None]
            inside = exists(chunk, CHUNKS, STEP)
            gate += chunk_dot(held[2 * (s - HELD)], x_row + chunk, inside, lut_low, lut_high, BITS, PTX, False, CHUNKS) * scales[2 * (s - HELD)]
            up += chunk_dot(held[2 * (s - HELD) + 1], x_row + chunk, inside, lut_low, lut_high, BITS, PTX, False, CHUNKS) * scales[2 * (s - HELD) + 1]
    found = sums((gate, up), 0, 2, PTX)
    value = silu_mul(found[0] * unit, found[1] * unit)
    tl.store(out_ptr + slot * WIDTH + quad_place(row, WIDTH), value.to(tl.float16), mask=row < WIDTH)


@jit
def _down_kernel(
    h_ptr: tl.tensor, ids_ptr: tl.tensor, weights_ptr: tl.tensor, words_ptr: tl.tensor, scale_ptr: tl.tensor, unit_ptr: tl.tensor,
    lut_low: tl.tensor, lut_high: tl.tensor, extra_ptr: tl.tensor, norm_ptr: tl.tensor,
    streams_ptr: tl.tensor, given_ptr: tl.tensor, scaled_ptr: tl.tensor, square_ptr: tl.tensor,
    TOPK: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, GROUP_CHUNKS: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr, HELD: tl.constexpr, COUNT: tl.constexpr, HIDDEN: tl.constexpr, PARTS: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (rows, token): ROWS outputs, summed over the token's slots and chunks seen as one row of TOPK * CHUNKS, with the shared expert's part, written
    back to the streams. Numbers and weights are of a kernel that has ended before this one may start; they are read past the first-level cache."""
    let_next_start(PTX)
    token = tl.program_id(1)
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    GROUPS: tl.constexpr = (CHUNKS + GROUP_CHUNKS - 1) // GROUP_CHUNKS
    STEPS: tl.constexpr = (TOPK * CHUNKS + STEP - 1) // STEP
    row_words, row_scales = row_base(place, BITS, CHUNKS), row_base(place, GROUPS, 1)
    norms = norms_of(norm_ptr, place, COUNT, HIDDEN)
    held = ()
    scales = ()
    total = tl.zeros([STEP, ROWS], dtype=tl.float32)
    for s in tl.static_range(STEPS + HELD):
        if s == HELD:
            inputs_ready(PTX)
            known = streams_at(streams_ptr, given_ptr, place, 1, token, COUNT, HIDDEN)
            more = tl.load(extra_ptr + token * HIDDEN + place, mask=place < HIDDEN, other=0)
        if s < STEPS:
            number = (s * STEP + tl.arange(0, STEP))[:, None]
            inside = exists(number, TOPK * CHUNKS, STEP)
            slot, chunk = token * TOPK + number // CHUNKS, number % CHUNKS
            expert = tl.load(ids_ptr + slot, mask=inside, other=0, cache_modifier=".cg").to(tl.int64)
            weight = tl.load(weights_ptr + slot, mask=inside, other=0, cache_modifier=".cg") * tl.load(unit_ptr + expert)
            words_at = words_ptr + expert * (BLOCKS * BITS * CHUNKS * 16) + row_words + chunk * 16
            held = held + (load_words(words_at, CHUNKS * 16, inside, BITS),)  # type: ignore[assignment]  # noqa: RUF005
            scale_at = scale_ptr + expert * (BLOCKS * GROUPS * 16) + row_scales + chunk // GROUP_CHUNKS * 16
            scales = scales + (group_scale(scale_at, inside) * weight,)  # type: ignore[assignment]  # noqa: RUF005
        if s >= HELD:
            number = ((s - HELD) * STEP + tl.arange(0, STEP))[:, None]
            h_at = h_ptr + (token * TOPK + number // CHUNKS) * (CHUNKS * 8) + number % CHUNKS
            part = chunk_dot(held[s - HELD], h_at, exists(number, TOPK * CHUNKS, STEP), lut_low, lut_high, BITS, PTX, False, CHUNKS)
            total += part * scales[s - HELD]
    y = tl.sum(total, axis=0) + more
    write_back(y, known[0], known[1], norms, token, place, tl.program_id(0), streams_ptr, scaled_ptr, square_ptr, COUNT, HIDDEN, PARTS)


def refused(planes: Planes, down: Planes) -> str | None:
    """Why a shared expert in these planes (halves = 2, and 1) cannot be served, or None."""
    fits = planes.bits == down.bits == 8 and planes.halves == 2 and planes.rows == down.cols and planes.rows % CHUNK == 0
    return None if fits else f"moe step: shared expert of {planes.rows} rows is no multiple of {CHUNK}"


def route(x: Tensor, quads: Tensor, router: Tensor, shared: Planes) -> tuple[Tensor, Tensor]:
    """x [B, H] natural and in quad order; router 16-bit [experts + 1, H]; shared: gate and up in planes -> (logits [B, experts + 1] in x's dtype, the shared
    expert's inner vector float16 [B, width] in quad order)."""
    batch, hidden = x.shape
    require(quads.shape == x.shape and shared.cols == hidden and router.shape[1] == hidden and router.is_contiguous(), "moe step", f"x {list(x.shape)}")
    require_gpu("moe step", x, quads, router, shared.words)
    logits = torch.empty(batch, len(router), dtype=x.dtype, device=x.device)
    inner = torch.empty(batch, shared.rows, dtype=torch.float16, device=x.device)
    chunks, rows, programs = hidden // CHUNK, 8, triton.cdiv(len(router), _SMALL_ROWS)
    step = min(128, triton.next_power_of_2(chunks))
    _router_kernel[(programs + shared.words.shape[2] * ROWS // rows,)](
        quads.view(torch.int64), x, router, logits, len(router), shared.words, shared.scale, shared.unit, inner, shared.rows,
        batch, chunks, shared.group // CHUNK, shared.rows, shared.words.shape[2], rows, step,
        programs, _SMALL_ROWS, min(1024, triton.next_power_of_2(hidden)), chain_ptx(), num_warps=max(1, step * rows // 128), **launch_options(),
    )  # fmt: skip
    return logits, inner


def choose(logits: Tensor, k: int, normalise: bool, inner: Tensor, down: Planes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """logits [B, experts + 1], the shared gate's last; inner as `route` gives it; down: the shared expert's -> (ids int32 [B, k], weights float32 [B, k],
    share float32 [B, 1], the shared expert's output times its share, float32 [B, H]). Equal logits go to the lower number. Raises LabError unless
    1 <= k <= experts < 65,536."""
    batch, experts = len(logits), logits.shape[1] - 1
    require(logits.element_size() == 2 and 1 <= k <= experts < 1 << 16, "moe step", f"logits {logits.dtype} {list(logits.shape)}, {k} to choose")
    require_gpu("moe step", logits, inner, down.words)
    ids = torch.empty(batch, k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(batch, k, dtype=torch.float32, device=logits.device)
    share = torch.empty(batch, 1, dtype=torch.float32, device=logits.device)
    out = torch.empty(batch, down.rows, dtype=torch.float32, device=logits.device)
    chunks, rows = down.cols // CHUNK, 8
    step = min(16, triton.next_power_of_2(chunks))
    _choose_kernel[(batch + down.words.shape[2] * ROWS // rows,)](
        logits, ids, weights, share, inner.view(torch.int64), down.words, down.scale, down.unit, out, down.rows,
        batch, experts, k, triton.next_power_of_2(k), triton.next_power_of_2(experts), normalise, chunks, down.group // CHUNK, rows, step, chain_ptx(),
        num_warps=1, **launch_options(),
    )  # fmt: skip
    return ids, weights, share, out


def gate_up(quads: Tensor, ids: Tensor, planes: Planes, tile: tuple[int, int, int, int] | None = None) -> Tensor:
    """quads float16 [B, H] in quad order, ids int32 [B, k] -> silu(gate x) * up x, float16 [B, k, width] in quad order. `tile`: rows per program, chunks per
    step, steps held ahead, warps."""
    batch, k = ids.shape
    chunks = planes.cols // CHUNK
    require(quads.shape == (batch, planes.cols) and planes.halves == 2 and planes.rows % CHUNK == 0, "moe step", f"quads {list(quads.shape)}")
    require_gpu("moe step", quads, ids, planes.words)
    out = torch.empty(batch, k, planes.rows, dtype=torch.float16, device=quads.device)
    step = min(16, triton.next_power_of_2(chunks))
    rows, step, held, warps = tile or (16, step, triton.cdiv(chunks, step), max(1, step * 16 // 128))
    # All slots of four tokens are 1,600 programs: with 165 registers 1,584 of them run at once, and the last 16 take as long again.
    bound = {"maxnreg": 144} if batch > 2 and planes.bits == 2 and use_ptx() else {}
    _gate_up_kernel[(planes.words.shape[2] * ROWS // rows, batch * k)](
        quads.view(torch.int64), ids, planes.words, planes.scale, planes.unit, out, *planes.lut_words(), k, planes.rows, planes.words.shape[2], chunks,
        planes.group // CHUNK, planes.bits, rows, step, held, chain_ptx(), num_warps=warps, **bound, **launch_options(),
    )  # fmt: skip
    return out


def down_back(
    h: Tensor, ids: Tensor, weights: Tensor, planes: Planes, extra: Tensor, streams: Streams, given: Tensor, norm: Tensor,
    tile: tuple[int, int, int, int] | None = None,
) -> Streams:  # fmt: skip
    """h as `gate_up` gives it; the weighted sum over the slots plus `extra` float32 [B, H], written back to the streams in place. Launched right after the
    `gate_up` that made h, whose wait this kernel relies on for ids and weights."""
    batch, count, hidden = streams.raw.shape
    k = ids.shape[1]
    chunks = planes.cols // CHUNK
    require(h.shape == (batch, k, planes.cols) and planes.rows == hidden, "moe step", f"h {list(h.shape)}")
    require_gpu("moe step", h, ids, weights, extra, planes.words)
    rows, step, held, warps = tile or _down_tile(k * chunks)
    parts = planes.words.shape[2] * ROWS // rows
    square = torch.empty(batch, count, parts, dtype=torch.float32, device=h.device)
    _down_kernel[(parts, batch)](
        h.view(torch.int64), ids, weights, planes.words, planes.scale, planes.unit, *planes.lut_words(), extra, norm,
        streams.raw, given, streams.scaled, square, k, planes.words.shape[2], chunks, planes.group // CHUNK, planes.bits,
        rows, step, held, count, hidden, parts, chain_ptx(), num_warps=warps, **launch_options(),
    )  # fmt: skip
    return Streams(streams.raw, streams.scaled, square)


def _down_tile(places: int) -> tuple[int, int, int, int]:
    """(rows per program, chunks per step, steps held, warps); measured in experiments/kernel_log.md."""
    rows, step = 16, min(64, triton.next_power_of_2(places))
    return rows, step, min(4, triton.cdiv(places, step)), max(1, step * rows // 128)
