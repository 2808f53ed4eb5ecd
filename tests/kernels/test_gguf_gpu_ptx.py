"""The PTX of the GGUF kernels, executed instruction by instruction on random words: what the interpreter of Triton cannot run.

The rules below are those of the PTX ISA (prmt in its default mode, lop3 by its truth table); the expected levels come from the block types' own tables.
What it does not prove: that a GPU's assembler reads the text so; on a GPU the product's tests run it.
"""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed")

from lab.kernels.gguf_gpu_types import SPECS
from lab.kernels.gguf_gpu_weight import _lookup_ptx, _mantissa_ptx, table_words
from tests.kernels.test_chunk import permute, to_float


def truth_table(a: int, b: int, c: int, table: int) -> int:
    """lop3.b32: bit i of the result is bit (4 a_i + 2 b_i + c_i) of `table`."""
    return sum((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1)) & 1) << i for i in range(32))


RULES = {
    "mov.b32": lambda a: a,
    "shr.u32": lambda a, n: a >> n,
    "shl.b32": lambda a, n: (a << n) & 0xFFFFFFFF,
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "prmt.b32": lambda a, b, selector: permute(a, b, selector & 0xFFFF),
    "lop3.b32": truth_table,
    "sub.rn.f32": lambda a, b: int((np.float32(to_float(a)) - np.float32(to_float(b))).view(np.uint32)),
}


def execute(ptx: str, operands: list[int], outputs: int) -> list[float]:
    """Runs straight-line PTX; operands follow the outputs in the numbering."""
    held = {f"${outputs + i}": value & 0xFFFFFFFF for i, value in enumerate(operands)}
    for line in (part.strip() for part in ptx.strip("{} ").split(";")):
        if line and not line.startswith(".reg"):
            name, rest = line.split(" ", 1)
            target, *sources = re.findall(r"[^,\s]+", rest)
            read = [held[s] if s in held else int(s[2:], 16) if s.startswith("0f") else int(s, 0) for s in sources]
            assert not target.startswith("$") or int(target[1:]) < outputs
            held[target] = RULES[name](*read)
    return [to_float(held[f"${i}"]) for i in range(outputs)]


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if not spec.step])
def test_uneven_levels(name: str) -> None:
    levels, draw = SPECS[name].levels, random.Random(name)
    for _ in range(20):
        codes = [draw.randrange(len(levels)) for _ in range(8)]
        word = sum(code << (4 * i) for i, code in enumerate(codes))
        assert execute(_lookup_ptx(), [word, *table_words(levels)], 8) == [levels[code] for code in codes]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_even_levels(bits: int) -> None:
    draw = random.Random(bits)
    for _ in range(20):
        codes = [draw.randrange(1 << bits) for _ in range(32 // bits)]
        word = sum(code << (bits * i) for i, code in enumerate(codes))
        assert execute(_mantissa_ptx(bits), [word], 32 // bits) == [1 + code / (1 << bits) for code in codes]
