"""Captured decoding: who gets a graph and why not, states that are cleared and handed out again, counts of replays. On a GPU also that replays are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lab.artifacts import Checkpoint, HfWeights
from lab.counters import Counters
from lab.engines.graphs import Graphs
from lab.engines.path_binder import PathBinder
from lab.models.qwen4_exp.config import from_file
from lab.models.qwen4_exp.model import ModelState, Qwen4Exp
from tests.models.tiny import text_ids, tiny_model, write_checkpoint

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


def model_of(folder: Path) -> tuple[Qwen4Exp, Counters]:
    write_checkpoint(folder, tiny_model(4), "fused")
    counters = Counters()
    return Qwen4Exp(from_file(folder / "config.json"), PathBinder(HfWeights(Checkpoint(folder)), {}, DEVICE, torch.float32, counters)), counters


def test_replays_count_what_was_captured_and_warming_up_counts_nothing() -> None:
    counters, key = Counters(), (0, "experts", "q2_g32", "cuda")
    counters.add(key, 1, 10, 100)
    with counters.recording():
        counters.add(key, 5, 50, 500)
    with counters.recording() as recording:
        counters.add(key, 2, 20, 200)
    assert counters.rows("experts") == 1
    with counters.span() as inside:
        recording.replays += 3
    assert (inside.calls, inside.rows, inside.weight_bytes, inside.flops) == (3, 6, 60, 600)
    assert counters.rows("experts") == 7
    assert counters.rows("experts") == 7, "replays are added once"


@pytest.mark.skipif(HAS_GPU, reason="shows what a machine without a GPU says")
def test_reason_without_a_gpu(tmp_path: Path) -> None:
    model, counters = model_of(tmp_path)
    graphs = Graphs(model, DEVICE, torch.float32, counters, "graph")
    assert graphs.evidence()["mode"] == "eager"
    assert "GPU" in graphs.evidence()["reason"]
    state = graphs.new_state(1, 8)
    assert graphs.logits(torch.ones(1, 1, dtype=torch.int64), state, True) is None
    assert Graphs(model, DEVICE, torch.float32, counters, "eager").evidence()["reason"] == "mode=eager"


@torch.no_grad()
def test_a_state_taken_over_and_one_cleared_go_on_as_new(tmp_path: Path) -> None:
    model, _ = model_of(tmp_path)
    ids = text_ids(2, 30).to(DEVICE)
    first, other = (model.new_state(2, size, DEVICE, torch.float32) for size in (20, 32))
    model.logits(ids[:, :20], first)
    model.logits(text_ids(2, 25, seed=3).to(DEVICE), other)
    other.take(first)
    want = model.logits(ids)[:, 20:]
    torch.testing.assert_close(model.logits(ids[:, 20:], other), want, atol=1e-4, rtol=0)
    other.reset()
    torch.testing.assert_close(model.logits(ids, other), model.logits(ids), atol=1e-4, rtol=0)


@pytest.mark.skipif(not HAS_GPU, reason="graphs need a GPU")
@torch.no_grad()
def test_replays_equal_eager_steps_and_states_are_used_again(tmp_path: Path) -> None:
    model, counters = model_of(tmp_path)
    graphs = Graphs(model, DEVICE, torch.float32, counters, "auto")
    assert graphs.reason is None
    ids = text_ids(2, 24).to(DEVICE)
    whole = model.logits(ids)
    for _ in range(3):
        state = graphs.new_state(2, 24)
        assert isinstance(state, ModelState)
        model.logits(ids[:, :10], state)
        for at in range(10, 24):
            got = graphs.logits(ids[:, at : at + 1], state, True)
            assert got is not None
            torch.testing.assert_close(got, whole[:, at : at + 1], atol=1e-3, rtol=0)
        del state
    assert len(graphs._held[2, 24]) == 1, "a state nobody holds is handed out again"


class FakePrompt:
    """Stands in for a capture, which needs a GPU: says that it was replayed."""

    refuse = False

    def __init__(self, model: Any, batch: int, tokens: int, *rest: Any) -> None:
        if self.refuse:
            raise RuntimeError("out of\nmemory")
        self.shape = batch, tokens

    def __call__(self, ids: torch.Tensor, state: Any) -> Any:
        return self.shape


@torch.no_grad()
def test_a_prompt_is_captured_after_its_first_run_up_to_a_size_and_so_many_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.engines.graphs.PromptGraph", FakePrompt)
    monkeypatch.setattr("lab.engines.graphs.MOST_PROMPTS", 2)
    monkeypatch.setattr("lab.engines.graphs.PROMPT_TOKENS", 24)
    model, counters = model_of(tmp_path)
    graphs = Graphs(model, DEVICE, torch.float32, counters, "eager")

    def run(batch: int, tokens: int, last_only: bool = True) -> Any:
        state = model.new_state(batch, 32, DEVICE, torch.float32)
        state.graph = object()
        return graphs.logits(text_ids(batch, tokens), state, last_only)

    first = run(2, 12)
    assert first.shape[:2] == (2, 1) and run(2, 12) == (2, 12), "the first call runs as it is"
    assert run(1, 25) is None and run(3, 9) is None and run(2, 12, last_only=False) is None, "more tokens than a capture holds, or more logits"
    assert run(1, 5).shape[:2] == (1, 1) and run(1, 6).shape[:2] == (1, 1)
    assert graphs.evidence()["prompts"] == [[1, 5], [1, 6]], "the first shape made room for the third"
    monkeypatch.setattr(FakePrompt, "refuse", True)
    assert run(1, 7).shape[:2] == (1, 1) and run(1, 7) is None
    assert graphs.evidence()["prompt_reason"] == "1 x 7 tokens not captured: out of memory" and run(1, 6) == (1, 6)
    assert graphs.evidence()["prompts"] == [[1, 5], [1, 6]], "what cannot be captured displaces nothing"
    monkeypatch.setattr(FakePrompt, "refuse", False)
    run(1, 8)
    assert run(1, 8) == (1, 8) and run(1, 7) is None, "one size that could not be captured says nothing of another, and is not tried again"


@pytest.mark.skipif(not HAS_GPU, reason="graphs need a GPU")
@torch.no_grad()
def test_prompts_of_several_sizes_share_memory_and_stay_right(tmp_path: Path) -> None:
    model, counters = model_of(tmp_path)
    graphs = Graphs(model, DEVICE, torch.float32, counters, "auto")
    ids = text_ids(2, 24).to(DEVICE)
    for tokens in (10, 24, 10, 17, 24, 10, 17):
        state = graphs.new_state(2, 24)
        got = graphs.logits(ids[:, :tokens], state, True)
        assert got is not None
        torch.testing.assert_close(got, model.logits(ids[:, :tokens])[:, -1:], atol=1e-3, rtol=0)
        del state
    assert graphs.evidence()["prompts"] == [[2, 10], [2, 24], [2, 17]]
