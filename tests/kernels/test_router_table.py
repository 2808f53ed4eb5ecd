"""Router and n-gram table: the reference's choice and values, NaN that stays visible, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="triton is not installed")

from lab.codecs import create
from lab.errors import LabError
from lab.kernels.router import route
from lab.kernels.table import Table
from lab.kernels.verify import check_router, check_table
from tests.kernels.support import DEVICE


@settings(max_examples=6, deadline=None)
@given(experts=st.integers(1, 70), share=st.floats(0.01, 1), tokens=st.integers(1, 2), seed=st.integers(0, 99))
def test_router_agrees_with_the_reference(experts: int, share: float, tokens: int, seed: int) -> None:
    torch.manual_seed(seed)
    for case, error in check_router(experts, max(1, min(9, int(share * experts))), tokens, DEVICE):
        assert error <= 1e-6, case


def test_equal_logits_go_to_the_lower_number() -> None:
    ids, weights = route(torch.tensor([[1.0, 3.0, 3.0, 3.0]], device=DEVICE), 2)
    assert ids.tolist() == [[1, 2]]
    assert weights.tolist() == [[0.5, 0.5]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_nan_logits_give_nan_weights_and_no_wild_ids() -> None:
    ids, weights = route(torch.tensor([[1.0, float("nan"), 0.0], [float("nan")] * 3], device=DEVICE), 3)
    assert bool(weights.isnan().all())
    assert bool(((ids >= -1) & (ids < 3)).all())


def test_router_refuses_k() -> None:
    for k in (0, 5):
        with pytest.raises(LabError, match=f"router: k={k}"):
            route(torch.zeros(1, 4, device=DEVICE), k)


@pytest.mark.parametrize("name", ["e4m3", "q2_rows"])
@pytest.mark.parametrize("cols", [160, 36])
def test_table_agrees_with_the_codec(name: str, cols: int) -> None:
    torch.manual_seed(cols)
    for case, error in check_table(create(name), 53, cols, DEVICE):
        assert error <= 5e-3, case  # bfloat16 rows; the interpreter truncates


@pytest.mark.parametrize("name", ["e4m3", "q2_rows"])
def test_rows_are_exact_in_float32_and_nan_outside(name: str) -> None:
    codec = create(name)
    parts = codec.encode(torch.randn(7, 160, device=DEVICE))
    ids = torch.tensor([[6, 0], [-1, 7]], device=DEVICE)
    rows = Table(codec, parts, 160)(ids, torch.float32)
    assert torch.equal(rows[0], codec.decode(codec.take_rows(parts, ids[0]), 160))
    assert bool(rows[1].isnan().all())


def test_table_refuses_other_codecs() -> None:
    blocks = create("e4m3", {"scale": "block128"})
    with pytest.raises(LabError, match="table: codec e4m3 .* has no table kernel"):
        Table(blocks, blocks.encode(torch.randn(4, 160)), 160)
    rows = create("q2_rows")
    with pytest.raises(LabError, match="needs one contiguous table"):
        Table(rows, rows.encode(torch.randn(2, 4, 160)), 160)
