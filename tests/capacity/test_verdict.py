"""Verdicts: exact at the border, monotone in memory, within every budget, and open where a memory that counts is not known."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lab.capacity import Ledger, judge
from tests.capacity.helpers import ledger

SIZES = st.integers(0, 10**12)


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


@given(SIZES, SIZES, SIZES, st.one_of(st.none(), SIZES), st.one_of(st.none(), SIZES))
def test_one_memory_fits_where_the_sum_and_each_budgeted_share_fit(device: int, host: int, free: int, of_device: int | None, of_host: int | None) -> None:
    made = ledger(device, host, one_memory=True, device_limit_bytes=of_device, host_limit_bytes=of_host)
    verdict = judge(made, free, None)
    shares = (device, of_device), (host, of_host)
    assert verdict.fits is (device + host <= free and all(limit is None or share <= limit for share, limit in shares))
    # Taking away what is short, from the shares that are over their budgets, is enough; and less is not.
    over = sum(max(0, share - limit) for share, limit in shares if limit is not None)
    assert verdict.short_by_bytes == max(over, device + host - free, 0)


def test_a_budget_of_one_byte_is_named_where_there_is_one_memory() -> None:
    verdict = judge(ledger(6 << 30, 5 << 30, one_memory=True, device_limit_bytes=1, host_limit_bytes=1), 100 << 30, None)
    assert verdict.fits is False and verdict.device_spare_bytes == 1 - (6 << 30)
    assert "device budget is short by 6.00 GiB" in verdict.sentence and "host budget is short by 5.00 GiB" in verdict.sentence
