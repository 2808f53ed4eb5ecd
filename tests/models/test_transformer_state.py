"""The KV cache of plain transformers: however a text is cut, the same state; what is not filled is never read; what does not fit is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lab.errors import LabError
from lab.models.transformer.model import Transformer, TransformerState
from tests.models.transformers_tiny import loaded, one_thread, text_ids, tiny  # noqa: F401

CPU = torch.device("cpu")
LENGTH = 26


@pytest.fixture(scope="module", params=["llama_llama3_one_key_head", "qwen3", "qwen3_moe_mixed"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Transformer:
    folder: Path = tmp_path_factory.mktemp(request.param)
    tiny(request.param, seed=4).save_pretrained(folder)
    return loaded(folder)[0]


def poisoned(model: Transformer, batch: int, capacity: int) -> TransformerState:
    state = model.new_state(batch, capacity, CPU, torch.float32)
    state.cache.fill_(torch.nan)
    return state


@torch.no_grad()
def after(model: Transformer, ids: Tensor, borders: list[int], capacity: int) -> tuple[TransformerState, Tensor]:
    """(state, logits) of `ids` cut at `borders`."""
    state = poisoned(model, ids.shape[0], capacity)
    return state, torch.cat([model.logits(piece, state) for piece in ids.tensor_split(borders, 1)], 1)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(borders=st.sets(st.integers(1, LENGTH - 1), max_size=6), batch=st.integers(1, 3), spare=st.integers(0, 9), seed=st.integers(0, 99))
def test_any_cut_gives_the_state_of_one_piece(model: Transformer, borders: set[int], batch: int, spare: int, seed: int) -> None:
    ids = text_ids(batch, LENGTH, seed)
    one, whole = after(model, ids, [], LENGTH)
    cut, pieces = after(model, ids, sorted(borders), LENGTH + spare)
    assert one.length == cut.length == LENGTH
    torch.testing.assert_close(cut.cache[..., :LENGTH, :], one.cache, atol=1e-4, rtol=0)
    torch.testing.assert_close(pieces, whole, atol=1e-4, rtol=0)
    assert bool(cut.cache[..., LENGTH:, :].isnan().all()), "written behind the text's end"
    assert cut.read_bytes() == one.read_bytes() == one.nbytes()


@torch.no_grad()
def test_a_state_that_is_too_small_is_refused_and_left_as_it_was(model: Transformer) -> None:
    ids = text_ids(2, 12)
    state, _ = after(model, ids[:, :7], [], 11)
    before = state.cache.clone()
    with pytest.raises(LabError, match=r"7 \+ 5 tokens do not fit a state of 11"):
        model.logits(ids[:, 7:], state)
    assert state.length == 7 and torch.equal(state.cache.nan_to_num(9.0), before.nan_to_num(9.0))
    model.logits(ids[:, 7:11], state)
    with pytest.raises(LabError, match=r"11 \+ 1 tokens do not fit"):
        model.logits(ids[:, 11:], state)


@torch.no_grad()
def test_a_state_of_another_batch_is_refused(model: Transformer) -> None:
    """One sequence would otherwise be broadcast into all lanes."""
    with pytest.raises(LabError, match="1 sequences do not fit a state of 3"):
        model.logits(text_ids(1, 4), poisoned(model, 3, 8))


@torch.no_grad()
def test_sequences_of_a_batch_do_not_see_each_other(model: Transformer) -> None:
    ids = text_ids(3, 21)
    _, together = after(model, ids, [8, 9, 15], 21)
    for lane in range(3):
        _, alone = after(model, ids[lane : lane + 1], [8, 9, 15], 21)
        torch.testing.assert_close(together[lane : lane + 1], alone, atol=1e-4, rtol=0)


@torch.no_grad()
def test_no_token_sees_a_later_one(model: Transformer) -> None:
    """Change the last tokens: everything before them stays, also when they share a chunk."""
    ids = text_ids(2, 20)
    other = ids.clone()
    other[:, 15:] = (other[:, 15:] + 1) % 101
    for borders in ([], [11]):
        (_, a), (_, b) = after(model, ids, borders, 20), after(model, other, borders, 20)
        torch.testing.assert_close(a[:, :15], b[:, :15], atol=1e-5, rtol=0)
        assert (a[:, 15:] - b[:, 15:]).abs().amax(-1).min() > 1e-3


@torch.no_grad()
def test_the_last_token_alone_has_the_same_logits(model: Transformer) -> None:
    ids = text_ids(2, 13)
    last = model.logits(ids, poisoned(model, 2, 13), last_only=True)
    assert last.shape == (2, 1, 101)
    torch.testing.assert_close(last, model.logits(ids)[:, -1:], atol=1e-5, rtol=0)


def test_a_state_is_one_allocation_and_can_be_sized_without_memory(model: Transformer) -> None:
    c = model.config
    state = model.new_state(4, 100_000_000, torch.device("meta"), torch.bfloat16)
    assert state.nbytes() == 2 * c.num_layers * 4 * 100_000_000 * c.num_kv_heads * c.head_dim * 2
    assert state.read_bytes() == 0
    small = model.new_state(1, 8, CPU, torch.float32)
    assert {t.untyped_storage().data_ptr() for pair in small.layers for t in pair} == {small.cache.untyped_storage().data_ptr()}
