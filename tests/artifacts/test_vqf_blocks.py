"""The rules that tell layouts apart: the right one fits every block, a wrong one far fewer, for sizes, distributions and odd matrices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lab.artifacts.vqf_blocks import FITS, candidates, fitting, sampled_bands, shares
from lab.codecs.vqf import PART
from tests.artifacts.vqf_files import one_thread  # noqa: F401
from tests.codecs.support import gaussian, student


def bands(plain: str, tile: int, weight: Tensor) -> tuple[Tensor, str]:
    codec = candidates(plain)[tile]
    return sampled_bands(codec.encode(weight)[PART].reshape(-1), weight.shape[0]), codec.name


@pytest.mark.parametrize("plain", ["Q8_0", "G256", "Q4_0"])
@pytest.mark.parametrize("draw", [gaussian, student])
@pytest.mark.parametrize(("rows", "cols"), [(8, 256), (72, 512), (256, 2048)])
def test_only_the_right_layout_fits(plain: str, draw: object, rows: int, cols: int) -> None:
    assert callable(draw)
    for tile in range(len(candidates(plain))):
        found, name = bands(plain, tile, draw(rows, cols, seed=rows))
        by_name = shares(found, candidates(plain), cols)
        assert by_name.pop(name) == 1.0
        assert max(by_name.values()) < 0.7
        assert fitting(found, candidates(plain), cols) == [name]


@pytest.mark.parametrize("plain", ["Q8_0", "Q4_0", "Q4I", "G256"])
def test_dead_and_outlying_rows_do_not_mislead(plain: str) -> None:
    weight = student(64, 512, seed=9)
    weight[3] = 0
    weight[17] *= 1e-12
    weight[:, 40] *= 8
    found, name = bands(plain, 0, weight)
    assert shares(found, candidates(plain), 512)[name] > FITS


def test_a_matrix_of_zeros_decides_nothing() -> None:
    found, _ = bands("Q4_0", 0, torch.zeros(16, 256))
    assert fitting(found, candidates("Q4_0"), 256) != ["vqf:Q4_0_4X4"]


def test_noise_fits_no_layout() -> None:
    noise = torch.randint(256, (4, 8 * 16 * 34), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert fitting(noise, candidates("Q8_0"), 512) == []
