"""The kernels of a chained decode step against plain torch at small sizes: every result of every launch, one token and several."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from lab.codecs import create
from lab.kernels.chain_verify import Sizes, check_inject, check_mixer, check_moe, check_project
from lab.kernels.ngram_step import hashed_rows
from lab.kernels.quads import natural_order, quad_order
from lab.models.qwen4_exp.ngram import ngram_row_ids
from tests.kernels.support import DEVICE

# float16, because the interpreter's bfloat16 is wrong. What is rounded to float16 on the way (streams, h) allows for more than one rounding.
TOLERANCE = 3e-3


def sizes(batch: int, hidden: int = 64, count: int = 2) -> Sizes:
    return Sizes(batch, count, hidden, torch.float16, DEVICE)


def test_quad_order_and_back() -> None:
    x = torch.arange(2 * 96).view(2, 96)
    assert quad_order(x)[0, :12].tolist() == [0, 1, 2, 3, 32, 33, 34, 35, 64, 65, 66, 67]
    assert torch.equal(natural_order(quad_order(x)), x)


@pytest.mark.parametrize(("batch", "hidden", "count", "rank"), [(1, 32, 2, 64)])
def test_mixer(batch: int, hidden: int, count: int, rank: int) -> None:
    for name, error in check_mixer(sizes(batch, hidden, count), rank):
        assert error < TOLERANCE, name


@pytest.mark.parametrize(("batch", "rows", "small"), [(2, 24, 6)])
def test_projections(batch: int, rows: int, small: int) -> None:
    for name, error in check_project(sizes(batch, 32), rows, small, 96):
        assert error < TOLERANCE, name


@pytest.mark.parametrize(("batch", "codec"), [(1, "q2_g32"), (1, "gguf:Q4_0")])
def test_experts(batch: int, codec: str) -> None:
    for name, error in check_moe(sizes(batch, 32), create(codec), 7, 64, 2):
        assert error < TOLERANCE, name


def test_injection() -> None:
    for name, error in check_inject(sizes(2), 3, 2):
        assert error < TOLERANCE, name


def test_hashes_are_those_of_the_module() -> None:
    class Config:
        ngram_size, heads_per_ngram, eos_token_id = 3, 4, 5

    multipliers, table_sizes = torch.tensor([(1 << 43) + 1, (1 << 44) + 3, (1 << 42) + 7]), torch.tensor([53, 59, 61, 67, 71, 73, 79, 83])
    offsets = table_sizes.cumsum(0) - table_sizes
    history = torch.randint(6, 90, (3, 8), generator=torch.Generator().manual_seed(1))
    history[0, 1], history[1, 4], history[2, 5], history[2, 6] = 5, 5, 5, 5
    history, multipliers, table_sizes, offsets = (t.to(DEVICE) for t in (history, multipliers, table_sizes, offsets))
    want = ngram_row_ids(history, Config, multipliers, table_sizes, offsets)  # type: ignore[arg-type]
    tokens = history[:, :2].contiguous()
    for at in range(2, 8):
        rows = hashed_rows(history[:, at : at + 1].contiguous(), tokens, multipliers, table_sizes, offsets, 5)
        assert torch.equal(rows[:, 0], want[:, at - 2])
        assert torch.equal(tokens, history[:, at - 1 : at + 1])
