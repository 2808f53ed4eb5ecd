"""int8 linear maps: every way against the float32 reference, at sizes that divide by nothing."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from lab.codecs import create
from lab.errors import LabError
from lab.kernels.planes import repack
from lab.kernels.trunk import Int8Linear, reference_linear
from lab.kernels.verify import check_linear, random_parts, relative_error
from tests.kernels.support import DEVICE, TOLERANCE


@pytest.mark.parametrize(("rows", "cols", "tokens"), [(16, 128, 1), (37, 96, 2), (40, 160, 3), (70, 288, 6), (33, 128, 65)])
def test_all_ways_agree_with_the_reference(rows: int, cols: int, tokens: int) -> None:
    torch.manual_seed(rows)
    for name, error in check_linear(rows, cols, tokens, torch.float16, DEVICE):
        assert error <= TOLERANCE, name


def test_bfloat16_in_and_out() -> None:
    torch.manual_seed(0)
    for name, error in check_linear(24, 64, 2, torch.bfloat16, DEVICE):
        assert error <= 5e-3, name  # bfloat16 rounding; the interpreter truncates


def linear(rows: int = 24, cols: int = 160) -> tuple[Int8Linear, torch.Tensor]:
    codec = create("int8_g128")
    parts = random_parts(codec, (rows, cols), DEVICE)
    return Int8Linear(repack(codec, parts, cols)), codec.decode(parts, cols)


def test_one_wrong_scale_is_seen() -> None:
    kernel, weight = linear()
    x = torch.randn(2, 160, device=DEVICE).to(torch.float16)
    assert relative_error(kernel(x), reference_linear(x, weight)) <= TOLERANCE
    kernel.planes.scale[0, 0, 1, 1, 3] *= 1.5  # row 19, columns 128-159
    assert relative_error(kernel(x), reference_linear(x, weight)) > 10 * TOLERANCE


def test_leading_dimensions_stay() -> None:
    kernel, _ = linear()
    x = torch.randn(2, 1, 160, device=DEVICE).to(torch.float16)
    assert kernel(x).shape == (2, 1, 24)


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter sums in float32")
def test_out_of_range_activations_are_not_finite() -> None:
    kernel, _ = linear()
    x = torch.full((1, 160), 1e9, dtype=torch.bfloat16, device=DEVICE)
    assert not bool(torch.isfinite(kernel(x)).all())


def test_wrong_inputs_are_one_line() -> None:
    kernel, _ = linear()
    for bad in (torch.zeros(1, 128, dtype=torch.float16), torch.zeros(1, 160)):
        with pytest.raises(LabError, match="int8 trunk: x is"):
            kernel(bad.to(DEVICE))
    q2 = create("q2_g32")
    with pytest.raises(LabError, match="needs one int8_g128 matrix"):
        Int8Linear(repack(q2, random_parts(q2, (2, 16, 64), DEVICE), 64))
