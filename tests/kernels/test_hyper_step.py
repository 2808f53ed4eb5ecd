"""The mixer's kernels of a decode step against plain torch: with and without a pending output, several tokens, sizes of two models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from lab.codecs import create
from lab.kernels.hyper_step import Pending, mix_streams, mixes, norm_streams, reference_mix, reference_norm
from lab.kernels.planes import repack
from lab.kernels.verify import poisoned, random_parts, relative_error
from tests.kernels.support import DEVICE


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(torch.float16)


@pytest.mark.parametrize("extra", [None, True])
@pytest.mark.parametrize(("batch", "count", "hidden"), [(1, 4, 160), (3, 2, 64)])
def test_norm_adds_what_is_pending(batch: int, count: int, hidden: int, extra: bool | None) -> None:
    streams, norm, inject = draw(batch, count, hidden), torch.randn(count * hidden, device=DEVICE) / 4, draw(count, count * hidden)
    given = torch.randn(batch, count, count, device=DEVICE)
    pending: Pending | None = (draw(batch, hidden), draw(batch, hidden) if extra else None, given)
    want = reference_norm(streams, pending, norm, inject, 1e-6)
    with poisoned():
        normed, share = norm_streams(streams, pending, norm, inject, 1e-6)
    assert relative_error(streams, want[0]) < 2e-3
    assert relative_error(normed, want[1]) < 2e-3
    assert relative_error(share.sum(1), want[2]) < 2e-3


def test_norm_alone_leaves_the_streams() -> None:
    streams, norm = draw(2, 4, 48), torch.randn(4 * 48, device=DEVICE) / 4
    before = streams.clone()
    normed, _ = norm_streams(streams, None, norm, None, 1e-6)
    assert torch.equal(streams, before)
    assert relative_error(normed, reference_norm(before, None, norm, None, 1e-6)[1]) < 2e-3


@pytest.mark.parametrize(("batch", "count", "hidden", "rank"), [(1, 4, 576, 96), (2, 2, 64, 160)])
def test_mix(batch: int, count: int, hidden: int, rank: int) -> None:
    codec = create("int8_g128")
    wide = count * hidden
    first, second = random_parts(codec, (rank, wide), DEVICE), random_parts(codec, (wide, rank), DEVICE)
    down, up = repack(codec, first, wide), repack(codec, second, rank)
    assert mixes(down, up, count) is None
    normed = draw(batch, count, hidden)
    want = reference_mix(normed, codec.decode(first, wide), codec.decode(second, rank))
    with poisoned():
        got = mix_streams(normed, down, up)
    assert relative_error(got, want) < 2e-3
