"""The bfloat16 mixer's two launches against plain torch: odd sizes, several tokens, poisoned outputs, shapes that do not fit."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from lab.errors import LabError
from lab.kernels.hyper_bf16 import mix_streams
from lab.kernels.hyper_step import reference_mix
from lab.kernels.verify import poisoned, relative_error
from tests.kernels.support import DEVICE


@pytest.mark.parametrize(("batch", "count", "hidden", "rank"), [(1, 4, 96, 20), (3, 2, 530, 37), (2, 4, 16, 8), (8, 1, 33, 64)])
def test_it_is_the_mixer(batch: int, count: int, hidden: int, rank: int) -> None:
    torch.manual_seed(batch)
    normed = torch.randn(batch, count, hidden, device=DEVICE).half()
    down = (torch.randn(rank, count * hidden, device=DEVICE) / hidden**0.5).bfloat16()
    up = (torch.randn(count * hidden, rank, device=DEVICE) / rank**0.5).bfloat16()
    with poisoned():
        got = mix_streams(normed, down, up)
    assert got.dtype == torch.float16 and got.shape == (batch, hidden)
    assert relative_error(got, reference_mix(normed.float(), down.float(), up.float())) < 1e-3


def test_what_does_not_fit_is_refused() -> None:
    normed, down, up = torch.zeros(1, 2, 8, device=DEVICE), torch.zeros(4, 16, device=DEVICE), torch.zeros(16, 4, device=DEVICE)
    for one in ((normed, down[:, :8], up), (normed, down, up.T), (normed, down.T.contiguous().T, up)):
        with pytest.raises(LabError, match=r"^kernel hyper bf16: normed \[1, 2, 8\]"):
            mix_streams(*one)
