"""When a word is allowed: exact values against published ones, few samples, ties, and how often chance alone would earn a word."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.stats import ALPHA, NOT_SEPARATED, compare_estimates, compare_samples, ratio_interval, smallest_p

FAST, SLOW = [110.0, 111.0, 112.0, 113.0, 114.0], [90.0, 91.0, 92.0, 93.0, 94.0]
SAMPLES = st.lists(st.floats(1.0, 1e4), min_size=1, max_size=9)


def test_five_repeats_that_lie_apart_earn_a_word() -> None:
    found = compare_samples(FAST, SLOW)
    assert (found.word, found.ratio, found.why) == ("faster", pytest.approx(112 / 92), "")
    assert found.p == pytest.approx(2 / 252)
    assert found.low is not None and found.high is not None and 1 < found.low < found.ratio < found.high
    assert compare_samples(SLOW, FAST).word == "slower"


def test_one_sample_in_between_takes_the_word_away() -> None:
    found = compare_samples([*FAST[:4], 93.5], SLOW)
    assert (found.word, found.why) == (NOT_SEPARATED, "") and found.p > ALPHA


def test_the_interval_must_exclude_one_as_well() -> None:
    """Ranks that differ while the medians are uncertain: one side is spread so wide that its median could be anywhere."""
    wide = [100.1, 100.2, 100.3, 100.4, 3000.0]
    found = compare_samples(wide, [95.0, 96.0, 97.0, 98.0, 99.0])
    assert found.p < ALPHA and found.word == NOT_SEPARATED and found.why == "the ranks differ, the medians do not clearly"


@pytest.mark.parametrize(("n", "m", "best"), [(5, 5, 2 / 252), (4, 5, 2 / 126), (1, 1, 1.0), (3, 9, 2 / 220)])
def test_too_few_samples_can_never_earn_a_word_and_say_so(n: int, m: int, best: float) -> None:
    assert smallest_p(n, m) == pytest.approx(best)
    found = compare_samples([1000.0 + i for i in range(n)], [1.0 + i / 10 for i in range(m)])
    assert (found.word != NOT_SEPARATED) == (best < ALPHA) == (found.why == "")
    assert (found.low is None) == (min(n, m) < 2)


def test_the_interval_is_the_published_one() -> None:
    """The example of R's statpsych::ci.ratio.median2, by the authors of the method."""
    first, second = [36, 44, 47, 42, 49, 39, 46, 31, 33, 48], [32, 39, 26, 35, 43, 27, 40, 37, 34, 29, 49, 42, 40]
    assert ratio_interval(first, second) == pytest.approx((0.927667, 1.455933), abs=1e-6)


@pytest.mark.parametrize("n", [5, 7, 10])
def test_the_interval_covers_the_truth_as_often_as_it_says(n: int) -> None:
    chance, covered = random.Random(n), 0
    for _ in range(1500):
        low, high = ratio_interval([chance.lognormvariate(0, 0.03) for _ in range(n)], [chance.lognormvariate(0, 0.03) for _ in range(n)]) or (2, 0)
        covered += low <= 1 <= high
    assert covered / 1500 > 0.935


def test_chance_alone_earns_a_word_in_fewer_than_one_of_a_hundred() -> None:
    chance = random.Random(0)
    words = [compare_samples(*([chance.lognormvariate(0, 0.03) for _ in range(5)] for _ in range(2))).word for _ in range(800)]
    assert sum(word != NOT_SEPARATED for word in words) <= 16


@given(SAMPLES, SAMPLES, st.floats(0.01, 100))
def test_sides_and_units_change_nothing_but_the_side_and_the_unit(a: list[float], b: list[float], scale: float) -> None:
    there, back = compare_samples(a, b), compare_samples(b, a)
    assert there.word == {"faster": "slower", "slower": "faster"}.get(back.word, NOT_SEPARATED)
    assert there.p == pytest.approx(back.p) and there.ratio * back.ratio == pytest.approx(1)
    assert compare_samples([x * scale for x in a], [x * scale for x in b]).ratio == pytest.approx(there.ratio)
    if there.low is not None and there.high is not None:
        assert there.low <= there.ratio * (1 + 1e-12) and there.ratio <= there.high * (1 + 1e-12)


def test_the_same_samples_are_never_separated() -> None:
    assert compare_samples([2.0] * 9, [2.0] * 9).word == NOT_SEPARATED


@pytest.mark.parametrize("bad", [[], [1.0, 0.0], [-1.0], [float("nan")], [float("inf")]])
def test_what_is_no_rate_is_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="positive, finite samples"):
        compare_samples(bad, [1.0])


def test_estimates_are_judged_by_their_standard_errors() -> None:
    assert compare_estimates(10.0, 0.1, 11.0, 0.1).word == "lower"
    assert compare_estimates(11.0, 0.0, 10.0, 0.1).word == "higher"
    near = compare_estimates(10.0, 0.1, 10.3, 0.1)
    assert (near.word, near.low < 0 < near.high) == (NOT_SEPARATED, False), "0.05 is not 0.01"
    assert near.p == pytest.approx(0.0339, abs=1e-4)
    with pytest.raises(ValueError, match="standard error"):
        compare_estimates(1.0, 0.0, 2.0, 0.0)
