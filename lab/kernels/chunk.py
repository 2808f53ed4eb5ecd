"""The inner product of one chunk: 32 codes of 2, 3, 4 or 8 bits with 32 activations, in 1.6 to 2 instructions per weight on NVIDIA.

Why PTX: at M = 1..8 a low-bit matrix costs more instructions than bytes. A byte permute looks up four levels at once (the high bytes of float16 values,
see planes.level_table), a mask or a permute sets two codes under float16's exponent of 1024, and float16 multiply-adds take two weights each. Sums are
float16 within a chunk only (two chains of 8, then one addition), weights there are at most 1, and sums are float32 beyond. The plain branch computes the
same in float32.
What it does not prove: anything for activations beyond float16's range: they give infinity or NaN, which the engine's numeric gate refuses.
"""

from __future__ import annotations

import triton.language as tl

from lab.kernels.backend import e4m3_to_half, jit
from lab.kernels.planes import code_bits, nibble_bit

_QUADS = 8  # 64-bit loads of four activations per chunk


def _level_quads(bits: int) -> list[list[str]]:
    """PTX per quad of activations that puts four levels as float16 pairs into `even` and `odd`, from words $1, $2 (, $3) and the table's halves."""
    quads = []
    for quad in range(_QUADS):
        word, rest = divmod(quad, 4)
        step, half = divmod(rest, 2)
        if half == 0:  # eight selectors: the low two bits, and at 3 bits the third
            lines = [f"shr.u32 s, ${1 + word}, {2 * step};", "and.b32 s, s, 0x33333333;"]
            if bits == 3:
                plane = 2 * word + step  # of the high word; its bits must come to bit 2 of each nibble
                lines.append(f"shl.b32 t, $3, {2 - plane};" if plane <= 2 else f"shr.u32 t, $3, {plane - 2};")
                lines += ["and.b32 t, t, 0x44444444;", "or.b32 s, s, t;"]
        else:
            lines = ["shr.u32 s, s, 16;"]
        quads.append([*lines, f"prmt.b32 v, ${bits + 1}, ${bits + 2}, s;", "and.b32 odd, v, 0xFF00FF00;", "prmt.b32 even, v, 0, 0x2404;"])
    return quads


def _byte_quads() -> list[list[str]]:
    """The same for biased bytes: 0x64bb is the float16 1024 + b, and (1024 + b) / 128 - 9 = (b - 128) / 128 is exact."""
    scale = [f"fma.rn.f16x2 {pair}, {pair}, t, v;" for pair in ("even", "odd")]
    constants = ["mov.b32 t, 0x20002000;", "mov.b32 v, 0xC880C880;", "mov.b32 s, 0x64646464;"]  # 2^-7, -9, exponent bytes
    return [[*constants, f"prmt.b32 even, ${1 + quad}, s, 0x4140;", f"prmt.b32 odd, ${1 + quad}, s, 0x4342;", *scale] for quad in range(_QUADS)]


def _nibble_quads() -> list[list[str]]:
    """The same for 4 bits: below 0x6400 the codes of a pair are 1024 + c, or 1024 + 16 c where the mask spares a shift; both come to c / 8 - 1, exactly."""
    found = []
    for quad in range(_QUADS):
        word, second = divmod(quad, 2)
        constants = ["mov.b32 m, 0x64006400;", "mov.b32 a0, 0x30003000;", "mov.b32 b0, 0xD808D808;"]  # 1024, 2^-3, -129
        constants += ["mov.b32 a1, 0x20002000;", "mov.b32 b1, 0xC880C880;"]  # 2^-7, -9
        lines = [f"shr.u32 s, ${1 + word}, 8;" if second else f"mov.b32 s, ${1 + word};"]
        lines += [f"lop3.b32 {pair}, s, {mask}, m, 0xEA;" for pair, mask in (("even", "0x000F000F"), ("odd", "0x00F000F0"))]  # (s & mask) | m
        lines += [f"fma.rn.f16x2 {pair}, {pair}, a{i}, b{i};" for i, pair in enumerate(("even", "odd"))]
        found.append([*([] if quad else constants), *lines])
    return found


def _table(bits: int) -> int:
    """Operands that a level table takes."""
    return 2 if bits < 4 else 0


def _chunk_ptx(bits: int) -> str:
    """PTX of one chunk: $0 float32 result; then the words, below 4 bits the level table's halves, and 8 quads of activations (64 bit)."""
    first = 1 + bits + _table(bits)
    lines = [".reg .b32 s, v, t, m, a0, a1, b0, b1, odd, even, x0, x1, sum0, sum1;", ".reg .b16 h0, h1;", ".reg .f32 f0, f1;"]
    quads = _byte_quads() if bits == 8 else _nibble_quads() if bits == 4 else _level_quads(bits)
    for quad, decode in enumerate(quads):
        lines += [*decode, f"mov.b64 {{x0, x1}}, ${first + quad};"]
        if quad == 0:
            lines += ["mul.rn.f16x2 sum0, even, x0;", "mul.rn.f16x2 sum1, odd, x1;"]
        else:
            lines += ["fma.rn.f16x2 sum0, even, x0, sum0;", "fma.rn.f16x2 sum1, odd, x1, sum1;"]
    lines += ["add.rn.f16x2 sum0, sum0, sum1;", "mov.b32 {h0, h1}, sum0;", "cvt.f32.f16 f0, h0;", "cvt.f32.f16 f1, h1;", "add.f32 $0, f0, f1;"]
    return "{ " + " ".join(lines) + " }"


def _constraints(bits: int) -> str:
    return ",".join(["=f"] + ["r"] * (bits + _table(bits)) + ["l"] * _QUADS)


_PTX2, _PTX2_ARGS = tl.constexpr(_chunk_ptx(2)), tl.constexpr(_constraints(2))
_PTX3, _PTX3_ARGS = tl.constexpr(_chunk_ptx(3)), tl.constexpr(_constraints(3))
_PTX4, _PTX4_ARGS = tl.constexpr(_chunk_ptx(4)), tl.constexpr(_constraints(4))
_PTX8, _PTX8_ARGS = tl.constexpr(_chunk_ptx(8)), tl.constexpr(_constraints(8))
_TO_HALF = tl.constexpr(
    "{ .reg .b32 a, b, c, d, p, q; mov.b64 {a, b}, $1; "
    "shl.b32 c, a, 16; and.b32 d, a, 0xFFFF0000; cvt.rn.f16x2.f32 p, d, c; "
    "shl.b32 c, b, 16; and.b32 d, b, 0xFFFF0000; cvt.rn.f16x2.f32 q, d, c; mov.b64 $0, {p, q}; }"
)
# Per position: shift of the low bits, shift of the high bit; shift of a code of 4 bits.
_LOW = tl.constexpr(tuple(code_bits(i)[0] for i in range(32)))
_HIGH = tl.constexpr(tuple(code_bits(i)[1] for i in range(32)))
_NIBBLE = tl.constexpr(tuple(nibble_bit(i) for i in range(32)))


@jit
def load_quad(x_ptr: tl.tensor, mask: tl.tensor, PTX: tl.constexpr, BF16: tl.constexpr) -> tl.tensor:
    """Four activations at int64 pointers as four float16 in an int64 (PTX) or as they are stored (plain). Masked ones are zero."""
    quad = tl.load(x_ptr, mask=mask, other=0)
    if PTX and BF16:
        quad = tl.inline_asm_elementwise(_TO_HALF, "=l,l", [quad], dtype=tl.int64, is_pure=True, pack=1)
    return quad


@jit
def _activation(quad: tl.tensor, position: tl.constexpr, BF16: tl.constexpr) -> tl.tensor:
    """One of a stored quad's four activations as float32, rounded to float16 as the PTX branch does."""
    bits = (quad >> (16 * position)) & 0xFFFF
    if BF16:
        return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True).to(tl.float16).to(tl.float32)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def _plain_weight(words: tl.tensor, lut_low: tl.tensor, lut_high: tl.tensor, POSITION: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """The weight at one position of the chunk, before its scale, as float32."""
    if BITS == 8:
        byte = words[POSITION // 4] >> (POSITION % 4 * 8)
        return ((byte & 0xFF) - 128).to(tl.float32) * 0.0078125
    elif BITS == 4:
        return (((words[POSITION // 8] >> _NIBBLE[POSITION]) & 15) - 8).to(tl.float32) * 0.125
    else:
        code = (words[POSITION // 16] >> _LOW[POSITION]) & 3
        if BITS == 3:
            code = code | (((words[2] >> _HIGH[POSITION]) & 1) << 2)
        byte = (tl.where(code < 4, lut_low, lut_high) >> ((code & 3) * 8)) & 0xFF
        return (byte << 8).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@jit
def load_words(words_ptr: tl.tensor, plane: tl.tensor, mask: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """The chunk's planes as a tuple of int32 [chunks, rows]; `words_ptr` points to plane 0, planes lie `plane` words apart. Apart from `chunk_dot`, so that
    a loop can ask for the next chunk's words before it computes on this one's."""
    words = (tl.load(words_ptr, mask=mask, other=0),)
    for number in tl.static_range(1, BITS):
        words = words + (tl.load(words_ptr + number * plane, mask=mask, other=0),)  # type: ignore[assignment]  # noqa: RUF005 (unknown to Triton)
    return words


@jit
def chunk_dot(
    words: tl.tensor, x_ptr: tl.tensor, mask: tl.tensor, lut_low: tl.tensor, lut_high: tl.tensor, BITS: tl.constexpr, PTX: tl.constexpr, BF16: tl.constexpr,
    APART: tl.constexpr = 1,
) -> tl.tensor:  # fmt: skip
    """float32 [chunks, rows]: sum over the chunk of level * x (levels: planes.Planes). `words` as `load_words` gives them; x_ptr int64 pointers
    [chunks, 1] to 32 activations in 8 quads, APART quads from one to the next; `mask` [chunks, 1] says which chunks exist."""
    if PTX:
        operands = words + (lut_low, lut_high) if BITS < 4 else words  # noqa: RUF005
        for quad in tl.static_range(8):
            operands = operands + (load_quad(x_ptr + quad * APART, mask, PTX, BF16),)  # noqa: RUF005
        code: tl.constexpr = _PTX2 if BITS == 2 else _PTX3 if BITS == 3 else _PTX4 if BITS == 4 else _PTX8
        kinds: tl.constexpr = _PTX2_ARGS if BITS == 2 else _PTX3_ARGS if BITS == 3 else _PTX4_ARGS if BITS == 4 else _PTX8_ARGS
        return tl.inline_asm_elementwise(code, kinds, operands, dtype=tl.float32, is_pure=True, pack=1)
    else:
        total = tl.zeros(words[0].shape, dtype=tl.float32)
        for i in tl.static_range(32):
            total += _plain_weight(words, lut_low, lut_high, i, BITS) * _activation(load_quad(x_ptr + i // 4 * APART, mask, PTX, BF16), i % 4, BF16)
        return total


@jit
def group_scale(scale_ptr: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """Stored scales as float32; uint8 pointers hold e4m3 bits."""
    stored = tl.load(scale_ptr, mask=mask, other=0)
    if stored.dtype == tl.uint8:
        return e4m3_to_half(stored).to(tl.float32) * 256.0
    return stored.to(tl.float32)
