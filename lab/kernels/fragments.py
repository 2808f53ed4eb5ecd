"""2-, 3- and 4-bit weights as the left operand of `tl.dot`, decoded in the registers the matrix units read them from.

Why: on the way through shared memory a decoded weight costs 15 instructions (experiments/kernel_log.md). A Hopper matrix unit takes its left operand from
registers, and the thread in lane 4 r + c of a warp holds columns 2c, 2c + 1, 2c + 8, 2c + 9 of every 16 (runs of 2), or, in the products of older units that
a warp does alone, 4c .. 4c + 3 (runs of 4: the compiler's choice for operands that were joined). A product is a sum over columns in any order, so
lane c is given chunk c of every four chunks whole: it decodes its own words, and only the right operand (the activations) has its columns put into that
order, once (`arrange_columns`). The compiler finds the rest: it carries the operand's layout back to the loads of the words.
Where inline PTX is not used the same tile is built by shifts. What it does not prove: that a later compiler still carries the layout back; the
ahead-of-time test counts instructions and fails if it does not.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.backend import jit
from lab.kernels.planes import code_bits, nibble_bit

BLOCK = 128
"""Columns that are put in order together: four chunks."""
# Per position of a chunk: shift of the low bits in its word, shift of the third bit in the high word.
_LOW = tl.constexpr(tuple(code_bits(i)[0] for i in range(32)))
_HIGH = tl.constexpr(tuple(code_bits(i)[1] for i in range(32)))
_NIBBLE = tl.constexpr(tuple(nibble_bit(i) for i in range(32)))
_OUTPUTS = ",".join(["=h"] * 16)
_CONSTRAINTS2 = tl.constexpr(f"{_OUTPUTS},r,f")
_CONSTRAINTS3 = tl.constexpr(f"{_OUTPUTS},r,f,r")


def padded(columns: int) -> int:
    """Columns of an arranged matrix: whole blocks."""
    return -(-columns // BLOCK) * BLOCK


@cache
def operand_ptx(lut: int, bits: int, half: int, bf16: bool) -> str:
    """PTX: $0..$15 the 16 weights of one low word, in order; $16 the word, $17 the scale (float32), at 3 bits $18 the chunk's high word, at 4 the second of
    two words of 8 codes.

    `lut`: planes.level_table; at 4 bits unused (`_nibble_ptx`). A 16-bit level is two bytes, and a byte permute looks up four of either at once; two more
    permutes pair them up. The scale is rounded to 16 bits, then the product, as 16-bit weights would be."""
    if bits == 4:
        return _nibble_ptx(bf16)
    table = torch.tensor([(lut >> (8 * i)) & 255 for i in range(8)], dtype=torch.uint8).view(torch.float8_e5m2).to(torch.bfloat16 if bf16 else torch.float16)
    values = [number & 0xFFFF for number in table.view(torch.int16).tolist()]
    tables = [sum(((value >> shift) & 0xFF) << (8 * (i % 4)) for i, value in enumerate(values) if i // 4 == part) for shift in (0, 8) for part in (0, 1)]
    kind = "bf16x2" if bf16 else "f16x2"
    lines = [".reg .b32 s, t, u, vl, vh, sc, " + ", ".join(f"t{i}" for i in range(4)) + ", " + ", ".join(f"p{i}" for i in range(8)) + ";"]
    lines += [f"mov.b32 t{i}, {word:#x};" for i, word in enumerate(tables)] + [f"cvt.rn.{kind}.f32 sc, $17, $17;"]
    for step in range(2):
        lines += [f"shr.u32 s, $16, {2 * step};", "and.b32 s, s, 0x33333333;"]
        if bits == 3:
            plane = 2 * half + step  # of the high word; its bits must come to bit 2 of each nibble
            lines += [f"shl.b32 t, $18, {2 - plane};" if plane <= 2 else f"shr.u32 t, $18, {plane - 2};", "and.b32 t, t, 0x44444444;", "or.b32 s, s, t;"]
        for second in range(2):
            lines += ["shr.u32 s, s, 16;"] * second + ["prmt.b32 vl, t0, t1, s;", "prmt.b32 vh, t2, t3, s;"]
            for pair, selector in enumerate(("0x6240", "0x7351")):
                lines += [f"prmt.b32 u, vl, vh, {selector};", f"mul.rn.{kind} p{4 * step + 2 * second + pair}, u, sc;"]
    lines += [f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, p{i};" for i in range(8)]
    return "{ " + " ".join(lines) + " }"


def _nibble_ptx(bf16: bool) -> str:
    """4 bits. bfloat16: the low 8 bits of a number are that many times its smallest subnormal 2^-133, up to where the second normal exponent begins, so a
    masked pair of codes, or of 16 times them, is a pair of numbers as it is, and one multiply-add takes 8 away and scales: c * s' - 8 * s' of the scale
    s' = scale * 2^-22 (2^111 and 2^107 make up for the subnormal; `gain` is what is left). That half-precision fma reads subnormal numbers is in the PTX
    ISA (fma, half precision: only .ftz flushes them, and bfloat16 has no .ftz). float16 has no such range of exponents: there codes go below 1024, as in
    lab.kernels.chunk, then times the scale. Both round as a level times a scale of 16 bits does."""
    kind = "bf16x2" if bf16 else "f16x2"
    pairs = [f"p{i}" for i in range(8)]
    lines = [f".reg .b32 s, m, sc, low, high, less, a0, a1, b0, b1, {', '.join(pairs)};", f"cvt.rn.{kind}.f32 sc, $17, $17;"]
    if bf16:
        for name, factor in (("low", "0x77007700"), ("high", "0x75007500"), ("less", "0xB600B600")):  # 2^111, 2^107, -2^-19
            lines += [f"mov.b32 m, {factor};", f"mul.rn.{kind} {name}, sc, m;"]
    else:
        lines += ["mov.b32 m, 0x64006400;", "mov.b32 a0, 0x30003000;", "mov.b32 b0, 0xD808D808;", "mov.b32 a1, 0x20002000;", "mov.b32 b1, 0xC880C880;"]
    for i, pair in enumerate(pairs):
        word, place = divmod(i, 4)
        if place % 2 == 0:
            lines.append(f"shr.u32 s, ${(16, 18)[word]}, {4 * place};")
        mask = ("0x000F000F", "0x00F000F0")[place % 2]
        if bf16:
            lines += [f"and.b32 {pair}, s, {mask};", f"fma.rn.{kind} {pair}, {pair}, {('low', 'high')[place % 2]}, less;"]
        else:
            lines += [f"lop3.b32 {pair}, s, {mask}, m, 0xEA;", f"fma.rn.{kind} {pair}, {pair}, a{place % 2}, b{place % 2};"]
            lines.append(f"mul.rn.{kind} {pair}, {pair}, sc;")
    lines += [f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, {pair};" for i, pair in enumerate(pairs)]
    return "{ " + " ".join(lines) + " }"


def gain(bits: int, bf16: bool, ptx: bool) -> float:
    """What a sum of products with the operand must be multiplied with, beside the stack's unit."""
    return 2.0**19 if bits == 4 and bf16 and ptx else 1.0


@jit
def row_order(position: tl.tensor, RUN: tl.constexpr) -> tl.tensor:
    """Which column (or row of the matrix that makes it) stands at an arranged position: runs of RUN from each of four chunks in turn."""
    j = position % 128
    return position // 128 * 128 + (j // RUN % 4) * 32 + j // (4 * RUN) * RUN + j % RUN


@jit
def load_scales(scale_ptr: tl.tensor, shift: tl.tensor, mask: tl.tensor, STORED: tl.constexpr) -> tl.tensor:
    """float32 scales from the 32-bit words that hold them: STORED 8 (e4m3), 16 (float16), -16 (bfloat16) or 32 bits. Words, because 32-bit loads are the
    ones that can be copied ahead, and because the operand's layout is carried back only to loads of one width."""
    word = tl.load(scale_ptr, mask=mask, other=0)
    if STORED == 32:
        scale = word.to(tl.float32, bitcast=True)
    elif STORED == 8:
        byte = word >> shift
        half = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)  # as backend.e4m3_to_half
        scale = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    elif STORED == 16:
        scale = (word >> shift).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        scale = ((word >> shift) << 16).to(tl.float32, bitcast=True)
    return scale


@jit
def _plain(word: tl.tensor, high: tl.tensor, scale: tl.tensor, POSITION: tl.constexpr, BITS: tl.constexpr, LUT: tl.constexpr, KIND: tl.constexpr) -> tl.tensor:
    """The weight at one position of the chunk by shifts."""
    if BITS == 4:
        nibble = (tl.where(POSITION % 16 < 8, word, high) >> _NIBBLE[POSITION]) & 15
        return ((nibble - 8).to(tl.float32) * 0.125 * scale).to(KIND)
    code = (word >> _LOW[POSITION]) & 3
    low: tl.constexpr = (LUT & 0x7FFFFFFF) - (LUT & 0x80000000)  # as a signed 32-bit number
    byte = (low >> (code * 8)) & 0xFF
    if BITS == 3:
        upper: tl.constexpr = ((LUT >> 32) & 0x7FFFFFFF) - ((LUT >> 32) & 0x80000000)
        byte = tl.where(((high >> _HIGH[POSITION]) & 1) != 0, (upper >> (code * 8)) & 0xFF, byte)
    return ((byte << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * scale).to(KIND)


@jit
def operand(
    word: tl.tensor, high: tl.tensor, scale: tl.tensor, ASM: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, LUT: tl.constexpr,
    N: tl.constexpr, RUN: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """KIND [N, 64]: half HALF of a block's columns, arranged, from low words, high words (3 bits; 4 bits: second words) and scales
    [N, 4 chunks]."""
    if PTX:
        operands = (word, scale, high) if BITS > 2 else (word, scale)
        constraints: tl.constexpr = _CONSTRAINTS3 if BITS > 2 else _CONSTRAINTS2
        if tl.bfloat16 == KIND:
            p = tl.inline_asm_elementwise(ASM, constraints, operands, dtype=(tl.bfloat16,) * 16, is_pure=True, pack=1)
        else:
            p = tl.inline_asm_elementwise(ASM, constraints, operands, dtype=(tl.float16,) * 16, is_pure=True, pack=1)
    else:
        p = (_plain(word, high, scale, HALF * 16, BITS, LUT, KIND),)
        for j in tl.static_range(1, 16):
            p = p + (_plain(word, high, scale, HALF * 16 + j, BITS, LUT, KIND),)  # noqa: RUF005 (unknown to Triton)
    first = tl.join(tl.join(tl.join(p[0], p[1]), tl.join(p[2], p[3])), tl.join(tl.join(p[4], p[5]), tl.join(p[6], p[7])))
    second = tl.join(tl.join(tl.join(p[8], p[9]), tl.join(p[10], p[11])), tl.join(tl.join(p[12], p[13]), tl.join(p[14], p[15])))
    whole = tl.join(first, second)  # [N, chunk, odd, pair, step, step]
    if RUN == 2:
        return tl.permute(whole, (0, 5, 4, 3, 1, 2)).reshape([N, 64])
    else:
        return tl.permute(whole, (0, 5, 4, 1, 3, 2)).reshape([N, 64])


@jit
def _arrange_kernel(x_ptr: tl.tensor, out_ptr: tl.tensor, columns: tl.tensor, width: tl.tensor, RUN: tl.constexpr, TILE: tl.constexpr) -> None:
    """Program (row, columns): out[row, p] = x[row, row_order(p)], zero beyond the columns."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * TILE + tl.arange(0, TILE)
    column = row_order(position, RUN)
    value = tl.load(x_ptr + row * columns + column, mask=column < columns, other=0)
    tl.store(out_ptr + row * width + position, value, mask=position < width)


def arrange_columns(x: Tensor, run: int = 2) -> Tensor:
    """x [T, columns] contiguous -> [T, padded(columns)] with the columns in the order of an operand (`run`: see `row_order`), zeros at the end."""
    width, tile = padded(x.shape[1]), min(1024, triton.next_power_of_2(x.shape[1]))
    out = torch.empty(len(x), width, dtype=x.dtype, device=x.device)
    _arrange_kernel[(len(x), triton.cdiv(width, tile))](x, out, x.shape[1], width, run, tile, num_warps=4)
    return out
