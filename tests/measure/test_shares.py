"""Shares of components: each kernel goes to the innermost range that launched it, the parts of the models are all found, and nothing stays replaced."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lab.artifacts import Checkpoint, HfWeights
from lab.cell import ComponentPlan
from lab.counters import Counters
from lab.engines.path_binder import PathBinder
from lab.errors import GapError
from lab.measure import shares
from lab.measure.shares import RANGE, TARGETS, attribute, component_shares, marked, traced
from lab.measure.text import Corpus
from lab.models.qwen4_exp.config import from_file
from lab.models.qwen4_exp.model import Qwen4Exp
from lab.models.qwen4_exp.moe import SparseMoe
from lab.record import Status
from tests.models.tiny import tiny_model, write_checkpoint


def span(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


def launched(correlation: int, ts: float, kernel: str, dur: float, cat: str = "kernel", driver: bool = False, tid: int = 1) -> list[dict[str, Any]]:
    """A launch on the CPU at `ts`, and what it put on the device, much later."""
    call = span("cuda_driver" if driver else "cuda_runtime", "launch", ts, 1, tid, correlation=correlation)
    return [call, span(cat, kernel, 1000 + ts, dur, 7, correlation=correlation)]


GPU = [
    span("user_annotation", f"{RANGE}whole", 0, 100),
    span("user_annotation", f"{RANGE}router_and_shared", 10, 40),
    span("user_annotation", f"{RANGE}experts", 20, 10),
    span("user_annotation", "another library's", 20, 10),
    span("user_annotation", f"{RANGE}?head", 28, 2),
    span("user_annotation", f"{RANGE}?head", 59, 4),
    span("gpu_user_annotation", f"{RANGE}experts", 1020, 900, 7),
    *launched(1, 5, "embed", 3),
    *launched(2, 12, "router", 4),
    *launched(3, 21, "gate_up", 10, driver=True),
    *launched(4, 25, "down", 6),
    *launched(5, 29, "Memcpy HtoD (Pinned -> Device)", 7, "gpu_memcpy"),
    *launched(6, 35, "Memcpy DtoD (Device -> Device)", 2, "gpu_memcpy"),
    *launched(7, 60, "head", 8),
    *launched(8, 22, "another thread's", 50, tid=2),
    *launched(9, 500, "after the pass", 5),
    span("kernel", "of nobody", 1700, 5, 7, correlation=99),
]


def test_a_kernel_belongs_to_the_innermost_range_around_its_launch() -> None:
    found = attribute(GPU, gpu=True)
    in_us = {component: round(1e6 * seconds, 6) for component, seconds in found.seconds.items()}
    assert in_us == {"other": 3, "router_and_shared": 4 + 2, "experts": 16, "transfers": 7, "head": 8}
    assert found.launches == {"other": 1, "router_and_shared": 2, "experts": 2, "transfers": 1, "head": 1}
    assert found.device_s == pytest.approx(100e-6) and found.whole_s == pytest.approx(40e-6)
    assert max(found.kernels, key=lambda key: found.kernels[key]) == ("experts", "gate_up")


def test_on_a_cpu_a_range_counts_without_what_is_inside_it() -> None:
    found = attribute(GPU, gpu=False)
    assert {name: round(1e6 * s, 6) for name, s in found.seconds.items()} == {"other": 56, "router_and_shared": 30, "experts": 8, "head": 6}


def test_a_trace_whose_kernels_are_not_linked_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "attribute", lambda events, gpu: attribute(GPU, True))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    with pytest.raises(GapError, match="puts 40% of the device's time into the passes") as raised:
        traced(lambda: torch.ones(3).sum(), torch.device("cuda"))
    assert raised.value.status is Status.UNSUPPORTED


def test_every_part_that_is_named_is_there() -> None:
    """A part that was renamed would silently count as `other`."""
    for module, path, _ in TARGETS:
        owner: Any = import_module(module)
        for name in path.split("."):
            owner = getattr(owner, name)
        assert callable(owner)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tiny")
    write_checkpoint(folder, tiny_model(4), "fused")
    counters, plan = Counters(), {"experts": ComponentPlan(codec="q2_g32")}
    binder = PathBinder(HfWeights(Checkpoint(folder)), plan, torch.device("cpu"), torch.float32, counters)
    model = Qwen4Exp(from_file(folder / "config.json"), binder)
    cpu, graphs = torch.device("cpu"), SimpleNamespace(plain_step=lambda: None)
    return SimpleNamespace(model=model, device=cpu, dtype=torch.float32, counters=counters, graphs=graphs, plain_logits=model.logits)


def test_both_shares_of_a_real_model_cover_its_parts_and_count_for_no_token(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shares, "PROMPT", 24)
    before = engine.counters.rows("embed")
    found = component_shares(engine, Corpus(torch.arange(200) % 90, None, {"name": "t"}))
    assert set(found) == {"decode_experts_share", "prefill_experts_share"} and engine.counters.rows("embed") == before
    for one in found.values():
        told = one.details["share_by_component"]
        assert {"experts", "router_and_shared", "gdn", "attention", "ngram", "hyper_connections", "embedding", "head"} <= set(told)
        assert sum(told.values()) == pytest.approx(1) and one.value == told["experts"] > 0 and min(told.values()) >= 0
    assert found["decode_experts_share"].details["launches_per_pass"]["head"] == 1
    assert found["prefill_experts_share"].details["launches_per_pass"]["experts"] == 4, "one call in each layer"


def test_nothing_stays_replaced_even_after_an_error(engine: Any) -> None:
    before, head = SparseMoe.__call__, engine.model.head
    with pytest.raises(RuntimeError), marked(engine.model):
        assert SparseMoe.__call__ is not before and engine.model.head is not head
        raise RuntimeError
    assert SparseMoe.__call__ is before and engine.model.head is head


def test_the_file_of_a_trace_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(GapError, match="shows no time"):
        traced(lambda: None, torch.device("cpu"))
    assert not list(tmp_path.iterdir())
