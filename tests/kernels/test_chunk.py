"""The PTX of one chunk and of the prompt kernels' operand, executed by a few lines of Python: CI has no NVIDIA GPU, and this text is what runs on one.

What it does not prove: that an assembler accepts it (test_compile does) or that registers hold what Triton says (the GPU checks do).
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed")

from lab.kernels.chunk import _TO_HALF, _chunk_ptx
from lab.kernels.fragments import gain, operand_ptx
from lab.kernels.planes import code_bits, level_table, nibble_bit

LEVELS = {2: (-8.0, -3.0, 3.0, 8.0), 3: (-8.0, -5.0, -3.0, -1.0, 1.0, 3.0, 5.0, 8.0)}


def pair(value: int) -> np.ndarray:
    """The two float16 of a 32-bit register, as float64."""
    return np.array([value & 0xFFFF, value >> 16], dtype=np.uint16).view(np.float16).astype(np.float64)


def packed(values: np.ndarray) -> int:
    """Rounded to float16 and put into a 32-bit register."""
    low, high = values.astype(np.float16).view(np.uint16).tolist()
    return low | high << 16


def pair_bf16(value: int) -> np.ndarray:
    """The two bfloat16 of a 32-bit register, as float64; subnormal ones are what they say, as PTX has it."""
    return np.array([value << 16 & 0xFFFFFFFF, value & 0xFFFF0000], dtype=np.uint32).view(np.float32).astype(np.float64)


def packed_bf16(values: np.ndarray) -> int:
    """Rounded once to bfloat16 (8 bits of mantissa, none smaller than 2^-133) and put into a 32-bit register."""
    step = np.exp2(np.maximum(np.frexp(values)[1] - 8, -133))
    low, high = ((np.rint(values / step) * step).astype(np.float32).view(np.uint32) >> 16).tolist()
    return int(low | high << 16)


def by_table(a: int, b: int, c: int, table: int) -> int:
    """lop3.b32: bit i of the table is the result for the inputs' bits of number i, a's the highest."""
    inputs = [(x if i >> (2 - at) & 1 else ~x) for i in range(8) for at, x in enumerate((a, b, c))]
    chosen = [inputs[3 * i] & inputs[3 * i + 1] & inputs[3 * i + 2] for i in range(8) if table >> i & 1]
    return int(np.bitwise_or.reduce(chosen)) & 0xFFFFFFFF


def permute(a: int, b: int, selector: int) -> int:
    """prmt.b32 in its default mode, without sign replication (bit 3 of a nibble must be clear)."""
    source = (a & 0xFFFFFFFF) | (b & 0xFFFFFFFF) << 32
    nibbles = [(selector >> (4 * i)) & 15 for i in range(4)]
    assert max(nibbles) < 8
    return sum(((source >> (8 * nibble)) & 255) << (8 * i) for i, nibble in enumerate(nibbles))


def to_float(value: int) -> float:
    return float(np.array([value], dtype=np.uint32).view(np.float32)[0])


RULES: dict[str, Callable[..., int | float]] = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, n: a >> n,
    "shl.b32": lambda a, n: (a << n) & 0xFFFFFFFF,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "prmt.b32": permute,
    "lop3.b32": by_table,
    "mul.rn.f16x2": lambda a, b: packed(pair(a) * pair(b)),
    "add.rn.f16x2": lambda a, b: packed(pair(a) + pair(b)),
    "fma.rn.f16x2": lambda a, b, c: packed(pair(a) * pair(b) + pair(c)),
    "cvt.f32.f16": lambda a: float(np.array([a], dtype=np.uint16).view(np.float16)[0]),
    "cvt.rn.f16x2.f32": lambda high, low: packed(np.array([to_float(low), to_float(high)])),
    "mul.rn.bf16x2": lambda a, b: packed_bf16(pair_bf16(a) * pair_bf16(b)),
    "fma.rn.bf16x2": lambda a, b, c: packed_bf16(pair_bf16(a) * pair_bf16(b) + pair_bf16(c)),
    "cvt.rn.bf16x2.f32": lambda high, low: packed_bf16(np.array([to_float(low), to_float(high)], dtype=np.float64)),
    "add.f32": lambda a, b: float(np.float32(a) + np.float32(b)),
}


def execute(ptx: str, inputs: list[int]) -> int | float:
    """Runs straight-line PTX on `$1`, `$2`, ... and gives `$0`."""
    return executed(ptx, inputs, 1)["$0"]


def executed(ptx: str, inputs: list[int], first: int) -> dict[str, int | float]:
    """Every register by name after straight-line PTX whose inputs begin at `first`."""
    held: dict[str, int | float] = {f"${i + first}": value for i, value in enumerate(inputs)}

    def value(text: str) -> int | float:
        return held[text] if text in held else int(text, 0)

    for line in (part.strip() for part in ptx.strip("{} ").split(";")):
        if not line or line.startswith(".reg"):
            continue
        name, rest = line.split(" ", 1)
        targets, *sources = re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        if name == "mov.b64":  # between one 64-bit register and two halves
            if targets.startswith("{"):
                low, high = (t.strip() for t in targets.strip("{}").split(","))
                whole = int(value(sources[0]))
                held[low], held[high] = whole & 0xFFFFFFFF, whole >> 32
            else:
                low, high = (int(value(t.strip())) for t in sources[0].strip("{}").split(","))
                held[targets] = low | high << 32
        elif targets.startswith("{"):  # mov.b32 into two 16-bit halves
            low, high = (t.strip() for t in targets.strip("{}").split(","))
            held[low], held[high] = int(value(sources[0])) & 0xFFFF, int(value(sources[0])) >> 16
        else:
            held[targets] = RULES[name](*(value(source) for source in sources))
    return held


def quads(x: np.ndarray) -> list[int]:
    """32 float16 as eight 64-bit numbers."""
    return [int(q) for q in x.astype(np.float16).view(np.uint64)]


@pytest.mark.parametrize("bits", [2, 3])
def test_low_bit_chunk(bits: int) -> None:
    random = np.random.default_rng(bits)
    table, factor = level_table(LEVELS[bits])
    for _ in range(20):
        codes, x = random.integers(0, 1 << bits, 32), random.standard_normal(32).astype(np.float16)
        words = [0] * bits
        for i, code in enumerate(codes.tolist()):
            low, high = code_bits(i)
            words[i // 16] |= (code & 3) << low
            if bits == 3:
                words[2] |= (code >> 2) << high
        got = execute(_chunk_ptx(bits), [*words, table & 0xFFFFFFFF, table >> 32, *quads(x)])
        want = float(np.array(LEVELS[bits])[codes] @ x.astype(np.float64)) / factor
        assert abs(got - want) <= 4e-3 * float(np.abs(x).sum())


def nibble_words(codes: list[int]) -> list[int]:
    """32 codes of 4 bits as four words."""
    words = [0] * 4
    for i, code in enumerate(codes):
        words[i // 8] |= code << nibble_bit(i)
    return words


def test_nibble_chunk() -> None:
    random = np.random.default_rng(4)
    for codes in (np.zeros(32, dtype=np.int64), np.full(32, 15), *(random.integers(0, 16, 32) for _ in range(20))):
        x = random.standard_normal(32).astype(np.float16)
        got = execute(_chunk_ptx(4), [*nibble_words(codes.tolist()), *quads(x)])
        assert abs(got - float((codes - 8) / 8 @ x.astype(np.float64))) <= 4e-3 * float(np.abs(x).sum())


@pytest.mark.parametrize("position", range(32))
def test_each_code_of_four_bits_is_exact_and_meets_its_own_activation(position: int) -> None:
    x = np.zeros(32, dtype=np.float16)
    x[position] = 2.0
    for code in range(16):
        codes = [(code * 7 + 3 * i) % 16 for i in range(32)]
        codes[position] = code
        assert execute(_chunk_ptx(4), [*nibble_words(codes), *quads(x)]) == 2 * (code - 8) / 8


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_an_operand_is_its_levels_times_the_scale_rounded_once(bits: int, bf16: bool) -> None:
    """Every code at every place; scales down to float16's smallest, where the operand is bfloat16."""
    random = np.random.default_rng(bits)
    table = 0 if bits == 4 else level_table(LEVELS[bits])[0]
    levels = (np.arange(16) - 8) / 8 if bits == 4 else np.array([(table >> (8 * i)) & 255 for i in range(1 << bits)], dtype=np.uint16) << 8
    levels = levels if bits == 4 else levels.astype(np.uint16).view(np.float16).astype(np.float64)
    unpair, repair = (pair_bf16, packed_bf16) if bf16 else (pair, packed)
    for scale in (0.0123, -0.5, 1.75, *((2.0**-24, -65504.0) if bf16 else ())):
        codes = random.permutation(np.arange(32) % (1 << bits))
        word = [0] * 4
        for i, code in enumerate(codes.tolist()):
            low, high = code_bits(i)
            word[i // 16] |= (code & 3) << low
            word[2] |= (code >> 2) << high
        words = nibble_words(codes.tolist()) if bits == 4 else word
        for half in (0, 1):
            inputs = [words[2 * half], words[2 * half + 1]] if bits == 4 else [words[half], words[2]]
            stored = int(np.array([scale], dtype=np.float32).view(np.uint32)[0])
            found = executed(operand_ptx(table, bits, half, bf16), [inputs[0], stored, inputs[1]], 16)
            rounded = unpair(repair(np.array([scale, scale])))[0]
            for i in range(16):
                got = unpair(int(found[f"${i}"]))[0] * gain(bits, bf16, True)
                assert got == unpair(repair(np.array([levels[codes[16 * half + i]] * rounded] * 2)))[0], (scale, half, i)


def test_byte_chunk() -> None:
    random = np.random.default_rng(8)
    for _ in range(20):
        codes, x = random.integers(-127, 128, 32), random.standard_normal(32).astype(np.float16)
        words = (codes + 128).astype(np.uint8).view(np.uint32).tolist()
        got = execute(_chunk_ptx(8), [*words, *quads(x)])
        assert abs(got - float(codes / 128 @ x.astype(np.float64))) <= 4e-3 * float(np.abs(x).sum())


@pytest.mark.parametrize(("bits", "position"), [(bits, i) for bits in (2, 3) for i in range(32)])
def test_each_position_meets_its_own_activation(bits: int, position: int) -> None:
    table, factor = level_table(LEVELS[bits])
    top, low, high = (1 << bits) - 1, *code_bits(position)
    words = [0] * bits
    words[position // 16] = 3 << low
    if bits == 3:
        words[2] = 1 << high
    x = np.zeros(32, dtype=np.float16)
    x[position] = 2.0
    assert execute(_chunk_ptx(bits), [*words, table & 0xFFFFFFFF, table >> 32, *quads(x)]) == 2 * LEVELS[bits][top] / factor


def test_bfloat16_activations_become_float16() -> None:
    x = np.array([1.5, -0.25, 3.0, 100.0], dtype=np.float32)
    stored = int((x.view(np.uint32) >> 16).astype(np.uint16).view(np.uint64)[0])
    whole = int(execute(_TO_HALF.value, [stored]))
    assert np.array([whole], dtype=np.uint64).view(np.float16).tolist() == x.tolist()
