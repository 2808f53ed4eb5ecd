"""Hit curves: against a cache that is simulated step by step, against the slots' own counts, and from a recorded text."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.counters import Counters
from lab.measure.hit_curve import hit_curve, record_routing, stack_distances
from lab.models.qwen4_exp.config import from_file
from tests.models.tiny import text_ids, tiny_model, write_checkpoint

EXPERTS, K = 21, 4


def stream(steps: int, layers: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(steps)
    weights = torch.rand(layers, EXPERTS, generator=random).square() + 0.02
    return torch.stack([torch.stack([torch.multinomial(row, K, generator=random) for row in weights]) for _ in range(steps)])


def simulated(asked: torch.Tensor, slots: int) -> int:
    """Hits of one layer: the experts of a step are looked up together, then are the newest, the first place the very newest."""
    held: list[int] = []
    hits = 0
    for row in asked.tolist():
        hits += sum(expert in held for expert in row)
        held = (row + [expert for expert in held if expert not in row])[:slots]
    return hits


def test_every_number_of_slots_is_as_if_it_had_been_run() -> None:
    trace = stream(60, 3)
    found = hit_curve(trace, EXPERTS, range(K, EXPERTS))
    for slots in range(K, EXPERTS + 1):
        want = sum(simulated(trace[:, layer], slots) for layer in range(3)) / trace.numel()
        assert found["slots"][str(slots)] == pytest.approx(want, abs=1e-12)
    assert found["slots"][str(EXPERTS)] == pytest.approx(1 - found["first_uses"])
    rising = list(found["slots"].values())
    assert rising == sorted(rising) and rising[0] < rising[-1]


def test_it_is_what_the_slots_count_themselves() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    from lab.kernels.slots import SlotTables, reference_assign

    trace = stream(80, 1)
    for slots in (4, 7, 15):
        tables = SlotTables.empty(EXPERTS, slots, torch.device("cpu"), torch.ones(1, dtype=torch.int64))
        for row in trace[:, 0].tolist():
            reference_assign(row, tables)
        assert int(tables.counts[1]) == int((stack_distances(trace, EXPERTS) < slots).sum())


def test_the_routing_of_a_text_is_recorded_in_every_layer_and_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    from lab.artifacts import Checkpoint, HfWeights
    from lab.engines.path_binder import PathBinder
    from lab.models.qwen4_exp.model import Qwen4Exp

    write_checkpoint(tmp_path, tiny_model(2), "fused")
    here = torch.device("cpu")
    model = Qwen4Exp(from_file(tmp_path / "config.json"), PathBinder(HfWeights(Checkpoint(tmp_path)), {}, here, torch.float32, Counters()))
    before = [layer.moe.experts for layer in model.layers]
    corpus: Any = SimpleNamespace(prompts=lambda count, tokens, offset: text_ids(count, 20)[:, :tokens])
    engine = SimpleNamespace(model=model, device=here)
    trace = record_routing(engine, corpus, 20)
    assert trace is not None and trace.shape == (20, 2, 3) and trace.dtype == torch.int16
    assert [layer.moe.experts for layer in model.layers] == before
    shorter = record_routing(engine, corpus, 12)
    assert shorter is not None and torch.equal(shorter, trace[:12]), "what a token asks for depends on what is before it alone"
    assert bool((trace.sort(-1).values.diff(dim=-1) > 0).all()), "a token's experts are different"
