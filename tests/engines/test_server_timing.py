"""Rates: exact on answers whose times are known, and refused where an answer cannot carry one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.engines.server.stream import Answer
from lab.engines.server.timing import CacheProbe, decode_rate, prefill_rate, probe_cache
from lab.errors import GapError
from lab.record import Status
from tests.engines.helpers import answer

COLD = CacheProbe(fresh_ttft_s=0.1, repeat_ttft_s=0.1, reported_tokens=None)


@given(st.floats(0.001, 10), st.floats(0.0001, 1), st.integers(480, 540))
def test_rates_of_even_streams_are_exact(ttft_s: float, step_s: float, prompt: int) -> None:
    found = [answer(sent_s=float(run), ttft_s=ttft_s, step_s=step_s, prompt_tokens=prompt) for run in range(5)]
    pp = prefill_rate(found, COLD, {})
    tg = decode_rate([[one] for one in found], {})
    assert pp.samples == pytest.approx([prompt / ttft_s] * 5)
    assert tg.samples == pytest.approx([1 / step_s] * 5)
    assert tg.details["itl_ms_p50"] == pytest.approx(1e3 * step_s)
    assert (tg.details["realised_tokens"], tg.details["requested_tokens"]) == (128, 128)


@given(st.lists(st.floats(0.0, 0.9), min_size=4, max_size=4), st.floats(0.001, 0.1))
def test_four_together_share_one_clock_and_are_never_a_sum(delays: list[float], step_s: float) -> None:
    step_s += max(delays) / 30
    wave = [answer(ttft_s=0.1 + delay, step_s=step_s) for delay in delays]
    agg = decode_rate([wave], {})
    wall = 127 * step_s + max(delays) - min(delays)
    assert agg.value == pytest.approx(4 * 127 / wall)
    assert agg.details["together_share"] == pytest.approx((127 * step_s - max(delays) + min(delays)) / wall)
    assert agg.value <= 4 / step_s * (1 + 1e-9)
    assert agg.details["with_prefill_tok_s"] == pytest.approx(512 / (0.1 + max(delays) + 127 * step_s))


def test_cached_tokens_within_the_shared_beginning_do_not_count_as_read() -> None:
    assert prefill_rate([answer(cached_tokens=2)], COLD, {}).value == pytest.approx(5100)


@pytest.mark.parametrize(
    ("changes", "probe", "reason"),
    [
        ({"cached_tokens": 16}, COLD, "reports 16 of its tokens as cached"),
        ({}, CacheProbe(0.1, 0.01, None), "starts after 10 ms, fresh ones after 100 ms"),
        ({}, CacheProbe(0.1, 0.01, 0), "does not say when"),
        ({}, CacheProbe(0.1, 0.01, 3), "does not say when"),
        ({"prompt_tokens": 400}, COLD, "400 to 400 tokens"),
        ({"prompt_tokens": 600}, COLD, "no measurement of 512"),
    ],
)
def test_prompts_that_were_not_computed_or_miss_the_length_are_refused(changes: dict[str, int], probe: CacheProbe, reason: str) -> None:
    with pytest.raises(GapError, match=reason) as raised:
        prefill_rate([answer(**changes)], probe, {})
    assert raised.value.status is Status.IMPLAUSIBLE


def test_a_probe_is_warm_by_time_or_by_word() -> None:
    fresh = [answer(ttft_s=0.1)] * 5
    assert not probe_cache(fresh, [answer(ttft_s=0.06), answer(ttft_s=0.02)]).warm
    assert probe_cache(fresh, [answer(ttft_s=0.04), answer(ttft_s=0.02)]).warm
    assert probe_cache(fresh, [answer(ttft_s=0.1, cached_tokens=496)]).warm
    assert prefill_rate(fresh, probe_cache(fresh, [answer(ttft_s=0.01, cached_tokens=496)]), {}).details["cache_probe"]["reported_tokens"] == 496


@pytest.mark.parametrize(
    ("wave", "status", "reason"),
    [
        ([answer(completion_tokens=1)], Status.IMPLAUSIBLE, "1 tokens came back"),
        ([answer(completion_tokens=129)], Status.IMPLAUSIBLE, "129 tokens came back"),
        ([answer(updates=7)], Status.IMPLAUSIBLE, "in 7 updates"),
        ([answer(updates=8, step_s=0.0)], Status.IMPLAUSIBLE, "collects the stream"),
        ([answer(sent_s=2.0 * lane) for lane in range(4)], Status.UNSUPPORTED, "together for 0% of their common time"),
        ([answer(ttft_s=0.1 + 0.25 * lane) for lane in range(4)], Status.UNSUPPORTED, "together for 26% of"),
    ],
)
def test_answers_that_are_no_decoding_are_refused(wave: list[Answer], status: Status, reason: str) -> None:
    with pytest.raises(GapError, match=reason) as raised:
        decode_rate([wave], {})
    assert raised.value.status is status


def test_drafts_are_summed_where_all_counts_are_there() -> None:
    details = decode_rate([[answer(drafted=100, accepted=60)], [answer(drafted=100, accepted=70)]], {}).details
    assert (details["drafted_tokens"], details["accepted_tokens"]) == (200, 130)
    assert "drafted_tokens" not in decode_rate([[answer()]], {}).details
