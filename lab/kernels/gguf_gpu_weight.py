"""Codes to weights inside a kernel: a word of 4 to 32 codes and its group's scale and offset become float32 weights, in 3 to 5 instructions each.

Even levels cost no conversion: a code placed in the top bits of the mantissa of 1.0 is the float 1 + code / 2^bits, and one multiply-add with numbers
made once per word gives the weight. Uneven levels come from a table of 16: on NVIDIA by byte permutes in registers (the selector of `prmt` has three
bits, so two lookups and a choice by the fourth; PTX ISA, prmt), elsewhere from memory, where it fills half a cache line.
What it does not prove: bit-equality of the multiply-add: it rounds once where the codec rounds twice. `gguf_gpu.decode` is exact.
"""

from __future__ import annotations

import triton.language as tl

from lab.kernels.backend import jit


def _lookup_ptx() -> str:
    """PTX: $0-$7 float32 levels of the eight codes of word $8, from the table's 16 bytes level + 128 in $9-$12.

    A byte b under the exponent of 2^23 is the float 2^23 + b, so a subtraction makes the level.
    """
    lines = [".reg .b32 q, h, c, lo, hi, v; .reg .f32 f;", "and.b32 q, $8, 0x77777777;", "and.b32 h, $8, 0x88888888;", "shr.u32 h, h, 1;"]
    lines += ["or.b32 h, h, 0x32103210;"]
    for first in (0, 4):
        if first:
            lines += ["shr.u32 q, q, 16;", "shr.u32 h, h, 16;"]
        lines += ["prmt.b32 lo, $9, $10, q;", "prmt.b32 hi, $11, $12, q;", "prmt.b32 v, lo, hi, h;"]
        for byte in range(4):
            lines += [f"prmt.b32 c, v, 0x4B000000, 0x744{byte};", "mov.b32 f, c;", f"sub.rn.f32 ${first + byte}, f, 0f4B000080;"]
    return "{ " + " ".join(lines) + " }"


def _mantissa_ptx(bits: int) -> str:
    """PTX: $0.. float32 1 + code / 2^bits of every code of the word in the last operand. `lop3` 0xEA is (a & b) | c: two instructions a code, where the
    compiler makes three."""
    count, lines = 32 // bits, [".reg .b32 t;"]
    for place in range(count):
        shift = 23 - bits - place * bits
        lines += [f"shl.b32 t, ${count}, {shift};" if shift >= 0 else f"shr.u32 t, ${count}, {-shift};"]
        lines += [f"lop3.b32 ${place}, t, {((1 << bits) - 1) << (23 - bits)}, 0x3F800000, 0xEA;"]
    return "{ " + " ".join(lines) + " }"


_LOOKUP = tl.constexpr(_lookup_ptx())
_LOOKUP_ARGS = tl.constexpr(",".join(["=&f"] * 8 + ["r"] * 5))
_EIGHT = tl.constexpr((tl.float32,) * 8)
_BITS = (1, 2, 4, 8)
_MANTISSA = tl.constexpr(tuple(_mantissa_ptx(bits) for bits in _BITS))
_MANTISSA_ARGS = tl.constexpr(tuple(",".join(["=&r"] * (32 // bits) + ["r"]) for bits in _BITS))
_WORDS = tl.constexpr(tuple((tl.int32,) * (32 // bits) for bits in _BITS))


def table_words(levels: tuple[int, ...]) -> tuple[int, int, int, int]:
    """The table of uneven levels as bytes level + 128 in four signed 32-bit numbers; zeros where levels are even."""
    raw = bytes(level + 128 for level in levels[:16]).ljust(16, b"\0")
    return tuple(int.from_bytes(raw[i : i + 4], "little", signed=True) for i in range(0, 16, 4))  # type: ignore[return-value]


@jit
def looked_up(words: tl.tensor, t0: tl.tensor, t1: tl.tensor, t2: tl.tensor, t3: tl.tensor) -> tl.tensor:
    """The eight levels of each word as a tuple of float32 tensors. NVIDIA only."""
    return tl.inline_asm_elementwise(_LOOKUP, _LOOKUP_ARGS, [words, t0, t1, t2, t3], dtype=_EIGHT, is_pure=True, pack=1)


@jit
def mantissas(words: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """1 + code / 2^BITS of every code of each word, as a tuple of float32 bits in int32 tensors. NVIDIA only."""
    at: tl.constexpr = BITS // 2 - BITS // 8  # 0, 1, 2, 3 of 1, 2, 4, 8
    return tl.inline_asm_elementwise(_MANTISSA[at], _MANTISSA_ARGS[at], [words], dtype=_WORDS[at], is_pure=True, pack=1)


@jit
def mantissa(words: tl.tensor, PLACE: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """1 + code / 2^BITS as float32, of the code at PLACE of each word."""
    shift: tl.constexpr = 23 - BITS - PLACE * BITS
    placed = words << shift if shift >= 0 else words >> -shift  # arithmetic: the sign's copies are masked away
    return ((placed & (((1 << BITS) - 1) << (23 - BITS))) | 0x3F800000).to(tl.float32, bitcast=True)


@jit
def decoded(
    words: tl.tensor, t0: tl.tensor, t1: tl.tensor, t2: tl.tensor, t3: tl.tensor, BITS: tl.constexpr, TABLE: tl.constexpr, PTX: tl.constexpr
) -> tl.tensor:
    """What `weight_at` takes: with PTX all codes of each word at once, else the words themselves."""
    if PTX:
        if TABLE:
            return looked_up(words, t0, t1, t2, t3)
        else:
            return mantissas(words, BITS)
    else:
        return words


@jit
def weight_at(
    codes: tl.tensor, table_ptr: tl.tensor, scale: tl.tensor, offset: tl.tensor, PLACE: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr,
    PTX: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The weights at PLACE of the words, float32. Scale and offset as `level_factors` gives them."""
    if TABLE:
        if PTX:
            return codes[PLACE] * scale
        else:
            return tl.load(table_ptr + ((codes >> (PLACE * BITS)) & 15)) * scale
    elif PTX:
        return tl.fma(codes[PLACE].to(tl.float32, bitcast=True), scale, offset)
    else:
        return tl.fma(mantissa(codes, PLACE, BITS), scale, offset)


@jit
def level_factors(scale: tl.tensor, offset: tl.tensor, BITS: tl.constexpr, FIRST: tl.constexpr, LEVEL_STEP: tl.constexpr) -> tl.tensor:
    """(scale, offset) by level -> by 1 + code / 2^BITS, for levels FIRST + LEVEL_STEP * code; unchanged where LEVEL_STEP is 0 and a table gives the levels."""
    if LEVEL_STEP > 0:
        scale = scale * (LEVEL_STEP * (1 << BITS))
        offset = offset - scale * (1.0 - FIRST / (LEVEL_STEP * (1 << BITS)))
    return scale, offset
