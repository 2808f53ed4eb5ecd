"""The search for a number of threads: by halves until it gets worse, long calls on all cores; an engine uses what was found and counts nothing for it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lab.compose import compose_cells
from lab.engines import threads
from lab.engines.local import LocalEngine
from lab.engines.threads import Threads, soonest
from tests.runner_helpers import ROOT


@pytest.fixture(autouse=True)
def same_threads_afterwards() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Clock:
    """A clock that only calls move, by what the present number of threads costs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cost: dict[int, float]) -> None:
        self.now, self.count, self.cost = 0.0, 0, cost
        monkeypatch.setattr(threads.time, "perf_counter", lambda: self.now)
        monkeypatch.setattr(torch, "set_num_threads", lambda count: setattr(self, "count", count))
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.count)

    def call(self) -> None:
        self.now += self.cost[self.count]


@pytest.mark.parametrize(
    ("cost", "best", "tried"),
    [
        ({32: 0.5, 16: 0.6, 8: 0.1, 4: 0.15, 2: 0.3}, 8, "32 16 8 4 2"),
        ({24: 0.010, 12: 0.012, 6: 0.021}, 24, "24 12 6"),
        ({3: 0.1, 1: 0.05}, 1, "3 1"),
        ({16: 1.5, 8: 0.02, 4: 0.05}, 8, "16 8 4"),  # a long call may be one whose threads wait for one another
        ({8: 2.0, 4: 2.5, 2: 5.0}, 8, "8 4 2"),
        ({32: 16.0}, 32, "32"),  # and here trying would take minutes
        ({1: 0.1}, 1, "1"),
    ],
)
def test_halves_until_it_gets_worse(monkeypatch: pytest.MonkeyPatch, cost: dict[int, float], best: int, tried: str) -> None:
    clock = Clock(monkeypatch, cost)
    found = soonest(clock.call, max(cost), torch.set_num_threads)
    assert found[0] == best == clock.count and list(found[1]) == tried.split()
    assert found[1][str(best)] == pytest.approx(1e3 * cost[best])


def test_a_call_that_fails_leaves_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, {8: 0.1})
    with pytest.raises(KeyError):
        soonest(clock.call, 8, torch.set_num_threads)
    assert clock.count == 8


def test_prompts_and_steps_have_numbers_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch, {4: 0.2, 2: 0.1, 1: 0.4})

    def step() -> None:
        clock.now += {4: 0.2, 2: 0.1, 1: 0.05}[clock.count]

    own = Threads(4)
    own.settle(clock.call, step, torch.set_num_threads)
    assert (own.prompts, own.steps) == (2, 1) and set(own.facts()) == {"prompts", "steps", "of", "tried_ms"}
    own.use(512)
    assert clock.count == 2
    own.use(1)
    assert clock.count == 1


def test_an_engine_tries_counts_nothing_and_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.engines.threads.usable_cores", lambda: 2)
    cell, given = (compose_cells(["model=nano", "path=expert_q2", "layers=2", "device=cpu", *words])[0] for words in ([], ["device.threads=2"]))
    engine = LocalEngine(cell, ROOT)
    ids = torch.arange(1, 20)[None]
    before = engine.logits(ids)
    rows = engine.counters.rows("embed")
    told = engine.settle_threads()
    assert told is not None and told["of"] == 2 and set(told["tried_ms"]) == {"prompts", "steps"} and set(told["tried_ms"]["steps"]) == {"2", "1"}
    assert engine.counters.rows("embed") == rows
    assert torch.allclose(engine.logits(ids), before, atol=1e-4) and torch.get_num_threads() == told["prompts"]
    state = engine.new_state(1, 4)
    engine.logits(ids[:, :1], state)
    assert torch.get_num_threads() == told["steps"]
    assert LocalEngine(given, ROOT).settle_threads() is None, "a number that is asked for is the number"
