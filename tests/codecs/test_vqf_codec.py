"""VQF's encodings: golden blocks from the notes, tile maps against the notes' byte formulas, decoding against the gguf package, refusals.

The formulas are written out here byte by byte in plain Python, apart from the tensor code that is tested. No file of the original converter is public, so
nothing here compares with one.
"""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.capacity.formats import file_type
from lab.codecs import cosine, parts_nbytes, verify_encoding
from lab.codecs.vqf import PART, ROWS, VQF_CODECS, VqfCodec, vqf_codec
from lab.codecs.vqf_encode import ENCODERS
from lab.codecs.vqf_tiles import Tile
from lab.errors import LabError
from lab.kernels import native
from lab.kernels.native import vqf as native_vqf
from tests.codecs.support import gaussian, student

NAMES = sorted(VQF_CODECS)
every = pytest.mark.parametrize("name", NAMES)


def made(name: str) -> VqfCodec:
    return VQF_CODECS[name]()


def raw(blocks: torch.Tensor) -> bytes:
    return blocks.numpy().tobytes()


def ramp() -> torch.Tensor:
    """The notes' golden input: x_i = (i - 16) / 16."""
    return ((torch.arange(32) - 16) / 16)[None]


def test_golden_blocks() -> None:
    q8 = "0820 81899199a1a9b1b9c0c8d0d8e0e8f0f8 000810182028303840474f575f676f77"
    q4 = "0030 809191a2a2b3b3c4c4d5d5e6e6f7f7f8"
    assert raw(vqf_codec("Q8_0").encode(ramp())[PART]).hex() == q8.replace(" ", "")
    assert raw(vqf_codec("Q4_0").encode(ramp())[PART]).hex() == q4.replace(" ", "")
    codes = [max(0, min(15, int(i / 2 + 0.5))) - 8 for i in range(32)]  # d = -1 / -8, so code = trunc((i - 16) / 2 + 8.5)
    assert raw(vqf_codec("Q4I").encode(ramp())[PART]).hex() == "0030" + struct.pack("32b", *codes).hex()


def test_rounding_is_away_from_zero_from_the_unrounded_scale_and_first_of_equals_wins() -> None:
    row = torch.zeros(32)
    row[:6] = torch.tensor([127.0, 0.5, -0.5, 1.5, -2.5, 0.49999997])
    assert raw(vqf_codec("Q8_0").encode(row[None])[PART])[2:8] == struct.pack("6b", 127, 1, -1, 2, -3, 0)
    close = torch.full((32,), 100.3)  # d = 0.789764; rounded to float16 it is 0.789551, which would lift 99.49 to 99.517
    close[1] = 99.49 * 100.3 / 127
    assert raw(vqf_codec("Q8_0").encode(close[None])[PART])[3] == 99
    both = torch.zeros(32)
    both[3], both[20] = -2.0, 2.0
    block = raw(vqf_codec("Q4_0").encode(both[None])[PART])
    assert block[:2] == struct.pack("<e", 0.25) and block[2 + 3] & 15 == 0 and block[2 + 4] >> 4 == 15  # +2 is clamped to 7 * d
    both[3], both[20] = 2.0, -2.0
    assert raw(vqf_codec("Q4_0").encode(both[None])[PART])[:2] == struct.pack("<e", -0.25)  # a negative scale


def test_g256_repeats_one_scale_and_q8_readers_decode_it() -> None:
    weight = student(3, 512, seed=4)
    blocks = vqf_codec("G256").encode(weight)[PART].view(3, 2, 8, 34)
    assert bool((blocks[..., :2] == blocks[:, :, :1, :2]).all())
    for row, group in ((0, 0), (2, 1)):
        piece = weight[row, 256 * group : 256 * (group + 1)]
        d = np.float32(piece.abs().max()) / np.float32(127)
        assert raw(blocks[row, group, 0, :2]) == struct.pack("<e", d)
        exact = [math.floor(abs(float(np.float32(x) * (np.float32(1) / d))) + 0.5) * (1 if x > 0 else -1) for x in piece]
        assert raw(blocks[row, group, :, 2:]) == struct.pack("256b", *exact)
    decoded = vqf_codec("Q8_0").decode({PART: blocks.view(3, -1)}, 512)
    assert torch.equal(decoded, vqf_codec("G256").decode({PART: blocks.view(3, -1)}, 512))


def test_the_embedding_is_cut_and_block_scales_are_rounded() -> None:
    values = torch.tensor([[1.0 + 2**-10 + 2**-11 + 2**-12, -1.9999999, 65535.0, 2**-14, 2**-15, -(2**-14) * 0.9999, 0.0, -0.0]])
    halves = struct.unpack("<8e", raw(vqf_codec("F16").encode(values)[PART]))
    assert halves[:4] == (1 + 2**-10, -(2 - 2**-10), 65504.0, 2**-14) and halves[4:] == (0, 0, 0, 0)
    assert [math.copysign(1, x) for x in halves[4:]] == [1, -1, 1, -1]
    tiny = torch.full((1, 32), 127 * 2.0**-20 * 1.4)  # d = 1.4 * 2**-20: a subnormal float16, kept and rounded to a multiple of 2**-24
    assert struct.unpack("<e", raw(vqf_codec("Q8_0").encode(tiny)[PART])[:2])[0] == 22 * 2.0**-24


@pytest.mark.parametrize(("name", "frame"), [("Q8_0", GGMLQuantizationType.Q8_0), ("Q4_0", GGMLQuantizationType.Q4_0)])
def test_decoding_equals_the_gguf_package(name: str, frame: GGMLQuantizationType) -> None:
    codec = vqf_codec(name)
    blocks = torch.randint(256, (5, 3, codec.block_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    blocks[..., 1] &= 0xBF  # no infinities among the random scales
    blocks = blocks.view(5, -1)
    assert np.array_equal(codec.decode({PART: blocks}, 96).numpy(), quants.dequantize(blocks.numpy(), frame))


@pytest.mark.parametrize(("name", "frame"), [("Q8_0", GGMLQuantizationType.Q8_0), ("Q4_0", GGMLQuantizationType.Q4_0)])
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 9), units=st.integers(1, 9), exponent=st.floats(-3, 2), seed=st.integers(0, 999))
def test_encoding_equals_the_gguf_package_where_no_block_is_empty(
    name: str, frame: GGMLQuantizationType, rows: int, units: int, exponent: float, seed: int
) -> None:
    """The rules in the notes are ggml's reference rules, apart from blocks of zeros and near nothing."""
    weight = student(rows, 32 * units, seed=seed, std=10**exponent)
    assert np.array_equal(vqf_codec(name).encode(weight)[PART].numpy(), quants.quantize(weight.numpy(), frame))


def slow_tile(tile: Tile, blocks: list[list[bytes]]) -> bytes:
    """The notes' formulas: `blocks[m]` are the plain blocks of row m of one tile row."""
    out = bytearray()
    for b in range(len(blocks[0])):
        column = [blocks[m][b] for m in range(tile.rows)]
        payload = len(column[0]) - 2
        piece = bytearray(tile.rows * (payload + 2))
        for m in range(tile.rows):
            piece[2 * m : 2 * m + 2] = column[m][:2]
        start = 2 * tile.rows
        if tile.flip == 0:  # code at start + 4 R k + 4 m + i for row m, column 4 k + i
            for m in range(tile.rows):
                for k in range(8):
                    for i in range(4):
                        piece[start + 4 * tile.rows * k + 4 * m + i] = column[m][2 + 4 * k + i]
        else:  # 16 chunks; chunk c = bytes unit * (c // R) .. of row c % R, every byte XOR 0x88
            for c in range(16):
                source = column[c % tile.rows][2 + tile.unit * (c // tile.rows) :][: tile.unit]
                piece[start + tile.unit * c : start + tile.unit * (c + 1)] = bytes(x ^ 0x88 for x in source)
        out += piece
    return bytes(out)


TILED = [n for n in NAMES if VQF_CODECS[n].tile]


@pytest.mark.parametrize("name", TILED)
@settings(max_examples=12, deadline=None)
@given(groups=st.integers(1, 5), count=st.integers(1, 9), lead=st.sampled_from([(), (3,), (2, 2)]), seed=st.integers(0, 999))
def test_tiles_are_the_notes_formulas_and_lose_nothing(name: str, groups: int, count: int, lead: tuple[int, ...], seed: int) -> None:
    codec = made(name)
    assert codec.tile is not None
    rows = groups * codec.tile.rows
    plain = torch.randint(256, (*lead, rows, count * codec.block_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    parts = codec.laid_out(plain)
    assert parts[PART].shape == (*lead, groups, count, codec.tile.rows * codec.block_bytes)
    assert torch.equal(codec.plain_blocks(parts), plain)
    matrix = plain.reshape(-1, rows, count, codec.block_bytes)[-1]
    slow = b"".join(
        slow_tile(codec.tile, [[raw(matrix[g * codec.tile.rows + m, b]) for b in range(count)] for m in range(codec.tile.rows)]) for g in range(groups)
    )
    assert raw(parts[PART].reshape(-1, groups, count, codec.tile.rows * codec.block_bytes)[-1]) == slow


def test_a_tile_row_follows_the_one_before() -> None:
    """Offset of row r, block b in a matrix of 64 columns: (r // 8) * 2 * 272 + b * 272, from the notes."""
    plain = torch.arange(16 * 2 * 34, dtype=torch.int64).remainder(251).to(torch.uint8).view(16, 68)
    flat = vqf_codec("Q8_0", "8X8").laid_out(plain)[PART].flatten()
    for r, b, k, i in ((0, 0, 0, 0), (9, 1, 7, 3), (15, 0, 3, 2), (7, 1, 5, 1)):
        assert flat[(r // 8) * 2 * 272 + b * 272 + 16 + 32 * k + 4 * (r % 8) + i] == plain[r, 34 * b + 2 + 4 * k + i]


def test_a_4_bit_tile_holds_signed_numbers() -> None:
    codec = vqf_codec("Q4_0", "4X4")
    tile = codec.encode(ramp().repeat(4, 1))[PART].flatten()
    first = int(tile[8])  # row 0, weights 0 and 16: codes 0 and 8
    assert (first & 15, first >> 4) == (8, 0)  # -8 and 0 in two's complement


@every
@settings(max_examples=8, deadline=None)
@given(lead=st.lists(st.integers(1, 2), max_size=2), groups=st.integers(1, 4), units=st.integers(1, 3), exponent=st.floats(-3, 2), seed=st.integers(0, 9))
def test_round_trip(name: str, lead: list[int], groups: int, units: int, exponent: float, seed: int) -> None:
    codec = made(name)
    rows, cols = groups * (codec.tile.rows if codec.tile else 3), units * codec.col_multiple * (1 if codec.col_multiple > 1 else 7)
    weight = student(*lead, rows, cols, seed=seed, std=10**exponent)
    if codec.plain == "F16":
        weight = torch.where(weight.abs() < 2**-14, torch.zeros_like(weight), weight)
    parts = codec.encode(weight)
    assert parts_nbytes(parts) == codec.nbytes(weight.shape) and all(part.dtype == torch.uint8 for part in parts.values())
    once = codec.decode(parts, cols)
    assert once.shape == weight.shape and once.dtype == torch.float32
    assert cosine(once, weight) > codec.plausible[0] and verify_encoding(codec, parts, weight).ok
    assert torch.equal(codec.decode(codec.laid_out(codec.plain_blocks(parts)), cols), once)
    plain = VQF_CODECS[f"vqf:{codec.plain}"]()
    assert torch.equal(plain.decode(plain.encode(weight), cols), once)  # a tile changes no value


@every
def test_rows_stacks_and_views(name: str) -> None:
    codec = made(name)
    weight = gaussian(3, 16, 256, seed=2)
    parts = codec.encode(weight)
    whole = codec.decode(parts, 256)
    ids = torch.tensor([15, 0, 7, 7, 8, 3])
    assert torch.equal(codec.decode(codec.take_rows(codec.select(parts, 1), ids), 256), whole[1, ids])
    again = codec.take_rows(codec.take_rows(codec.select(parts, 2), ids), torch.tensor([1, 4]))
    assert torch.equal(codec.decode(again, 256), whole[2, [0, 8]])
    assert torch.equal(codec.decode(codec.select(parts, torch.tensor([2, 0])), 256), whole[[2, 0]])
    spaced = {key: torch.stack((part, torch.full_like(part, 255)), dim=-1)[..., 0] for key, part in parts.items()}  # strided, among poison
    assert torch.equal(codec.decode(spaced, 256), whole)
    before = parts[PART].clone()
    codec.decode(parts, 256).fill_(7)
    assert torch.equal(parts[PART], before)  # what comes out is no view of the file


@pytest.mark.parametrize("name", TILED)
def test_columns_of_a_tiled_matrix_are_views(name: str) -> None:
    """Experts own columns of the down projection: blocks of 32 columns can be cut out without copying."""
    codec = made(name)
    weight = gaussian(8, 3 * 256, seed=5)
    tiles = codec.encode(weight)[PART]
    middle = tiles.unflatten(1, (3, 8)).transpose(0, 1)[1]
    assert torch.equal(codec.decode({PART: middle}, 256), codec.decode({PART: tiles}, 768)[:, 256:512])


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4I", "G256"])
def test_odd_blocks(name: str) -> None:
    codec = vqf_codec(name)
    zero = codec.encode(torch.zeros(2, 256))
    assert bool((codec.decode(zero, 256) == 0).all())
    tiny = torch.full((1, 256), 1e-42)
    tiny[0, 5] = 0
    assert bool((codec.decode(codec.encode(tiny), 256).abs() <= 1e-9).all())
    negative = -gaussian(1, 256).abs()
    assert cosine(codec.decode(codec.encode(negative), 256), negative) > 0.98


@every
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_refuses_what_is_not_finite(name: str, bad: float) -> None:
    weight = gaussian(8, 256)
    weight[5, 77] = bad
    with pytest.raises(LabError, match=f"codec {name}: the weight holds NaN or infinity"):
        made(name).encode(weight)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "vqf:F32"])
def test_refuses_what_does_not_fit_16_bits(name: str) -> None:
    with pytest.raises(LabError, match=f"codec {name}: weights up to 1e\\+08 do not fit"):
        made(name).encode(torch.full((8, 256), 1e8))


def test_refusals_name_the_reason() -> None:
    with pytest.raises(LabError, match="codec vqf:Q8_0_8X8: 12 rows are no whole tiles of 8"):
        vqf_codec("Q8_0", "8X8").encode(gaussian(12, 64))
    with pytest.raises(LabError, match="codec vqf:Q4_0_4X4: 6 rows are no whole tiles of 4"):
        vqf_codec("Q4_0", "4X4").nbytes((6, 64))
    with pytest.raises(LabError, match="must be a positive multiple of 256"):
        vqf_codec("G256").encode(gaussian(4, 288))
    with pytest.raises(LabError, match="no VQF file holds it"):
        vqf_codec("Q4I", "8X8")
    with pytest.raises(LabError, match=r"lie in tiles \[2, 272\], not \[3, 272\]"):
        vqf_codec("Q8_0", "8X8").decode(vqf_codec("Q8_0", "8X8").encode(gaussian(8, 96)), 64)
    with pytest.raises(LabError, match="a row of 64 weights has 36 bytes, not 54"):
        vqf_codec("Q4_0").decode(vqf_codec("Q4_0").encode(gaussian(2, 96)), 64)
    assert ROWS not in vqf_codec("Q4_0").take_rows(vqf_codec("Q4_0").encode(gaussian(2, 64)), torch.tensor([1]))


@pytest.mark.parametrize("name", ["F32", "F16", "Q8_0", "Q4_0", "Q4_8X8L"])
def test_the_ledger_counts_the_same_bytes(name: str) -> None:
    assert VQF_CODECS[f"vqf:{name}"]().nbytes((3, 16, 96)) == file_type(f"vqf:{name}", 96).nbytes((3, 16, 96))


@pytest.mark.parametrize("plain", sorted(native_vqf.KINDS))
@pytest.mark.skipif(native.unavailable() is not None, reason=str(native.unavailable()))
def test_native_encoders_give_the_same_bytes(plain: str) -> None:
    """On every kind of float32, subnormal ones and ties among them."""
    bits = torch.randint(-(2**31), 2**31, (96, 512), generator=torch.Generator().manual_seed(1)).to(torch.int32).view(torch.float32)
    halves = torch.randint(-255, 256, (96, 512), generator=torch.Generator().manual_seed(2)) / 2
    inputs = [
        torch.where(torch.isfinite(bits), bits, 1.0),
        halves,
        gaussian(96, 512),
        student(96, 512),
        gaussian(8, 256) * 1e-41,
        torch.zeros(8, 256),
        -torch.zeros(8, 256),
    ]
    for rows in inputs:
        found = native_vqf.encode(plain, rows)
        assert found is not None and torch.equal(found, ENCODERS[plain](rows))
    assert native_vqf.encode("F32", inputs[1]) is None
