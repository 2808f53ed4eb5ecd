"""What experts kept in part cost: counted around the timed steps alone, a bound that the bus sets, hit rate with its curve, and the rate of copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.cell import SYNTHETIC
from lab.counters import Counters
from lab.measure import tiers
from lab.measure.throughput import DECODE, decode_bound
from lab.metrics import METRICS
from lab.placement.tiers import Moved
from lab.record import Measurement

BOUNDS = {"read_bytes_s": 4e12, "flops_s": 1e14, "bus_bytes_s": 5e10}


class Tier:
    """Every look at it, half of the requests since the last look were found and each miss moved 1000 bytes."""

    def __init__(self, kind: str = "tiered") -> None:
        self.kind, self.layers, self.slots, self.count, self.total_layers = kind, (0, 1), 6, 9, 2
        self.now = Moved()
        self.shared: Any = None

    def moved(self) -> Moved:
        return self.now

    def work(self, requests: int) -> None:
        self.now += Moved(requests, requests // 2, requests // 2, 1000 * (requests // 2), 0)


def engine_with(tier: Tier | None) -> Any:
    return SimpleNamespace(tiers=tier, counters=Counters(), device=torch.device("cpu"))


def test_only_counted_steps_are_counted_with_the_tables_rows() -> None:
    tier = Tier()
    engine = engine_with(tier)
    carried = tiers.Carried(engine)
    for counts, requests in ((False, 1000), (True, 80), (True, 40)):
        with carried.over(10, counts):
            tier.work(requests)
            engine.counters.add((1, "ple", "e4m3", "cpu"), 16, 160, 0)
            engine.counters.add((1, "trunk", "int8_g128", "cuda"), 16, 10**9, 0)
        tier.work(7)  # between the steps: a prompt
    assert carried.details(BOUNDS)["tier"] == {
        "requests": 120, "hits": 60, "misses": 60, "steps": 20, "bus_bytes_per_step": 3016.0, "bus_step_ms": pytest.approx(3016e3 / 5e10)
    }  # fmt: skip
    assert carried.least_s(None) == 0.0 and "bus_step_ms" not in carried.details({"read_bytes_s": 1.0})["tier"]
    alone = tiers.Carried(engine_with(None))
    with alone.over(10, True):
        pass
    assert alone.details(BOUNDS) == {} and alone.least_s(BOUNDS) == 0.0


def test_the_slower_of_memory_and_bus_bounds_a_step() -> None:
    assert decode_bound(4e9, 1, BOUNDS, False, 0.0005) == pytest.approx(1000)
    assert decode_bound(4e9, 4, BOUNDS, False, 0.004) == pytest.approx(1000)
    assert decode_bound(4e9, 1, None, False, 0.004) is None


def rate_of(tier: dict[str, Any]) -> Measurement:
    known = METRICS["tg128_tok_s"]
    return Measurement(value=100.0, unit=known.unit, protocol=known.protocol, details={"tier": tier})


def test_hit_rate_and_bytes_are_those_of_the_rate_and_say_whose_routers_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = torch.stack([torch.stack([torch.randperm(9)[:2] for _ in range(2)]) for _ in range(30)])
    monkeypatch.setattr(tiers, "record_routing", lambda engine, corpus: trace)
    told = {"requests": 400, "hits": 300, "misses": 100, "steps": DECODE, "bus_bytes_per_step": 9.5e6}
    cell: Any = SimpleNamespace(model=SimpleNamespace(artifact=SYNTHETIC))
    corpus: Any = SimpleNamespace(facts={"name": "text"})
    found = tiers.tier_metrics(engine_with(Tier("cpu_cold")), cell, corpus, rate_of(told), BOUNDS)
    assert found.keys() == {"expert_hit_rate", "bus_bytes_per_token"}
    assert found["expert_hit_rate"].value == 0.75 and found["bus_bytes_per_token"].value == 9.5e6
    details = found["expert_hit_rate"].details
    assert details["router"] == "random weights" and details["hit_curve"]["slots"].keys() == {"9"} and details["slots"] == 6
    assert tiers.tier_metrics(engine_with(None), cell, corpus, rate_of(told), BOUNDS) == {}
    assert tiers.tier_metrics(engine_with(Tier("cpu_cold")), cell, corpus, None, BOUNDS) == {}


def test_the_copy_rate_goes_through_all_experts_and_is_no_work_of_the_cell() -> None:
    asked: list[list[int]] = []
    inside: list[bool] = [False]

    @contextmanager
    def uncounted() -> Iterator[None]:
        inside[0] = True
        yield
        inside[0] = False

    def bring(ids: torch.Tensor) -> None:
        assert inside[0]
        asked.append(ids.flatten().tolist())

    op = SimpleNamespace(room=SimpleNamespace(units=[torch.zeros(6)]), count=9, expert_bytes=1 << 20, bring=bring)
    pool = SimpleNamespace(layers=(0,), ops={0: op}, top_k=4, device=torch.device("cpu"), uncounted=uncounted)
    found = tiers.copy_rate(pool, 5e10)
    assert asked == [[0, 1, 2, 3], [4, 5, 6, 7]] * (tiers.COPY_REPEATS + 1) and not inside[0]
    assert len(found.samples) == tiers.COPY_REPEATS and found.unit == "B/s" and found.value > 0
    assert found.details["share_of_bus"] == pytest.approx(found.value / 5e10)
