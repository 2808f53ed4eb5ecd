"""How a number is printed: its unit, its digits, and its spread.

One place, so that a table and a sentence never round the same value differently. Bytes print as MB (10^6 B) and fractions as percent.
Digits are chosen for reading; the record holds the full value. Rounding proves nothing about precision: the spread stands beside it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lab.matrix import Entry
from lab.metrics import METRICS
from lab.record import Measurement
from lab.report.fillers import gap_word

if TYPE_CHECKING:
    from lab.report.language import Language

_SCALE = {"B": (1e-6, "MB"), "B/s": (1e-9, "GB/s"), "fraction": (100.0, "%")}
_PLACES = {"fraction": 2, "cosine": 5}
_DIGITS = {"ppl": 4, "bit/B": 4}
_COUNTS = frozenset({"tokens"})
"""Units of things that are counted: a whole number of them prints whole."""


def unit(metric: str, lang: Language | None = None) -> str:
    """The unit a metric is printed in, in words of `lang` where it is one; empty where the value has none worth saying."""
    stored = METRICS[metric].unit
    printed = _SCALE.get(stored, (1.0, stored))[1]
    return "" if printed in {"ppl", "cosine"} else lang.unit(printed) if lang else printed


def significant(value: float, digits: int = 3) -> str:
    """`value` to at least so many significant digits, with an exponent only where plain digits would not read."""
    if value == 0:
        return "0"
    if not 1e-4 <= abs(value) < 1e7:
        return f"{value:.{digits - 1}e}"
    places = digits - 1 - math.floor(math.log10(abs(value)))
    return f"{value:.{max(places, 0)}f}"


def scaled(metric: str, value: float) -> float:
    """The value in the unit it is printed in."""
    return value * _SCALE.get(METRICS[metric].unit, (1.0, ""))[0]


def number(metric: str, value: float) -> str:
    """A value of `metric` in its printed unit, without the unit."""
    stored = METRICS[metric].unit
    if stored in _COUNTS and float(value).is_integer():
        return f"{value:.0f}"
    if stored in _PLACES:
        return f"{scaled(metric, value):.{_PLACES[stored]}f}"
    return significant(scaled(metric, value), _DIGITS.get(stored, 3))


def with_unit(metric: str, value: float, lang: Language | None = None) -> str:
    """A value of `metric` with the unit it is printed in."""
    return f"{number(metric, value)} {unit(metric, lang)}".rstrip()


def as_registered(metric: str, value: float, lang: Language | None = None) -> str:
    """A value from an experiment file in the unit its metric is printed in, with the digits it was written with."""
    return f"{scaled(metric, value):.10g} {unit(metric, lang)}".rstrip()


def short(entry: Entry) -> str:
    """For narrow tables: the value, or the status word of the gap."""
    return number(entry.metric, entry.measurement.value) if entry.measurement else status_word(entry)


def with_error(entry: Entry) -> str:
    """The value with its standard error where the record has one, or the status word of the gap."""
    found = entry.measurement
    if found is None or found.stderr is None:
        return short(entry)
    return f"{number(entry.metric, found.value)} ± {significant(scaled(entry.metric, found.stderr), 2)}"


def full(entry: Entry, of_roofline: str) -> str:
    """Median [min, max] × repeats, and roofline where known (with the words `of_roofline`), else the value with its error; the status word of a gap."""
    found = entry.measurement
    if found is None or found.min is None or found.max is None:
        return with_error(entry)
    low, high = number(entry.metric, found.min), number(entry.metric, found.max)
    share = f", {roofline(found)} {of_roofline}" if found.roofline_pct is not None else ""
    return f"{number(entry.metric, found.value)} [{low}, {high}] × {len(found.samples)}{share}"


def roofline(found: Measurement | None) -> str:
    """The share of the physical bound in percent, or a dash where none was computed."""
    return f"{significant(found.roofline_pct, 2)} %" if found and found.roofline_pct is not None else "–"


def status_word(entry: Entry) -> str:
    """A gap as it stands in a table: its word, set in italics, never a digit."""
    return f"*{gap_word(entry.gap)}*" if entry.gap else ""
