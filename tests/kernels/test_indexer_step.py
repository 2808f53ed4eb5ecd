"""The indexer's choice for one token against the model's own: few and many complete blocks, equal scores, keys that are not there yet, shapes refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from lab.errors import LabError
from lab.kernels import indexer_step
from lab.kernels.indexer_step import block_scores, choose_blocks
from lab.kernels.verify import poisoned
from lab.models.qwen4_exp.sparse_attention import Indexer
from tests.kernels.support import DEVICE

HEADS, D, BLOCK, BUDGET, ROTARY, EPS = 3, 16, 4, 5, 8, 1e-6


class Config:
    """What `Indexer.chosen_at` asks of a model's config."""

    indexer_heads, indexer_head_dim, indexer_block, indexer_budget, rms_norm_eps = HEADS, D, BLOCK, BUDGET * BLOCK, EPS


def indexer() -> Indexer:
    found = Indexer.__new__(Indexer)
    found.config = Config  # type: ignore[assignment]
    found.q_norm, found.k_norm = (torch.randn(D, device=DEVICE) / 4 for _ in range(2))
    return found


def tables(capacity: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(capacity, device=DEVICE)[:, None] / 100 ** (torch.arange(ROTARY // 2, device=DEVICE) / (ROTARY // 2))
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def chosen(own: Indexer, index: Tensor, raw: Tensor, position: int) -> tuple[Tensor, Tensor]:
    """By the kernels, and by the model's own code."""
    where, cos_sin = torch.tensor([position], dtype=torch.int32, device=DEVICE), tables(raw.shape[1])
    with poisoned():
        got = choose_blocks(block_scores(index, raw, where, cos_sin, (own.q_norm, own.k_norm), HEADS, BLOCK, EPS), where, BLOCK, BUDGET)
    raw = raw.clone()
    raw[:, position + 1 :] = 0
    return got, own.chosen_at(index, raw, where.long(), cos_sin)


@pytest.mark.parametrize(("capacity", "position"), [(150, 0), (150, 2), (150, 18), (150, 19), (150, 23), (150, 98), (150, 149), (24, 23), (263, 262)])
def test_one_token(capacity: int, position: int) -> None:
    torch.manual_seed(position)
    own, index, raw = indexer(), torch.randn(2, (HEADS + 1) * D, device=DEVICE), torch.randn(2, capacity, D, device=DEVICE)
    raw[:, position + 1 :] = float("nan")  # what is not filled yet must not be read
    got, want = chosen(own, index, raw, position)
    assert got.dtype == torch.uint8 and torch.equal(got, want)
    complete = (position + 1) // BLOCK
    assert got.sum(1).tolist() == [min(complete, BUDGET)] * 2 and not got[:, complete:].any()


def test_of_equal_scores_the_earlier_block_is_seen() -> None:
    own, raw = indexer(), torch.randn(1, 150, D, device=DEVICE)
    index = torch.zeros(1, (HEADS + 1) * D, device=DEVICE)  # every score is zero
    got, want = chosen(own, index, raw, 120)
    assert torch.equal(got, want) and got[0].nonzero().flatten().tolist() == list(range(BUDGET))


def test_half_precision_keys_give_the_choice_of_their_own_values() -> None:
    torch.manual_seed(1)
    own, index, raw = indexer(), torch.randn(2, (HEADS + 1) * D, device=DEVICE).half(), torch.randn(2, 150, D, device=DEVICE).half()
    got, want = chosen(own, index, raw, 149)
    assert (got != want).sum() <= 2, "near ties alone may fall differently"


@pytest.mark.parametrize(
    ("capacity", "width", "message"),
    [(3, HEADS + 1, "raw keys [2, 3, 16]"), (400, HEADS + 1, "100 blocks; at most 64"), (40, HEADS, "index [2, 48]")],
)
def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch, capacity: int, width: int, message: str) -> None:
    monkeypatch.setattr(indexer_step, "MOST_BLOCKS", 64)
    with pytest.raises(LabError) as refused:
        chosen(indexer(), torch.randn(2, width * D, device=DEVICE), torch.randn(2, capacity, D, device=DEVICE), 2)
    assert message in str(refused.value)
