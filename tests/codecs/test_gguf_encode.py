"""Encoders of 256-weight GGUF blocks: what llama.cpp's own quantisers reach, blocks that have an exact answer, and codes that no other codes beat."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lab.codecs import relative_mse
from lab.codecs.gguf import PART, GgufCodec, codec_of
from lab.codecs.gguf_encode import ENCODERS
from lab.codecs.gguf_package import grid
from lab.codecs.gguf_types import TYPES
from lab.errors import LabError
from tests.codecs.gguf_blocks import as_bits, packed_rows
from tests.codecs.support import gaussian, student

package = pytest.importorskip("gguf")

GGML_RMSE = {
    "IQ4_XS": (0.07557, 0.08801),
    "IQ3_S": (0.13691, 0.15499),
    "IQ3_XXS": (0.18163, 0.19692),
    "IQ2_S": (0.24889, 0.28985),
    "IQ2_XS": (0.29957, 0.32799),
    "IQ2_XXS": (0.34388, 0.38613),
    "IQ1_M": (0.45094, 0.48947),
    "IQ1_S": (0.48551, 0.55595),
    "Q2_K": (0.26820, 0.29527),
    "Q3_K": (0.14443, 0.16969),
    "Q4_K": (0.07074, 0.08223),
    "Q5_K": (0.03536, 0.04129),
    "Q6_K": (0.01731, 0.02095),
}
"""Relative RMS error of ggml_quantize_chunk (llama.cpp as in llama-cpp-python 0.3.36), importances all 1, the better of its two ways: on `gaussian(1024, 1024)`
and on `student(512, 1024)`."""
EXACT = {"Q6_K": (0.0, 1e-4), "Q2_K": (0.7, 1e-3), "IQ2_XS": (0.5, 3e-3), "IQ2_S": (0.75, 1e-3)}
"""Share of the random blocks below that must come back exactly, and the mean relative squared error; the other types: 95 % and 1e-4."""
CODEBOOK_LACKS_CONSTANTS = ("IQ3_S", "IQ2_XXS", "IQ3_XXS")
SIGNED_GRIDS = {"IQ2_XXS": 32, "IQ2_XS": 16, "IQ2_S": 16, "IQ3_XXS": 32, "IQ3_S": 32}  # weights per scale
EVEN = ("IQ2_XXS", "IQ2_XS", "IQ3_XXS")
SLOW = ("IQ1_S", "IQ1_M")
BIG = [name for name in ENCODERS if TYPES[name].block == 256]


def _codec(name: str) -> GgufCodec:
    return codec_of(TYPES[name])


def _again(name: str, weight: torch.Tensor) -> torch.Tensor:
    codec = _codec(name)
    return codec.decode(codec.encode(weight), weight.shape[-1])


def test_the_table_has_a_bound_for_every_type() -> None:
    assert set(BIG) == set(GGML_RMSE)


@pytest.mark.parametrize("name", BIG)
def test_no_worse_than_llama_quantize(name: str) -> None:
    rows = 32 if name in SLOW else 96
    for weight, bound in zip((gaussian(rows, 512, seed=5), student(rows, 512, seed=6)), GGML_RMSE[name], strict=True):
        assert relative_mse(_again(name, weight), weight) ** 0.5 < bound


@pytest.mark.parametrize("name", BIG)
def test_the_package_reads_the_same_from_the_bytes(name: str) -> None:
    weight = student(11, 768, seed=2)
    weight[3], weight[4, 256:512], weight[5] = 0, -0.03, weight[5].abs()
    packed = _codec(name).encode(weight)[PART]
    expected = package.quants.dequantize(packed.numpy(), package.GGMLQuantizationType[name])
    assert np.array_equal(as_bits(_codec(name).decode({PART: packed}, 768)), as_bits(expected))


def _random_blocks(name: str, count: int) -> torch.Tensor:
    """uint8 [count, bytes]: any codes and scales, one moderate d (and dmin) per block. Groups of Q4_K and Q5_K use code 0 and the largest code."""
    blocks = packed_rows(name, 1, seed=3)[:count].copy()
    d = np.random.default_rng(4).uniform(0.001, 0.1, count).astype(np.float16)
    if name == "IQ1_M":
        for word, nibble in enumerate((0, 4, 8, 12)):
            high = blocks[:, 49 + 2 * word]
            blocks[:, 49 + 2 * word] = (high & 15) | ((d.view(np.uint16) >> nibble & 15) << 4).astype(np.uint8)
    else:
        for at in {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}.get(name, (0,)):
            blocks[:, at : at + 2] = d[:, None].view(np.uint8)
    if name in ("Q4_K", "Q5_K"):
        blocks[:, -128::32], blocks[:, -127::32] = 0, 255
    if name == "Q5_K":
        blocks[:, 16], blocks[:, 17] = 0, 255
    return torch.from_numpy(blocks)


@pytest.mark.parametrize("name", BIG)
def test_blocks_that_have_an_exact_answer_keep_their_values(name: str) -> None:
    """Any entry, sign and scale can be written. Where a group's codes leave its scale open the answer may be another, close one."""
    count = 64 if name in SLOW else 256
    exact = _codec(name).decode({PART: _random_blocks(name, count)}, 256)
    again = _again(name, exact)
    off = (again - exact).square().sum(1) / exact.square().sum(1)
    share, mean = EXACT.get(name, (0.95, 1e-4))
    assert (off < 1e-7).float().mean() >= share and off.mean() < mean


@pytest.mark.parametrize("name", SIGNED_GRIDS)
def test_no_other_entry_or_sign_pattern_fits_the_stored_scales_better(name: str) -> None:
    """All entries and, where the count of minus signs must be even, all 128 sign patterns, for every eight weights at the scales that were stored."""
    weight, codec = student(4, 256, seed=9), _codec(name)
    packed = codec.encode(weight)[PART]
    entries = grid(name).to(torch.float64)
    ours = (codec.decode({PART: packed}, 256) - weight).double().square().view(-1, 8).sum(1)
    scale = _stored_scales(name, packed).double().repeat_interleave(SIGNED_GRIDS[name] // 8)
    share = weight.double().view(-1, 8) / scale[:, None]
    patterns = torch.tensor([[-1.0 if number >> i & 1 else 1.0 for i in range(8)] for number in range(256)], dtype=torch.float64)
    if name in EVEN:
        patterns = patterns[(patterns < 0).sum(1) % 2 == 0]
    best = torch.full_like(ours, float("inf"))
    for pattern in patterns:
        distance = torch.cdist((share * pattern).view(-1, entries.shape[1]), entries).square().amin(1)
        best = torch.minimum(best, distance.view(len(ours), -1).sum(1) * scale.square())
    assert (ours < 1.001 * best).all()


def _stored_scales(name: str, packed: torch.Tensor) -> torch.Tensor:
    """float32 [groups]: what the package reads from the same blocks with entry 0 and plus signs everywhere, over the first weight of entry 0."""
    blank = packed.numpy().copy()
    if name == "IQ2_XXS":
        groups = blank[:, 2:].reshape(-1, 8, 8)
        groups[..., :7], groups[..., 7] = 0, groups[..., 7] & 0xF0
        blank[:, 2:] = groups.reshape(len(blank), -1)
    elif name == "IQ3_XXS":
        blank[:, 2:66], words = 0, blank[:, 66:].reshape(-1, 8, 4)
        words[..., :3], words[..., 3] = 0, words[..., 3] & 0xF0
        blank[:, 66:] = words.reshape(len(blank), -1)
    else:
        blank[:, 2 : {"IQ2_XS": 66, "IQ2_S": 74, "IQ3_S": 106}[name]] = 0
    values = torch.from_numpy(package.quants.dequantize(blank, package.GGMLQuantizationType[name]))
    return values.view(-1, SIGNED_GRIDS[name])[:, 0] / float(grid(name)[0, 0])


@pytest.mark.parametrize("name", SIGNED_GRIDS)
def test_negated_weights_give_negated_values(name: str) -> None:
    weight = student(7, 512, seed=4)
    assert torch.equal(_again(name, -weight), -_again(name, weight))


@pytest.mark.parametrize("name", BIG)
def test_powers_of_two_move_only_the_scale(name: str) -> None:
    weight = gaussian(3, 256, seed=8, std=4.0)  # large enough that every d is a normal float16, whose bits the factor leaves alone
    whole = _again(name, weight)
    for factor in (2.0**-2, 2.0**8):
        assert torch.equal(_again(name, weight * factor), whole * factor)


@pytest.mark.parametrize("name", BIG)
def test_rows_out_of_the_ordinary(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    noise = torch.randn(256, generator=generator)
    rows = {
        "constant": torch.full((256,), 0.7),
        "negative constant": torch.full((256,), -0.7),
        "negative only": -noise.abs() - 0.1,
        "one weight": torch.nn.functional.one_hot(torch.tensor(77), 256).float() * -3,
        "two sizes": torch.where(torch.arange(256) < 128, noise, noise * 1e-4),
        "half zero": torch.where(torch.arange(256) % 64 < 32, noise, 0.0),
        "small": noise * 3e-4,  # d of the finer types is a float16 of few bits
        "tiny": noise * 1e-7,
        "below float16": noise * 1e-12,
        "subnormal": noise * 1e-40,
        "large": noise * 1e4,
    }
    weight = torch.stack(list(rows.values()))
    decoded = _again(name, weight)
    usual = GGML_RMSE[name][0] ** 2
    off = {what: relative_mse(row, exact) for what, row, exact in zip(rows, decoded, weight, strict=True)}
    assert max(off.values()) <= 1.0  # never worse than zeros
    assert max(off[what] for what in ("negative only", "half zero", "two sizes", "large", "small")) < 1.3 * usual
    assert max(off["constant"], off["negative constant"]) < (1.5 * usual if name in CODEBOOK_LACKS_CONSTANTS else 1e-7)
    assert not decoded[list(rows).index("subnormal")].any()


@pytest.mark.parametrize("name", BIG)
def test_the_batch_size_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = student(3 if name in SLOW else 9, 768, seed=12)
    weight[1] = 0
    whole = _codec(name).encode(weight)[PART]
    monkeypatch.setattr("lab.codecs.gguf_encode_scales._BLOCKS", 2)
    monkeypatch.setattr("lab.codecs.gguf_encode_codebook._SCORES_CPU", 5 * 2048)
    assert torch.equal(_codec(name).encode(weight)[PART], whole)
    assert not _codec(name).decode({PART: whole}, 768)[1].any()


@pytest.mark.parametrize("name", BIG)
def test_refusals(name: str) -> None:
    codec = _codec(name)
    with pytest.raises(LabError, match=r"\[2, 384\].*multiple of 256"):
        codec.encode(gaussian(2, 384))
    for size in (1e9, 1e37):
        with pytest.raises(LabError, match=f"gguf:{name}: weights up to .* do not fit its 16-bit floats"):
            codec.encode(gaussian(2, 256, std=size))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device")
@pytest.mark.parametrize("name", BIG)
def test_a_gpu_encodes_as_well(name: str) -> None:
    """Sums run in another order there, so that near ties may fall the other way (6 % of the bytes of Q6_K); the errors are the same."""
    weight, codec = student(64, 512, seed=14), _codec(name)
    here, there = codec.encode(weight)[PART], codec.encode(weight.cuda())[PART]
    assert there.is_cuda
    off = [relative_mse(codec.decode({PART: packed.cpu()}, 512), weight) for packed in (here, there)]
    assert off[1] == pytest.approx(off[0], rel=2e-3)
    assert (there.cpu() == here).float().mean() > 0.85
