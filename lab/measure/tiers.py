"""What experts kept in part cost: hits, bytes over the bus for each token, and the rate of the copies against the bus as measured.

The counts are the device's own (`lab.kernels.slots`), taken around the very steps whose speed is reported, so that the bound they set belongs to that
speed. The copy rate asks one layer for experts that it does not hold, again and again.
What it does not prove: hit rates of another text or model; with synthetic weights routers are random, and the details say so.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lab.cell import SYNTHETIC, Cell
from lab.measure.hit_curve import hit_curve, record_routing
from lab.measure.text import Corpus
from lab.metrics import METRICS
from lab.placement.tiers import Moved
from lab.record import Measurement

COPY_REPEATS = 5


class Carried:
    """Adds up what moved during timed steps of an engine; nothing where its experts are all in one place."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.tiers = engine, getattr(engine, "tiers", None)
        self.total, self.table_bytes, self.steps = Moved(), 0, 0

    @contextmanager
    def over(self, steps: int, counts: bool) -> Iterator[None]:
        """Around `steps` timed steps; warm-up runs do not count."""
        if self.tiers is None or not counts:
            yield
            return
        before, table = self.tiers.moved(), self._table()
        yield
        self.total += self.tiers.moved() - before
        self.table_bytes += self._table() - table
        self.steps += steps

    def _table(self) -> int:
        """Bytes of the n-gram table's rows read from host memory."""
        return sum(tally.weight_bytes for key, tally in self.engine.counters.tallies.items() if key[1] == "ple" and key[3] == "cpu")

    @property
    def bytes_per_step(self) -> float:
        """Over the bus: missing experts, layers streamed for prompts, and rows of a table in host memory."""
        return (self.total.bus_bytes + self.total.streamed_bytes + self.table_bytes) / self.steps if self.steps else 0.0

    def least_s(self, bounds: dict[str, Any] | None) -> float:
        """Seconds that the bus as measured needs for a step's bytes; 0 where nothing crosses it, or it was not measured."""
        bus = None if bounds is None else bounds.get("bus_bytes_s")
        return self.bytes_per_step / bus if bus else 0.0

    def details(self, bounds: dict[str, Any] | None) -> dict[str, Any]:
        """{tier: {requests, hits, misses, steps, bus_bytes_per_step, bus_step_ms}} for a rate's details; empty where nothing is kept in part."""
        if self.tiers is None or not self.steps:
            return {}
        moved = {name: getattr(self.total, name) for name in ("requests", "hits", "misses")}
        least = {"bus_step_ms": 1e3 * self.least_s(bounds)} if self.least_s(bounds) else {}
        cpu = {"cpu_experts": self.total.cpu_experts, "cpu_step_ms": 1e-6 * self.total.cpu_ns / self.steps} if self.total.cpu_experts else {}
        return {"tier": {**moved, "steps": self.steps, "bus_bytes_per_step": self.bytes_per_step, **least, **cpu}}


def tier_metrics(engine: Any, cell: Cell, corpus: Corpus, rate: Measurement | None, bounds: dict[str, Any] | None) -> dict[str, Measurement]:
    """expert_hit_rate and bus_bytes_per_token of the steps that `rate` (of one sequence) was measured on, with the hit curve of the text; bus_bytes_s of the
    copies (tiered); cpu_us_per_expert (cpu_cold). Empty where no layer is kept in part. Changes what the first layer's slots hold: to be called last."""
    tiers = engine.tiers
    if tiers is None or not tiers.layers:
        return {}
    found = {}
    told = None if rate is None else rate.details.get("tier")
    if told and told["requests"]:
        trace = record_routing(engine, corpus)
        curve = None if trace is None else {**hit_curve(trace, tiers.count), "text": corpus.facts}
        router = "random weights" if cell.model.artifact == SYNTHETIC else "the model's own"
        kept = {"slots": tiers.slots, "of_experts": tiers.count, "layers_in_part": len(tiers.layers), "of_layers": tiers.total_layers}
        found["expert_hit_rate"] = _one("expert_hit_rate", told["hits"] / told["requests"], {**told, **kept, "router": router, "hit_curve": curve})
        found["bus_bytes_per_token"] = _one("bus_bytes_per_token", told["bus_bytes_per_step"], {**kept, "router": router})
    if told and told.get("cpu_experts"):
        us = 1e3 * told["cpu_step_ms"] * told["steps"] / told["cpu_experts"]
        found["cpu_us_per_expert"] = _one("cpu_us_per_expert", us, {**told, **tiers.shared.cpu_side()})
    if tiers.kind == "tiered":
        found["bus_bytes_s"] = copy_rate(tiers.shared, None if bounds is None else bounds.get("bus_bytes_s"))
    return found


def copy_rate(pool: Any, bus_bytes_s: float | None) -> Measurement:
    """Bytes per second of the copy kernel when every expert of a step is missing: calls on one layer that go through all its experts, over one wall clock."""
    op = pool.ops[pool.layers[0]]
    each = min(pool.top_k, len(op.room.units[0]))
    asked = [torch.arange(start, start + each, dtype=torch.int32, device=pool.device)[None] for start in range(0, op.count - each + 1, each)]
    samples = []
    with pool.uncounted():
        for repeat in range(COPY_REPEATS + 1):
            _wait(pool.device)
            started = time.perf_counter()
            for ids in asked:
                op.bring(ids)
            _wait(pool.device)
            if repeat:
                samples.append(len(asked) * each * op.expert_bytes / (time.perf_counter() - started))
    known = METRICS["bus_bytes_s"]
    details = {
        "experts_per_call": each,
        "calls": len(asked),
        "expert_bytes": op.expert_bytes,
        "bus_bytes_s": bus_bytes_s,
        "missing": "all, unless every one has a slot",
    }
    result = Measurement.from_samples(samples, known.unit, known.protocol, details=details)
    return result if bus_bytes_s is None else result.model_copy(update={"details": {**details, "share_of_bus": result.value / bus_bytes_s}})


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _one(name: str, value: float, details: dict[str, Any]) -> Measurement:
    known = METRICS[name]
    return Measurement(value=float(value), unit=known.unit, protocol=known.protocol, details=details)
