"""When two sets of numbers may be called different: an interval and a rank test for repeats, standard errors where there are none.

A word such as faster is an assertion, so it needs both a two-sided rank test below ALPHA and an interval of the ratio that excludes 1; everything else
is "not separated", which is not the same as equal. Repeats inside one process do not contain restart-to-restart noise: even then a word is about
these runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

ALPHA = 0.01
"""Two-sided level a test must stay below."""
CONFIDENCE = 0.95
NOT_SEPARATED: Literal["not separated"] = "not separated"


@dataclass(frozen=True)
class Comparison:
    """Rates `a` against rates `b`: the ratio of their medians (a / b) with its 95 % interval (None where one sample gives none), and the rank test's p.

    `why` says what stood against a word, where it was not simply that the samples overlap.
    """

    word: Literal["faster", "slower", "not separated"]
    ratio: float
    low: float | None
    high: float | None
    p: float
    why: str = ""


@dataclass(frozen=True)
class Difference:
    """Two estimates with standard errors: their difference (a - b) with its 95 % interval, and the two-sided p of a z test."""

    word: Literal["higher", "lower", "not separated"]
    difference: float
    low: float
    high: float
    p: float


def compare_samples(a: Sequence[float], b: Sequence[float]) -> Comparison:
    """Are the rates `a` faster or slower than `b`? Samples must be positive and finite; raises ValueError otherwise.

    The test is Mann-Whitney's U with its exact distribution (Mann and Whitney 1947); ties only make it more careful. The interval is `ratio_interval`.
    """
    from scipy.stats import mannwhitneyu  # slow to import

    if not a or not b or not all(math.isfinite(x) and x > 0 for x in (*a, *b)):
        raise ValueError(f"a comparison needs positive, finite samples on both sides, got {list(a)!r} and {list(b)!r}")
    ratio = statistics.median(a) / statistics.median(b)
    interval = ratio_interval(a, b)
    p = float(mannwhitneyu(a, b, alternative="two-sided", method="exact").pvalue)
    low, high = interval or (None, None)
    best = smallest_p(len(a), len(b))
    if interval is None or best >= ALPHA:
        why = f"{len(a)} against {len(b)} samples reach p = {best:.2g} at best, and a word needs p < {ALPHA:g}"
        return Comparison(NOT_SEPARATED, ratio, low, high, p, why)
    if p < ALPHA and not interval[0] <= 1 <= interval[1]:
        return Comparison("faster" if ratio > 1 else "slower", ratio, low, high, p)
    return Comparison(NOT_SEPARATED, ratio, low, high, p, "the ranks differ, the medians do not clearly" if p < ALPHA else "")


def smallest_p(n: int, m: int) -> float:
    """The smallest two-sided p that a rank test of `n` against `m` samples can reach: all of one side above all of the other."""
    return min(1.0, 2 / math.comb(n + m, n))


def ratio_interval(a: Sequence[float], b: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """A distribution-free interval for the ratio of two medians, a / b; None where a side has one sample.

    Bonett and Price 2020, "Confidence intervals for ratios of means and medians", J. Educ. Behav. Stat. 45(6), 750-770: the difference of the
    log medians, with standard errors from order statistics. Needs no resampling, so the same samples give the same interval.
    """
    if min(len(a), len(b)) < 2:
        return None
    centre = math.log(statistics.median(a)) - math.log(statistics.median(b))
    half = statistics.NormalDist().inv_cdf(0.5 + confidence / 2) * math.hypot(_log_median_error(a), _log_median_error(b))
    return math.exp(centre - half), math.exp(centre + half)


def _log_median_error(samples: Sequence[float]) -> float:
    """The standard error of the log of a sample's median: the width between two symmetric order statistics, over the width a normal would give them."""
    ordered, n = sorted(samples), len(samples)
    rank = max(1, round(n / 2 - math.sqrt(n)))
    outside = sum(math.comb(n, k) for k in range(rank)) / 2**n
    return math.log(ordered[n - rank] / ordered[rank - 1]) / (2 * statistics.NormalDist().inv_cdf(1 - outside))


def compare_estimates(a: float, a_stderr: float, b: float, b_stderr: float) -> Difference:
    """Is the estimate `a` higher or lower than `b`? A two-sided z test at ALPHA on the difference, as for independent estimates.

    On the same text the two errors go together, so that this is wider than a paired test: it may miss a difference, and hardly invents one. Raises
    ValueError where no error is known (both 0).
    """
    error = math.hypot(a_stderr, b_stderr)
    if not error > 0:
        raise ValueError("a comparison of estimates needs a standard error on at least one side")
    difference = a - b
    p = math.erfc(abs(difference) / error / math.sqrt(2))
    half = statistics.NormalDist().inv_cdf(0.5 + CONFIDENCE / 2) * error
    word: Literal["higher", "lower", "not separated"] = ("higher" if difference > 0 else "lower") if p < ALPHA else NOT_SEPARATED
    return Difference(word, difference, difference - half, difference + half, p)
