"""GGUF types as codecs: encoding, exact bytes, selection, and the engine's operations on packed rows, 640 wide among them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.artifacts.gguf import open_gguf
from lab.codecs import cosine, parts_nbytes, relative_mse, verify_encoding
from lab.codecs.gguf import GGUF_CODECS, PART, GgufCodec, codec_of, parts_of
from lab.codecs.gguf_encode import ENCODERS
from lab.codecs.gguf_types import TYPES
from lab.counters import Counters
from lab.errors import LabError
from lab.ops import Packed, PackedExperts, PackedLinear, PackedTable
from tests.artifacts.gguf_files import Spec, Tensor
from tests.codecs.gguf_blocks import packed_rows
from tests.codecs.support import gaussian, student

package = pytest.importorskip("gguf")

FITS_640 = [name for name, kind in TYPES.items() if f"gguf:{name}" in GGUF_CODECS and kind.fits(640)]


def _codec(name: str) -> GgufCodec:
    return codec_of(TYPES[name])


@pytest.mark.parametrize("name", ENCODERS)
@settings(max_examples=8, deadline=None)
@given(lead=st.lists(st.integers(1, 2), max_size=2), rows=st.integers(1, 40), blocks=st.integers(1, 5), exponent=st.floats(-2, 2), seed=st.integers(0, 9))
def test_encoding_keeps_bytes_and_weights(name: str, lead: list[int], rows: int, blocks: int, exponent: float, seed: int) -> None:
    codec = _codec(name)
    cols = blocks * max(32, codec.kind.block)
    weight = gaussian(*lead, rows, cols, seed=seed, std=10**exponent)
    parts = codec.encode(weight)
    assert parts[PART].shape == (*lead, rows, codec.row_bytes(cols)) and parts[PART].dtype == torch.uint8
    assert parts_nbytes(parts) == codec.nbytes(weight.shape)
    decoded = codec.decode(parts, cols)
    assert decoded.shape == weight.shape and decoded.dtype == torch.float32
    verify_encoding(codec, parts, weight).require(name)
    assert relative_mse(codec.decode(codec.encode(decoded), cols), decoded) < 0.01  # what it can say, it says again


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "BF16", "F16"])
def test_encoding_is_the_packages(name: str) -> None:
    weight = student(37, 96)
    expected = package.quants.quantize(weight.numpy(), package.GGMLQuantizationType[name]).view(np.uint8)
    assert np.array_equal(_codec(name).encode(weight)[PART].numpy(), expected)


def test_q2_0_uses_the_outer_code_and_both_signs_of_the_scale() -> None:
    """Weights that are exactly -d, 0, d, 2d for a positive and a negative d come back exactly; ggml's reference quantiser cannot say them."""
    codes = torch.randint(0, 4, (50, 64), generator=torch.Generator().manual_seed(0))
    codes[:, 0] = 3
    weight = (codes - 1).float() * torch.where(torch.arange(50) % 2 == 0, 0.25, -0.125)[:, None]
    codec = _codec("Q2_0")
    parts = codec.encode(weight)
    assert torch.equal(codec.decode(parts, 64), weight)
    assert set((parts[PART][:, 1] >> 7).tolist()) == {0, 1}


def test_the_scale_search_beats_the_largest_weight() -> None:
    weight = student(200, 640)
    absmax = weight.view(-1, 64).abs().amax(1, keepdim=True)
    ternary = ((weight.view(-1, 64) / absmax).round() * absmax).view_as(weight)  # ggml's reference for Q2_0
    q2, iq4, q4 = (relative_mse(_codec(name).decode(_codec(name).encode(weight), 640), weight) for name in ("Q2_0", "IQ4_NL", "Q4_0"))
    assert q2 < 0.6 * relative_mse(ternary, weight)
    assert iq4 < 0.8 * q4


@pytest.mark.parametrize("name", ENCODERS)
def test_zero_rows_stay_zero_and_pieces_encode_as_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = _codec(name)
    cols = max(128, codec.kind.block)
    weight = gaussian(9, cols)
    weight[4] = 0
    whole = codec.encode(weight)[PART]
    assert not codec.decode({PART: whole}, cols)[4].any()
    monkeypatch.setattr("lab.codecs.base._CHUNK_CPU", 2 * cols)
    monkeypatch.setattr("lab.codecs.gguf_encode._GROUPS", 3)
    assert torch.equal(codec.encode(weight)[PART], whole)


def test_encoding_refusals() -> None:
    with pytest.raises(LabError, match="gguf:NVFP4: only read, not encoded; types to encode: F32"):
        _codec("NVFP4").encode(gaussian(2, 256))
    with pytest.raises(LabError, match=r"gguf:Q2_0.*\[2, 96\].*multiple of 64"):
        _codec("Q2_0").encode(gaussian(2, 96))
    for name in ("F16", "Q8_0", "Q4_1", "IQ4_NL", "Q2_0"):
        with pytest.raises(LabError, match=f"gguf:{name}: weights up to .* do not fit"):
            _codec(name).encode(gaussian(2, 64, std=1e8))
    with pytest.raises(LabError, match="NaN"):
        _codec("Q8_0").encode(torch.full((1, 32), float("nan")))
    with pytest.raises(LabError, match="unknown option"):
        GGUF_CODECS["gguf:Q8_0"](scale="search")


@pytest.mark.parametrize("name", sorted({codec.kind.name for codec in GGUF_CODECS.values()}))
def test_select_and_take_rows_equal_slices_of_the_decode(name: str) -> None:
    codec = _codec(name)
    packed = packed_rows(name) if codec.kind.block > 1 else gaussian(1024, 16).numpy().view(np.uint8)[:, : 16 * codec.kind.nbytes]
    parts = {PART: torch.from_numpy(np.ascontiguousarray(packed)).view(4, 256, -1)}
    cols = packed.shape[1] // codec.kind.nbytes * codec.kind.block
    whole = codec.decode(parts, cols).view(torch.int32)  # bits, since random floats may be NaN
    picks = torch.tensor([3, 0, 3])
    assert torch.equal(codec.decode(codec.select(parts, picks), cols).view(torch.int32), whole[picks])
    one, ids = codec.select(parts, 1), torch.tensor([255, 0, 128, 128])
    assert torch.equal(codec.decode(codec.take_rows(one, ids), cols).view(torch.int32), whole[1][ids])
    assert codec.decode(codec.take_rows(one, ids[:0]), cols).shape == (0, cols)


def _packed(codec: GgufCodec, parts: dict[str, torch.Tensor], shape: tuple[int, ...], counters: Counters) -> Packed:
    return Packed(codec, parts, shape, 0, "experts", counters)


@pytest.mark.parametrize("name", FITS_640)
def test_packed_products_of_640_wide_rows(name: str, tmp_path: Path) -> None:
    """From a mapped file through the engine's operations: the products are those of the decoded weights, and the bytes counted are the file's."""
    codec = _codec(name)
    down = codec.encode(gaussian(4, 96, 640)) if name in ENCODERS else _random_stack(codec, 4, 96, 640)
    gate_up = _codec("Q8_0").encode(gaussian(4, 1280, 96, seed=1))
    tensors = [Tensor("down", name, (4, 96, 640), down[PART].numpy().tobytes()), Tensor("gate_up", "Q8_0", (4, 1280, 96), gate_up[PART].numpy().tobytes())]
    gguf = open_gguf(Spec(tensors).write(tmp_path / "m.gguf"))
    counters = Counters()
    mapped = parts_of(gguf.raw("down"))
    stack = _packed(codec, mapped, (4, 96, 640), counters)
    dense = codec.decode(mapped, 640)
    assert torch.isfinite(dense).all() and stack.nbytes() == gguf.tensors["down"].nbytes

    x = gaussian(5, 640, seed=2, std=1.0)
    linear = PackedLinear(_packed(codec, codec.select(mapped, 2), (96, 640), counters))
    torch.testing.assert_close(linear(x), x @ dense[2].T, rtol=1e-4, atol=1e-4)

    rows = torch.tensor([[3, 95], [0, 3]])
    table = PackedTable(_packed(codec, codec.select(mapped, 0), (96, 640), counters), torch.float32, torch.device("cpu"))
    assert torch.equal(table(rows), dense[0][rows])

    experts = PackedExperts([_packed(_codec("Q8_0"), parts_of(gguf.raw("gate_up")), (4, 1280, 96), counters)], stack)
    hidden, weights = gaussian(3, 96, seed=3, std=1.0), torch.tensor([[0.5, 0.5]] * 3)
    ids = torch.tensor([[0, 3], [1, 0], [2, 3]])
    gates = _codec("Q8_0").decode(gate_up, 96)
    expected = torch.zeros(3, 96)
    for t in range(3):
        for k in range(2):
            gate, up = (gates[ids[t, k]] @ hidden[t]).chunk(2)
            expected[t] += weights[t, k] * (dense[ids[t, k]] @ (torch.nn.functional.silu(gate) * up))
    torch.testing.assert_close(experts(hidden, ids, weights), expected, rtol=1e-4, atol=1e-4)
    assert {key[2] for key in counters.tallies} == {codec.name, "gguf:Q8_0"}


def _random_stack(codec: GgufCodec, *shape: int) -> dict[str, torch.Tensor]:
    """For a type without an encoder: blocks of moderate scales and any codes."""
    blocks = packed_rows(codec.kind.name, 1, seed=7)
    if codec.kind.name == "NVFP4":
        blocks[:, :4] &= 0x37  # scales below 2^0
    else:
        blocks[:, :2] = np.array([0.01], dtype=np.float16).view(np.uint8)
    count = shape[0] * shape[1] * shape[2] // codec.kind.block
    return {PART: torch.from_numpy(np.resize(blocks, (count, codec.kind.nbytes))).view(*shape[:2], -1)}


def test_the_decode_of_a_mapped_file_may_be_written_into(tmp_path: Path) -> None:
    """F32 decodes to what it is stored as; handing out the mapping itself would kill whoever scales it in place."""
    weight = gaussian(4, 8)
    path = Spec([Tensor("w", "F32", (4, 8), weight.numpy().tobytes())]).write(tmp_path / "m.gguf")
    decoded = _codec("F32").decode(parts_of(open_gguf(path).raw("w")), 8)
    decoded.mul_(2)
    assert cosine(decoded, weight) == pytest.approx(1.0)
    assert torch.equal(decoded, 2 * weight)
