"""Verdicts and estimates: exact at the border, monotone in memory and depth, and open where a memory that counts is not known."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.capacity import Ledger, PastOom, capacity_evidence, estimate_with_memory, judge, past_ooms
from lab.capacity.ledger import Line, Place, Reads, Workspace
from lab.record import Status
from tests.runner_helpers import cell_of, make_project, record_of


def ledger(device: int, host: int = 0, layers: int = 12, **changes: object) -> Ledger:
    """A ledger of so many weight bytes at each place and none beside them."""
    sizes: dict[Place, int] = {"device": device, "host": host}
    lines = [Line(component="trunk", codec="bf16", placement=where, where=where, weights=size // 2, bytes=size) for where, size in sizes.items()]
    data: dict[str, object] = {
        "model": "nano",
        "path": "expert_q2",
        "device": "cpu",
        "layers": layers,
        "one_memory": False,
        "lines": tuple(line for line in lines if line.bytes),
        "state_bytes": 0,
        "state_basis": "none",
        "workspace": Workspace(device_bytes=0, host_bytes=0, basis="none"),
        "decode_bytes_per_token": Reads(device_bytes=1, bus_bytes=0, host_bytes=0),
        "flops_per_token": 1.0,
        "basis": "none",
    }
    return Ledger.model_validate({**data, **changes})


@given(st.integers(1, 10**12), st.integers(0, 10**12), st.integers(0, 10**12), st.integers(0, 10**12))
def test_a_verdict_says_what_is_missing_and_more_memory_never_hurts(device: int, host: int, free: int, more: int) -> None:
    verdict = judge(ledger(device, host), free, free)
    assert verdict.short_by_bytes == max(0, device - free) + max(0, host - free)
    assert verdict.fits is (verdict.short_by_bytes == 0)
    assert verdict.device_spare_bytes == free - device
    assert judge(ledger(device, host), free + more, free + more).short_by_bytes <= verdict.short_by_bytes


def test_what_is_not_known_stays_open_only_where_it_matters() -> None:
    assert judge(ledger(10), None, 5).fits is None
    assert judge(ledger(10), 10, None).fits is True
    assert judge(ledger(10, 1), 10, None).fits is None
    assert judge(ledger(10, 1), 9, None).fits is False
    assert "its memory is not known" in judge(ledger(10, 1), 10, None).sentence


def test_one_memory_holds_the_sum_and_a_budget_is_a_smaller_memory() -> None:
    assert judge(ledger(6, 5, one_memory=True), 10, 10).short_by_bytes == 1
    assert judge(ledger(6, 5, one_memory=True), 11, None).fits is True
    assert judge(ledger(6, 5, device_limit_bytes=5), 100, 100).short_by_bytes == 1
    assert judge(ledger(6, 5, host_limit_bytes=4), 100, None).short_by_bytes == 1


def test_a_ledger_survives_json() -> None:
    before = ledger(6, 5)
    assert Ledger.model_validate_json(before.model_dump_json()) == before


def oom(layers: int, predicted: int, free: int, **changes: str) -> PastOom:
    names = {"model": "nano", "path": "expert_q2", "device": "cpu", **changes}
    return PastOom(**names, layers=layers, predicted_bytes=predicted, free_bytes=free)


@given(
    st.integers(1, 10**12),
    st.integers(1, 48),
    st.lists(st.tuples(st.integers(1, 48), st.integers(1, 10**12), st.integers(0, 10**12)), max_size=5),
    st.integers(0, 10**11),
)
def test_an_estimate_is_raised_never_lowered_and_grows_with_depth_and_failures(size: int, layers: int, failures: list[tuple[int, int, int]], more: int) -> None:
    past = [oom(*failure) for failure in failures]
    found = estimate_with_memory(ledger(size, layers=layers), past)
    assert found.ledger_bytes == size <= found.bytes
    assert bool(found.reason) is (found.bytes > size)
    assert estimate_with_memory(ledger(size, layers=layers), past[1:]).bytes <= found.bytes
    assert estimate_with_memory(ledger(size + more, layers=layers + 1), past).bytes >= found.bytes


def test_the_cell_that_failed_does_not_fit_the_memory_it_failed_in() -> None:
    failed = ledger(100, layers=6)
    raised = estimate_with_memory(failed, [oom(6, 100, 130)])
    assert judge(failed, 130, None).fits and judge(failed, 130, None, raised).fits is False
    assert raised.bytes == 131 and "raised by 1.310: out of memory at 6 layers" in raised.reason


@pytest.mark.parametrize("other", [{"model": "x"}, {"path": "x"}, {"device": "x"}])
def test_failures_of_other_cells_do_not_count(other: dict[str, str]) -> None:
    assert estimate_with_memory(ledger(100), [oom(12, 100, 500, **other), oom(13, 100, 500)]).bytes == 100


def test_a_failure_is_read_back_from_its_record(tmp_path: Path) -> None:
    cell = cell_of(make_project(tmp_path / "p"), "path=expert_q2", "layers=6")
    evidence = {"capacity": capacity_evidence(ledger(100, layers=6), 130, 50)}
    failed = record_of(cell, Status.OOM, evidence=evidence)
    others = [record_of(cell, Status.OOM), record_of(cell, Status.TIMEOUT, evidence=evidence)]
    assert past_ooms([failed, *others]) == [PastOom("nano", "expert_q2", "cpu", 6, 100, 130, f"{cell.id}/001")]
