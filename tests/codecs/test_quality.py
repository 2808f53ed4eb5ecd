"""The quality ladder, and the self-check that must notice a dropped scale.

Why with bounds: the ladder's values were measured independently on Gaussian and Student-t weights; a codec that falls off its rung has a bug.
What it does not prove: the order of perplexities.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from lab.codecs import Codec, Parts, checksum, cosine, create, relative_mse, verify_encoding
from lab.codecs.q2 import Q2Rows
from lab.errors import LabError
from tests.codecs.support import IDS, VARIANTS, gaussian, student


def measured(name: str, weight: Tensor, **options: object) -> float:
    codec = create(name, options)
    return cosine(codec.decode(codec.encode(weight), weight.shape[-1]), weight)


@pytest.mark.parametrize(("make", "w3", "q2"), [(gaussian, 0.984, 0.944), (student, 0.970, 0.913)])
def test_ladder(make, w3: float, q2: float) -> None:  # type: ignore[no-untyped-def]
    weight = make(96, 2560)
    ladder = [measured(name, weight) for name in ("bf16", "int8_g128", "e4m3", "w3_levels", "q2_g32", "q2_levels")]
    assert ladder == sorted(ladder, reverse=True)
    assert ladder[0] > 0.999995 and ladder[1] > 0.9999 and ladder[2] > 0.9995 and ladder[3] > w3 and ladder[4] > q2
    assert 0.6 < ladder[5] < 0.88  # one absmax scale per row
    assert measured("q2_g32", weight, scale_dtype="e4m3") > ladder[4] - 0.001
    assert measured("w3_levels", weight, scale="absmax") < ladder[3]
    assert measured("q2_g32", weight, scale="absmax") < ladder[4] - 0.02
    assert measured("q2_levels", weight) < measured("q2_levels", weight, scale="search") < ladder[4]


def test_row_codec_on_table_rows() -> None:
    assert measured("q2_rows", gaussian(2000, 160)) > 0.938
    # Least squares leaves the residual orthogonal: |decoded| = cosine * |w|.
    codec, weight = create("q2_rows"), gaussian(2000, 160)
    decoded = codec.decode(codec.encode(weight), 160)
    assert float(decoded.norm() / weight.norm()) == pytest.approx(cosine(decoded, weight), abs=2e-4)


def test_measures() -> None:
    a = torch.tensor([3.0, 4.0])
    assert cosine(a, a * 7) == pytest.approx(1.0) and cosine(a, torch.tensor([4.0, -3.0])) == pytest.approx(0.0)
    assert relative_mse(a * 1.1, a) == pytest.approx(0.01, rel=1e-6)
    zero = torch.zeros(2)
    assert cosine(zero, zero) == 1.0 and cosine(zero, a) == 0.0
    assert relative_mse(zero, zero) == 0.0 and math.isinf(relative_mse(a, zero))
    for measure in (cosine, relative_mse):
        with pytest.raises(ValueError, match="shapes differ"):
            measure(a, torch.zeros(3))


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)
def test_sound_encodings_pass_the_check(name: str, options: dict) -> None:
    codec = create(name, options)
    for weight in (gaussian(320, 640), student(6, 40, 192), student(2, 3, 20, 128).to(torch.bfloat16)):
        check = verify_encoding(codec, codec.encode(weight), weight)
        assert check.ok and check.rows <= 128, check
        check.require("experts")


class WithoutRowScale(Q2Rows):
    """The bug that gave PPL 142.6: codes become levels and the row scale is never applied."""

    def decode(self, parts: Parts, cols: int) -> Tensor:
        return super().decode({**parts, "scale": torch.ones_like(parts["scale"])}, cols)


def test_a_dropped_row_scale_is_caught() -> None:
    weight = gaussian(500, 160, std=1.0)
    parts = create("q2_rows").encode(weight)
    broken: Codec = WithoutRowScale()
    table = weight * 0.05  # rows of one size: without the scale the cosine stays, the norms do not
    check = verify_encoding(broken, create("q2_rows").encode(table), table)
    assert check.cosine > 0.93 and check.norm_error > 5 and not check.ok and "row norms" in check.reason
    with pytest.raises(LabError, match="ple table: codec q2_rows: row norms are off"):
        check.require("ple table")
    spread = weight * torch.logspace(-1, 1, 500)[:, None]  # rows of many sizes, right in the mean
    check = verify_encoding(broken, create("q2_rows").encode(spread), spread)
    assert not check.ok
    assert verify_encoding(create("q2_rows"), parts, weight).ok


@pytest.mark.parametrize(("name", "options"), [v for v in VARIANTS if v[0] != "bf16"], ids=[i for i in IDS if i != "bf16"])
def test_a_dropped_scale_is_caught_for_every_codec(name: str, options: dict) -> None:
    codec, weight = create(name, options), student(4, 40, 192)
    parts = codec.encode(weight)
    for key in [key for key in parts if "scale" in key]:
        check = verify_encoding(codec, {**parts, key: torch.ones_like(parts[key], dtype=torch.float32).to(parts[key].dtype)}, weight)
        assert not check.ok, (key, check)


def test_a_wrong_code_order_and_nan_are_caught() -> None:
    weight = gaussian(64, 256)
    parts = create("w3_levels").encode(weight)
    assert not verify_encoding(create("w3_levels", {"code_order": "10_10_10_2"}), parts, weight).ok
    assert not verify_encoding(create("w3_levels"), {**parts, "factor": torch.tensor([float("nan")])}, weight).ok
    assert not verify_encoding(create("w3_levels"), parts, weight, min_cosine=0.999).ok
    assert not verify_encoding(create("w3_levels"), parts, weight, max_rel_norm_error=0.001).ok


@pytest.mark.parametrize("size", [1, 7, 8, 4099])
def test_a_checksum_sees_every_byte_and_its_place(size: int) -> None:
    codes = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    scale = torch.ones(3, dtype=torch.float16)
    whole = checksum({"codes": codes, "scale": scale})
    assert whole == checksum({"scale": scale.clone(), "codes": codes.repeat(2, 1).T[:, 0]}) and 0 <= whole < 2**64
    for place in {0, size // 2, size - 1}:
        other = codes.clone()
        other[place] ^= 1
        assert checksum({"codes": other, "scale": scale}) != whole
    if size > 16:
        assert checksum({"codes": codes.roll(8), "scale": scale}) != whole
    assert checksum({"codes": codes, "scale": scale * 2}) != whole


def test_a_checksum_sees_what_a_wrong_kernel_would_do() -> None:
    weight, signs = torch.randn(64, 256).bfloat16(), torch.ones(256)
    signs[3::4] = -1
    swapped = weight.clone()
    swapped[0, 3::4], swapped[32, 3::4] = weight[32, 3::4], weight[0, 3::4]
    lanes = weight.clone()
    lanes[:, 7::8] = weight.roll(32, 0)[:, 7::8]
    far, near = torch.zeros(4096, dtype=torch.uint8), torch.zeros(4096, dtype=torch.uint8)
    far[1031], near[7] = 1, 1
    tensors = [
        weight,
        weight * signs.bfloat16(),
        swapped,
        lanes,
        far,
        near,
        weight.view(32, 512),
        weight.view(torch.int16),
        torch.tensor(1.0),
        ~weight.view(torch.int16),
    ]
    assert len({checksum({"a": tensor}) for tensor in tensors}) == len(tensors)
    assert checksum({"a": weight}) != checksum({"b": weight}) != checksum({"a": torch.zeros(1), "b": weight})
    assert checksum({"a": torch.tensor([1, 2, 0], dtype=torch.uint8)}) != checksum({"a": torch.tensor([1, 2], dtype=torch.uint8)})
    places = torch.arange(4096).view(-1, 2)
    codes = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    swaps = set()
    for a, b in places[torch.randperm(2048)[:300]].tolist():
        other = codes.clone()
        other[a], other[b] = codes[b] + 1, codes[a]
        swaps.add(checksum({"a": other}))
    assert len(swaps) == 300


def test_a_checksum_does_not_depend_on_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = {"codes": torch.arange(999, dtype=torch.int32), "scale": torch.rand(70).to(torch.float8_e4m3fn)}
    whole = checksum(parts)
    monkeypatch.setattr("lab.codecs.quality._PIECE", 16)
    assert checksum(parts) == whole
