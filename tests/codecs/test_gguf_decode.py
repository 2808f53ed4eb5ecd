"""Decoding is bit-equal to the `gguf` package, or to the layout worked by hand where the package lacks the type, on blocks that use every code."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch

from lab.codecs import gguf_bits, gguf_grid, gguf_simple
from lab.codecs.gguf import GGUF_CODECS, PART, codec_of, parts_of
from lab.codecs.gguf_types import TYPES
from lab.errors import LabError
from tests.codecs.gguf_blocks import as_bits, packed_rows

package = pytest.importorskip("gguf")

FLOATS = ("F32", "F16", "BF16")
BY_HAND = ("Q1_0", "Q2_0", "Q2_0_G128")  # the package names the first and cannot decode it; it does not know the others
BLOCKED = [codec.kind.name for codec in GGUF_CODECS.values() if codec.kind.name not in FLOATS]


def test_the_types_of_the_issue_are_all_there() -> None:
    wanted = "F32 F16 BF16 Q8_0 Q4_0 Q4_1 Q5_0 Q5_1 Q2_K Q3_K Q4_K Q5_K Q6_K IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S IQ3_XXS IQ3_S IQ4_NL IQ4_XS MXFP4 NVFP4 Q1_0 Q2_0"
    assert set(GGUF_CODECS) == {f"gguf:{name}" for name in [*wanted.split(), "Q2_0_G128"]}


@pytest.mark.parametrize("name", [name for name in BLOCKED if name not in BY_HAND])
def test_blocks_decode_as_in_the_package(name: str) -> None:
    packed, codec = packed_rows(name), codec_of(TYPES[name])
    decoded = codec.decode(parts_of(packed), 2 * codec.kind.block)
    with np.errstate(over="ignore"):  # MXFP4 scales go up to 2^127
        expected = package.quants.dequantize(packed, package.GGMLQuantizationType[name])
    assert not np.isnan(expected).any()
    assert np.array_equal(as_bits(decoded), as_bits(expected))


@pytest.mark.parametrize("name", FLOATS)
def test_floats_decode_as_in_the_package(name: str) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    bits = bits[(bits & (0x7C00 if name == "F16" else 0x7F80)) != (0x7C00 if name == "F16" else 0x7F80)]
    packed = (bits.astype(np.uint32) << 16 if name == "F32" else bits).view(np.uint8).reshape(2, -1)
    cols = packed.shape[1] // TYPES[name].nbytes
    expected = package.quants.dequantize(packed, package.GGMLQuantizationType[name])
    assert np.array_equal(as_bits(codec_of(TYPES[name]).decode(parts_of(packed), cols)), as_bits(expected))


@pytest.mark.parametrize("name", BY_HAND)
def test_blocks_decode_as_written_down(name: str) -> None:
    """Weight by weight from the written layout: f16 d, then codes from the lowest bits up; 1 bit: -d or d; 2 bits: (code - 1) d."""
    kind, packed = TYPES[name], packed_rows(name, blocks_per_row=1)
    width = 8 * (kind.nbytes - 2) // kind.block
    expected, used = np.empty((len(packed), kind.block), dtype=np.float32), set[int]()
    for row, block in zip(expected, packed, strict=True):
        (d,) = struct.unpack("<e", block[:2].tobytes())
        word = int.from_bytes(block[2:].tobytes(), "little")
        codes = [word >> (width * j) & ((1 << width) - 1) for j in range(kind.block)]
        used |= set(codes)
        row[:] = [(2 * code - 1) * d if width == 1 else (code - 1) * d for code in codes]
    assert used == set(range(1 << width)) and (packed[:, 1] >= 128).any()  # every code, and negative d
    assert np.array_equal(as_bits(codec_of(kind).decode(parts_of(packed), kind.block)), as_bits(expected))


def test_q2_0_golden_block() -> None:
    """d = -0.5, codes 3 2 1 0 in the first byte, 1 everywhere else: code 3 is +2 d, and a 640-wide row is ten such blocks in 180 bytes."""
    block = struct.pack("<e", -0.5) + bytes([0b00_01_10_11]) + bytes([0b01_01_01_01]) * 15
    codec = codec_of(TYPES["Q2_0"])
    row = codec.decode({PART: torch.tensor([list(block * 10)], dtype=torch.uint8)}, 640)
    assert codec.row_bytes(640) == 180
    assert row.view(10, 64)[:, :4].tolist() == [[-1.0, -0.5, 0.0, 0.5]] * 10 and not row.view(10, 64)[:, 4:].any()


@pytest.mark.parametrize(
    ("name", "function", "levels"),
    [
        ("Q4_0", gguf_simple.q4_0, range(-8, 8)),
        ("Q4_1", gguf_simple.q4_1, range(16)),
        ("Q5_0", gguf_simple.q5_0, range(-16, 16)),
        ("Q5_1", gguf_simple.q5_1, range(32)),
        ("Q8_0", gguf_simple.q8_0, range(-128, 128)),
        ("Q2_0", gguf_simple.q2_0, range(-1, 3)),
        ("IQ4_NL", gguf_simple.iq4_nl, gguf_simple.IQ4_LEVELS),
        ("MXFP4", gguf_simple.mxfp4, {0, 1, 2, 3, 4, 6, 8, 12, -1, -2, -3, -4, -6, -8, -12}),
    ],
)
def test_the_blocks_use_every_level(name: str, function: object, levels: object) -> None:
    terms = function(torch.from_numpy(packed_rows(name, 1)))  # type: ignore[operator]
    assert set(terms.codes.unique().tolist()) == set(levels)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("name", "function", "size"),
    [
        ("IQ1_S", gguf_grid.iq1_s, 2 * 2048),  # each entry shifted up and down
        ("IQ1_M", gguf_grid.iq1_m, 2 * 2048),
        ("IQ2_XXS", gguf_grid.iq2_xxs, 256),
        ("IQ2_XS", gguf_grid.iq2_xs, 512),
        ("IQ2_S", gguf_grid.iq2_s, 1024),
        ("IQ3_XXS", gguf_grid.iq3_xxs, 256),
        ("IQ3_S", gguf_grid.iq3_s, 512),
    ],
)
def test_the_blocks_use_every_entry_of_the_codebook(name: str, function: object, size: int) -> None:
    codes = function(torch.from_numpy(packed_rows(name, 1))).codes  # type: ignore[operator]
    width = 4 if name.startswith("IQ3") else 8
    entries = codes if name.startswith("IQ1") else codes.abs()
    assert len(gguf_bits.words(entries.reshape(-1, width), torch.device("cpu")).unique()) == size


def test_iq2_xs_uses_every_entry_with_every_sign_number() -> None:
    blocks = np.zeros((2048, 74), dtype=np.uint8)
    blocks[:, :2] = np.array([1.0], dtype=np.float16).view(np.uint8)
    blocks[:, 2:66] = np.arange(1 << 16, dtype=np.uint16).reshape(2048, 32).view(np.uint8)
    blocks[:, 66:] = np.arange(8) * 33
    expected = package.quants.dequantize(blocks, package.GGMLQuantizationType.IQ2_XS)
    assert np.array_equal(as_bits(codec_of(TYPES["IQ2_XS"]).decode(parts_of(blocks), 256)), as_bits(expected))


@pytest.mark.parametrize("name", BLOCKED)
def test_batches_decode_as_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, parts = codec_of(TYPES[name]), parts_of(packed_rows(name))
    whole = codec.decode(parts, 2 * codec.kind.block)
    monkeypatch.setattr("lab.codecs.gguf._BATCH_CPU", 7 * codec.kind.block)
    assert np.array_equal(as_bits(codec.decode(parts, 2 * codec.kind.block)), as_bits(whole))


@pytest.mark.parametrize("name", BLOCKED)
def test_a_block_decodes_alone_wherever_it_lies(name: str) -> None:
    """One block at an odd place in memory: fields then begin at no multiple of their size."""
    codec, packed = codec_of(TYPES[name]), torch.from_numpy(packed_rows(name, 1))
    whole = codec.decode({PART: packed}, codec.kind.block)
    for row in (1, 3):
        lone = torch.cat((torch.zeros(1, dtype=torch.uint8), packed[row]))[1:]
        assert np.array_equal(as_bits(codec.decode({PART: packed[row]}, codec.kind.block)), as_bits(whole[row]))
        assert np.array_equal(as_bits(codec.decode({PART: lone[None]}, codec.kind.block)), as_bits(whole[row : row + 1]))


def test_rows_of_another_width_are_refused() -> None:
    codec = codec_of(TYPES["Q4_K"])
    for cols in (640, 0, 255):
        with pytest.raises(LabError, match="gguf:Q4_K.*multiple of 256"):
            codec.row_bytes(cols)
    with pytest.raises(LabError, match="gguf:Q4_K: a row of 512 weights has 288 bytes, not 144"):
        codec.decode({PART: torch.zeros(3, 144, dtype=torch.uint8)}, 512)


def test_types_without_a_codec_are_refused() -> None:
    for name in ("I32", "TQ1_0", "F64"):
        with pytest.raises(LabError, match=f"GGUF type {name}: no codec; known: gguf:F32"):
            codec_of(TYPES[name])


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    gguf_grid._entries.cache_clear()
    with pytest.raises(LabError, match=r"gguf:IQ2_XXS needs the gguf package: pip install 'migration-lab\[gguf\]'"):
        codec_of(TYPES["IQ2_XXS"]).decode(parts_of(packed_rows("IQ2_XXS")), 512)
    assert codec_of(TYPES["Q4_K"]).decode(parts_of(packed_rows("Q4_K")), 512).shape == (1024, 512)
