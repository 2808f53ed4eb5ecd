"""The comparison of nano on two devices: one CPU twice is equal, and what is not equal is said, whichever of the three it is."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experiments.nano_parity import ROOT, Side, compare, main, run, same_codes
from lab.compose import compose_cells
from lab.engines.local import LocalEngine
from lab.measure.greedy import Continuation
from tests.codecs.test_other_order import OtherDevice


def test_the_cpu_against_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("expert_q2", 3, 1, device="cpu", new=3)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and all(line.startswith("ok ") for line in lines)
    assert lines[0].endswith("codes and scales: trunk, experts, ple, head") and lines[4].endswith("codes and scales: trunk, experts, ple, head")
    assert "0.0000 % apart" in lines[1] and "KLD" in lines[2] and "3, 3, 3, 3 of 3 equal" in lines[3]
    assert "noise floors" in lines[6] and "noise floors" not in lines[2]


def test_other_codes_are_said() -> None:
    def engine(**sums: str) -> Any:
        return SimpleNamespace(binder=SimpleNamespace(encodings=lambda: {name: {"checksum": value} for name, value in sums.items()}))

    assert same_codes(engine(trunk="1", head="2"), engine(trunk="1", head="2")) == (True, "codes and scales: trunk, head")
    assert same_codes(engine(trunk="1", head="2"), engine(trunk="1", head="3")) == (False, "codes and scales: trunk, head DIFFER")
    assert same_codes(engine(trunk="1", head="2"), engine(trunk="1"))[1].endswith("head DIFFER")
    assert same_codes(engine(), engine(trunk="1")) == (False, "codes and scales: trunk DIFFER")
    assert same_codes(engine(), engine()) == (True, "codes and scales: none encoded")


def test_an_engine_that_encodes_in_another_order_holds_the_same_codes() -> None:
    words = ["model=nano", "path=expert_q2", "layers=3", "bench=quick", "device=cpu", "device.threads=1"]
    cell = compose_cells(words)[0]
    here = LocalEngine(cell, ROOT)
    with OtherDevice() as other:
        there = LocalEngine(cell, ROOT)
    assert "cumsum" in other.seen
    assert same_codes(here, there) == (True, "codes and scales: trunk, experts, ple, head")


def test_each_difference_is_said() -> None:
    torch.manual_seed(0)
    log_p = torch.randn(6, 5).log_softmax(-1)
    cpu = Side(log_p, torch.rand(6).double(), torch.tensor([0, 0, 0, 1, 1, 1]), [Continuation([3, 4, 1], [0, 0, 2], [1.0, 2.0, 0.5])])
    assert [fine for fine, _ in compare(cpu, cpu, 1e-9, 0.1)] == [True] * 3
    found = compare(cpu, replace(cpu, nll=cpu.nll + 2e-3), 1e-9, 0.1)
    assert [fine for fine, _ in found] == [False, True, True] and "0.2002 % apart, at most 0.1 %" in found[0][1]
    found = compare(cpu, replace(cpu, log_p=(log_p + 0.1 * torch.randn(6, 5)).log_softmax(-1)), 1e-9, 0.1)
    assert [fine for fine, _ in found] == [True, False, True]
    found = compare(cpu, replace(cpu, greedy=[Continuation([3, 4, 2], [0, 0, 1], [1.0, 2.0, 0.4])]), 1e-9, 0.1)
    assert [fine for fine, _ in found] == [True, True, False] and found[2][1] == "greedy ids: 2 of 3 equal; logits' gaps at the flips 0.5, at most 0.1"
    assert compare(cpu, replace(cpu, greedy=[Continuation([3, 4, 2], [0, 0, 1], [1.0, 2.0, 0.4])]), 1e-9, 0.6)[2][0]


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["nano_parity"])
    assert main() == 2 and "needs a GPU" in capsys.readouterr().err
