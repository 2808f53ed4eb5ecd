"""A prompt's Gated DeltaNet kernels against plain torch: convolution across the start, ring places, head norms, gates, gated norm."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from torch.nn.functional import silu, softplus

from lab.kernels.delta_prefill import convolve_prompt, gated_norm_prompt, gates_prompt
from lab.kernels.verify import poisoned, relative_error
from lab.models.qwen4_exp.norms import gated_rms_norm, l2_normalise
from tests.kernels.support import DEVICE, TOLERANCE


@pytest.mark.parametrize(("tokens", "start"), [(19, 5), (2, 3)])
def test_convolution_reads_the_past_and_keeps_the_last_inputs(tokens: int, start: int) -> None:
    batch, keys, d, wide, kernel = 2, 32, 16, 2 * 32 + 48, 4
    rows = torch.randn(batch, tokens, wide + 8, device=DEVICE).to(torch.float16)
    x, past = rows[..., :wide], torch.randn(batch, kernel - 1, wide, device=DEVICE).to(torch.float16)
    taps = torch.randn(kernel, wide, device=DEVICE) / 2
    ring = torch.full((batch, kernel, wide), 9.0, dtype=torch.float16, device=DEVICE)
    with poisoned():
        q, k, v = convolve_prompt(x, past, taps, ring, start, keys, d)
    history = torch.cat([past, x], 1).float()
    convolved = silu(sum(history[:, i : i + tokens] * taps[i] for i in range(kernel)))
    want_q, want_k = (l2_normalise(t.unflatten(-1, (-1, d))) for t in convolved[..., : 2 * keys].chunk(2, -1))
    for got, want in ((q, want_q), (k, want_k), (v, convolved[..., 2 * keys :].unflatten(-1, (-1, d)))):
        assert relative_error(got, want) < TOLERANCE
    kept = range(max(start, start + tokens - kernel), start + tokens)
    assert all(torch.equal(ring[:, at % kernel], x[:, at - start]) for at in kept)
    assert all(bool((ring[:, place] == 9).all()) for place in set(range(kernel)) - {at % kernel for at in kept})


def test_gates() -> None:
    ab, a_log, bias = torch.randn(2, 7, 16, device=DEVICE).to(torch.float16) * 8, torch.randn(6, device=DEVICE) / 4, torch.randn(6, device=DEVICE)
    with poisoned():
        decay, beta = gates_prompt(ab[..., :12], a_log, bias)
    assert relative_error(decay, -torch.exp(a_log) * softplus(ab[..., :6].float() + bias)) < 1e-5
    assert relative_error(beta, torch.sigmoid(ab[..., 6:12].float())) < 1e-5


@pytest.mark.parametrize("activation", ["sigmoid", "silu"])
def test_gated_norm(activation: str) -> None:
    read, z, norm = (
        torch.randn(2, 7, 3, 16, device=DEVICE).to(torch.float16),
        torch.randn(2, 7, 60, device=DEVICE).to(torch.float16),
        torch.rand(16, device=DEVICE),
    )
    with poisoned():
        got = gated_norm_prompt(read, z[..., :48], norm, 1e-6, activation)
    want = gated_rms_norm(read.float(), z[..., :48].unflatten(-1, (3, 16)).float(), norm, 1e-6, activation).flatten(-2)
    assert relative_error(got, want) < TOLERANCE
