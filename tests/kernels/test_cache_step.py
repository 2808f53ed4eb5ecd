"""What stands between the products of a plain transformer's decode step, against plain torch: norms, gate, cache entries, attention of one token."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from lab.errors import LabError
from lab.kernels import cache_step, residual_step
from lab.kernels.verify import poisoned, relative_error
from tests.kernels.support import DEVICE

HEADS, KV, D, CAPACITY, BATCH = 6, 2, 16, 150, 2


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


@pytest.mark.parametrize(("batch", "hidden", "add"), [(1, 100, True), (3, 256, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_residual_and_norm(batch: int, hidden: int, add: bool, dtype: torch.dtype) -> None:
    x, weight = draw(batch, hidden).to(dtype), draw(hidden) / 4 + 1
    y = draw(batch, hidden).to(dtype) if add else None
    want = residual_step.reference_add_norm(x, y, weight, 1e-5)
    with poisoned():
        got = residual_step.add_norm(x, y, weight, 1e-5)
    assert got[0] is x, "the sum is made in place"
    assert all(relative_error(a, b) < (1e-6 if dtype == torch.float32 else 1e-3) for a, b in zip(got, want, strict=True))
    with pytest.raises(LabError, match="contiguous"):
        residual_step.add_norm(x, draw(batch, hidden + 1), weight, 1e-5)


@pytest.mark.parametrize("width", [90, 1500])
def test_gate(width: int) -> None:
    both = draw(3, 2 * width)
    with poisoned():
        got = residual_step.gated(both)
    assert relative_error(got, residual_step.reference_gated(both)) < 1e-6


@pytest.mark.parametrize(("position", "normed"), [(0, False), (33, True), (149, True)])
def test_one_token(position: int, normed: bool) -> None:
    mixed, tables = draw(BATCH, (HEADS + 2 * KV) * D), (draw(CAPACITY, D), draw(CAPACITY, D))
    norm = draw(HEADS + KV, D) / 4 + 1 if normed else None
    filled = draw(2, BATCH, KV, CAPACITY, D)
    filled[:, :, :, position:] = float("nan")  # what is not filled yet must not be read
    ours, theirs = filled.clone(), filled.clone()
    where = torch.tensor([position], dtype=torch.int32, device=DEVICE)
    want = cache_step.reference_prepare(mixed, where, tables, norm, HEADS, 1e-5, *theirs)
    with poisoned():
        query = cache_step.prepare(mixed, where, tables, norm, HEADS, 1e-5, *ours)
        got = cache_step.attend(query, *ours, where)
    assert relative_error(query, want) < 1e-6
    assert relative_error(ours[:, :, :, : position + 1], theirs[:, :, :, : position + 1]) < 1e-6
    assert bool(ours[:, :, :, position + 1 :].isnan().all()), "written behind the position"
    assert relative_error(got, cache_step.reference_attend(want, *theirs, where)) < 1e-5
    # The reference itself, against every key written out.
    k, v = (part[:, :, : position + 1].repeat_interleave(HEADS // KV, 1).double() for part in theirs)
    scores = torch.einsum("bhd,bhnd->bhn", want.double(), k) * D**-0.5
    assert relative_error(got, torch.einsum("bhn,bhnd->bhd", scores.softmax(-1), v).flatten(1)) < 1e-5


def test_heads_without_a_kernel_are_refused() -> None:
    assert cache_step.refused(4, 2, 20) and cache_step.refused(4, 2, 8) and cache_step.refused(4, 2, 64) is None
    with pytest.raises(LabError, match="no kernel"):
        cache_step.prepare(draw(1, 80), torch.zeros(1, dtype=torch.int32), (draw(4, 20), draw(4, 20)), None, 2, 1e-5, draw(1, 1, 4, 20), draw(1, 1, 4, 20))
