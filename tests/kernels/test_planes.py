"""The repacked order: nothing is lost, every bit has one place, and what does not fit is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from lab.codecs import create, parts_nbytes, relative_mse
from lab.codecs.gguf import PART
from lab.codecs.q2 import LLOYD_MAX
from lab.codecs.w3 import LEVELS
from lab.errors import LabError
from lab.kernels.planes import LEVEL_ERROR, code_bits, level_table, nibble_bit, repack, repack_nibbles, unpack_planes
from tests.codecs.support import student

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("int8_g128", {}),
    ("w3_levels", {}),
    ("w3_levels", {"code_order": "10_10_10_2", "code_numbering": "sign_magnitude", "scale_meaning": "div64"}),
    ("q2_levels", {"levels": (-5, -1, 1, 8), "scale_dtype": "bfloat16"}),
    ("q2_g32", {}),
    ("q2_g32", {"scale_dtype": "e4m3"}),
    ("q2_g32", {"scale_dtype": "bfloat16"}),
    ("gguf:Q4_0", {}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=[f"{n}-{'-'.join(map(str, o.values()))}" for n, o in VARIANTS])
@settings(max_examples=8, deadline=None)
@given(experts=st.integers(1, 9), rows=st.integers(1, 40), units=st.integers(1, 4), halves=st.integers(1, 2), seed=st.integers(0, 9))
def test_planes_hold_what_the_codec_decodes(name: str, options: dict[str, Any], experts: int, rows: int, units: int, halves: int, seed: int) -> None:
    codec = create(name, options)
    cols = units * 64 if name == "w3_levels" else units * 32
    parts = codec.encode(student(experts, halves * rows, cols, seed=seed))
    unpacked, decoded = unpack_planes(repack(codec, parts, cols, halves)), codec.decode(parts, cols)
    assert unpacked.shape == decoded.shape
    if codec.options.get("levels") == LLOYD_MAX:  # 10 : 3 stands for 3.3348
        assert relative_mse(unpacked, decoded) < LEVEL_ERROR**2
    else:
        torch.testing.assert_close(unpacked, decoded, rtol=1e-6, atol=0)


def test_every_bit_of_a_chunk_has_one_place() -> None:
    places = [code_bits(i) for i in range(32)]
    for word in range(2):
        low = [places[i][0] for i in range(16 * word, 16 * word + 16)]
        assert sorted(low) == list(range(0, 32, 2))
    assert sorted(high for _, high in places) == list(range(32))
    for word in range(4):
        assert sorted(nibble_bit(i) for i in range(8 * word, 8 * word + 8)) == list(range(0, 32, 4))


def test_blocks_of_four_bits_become_planes_bit_for_bit() -> None:
    """Any bytes: all codes, scales of either sign, zeros, subnormal ones and the largest."""
    random = torch.Generator().manual_seed(4)
    blocks = torch.randint(0, 256, (11, 2 * 21, 3, 18), dtype=torch.uint8, generator=random)
    blocks[..., 1] &= 0xFB  # no infinities or NaN, which differ from themselves
    extreme = torch.tensor([0.0, -0.0, 2**-24, -(2**-24), 65504.0, -65504.0], dtype=torch.float16).view(torch.uint8).view(2, 3, 2)
    blocks[10, :2, :, :2] = extreme
    blocks[10, 0, :, 2:], blocks[10, 1, :, 2:] = 0x0F, 0xF0
    codec, parts = create("gguf:Q4_0"), {PART: blocks.flatten(-2)}
    want = codec.decode(parts, 96)
    assert want.abs().max() == 8 * 65504
    for halves in (1, 2):
        got = unpack_planes(repack(codec, parts, 96, halves))
        assert torch.equal(got.view(torch.int32), want.view(torch.int32)), "the sign of a zero counts, too"
    apart = repack_nibbles([part.contiguous() for part in parts[PART].chunk(2, 1)], 96)
    assert apart.halves == 2 and torch.equal(apart.words, repack(codec, parts, 96, 2).words)
    assert apart.nbytes() == 11 * (2 * 32 * 96 * 18 // 32 + 4), "4.5 bits a weight, rows to whole blocks of 16, and a unit"


def test_bytes_stay_the_codecs_own() -> None:
    for name, cols in (("int8_g128", 256), ("w3_levels", 128), ("q2_g32", 96), ("gguf:Q4_0", 96)):
        codec = create(name)
        parts = codec.encode(student(3, 32, cols))
        unit = 4 * 3
        factor = parts["factor"].nbytes if "factor" in parts else 0
        assert repack(codec, parts, cols).nbytes() == parts_nbytes(parts) - factor + unit


def test_a_matrix_is_a_stack_of_one() -> None:
    codec, weight = create("int8_g128"), student(20, 64)
    planes = repack(codec, codec.encode(weight), 64)
    assert torch.equal(unpack_planes(planes)[0], codec.decode(codec.encode(weight), 64))


@pytest.mark.parametrize("levels", [LEVELS, (-8.0, -3.0, 3.0, 8.0), LLOYD_MAX, (-3.0, -1.0, 1.0, 3.0), (-1.0, 0.0, 1.0, 2.0)])
def test_level_table_reproduces_levels(levels: tuple[float, ...]) -> None:
    table, factor = level_table(levels)
    stored = torch.tensor([(table >> (8 * i)) & 255 for i in range(len(levels))], dtype=torch.uint8).view(torch.float8_e5m2).float()
    assert 0.5 <= float(stored.abs().max()) <= 1
    torch.testing.assert_close(stored * factor, torch.tensor(levels), rtol=LEVEL_ERROR, atol=1e-7)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(LabError, match="low-bit.*levels.*float8_e5m2"):
        level_table((-1.9, -0.77, 0.5, 1.3))
    bf16 = create("bf16")
    with pytest.raises(LabError, match="bf16.*no plane kernel"):
        repack(bf16, bf16.encode(student(2, 4, 64)), 64)
    int8 = create("int8_g128")
    with pytest.raises(LabError, match="int8_g128: 40 columns.*multiple of 32"):
        repack(int8, int8.encode(student(4, 40)), 40)
    with pytest.raises(LabError, match="2 equal halves"):
        repack(int8, int8.encode(student(2, 5, 64)), 64, halves=2)
    nibbles = create("gguf:Q4_0")
    with pytest.raises(LabError, match="2 equal halves"):
        repack(nibbles, nibbles.encode(student(2, 5, 64)), 64, halves=2)
    with pytest.raises(LabError, match="gguf:Q4_0: stacks .* of 96 columns"):
        repack(nibbles, nibbles.encode(student(2, 4, 64)), 96)
    with pytest.raises(LabError, match="not equal ones"):
        repack_nibbles([nibbles.encode(student(2, rows, 64))[PART] for rows in (4, 5)], 64)
