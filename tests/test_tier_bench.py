"""The checks of experiments.tier_bench: green on what there is, red on a copy, a table or a job that is wrong. What it does not prove: its times."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from experiments import tier_bench
from lab.kernels import native
from tests.kernels.support import DEVICE

if native.unavailable():
    pytest.skip(str(native.unavailable()), allow_module_level=True)

HERE = torch.device(DEVICE)


def test_everything_is_checked_and_right() -> None:
    found = dict(tier_bench.checks(HERE))
    assert set(found.values()) == {None}
    for part in ("tiered tables", "cpu_cold tables", "copies", "sum", *(f"CPU job {codec}" for codec in tier_bench.CODECS)):
        assert any(name.startswith(part) for name in found), part


def test_a_wrong_copy_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tier_bench.copy_experts

    def wrong(copies: Any, slots: Any, tables: Any, source: Any, target: Any, units: Any) -> None:
        real(copies, slots, tables, source, target, units)
        target[3][slots.flatten()[1], 0] += 1

    monkeypatch.setattr(tier_bench, "copy_experts", wrong)
    assert tier_bench.check_copies(128, 64, HERE)[1] == "slots [1] differ"


def test_a_wrong_table_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tier_bench.assign

    def wrong(ids: Any, tables: Any) -> Any:
        found = real(ids, tables)
        tables.last_use[0] += 1
        return found

    monkeypatch.setattr(tier_bench, "assign", wrong)
    (_, tiered), (_, cold) = tier_bench.check_tables(37, 11, 1, 5, 3, HERE)
    assert tiered is not None and cold is None


def test_a_wrong_job_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_bench, "reference_experts", lambda x, *rest: torch.ones(len(x), x.shape[1]))
    assert "relative error" in str(tier_bench.check_job("q2_g32", 128, 64, 2)[1])


def test_a_row_is_told_with_its_rate_and_share() -> None:
    line = tier_bench.told({"name": "copies", "us": [9.0, 10.0, 12.0], "bytes": 500_000, "bound_bytes_s": 100e9})
    assert line.split() == ["copies", "10.00", "us", "[9.00,", "12.00]", "50.0", "GB/s", "50.0%"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, "-m", "experiments.tier_bench"], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("tier_bench needs a GPU")
