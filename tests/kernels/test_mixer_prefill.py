"""A prompt's mixer kernels and the decode beside other rows against plain torch, at sizes that divide by nothing."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from lab.codecs import create
from lab.kernels.hyper_step import reference_mix, reference_norm
from lab.kernels.mixer_prefill import mix_prompt, norm_prompt, silu_prompt
from lab.kernels.planes import repack
from lab.kernels.trunk_prefill import decode_into
from lab.kernels.verify import poisoned, random_parts, relative_error
from tests.kernels.support import DEVICE, TOLERANCE


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(torch.float16)


@pytest.mark.parametrize("kind", ["first", "plain", "pending"])
def test_norm_writes_back_what_is_pending(kind: str) -> None:
    streams, norm, y, logits = half(5, 4, 96), torch.randn(4 * 96, device=DEVICE) / 4, half(5, 96), half(5, 9)
    if kind == "first":
        streams = y[:, None].expand(5, 4, 96).contiguous()
    given = logits[:, 3:7]
    share = torch.diag_embed(given.float())  # reference_norm sums logits over the streams they come from
    want = reference_norm(streams, (y, None, share) if kind == "pending" else None, norm, None, 1e-6)
    if kind == "first":
        streams = torch.full_like(streams, float("nan"))
    with poisoned():
        normed = norm_prompt(streams, None if kind == "plain" else y, given if kind == "pending" else None, norm, 1e-6)
    assert relative_error(streams, want[0]) < TOLERANCE and relative_error(normed, want[1]) < TOLERANCE


@pytest.mark.parametrize(("tokens", "hidden", "rank"), [(21, 48, 80), (3, 80, 33)])
def test_mix_is_the_mean_of_weighted_streams(tokens: int, hidden: int, rank: int) -> None:
    normed, down, up = half(tokens, 4, hidden), half(rank, 4 * hidden) / 16, half(4 * hidden, rank) / 4
    inner = normed.flatten(1) @ torch.cat([down, half(5, 4 * hidden)]).T
    with poisoned():
        got = mix_prompt(silu_prompt(inner, rank, 4), up, normed, (16, 16, 1, 1))
    assert relative_error(got, reference_mix(normed, down.float(), up.float())) < TOLERANCE


@pytest.mark.parametrize(("rows", "cols"), [(37, 352), (64, 128)])
def test_decoding_into_the_first_rows_leaves_the_others(rows: int, cols: int) -> None:
    codec = create("int8_g128")
    parts = random_parts(codec, (rows, cols), DEVICE)
    out = torch.full((rows + 3, cols), float("nan"), dtype=torch.float16, device=DEVICE)
    out[rows:] = 7
    decode_into(repack(codec, parts, cols), out)
    assert relative_error(out[:rows], codec.decode(parts, cols)) < TOLERANCE and bool((out[rows:] == 7).all())
