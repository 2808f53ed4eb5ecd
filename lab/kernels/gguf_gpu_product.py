"""Products with transcoded GGUF blocks (`lab.kernels.gguf_gpu`): inner products for a few tokens, chosen experts per slot, and decoding for many.

Each program takes 8 rows whole and its threads share the columns, so a row's sum is made in one program, in a fixed order and without atomics.
Weights become float32 in registers and sums are float32: nothing is lost but float32 rounding, whatever the activations' range. Nothing waits for the
GPU, so all of it replays in a CUDA graph. What it does not prove: that the launch shapes below suit a GPU; experiments/gguf_gpu_bench.py searches them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.backend import launch_options, require, require_gpu, use_ptx, wait_for_inputs
from lab.kernels.gguf_gpu import GpuBlocks
from lab.kernels.gguf_gpu_step import add_products, group_factors, load_group, load_run, token_sums
from lab.kernels.gguf_gpu_types import BlockSpec
from lab.kernels.gguf_gpu_weight import table_words

TOKENS = 8
"""The most tokens `product` takes."""
Shape = tuple[int, int, int]
"""(words per step, steps asked for at once, warps). With a multiple of 32 words per warp, a thread holds all 8 rows of its words and its activations; with
fewer, Triton moves every weight through shared memory."""
_jit: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=["tokens", "share", "experts", "rows", "blocks", "t0", "t1", "t2", "t3"])
"""Sizes that differ from call to call do not make another kernel."""
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


@_jit
def _product_kernel(
    x_ptr: tl.tensor, ids_ptr: tl.tensor, words_ptr: tl.tensor, scale_ptr: tl.tensor, small_ptr: tl.tensor, offset_ptr: tl.tensor,
    small_offset_ptr: tl.tensor, table_ptr: tl.tensor, out_ptr: tl.tensor, t0: tl.tensor, t1: tl.tensor, t2: tl.tensor, t3: tl.tensor,
    tokens: tl.tensor, share: tl.tensor, experts: tl.tensor, rows: tl.tensor, blocks: tl.tensor,
    M: tl.constexpr, SLOTS: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, PER_SUPER: tl.constexpr, OFFSET: tl.constexpr,
    FIRST: tl.constexpr, LEVEL_STEP: tl.constexpr, UNIT: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr, STEPS: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (block of 8 rows, slot): 8 outputs for M tokens, or, with SLOTS, of expert ids[slot] for the slot's activations. Levels are
    FIRST + LEVEL_STEP * code, or the table's where LEVEL_STEP is 0."""
    wait_for_inputs(PTX)
    per_word: tl.constexpr = 32 // BITS
    groups: tl.constexpr = WORDS * per_word // GROUP
    scales: tl.constexpr = groups // PER_SUPER if PER_SUPER > 0 else groups
    run: tl.constexpr = per_word // (2 if KIND == 0 else 4)  # int64s of activations per word
    block, slot = tl.program_id(0).to(tl.int64), tl.program_id(1)
    expert = slot.to(tl.int64) * 0
    if SLOTS:
        expert = tl.load(ids_ptr + slot).to(tl.int64)
        x_ptr += (slot // share).to(tl.int64) * (WORDS * run)
    held = (expert >= 0) & (expert < experts)
    block += tl.where(held, expert, 0) * blocks
    lane = tl.arange(0, 8)[None, :]
    words_ptr += block * (WORDS * 8)
    scale_row, offset_row = scale_ptr + block * (scales * 8) + lane, offset_ptr + block * (scales * 8) + lane
    small_row, small_offset_row = small_ptr + block * (groups * 8) + lane, small_offset_ptr + block * (groups * 8) + lane
    total = (tl.zeros([TILE, 8], dtype=tl.float32),) * M
    for start in tl.range(0, WORDS, TILE * STEPS):
        first = (start + tl.arange(0, TILE))[:, None]
        codes, x, stored = (), (), ()
        for step in tl.static_range(STEPS):
            word = first + step * TILE
            used = ((word < WORDS) & held & (lane >= 0)) != 0  # the comparison changes nothing but the interpreter's dtype
            codes = codes + (tl.load(words_ptr + word * 8 + lane, mask=used, other=0),)  # type: ignore[assignment]  # noqa: RUF005 (unknown to Triton)
            x = x + (load_run(x_ptr + word * run, word < WORDS, run),)  # type: ignore[assignment]  # noqa: RUF005
            found = load_group(scale_row, small_row, offset_row, small_offset_row, word * per_word // GROUP, used, PER_SUPER, OFFSET)
            stored = stored + (found,)  # type: ignore[assignment]  # noqa: RUF005
        total = add_products(
            total, codes, x, stored, x_ptr, first, table_ptr, (t0, t1, t2, t3), tokens,
            M, WORDS, BITS, PER_SUPER, OFFSET, FIRST, LEVEL_STEP, UNIT, KIND, TILE, STEPS, PTX,
        )  # fmt: skip
    # An expert that does not exist must be seen: NaN reaches the engine's numeric gate, a wrong matrix would not.
    value = tl.where(held, token_sums(total, M), tl.where(expert < 0, 0.0, float("nan")))
    row, token = (tl.program_id(0) * 8 + tl.arange(0, 8))[:, None], tl.arange(0, M)[None, :]
    where = out_ptr + (slot + token).to(tl.int64) * rows + row
    tl.store(where, value.to(out_ptr.dtype.element_ty), mask=((row < rows) & (token < tokens)) != 0)


@_jit
def _floats_kernel(
    x_ptr: tl.tensor, ids_ptr: tl.tensor, weight_ptr: tl.tensor, out_ptr: tl.tensor, tokens: tl.tensor, share: tl.tensor, experts: tl.tensor, rows: tl.tensor,
    M: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """The same for weights that are floats, [E, rows, cols] in row order."""
    wait_for_inputs(PTX)
    slot, row = tl.program_id(1), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = slot.to(tl.int64) * 0
    if SLOTS:
        expert = tl.load(ids_ptr + slot).to(tl.int64)
        x_ptr += (slot // share).to(tl.int64) * COLUMNS
    held = (expert >= 0) & (expert < experts)
    first = weight_ptr + (tl.where(held, expert, 0) * rows + row)[:, None] * COLUMNS
    total = (tl.zeros([ROWS, TILE], dtype=tl.float32),) * M
    for start in tl.range(0, COLUMNS, TILE):
        column = (start + tl.arange(0, TILE))[None, :]
        weight = tl.load(first + column, mask=((row < rows)[:, None] & (column < COLUMNS) & held) != 0, other=0).to(tl.float32)
        grown = (total[0] + weight * tl.load(x_ptr + column, mask=column < COLUMNS, other=0).to(tl.float32),)
        for m in tl.static_range(1, M):
            x = tl.load(x_ptr + m * COLUMNS + column, mask=((column < COLUMNS) & (m < tokens)) != 0, other=0).to(tl.float32)
            grown = grown + (total[m] + weight * x,)  # type: ignore[assignment]  # noqa: RUF005
        total = grown
    for m in tl.static_range(M):
        value = tl.where(held, tl.sum(total[m], axis=1), tl.where(expert < 0, 0.0, float("nan"))).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (slot + m).to(tl.int64) * rows + row, value, mask=((row < rows) & (m < tokens)) != 0)


@_jit
def _decode_kernel(
    words_ptr: tl.tensor, scale_ptr: tl.tensor, small_ptr: tl.tensor, offset_ptr: tl.tensor, small_offset_ptr: tl.tensor, table_ptr: tl.tensor,
    out_ptr: tl.tensor, rows: tl.tensor, blocks: tl.tensor,
    WORDS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, PER_SUPER: tl.constexpr, OFFSET: tl.constexpr, FIRST: tl.constexpr,
    LEVEL_STEP: tl.constexpr, UNIT: tl.constexpr, TILE: tl.constexpr,
) -> None:  # fmt: skip
    """Program (block of 8 rows, words, expert): decoded weights, out [E, rows, columns]."""
    per_word: tl.constexpr = 32 // BITS
    groups: tl.constexpr = WORDS * per_word // GROUP
    scales: tl.constexpr = groups // PER_SUPER if PER_SUPER > 0 else groups
    matrix = tl.program_id(2).to(tl.int64)
    block = matrix * blocks + tl.program_id(0)
    lane = tl.arange(0, 8)[None, :]
    word = (tl.program_id(1) * TILE + tl.arange(0, TILE))[:, None]
    inside = (word < WORDS) & (lane >= 0)
    codes = tl.load(words_ptr + block * (WORDS * 8) + word * 8 + lane, mask=inside, other=0)
    stored = load_group(
        scale_ptr + block * (scales * 8) + lane, small_ptr + block * (groups * 8) + lane, offset_ptr + block * (scales * 8) + lane,
        small_offset_ptr + block * (groups * 8) + lane, word * per_word // GROUP, inside, PER_SUPER, OFFSET,
    )  # fmt: skip
    scale, offset = group_factors(stored, PER_SUPER, OFFSET, UNIT)
    shift = tl.arange(0, per_word)[None, :, None] * BITS
    code = (codes[:, None, :] >> shift) & ((1 << BITS) - 1)  # [TILE, per_word, 8]: the first two dimensions are the columns in order
    level = tl.load(table_ptr + code) if LEVEL_STEP == 0 else (code * LEVEL_STEP + FIRST).to(tl.float32)
    value = level * scale[:, None, :]
    if OFFSET:
        value += offset[:, None, :]
    value = tl.trans(value.reshape([TILE * per_word, 8]))
    row = tl.program_id(0) * 8 + tl.arange(0, 8)[:, None]
    column = tl.program_id(1) * (TILE * per_word) + tl.arange(0, TILE * per_word)[None, :]
    where = out_ptr + (matrix * rows + row) * (WORDS * per_word) + column
    tl.store(where, value.to(out_ptr.dtype.element_ty), mask=(row < rows) & (column < WORDS * per_word))


def product(blocks: GpuBlocks, x: Tensor, out: Tensor | None = None, shape: Shape | None = None) -> Tensor:
    """x [n, cols] float32, float16 or bfloat16, n = 1..8, times one matrix -> [n, rows] in x's dtype, or in `out` [n, rows] of any float dtype."""
    require(not blocks.stacked, _who(blocks), f"a stack of {len(blocks.words)} matrices needs expert ids; use expert_slots")
    require(x.ndim == 2 and 1 <= len(x) <= TOKENS, _who(blocks), f"x is {list(x.shape)}, not [1..{TOKENS}, {blocks.cols}]; use dequantise for more")
    return _multiply(blocks, x, None, len(x), _result(blocks, x, len(x), out), shape)


def expert_slots(blocks: GpuBlocks, ids: Tensor, x: Tensor, out: Tensor | None = None, shape: Shape | None = None) -> Tensor:
    """ids integer [s] choose matrices of a stack, x [s, cols] (or [t, cols], where s / t slots in a row share one) -> [s, rows].

    Slots of id -1 are zeros; an id beyond the stack gives NaN, since looking at ids here would wait for the GPU.
    """
    require(ids.ndim == 1 and len(ids) > 0 and not ids.is_floating_point(), _who(blocks), f"ids are {ids.dtype} {list(ids.shape)}, not integers [slots]")
    require(len(ids) < 1 << 16, _who(blocks), f"{len(ids)} slots: a launch takes 65,535; give them in pieces")
    require(x.ndim == 2 and len(x) > 0 and len(ids) % len(x) == 0, _who(blocks), f"x {list(x.shape)} does not divide {len(ids)} slots")
    return _multiply(blocks, x, ids.contiguous(), len(ids), _result(blocks, x, len(ids), out), shape)


def dequantise(blocks: GpuBlocks, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """Decoded weights [.., rows, cols] in `dtype`, rounded once from float32; into `out` where given."""
    out = torch.empty(blocks.shape(), dtype=dtype, device=blocks.words.device) if out is None else out
    require(out.shape == blocks.shape() and out.is_contiguous(), _who(blocks), f"out {list(out.shape)} is not contiguous {list(blocks.shape())}")
    require_gpu(_who(blocks), blocks.words, out)
    if blocks.spec is None:
        return out.copy_(blocks.words.view(blocks.shape()))
    words = blocks.words.shape[2]
    tile = min(triton.next_power_of_2(words), 32)
    _decode_kernel[(blocks.words.shape[1], triton.cdiv(words, tile), len(blocks.words))](
        *_pointers(blocks, blocks.spec), out, blocks.rows, blocks.words.shape[1], *_numbers(blocks, blocks.spec), tile, num_warps=4
    )
    return out


def launch_shape(tokens: int, words: int, bits: int) -> Shape:
    """A launch shape for rows of so many words: as many warps (to 4) as end without a quarter of the last step idle; at one token as many steps asked for at
    once as registers hold (more of them spilled in the machine code)."""
    warps = next((count for count in (4, 2) if triton.cdiv(words, 32 * count) * 32 * count <= 1.25 * words), 1)
    most = {1: 2, 2: 3, 4: 5, 8: 5}[bits] if tokens == 1 else 1
    return 32 * warps, min(triton.cdiv(words, 32 * warps), most), warps


def reference_product(weight: Tensor, x: Tensor) -> Tensor:
    """x [n, cols] times decoded weights [rows, cols] in float64: what `product` is compared with."""
    return x.double() @ weight.double().T


def reference_slots(weight: Tensor, ids: Tensor, x: Tensor) -> Tensor:
    """Decoded weights [E, rows, cols], ids [s], x [s, cols] -> float64 [s, rows], zeros where an id is -1."""
    found = torch.zeros(len(ids), weight.shape[1], dtype=torch.float64, device=x.device)
    for slot, expert in enumerate(ids.tolist()):
        if expert >= 0:
            found[slot] = weight[expert].double() @ x[slot].double()
    return found


def _multiply(blocks: GpuBlocks, x: Tensor, ids: Tensor | None, count: int, out: Tensor, shape: Shape | None) -> Tensor:
    require_gpu(_who(blocks), x, blocks.words, *(() if ids is None else (ids,)))
    m = 1 if ids is not None else triton.next_power_of_2(len(x))
    slots, share = (count if ids is not None else 1), count // len(x)
    x = x.contiguous()
    if blocks.spec is None:
        _floats_kernel[(triton.cdiv(blocks.rows, 4), slots)](
            x, out if ids is None else ids, blocks.words, out, len(x), share, len(blocks.words), blocks.rows,
            m, ids is not None, blocks.cols, 4, 256, use_ptx(), num_warps=4, **launch_options(),
        )  # fmt: skip
        return out
    if x.data_ptr() % 8:  # activations are read 8 bytes at a time
        x = x.clone()
    tile = shape or launch_shape(m, blocks.words.shape[2], blocks.spec.bits)
    even = blocks.spec.step > 0
    _product_kernel[(blocks.words.shape[1], slots)](
        x.view(torch.int64), out if ids is None else ids, *_pointers(blocks, blocks.spec), out, *table_words(() if even else blocks.spec.levels),
        len(x), share, len(blocks.words), blocks.rows, blocks.words.shape[1],
        m, ids is not None, *_numbers(blocks, blocks.spec), _KINDS[x.dtype], *tile[:2], use_ptx(), num_warps=tile[2], **launch_options(),
    )  # fmt: skip
    return out


def _result(blocks: GpuBlocks, x: Tensor, count: int, out: Tensor | None) -> Tensor:
    """`out`, checked, or a new one; checks x too."""
    require(x.shape[1] == blocks.cols and x.dtype in _KINDS, _who(blocks), f"x is {x.dtype} {list(x.shape)}, not float32 or 16-bit, {blocks.cols} wide")
    if out is None:
        return torch.empty(count, blocks.rows, dtype=x.dtype, device=x.device)
    fits = out.shape == (count, blocks.rows) and out.is_contiguous() and out.is_floating_point()
    require(fits, _who(blocks), f"out is {out.dtype} {list(out.shape)}, not contiguous floats [{count}, {blocks.rows}]")
    return out


def _who(blocks: GpuBlocks) -> str:
    return f"gguf:{blocks.name}"


def _pointers(blocks: GpuBlocks, spec: BlockSpec) -> tuple[Tensor, ...]:
    """Words, scales and table as kernels take them; a part that the type does not have is never read, and the scales stand for it."""
    parts = (blocks.small, blocks.offset, blocks.small_offset, blocks.table)
    return blocks.words, blocks.scale, *(blocks.scale if part is None else part for part in parts)


def _numbers(blocks: GpuBlocks, spec: BlockSpec) -> tuple[int | bool | float, ...]:
    """WORDS, BITS, GROUP, PER_SUPER, OFFSET, FIRST, LEVEL_STEP, UNIT of the kernels."""
    return blocks.words.shape[2], spec.bits, spec.group, spec.per_super, spec.offset, spec.levels[0], spec.step, spec.unit
