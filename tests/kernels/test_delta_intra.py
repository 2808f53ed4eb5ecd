"""The inverse of a chunk's system times values and keys against a triangular solve, with keys that are nearly equal and with an incomplete chunk."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from lab.kernels.delta_intra import intra_chunks, reference_intra
from lab.kernels.verify import poisoned, relative_error
from lab.models.qwen4_exp.norms import l2_normalise
from tests.kernels.support import DEVICE, TOLERANCE


@pytest.mark.parametrize("alike", [0.0, 3.0])
def test_chunks(alike: float) -> None:
    tokens, d = 70, 16
    k = l2_normalise(torch.randn(1, tokens, 1, d, device=DEVICE) + alike).to(torch.float16)
    v = torch.randn(1, tokens, 2, d, device=DEVICE).to(torch.float16)
    decay, beta = -torch.rand(1, tokens, 2, device=DEVICE) / 4, torch.rand(1, tokens, 2, device=DEVICE)
    with poisoned():
        got = intra_chunks(k, v, decay, beta)
    for name, one, want in zip(("w", "u", "total"), got, reference_intra(k, v, decay, beta), strict=True):
        assert relative_error(one, want) < TOLERANCE, name
