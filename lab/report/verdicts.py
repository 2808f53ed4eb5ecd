"""Verdicts: what the registered hypotheses and targets come to.

A hypothesis with a gap in it is OPEN, whatever its other values say, and so is a target without a measured cell; a reported claim decides neither.
Samples are repeats inside one process: restart-to-restart noise is not in them, so even a decided verdict is about these runs.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from lab.matrix import Entry, Matrix, Row
from lab.record import Measurement
from lab.registered import Hypothesis, OrderCriterion, Overrides, Target, ValueCriterion, matches, pick
from lab.report.facts import differences
from lab.report.language import Language
from lab.report.numbers import as_registered, number, with_unit
from lab.report.tables import named, place

COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
Word = Literal["HOLDS", "FAILS", "OPEN"]
Outcome = Literal["REACHED", "MISSED", "OPEN"]


@dataclass(frozen=True)
class Verdict:
    """The outcome of one hypothesis: the entries it rests on, in the registered order, and what limits it."""

    hypothesis: Hypothesis
    word: Word
    why: str
    entries: tuple[Entry, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class Aim:
    """One target against one cell it applies to."""

    entry: Entry
    outcome: Outcome


@dataclass(frozen=True)
class TargetResult:
    """One target and every cell it applies to. MISSED where any measured cell misses; OPEN until every one is measured."""

    target: Target
    aims: tuple[Aim, ...]

    @property
    def word(self) -> Outcome:
        """The target as a whole."""
        found = Counter(aim.outcome for aim in self.aims)
        return "MISSED" if found["MISSED"] else "OPEN" if found["OPEN"] else "REACHED"


def judge(matrix: Matrix, hypothesis: Hypothesis, lang: Language) -> Verdict:
    """Evaluate a criterion on the current attempts."""
    rule = hypothesis.criterion
    if isinstance(rule, OrderCriterion):
        chosen: list[Overrides] = [{"path": path, "layers": rule.layers} for path in rule.order]
    else:
        chosen = [rule.where, *([rule.against] if rule.against else [])]
    entries = tuple(matrix.entry(_row(matrix, where), rule.metric) for where in chosen)
    missing = [lang("verdict.is_gap", what=named(matrix, e.row, lang), status=e.gap.status) for e in entries if e.gap]
    if missing:
        return Verdict(hypothesis, "OPEN", lang("verdict.not_decided", gaps=lang.clauses(missing)), entries, ())
    broken, remarks = _order(entries, lang) if isinstance(rule, OrderCriterion) else _value(rule, entries, lang)
    records = [entry.row.current for entry in entries if entry.row.current]
    remarks += [lang("verdict.records_differ", what=fact.key, text=fact.text) for fact in differences(records)]
    return Verdict(hypothesis, "FAILS" if broken else "HOLDS", lang.clauses(broken), entries, tuple(remarks))


def _row(matrix: Matrix, where: Overrides) -> Row:
    found = pick([row.point for row in matrix.rows], where)
    assert found is not None, "the experiment file's check names exactly one cell per criterion"
    return matrix.rows[found]


def _order(entries: tuple[Entry, ...], lang: Language) -> tuple[list[str], list[str]]:
    broken, remarks = [], []
    for a, b in pairwise(entries):
        x, y, low, high = a.measurement, b.measurement, a.row.cell.path.name, b.row.cell.path.name
        if x is None or y is None:
            continue
        if x.value >= y.value:
            broken.append(lang("verdict.not_below", low=low, low_value=number(a.metric, x.value), high=high, high_value=number(b.metric, y.value)))
        if _within_error(x, y):
            remarks.append(lang("verdict.within_errors", a=low, b=high))
    return broken, remarks


def _value(rule: ValueCriterion, entries: tuple[Entry, ...], lang: Language) -> tuple[list[str], list[str]]:
    found, *bases = (entry.measurement for entry in entries)
    if found is None or None in bases:
        return [], []
    limit = rule.value * math.prod(base.value for base in bases if base is not None)
    broken = (
        []
        if COMPARE[rule.comparison](found.value, limit)
        else [lang("verdict.not_met", value=with_unit(rule.metric, found.value), comparison=rule.comparison, limit=with_unit(rule.metric, limit))]
    )
    return broken, [lang("verdict.straddles", limit=with_unit(rule.metric, limit))] if straddles(found, limit) else []


def straddles(found: Measurement, limit: float) -> bool:
    """True when the measurement's own spread lies on both sides of the limit: repeats, or twice the standard error."""
    if found.min is not None and found.max is not None:
        return found.min < limit < found.max
    return found.stderr is not None and abs(found.value - limit) < 2.0 * found.stderr


def _within_error(a: Measurement, b: Measurement) -> bool:
    """True when the difference is below twice its standard error, taken as for independent samples (wider than the paired one)."""
    if a.stderr is None or b.stderr is None:
        return False
    return abs(a.value - b.value) < 2.0 * math.hypot(a.stderr, b.stderr)


def judge_target(matrix: Matrix, target: Target) -> TargetResult:
    """The target against each cell it applies to: REACHED, MISSED, or OPEN for a gap."""
    aims = []
    for row in (r for r in matrix.rows if matches(r.point, target.where)):
        entry = matrix.entry(row, target.metric)
        if entry.measurement is None:
            aims.append(Aim(entry, "OPEN"))
        else:
            aims.append(Aim(entry, "REACHED" if COMPARE[target.comparison](entry.measurement.value, target.value) else "MISSED"))
    return TargetResult(target, tuple(aims))


def wanted(target: Target) -> str:
    """The target's value as a condition, such as `>= 90 tok/s`."""
    return f"{target.comparison} {as_registered(target.metric, target.value)}"


def criterion(rule: OrderCriterion | ValueCriterion, lang: Language) -> str:
    """A criterion as one condition."""
    if isinstance(rule, OrderCriterion):
        return lang("verdict.order_rule", metric=lang.metric(rule.metric), layers=rule.layers, order=" < ".join(rule.order))
    what = lang("verdict.of", metric=lang.metric(rule.metric), place=place(rule.where, lang))
    if rule.against is None:
        return f"{what} {rule.comparison} {as_registered(rule.metric, rule.value)}"
    return f"{what} {rule.comparison} {rule.value:g} × ({place(rule.against, lang)})"
