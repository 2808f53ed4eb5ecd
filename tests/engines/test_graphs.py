"""Captured decoding: who gets a graph and why not, states that are cleared and handed out again, counts of replays. On a GPU also that replays are right."""

from __future__ import annotations

from pathlib import Path

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
