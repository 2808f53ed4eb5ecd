"""Small products and the router's choice against plain torch, with equal logits and a NaN among them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from lab.kernels.router import reference_route
from lab.kernels.rows_step import choose, small_product
from lab.kernels.verify import poisoned, relative_error
from tests.kernels.support import DEVICE


@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 13, 160), (3, 8, 96)])
def test_product(tokens: int, rows: int, columns: int) -> None:
    x, weight = torch.randn(tokens, columns, device=DEVICE).half(), torch.randn(rows, columns, device=DEVICE).half()
    with poisoned():
        got = small_product(x, weight)
    assert relative_error(got, x.float() @ weight.float().T) < 1e-3


@pytest.mark.parametrize(("experts", "k", "normalise"), [(512, 10, True), (30, 3, False)])
def test_choice(experts: int, k: int, normalise: bool) -> None:
    logits = torch.randn(4, experts + 1, device=DEVICE).half()
    distinct = torch.arange(experts, device=DEVICE).half() / 64 - 3  # no two equal, so that the order is defined
    logits[0, :experts] = distinct[torch.randperm(experts, device=DEVICE)]
    logits[1, :experts], logits[1, 7] = -1.0, 2.0
    want = reference_route(logits[:, :experts].float(), k, normalise)
    with poisoned():
        ids, weights, share = choose(logits, k, normalise)
    assert ids[0].tolist() == want[0][0].tolist()
    assert ids[1].tolist() == [7, *(i for i in range(k) if i != 7)][:k], "equal logits go to the lower number"
    assert relative_error(weights, want[1]) < 1e-4
    assert relative_error(share, torch.sigmoid(logits[:, experts:].float())) < 1e-5


def test_a_logit_that_is_no_number_shows() -> None:
    logits = torch.randn(2, 17, device=DEVICE).half()
    logits[1, 3] = float("nan")
    weights = choose(logits, 2, True)[1]
    assert torch.isfinite(weights[0]).all()
    assert torch.isnan(weights[1]).all()
