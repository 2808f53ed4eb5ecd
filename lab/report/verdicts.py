"""Verdicts: what the registered hypotheses and targets come to.

A hypothesis with a gap in it is OPEN, whatever its other values say; so is one whose cells were measured under circumstances that do not compare, an
order whose steps the samples do not separate, and a target without a measured cell. A reported claim decides nothing. Samples are repeats inside one
process: restart-to-restart noise is not in them, so even a decided verdict is about these runs.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from lab.likeness import beside, contrast, unlike
from lab.matrix import Entry, Matrix, Row
from lab.record import Measurement, Record, Status
from lab.registered import Hypothesis, OrderCriterion, Overrides, Target, ValueCriterion, matches, pick
from lab.report.fillers import gap_word
from lab.report.language import Language
from lab.report.numbers import as_registered, number, roofline, with_unit
from lab.report.tables import named, place, told_apart
from lab.standing import age
from lab.stats import NOT_SEPARATED

COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
DECISIVE: dict[str, tuple[Literal["REACHED", "MISSED"], Literal["REACHED", "MISSED"]]] = {"all": ("MISSED", "REACHED"), "any": ("REACHED", "MISSED")}
"""By quantifier: what one cell alone decides, and what it takes every cell for."""
Word = Literal["HOLDS", "FAILS", "OPEN"]
Outcome = Literal["REACHED", "MISSED", "OPEN", "CLOSED"]
"""CLOSED: a dead end closes the cell and nobody was forced past it, so the target does not ask for it."""


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
    """One target and every cell it applies to.

    Of a target for all, one cell that misses decides; of a target for any, one that reaches. Short of that it is OPEN until every cell is measured.
    """

    target: Target
    aims: tuple[Aim, ...]

    @property
    def word(self) -> Outcome:
        """The target as a whole; OPEN where every cell is closed."""
        found = Counter(aim.outcome for aim in self.aims)
        decisive, otherwise = DECISIVE[self.target.quantifier]
        return decisive if found[decisive] else otherwise if found[otherwise] and not found["OPEN"] else "OPEN"


def judge(matrix: Matrix, hypothesis: Hypothesis, lang: Language) -> Verdict:
    """Evaluate a criterion on the current attempts."""
    rule = hypothesis.criterion
    if isinstance(rule, OrderCriterion):
        chosen: list[tuple[Overrides, str]] = [({"path": path, "layers": rule.layers}, rule.metric) for path in rule.order]
    else:
        chosen = [(rule.where, rule.metric), *([rule.base] if rule.base else [])]
    entries = tuple(matrix.entry(_row(matrix, where), metric) for where, metric in chosen)
    names = told_apart(matrix, entries, lang)
    missing = [lang("verdict.is_gap", what=name, status=gap_word(e.gap)) for name, e in zip(names, entries, strict=True) if e.gap]
    if missing:
        return Verdict(hypothesis, "OPEN", lang("verdict.not_decided", gaps=lang.clauses(missing)), entries, ())
    records = [entry.row.current for entry in entries if entry.row.current]
    if apart := _apart(matrix, entries, records, lang):
        return Verdict(hypothesis, "OPEN", lang("verdict.not_decided", gaps=lang.clauses(apart)), entries, ())
    broken, unsure, remarks = _order(entries, lang) if isinstance(rule, OrderCriterion) else _value(rule, entries, lang)
    others = dict.fromkeys(lang("verdict.records_differ", what=lang.difference(one)) for record in records[1:] for one in beside(records[0], record))
    if broken or not unsure:
        return Verdict(hypothesis, "FAILS" if broken else "HOLDS", lang.clauses(broken), entries, (*unsure, *remarks, *others))
    return Verdict(hypothesis, "OPEN", lang("verdict.not_decided", gaps=lang.clauses(unsure)), entries, (*remarks, *others))


def _apart(matrix: Matrix, entries: tuple[Entry, ...], records: list[Record], lang: Language) -> list[str]:
    """Which cells cannot be set against the first, and for what; being alike is mutual, so the first stands for all."""
    found = []
    for entry, record in zip(entries[1:], records[1:], strict=True):
        if entry.metric != entries[0].metric:  # two metrics of one cell: one record, and each under its own protocol
            continue
        if reasons := unlike(records[0], record, entry.metric):
            a, b = (named(matrix, one.row, lang) for one in (entries[0], entry))
            found.append(lang("verdict.not_comparable", a=a, b=b, what=lang.series(lang.difference(reason) for reason in reasons)))
    return found


def _row(matrix: Matrix, where: Overrides) -> Row:
    found = pick([row.point for row in matrix.rows], where)
    assert found is not None, "the experiment file's check names exactly one cell per criterion"
    return matrix.rows[found]


class _Judged(NamedTuple):
    """What breaks a criterion, what leaves it undecided, and what else is to be said."""

    broken: Sequence[str]
    unsure: Sequence[str] = ()
    remarks: Sequence[str] = ()


def _order(entries: tuple[Entry, ...], lang: Language) -> _Judged:
    """Each step must rise, and by more than the samples or errors leave open."""
    broken, unsure = [], []
    for a, b in pairwise(entries):
        x, y, low, high = a.measurement, b.measurement, a.row.cell.path.name, b.row.cell.path.name
        if x is None or y is None:
            continue
        found = contrast(x, y)
        if found is not None and found.word == NOT_SEPARATED:
            unsure.append(lang("verdict.not_separated", a=low, b=high))
        elif x.value >= y.value:
            broken.append(lang("verdict.not_below", low=low, low_value=number(a.metric, x.value), high=high, high_value=number(b.metric, y.value)))
    return _Judged(broken, unsure)


def _value(rule: ValueCriterion, entries: tuple[Entry, ...], lang: Language) -> _Judged:
    """The limit was fixed for the value itself, so its spread is only told."""
    found, *bases = (entry.measurement for entry in entries)
    if found is None or None in bases:
        return _Judged(())
    limit = rule.value * math.prod(base.value for base in bases if base is not None)
    broken = (
        []
        if COMPARE[rule.comparison](found.value, limit)
        else [lang("verdict.not_met", value=with_unit(rule.metric, found.value, lang), comparison=rule.comparison, limit=with_unit(rule.metric, limit, lang))]
    )
    return _Judged(broken, remarks=[lang("verdict.straddles", limit=with_unit(rule.metric, limit, lang))] if straddles(found, limit) else ())


def straddles(found: Measurement, limit: float) -> bool:
    """True when the measurement's own spread lies on both sides of the limit: repeats, or twice the standard error."""
    if found.min is not None and found.max is not None:
        return found.min < limit < found.max
    return found.stderr is not None and abs(found.value - limit) < 2.0 * found.stderr


def judge_target(matrix: Matrix, target: Target) -> TargetResult:
    """The target against each cell it applies to: REACHED, MISSED, OPEN for a gap, or CLOSED."""
    rows = (row for row in matrix.rows if matches(row.point, target.where))
    return TargetResult(target, tuple(_aim(matrix.entry(row, target.metric), target) for row in rows))


def aimed(found: Measurement, target: Target) -> float | None:
    """What of a measurement the target is about: its value, or its share of the bound in %, None where no bound was recorded."""
    return found.value if target.of == "value" else found.roofline_pct


def shown(found: Measurement, target: Target, lang: Language | None = None) -> str:
    """That part as it is printed, with its unit in words of `lang`; without `lang` a value has none."""
    if target.of == "value":
        return with_unit(target.metric, found.value, lang) if lang else number(target.metric, found.value)
    return roofline(found)


def across(found: Measurement, target: Target) -> bool:
    """Whether the measurement's own spread lies on both sides of the target."""
    if target.of == "value":
        return straddles(found, target.value)
    return bool(found.roofline_pct) and straddles(found, target.value * found.value / float(found.roofline_pct or 1))


def limit_text(target: Target, lang: Language) -> str:
    """The target's value with its unit."""
    return as_registered(target.metric, target.value, lang) if target.of == "value" else f"{target.value:.10g} %"


def _aim(entry: Entry, target: Target) -> Aim:
    row = entry.row
    if entry.measurement is not None:
        part = aimed(entry.measurement, target)
        return Aim(entry, "OPEN" if part is None else "REACHED" if COMPARE[target.comparison](part, target.value) else "MISSED")
    unforced = row.current is None or row.current.status is Status.DEAD_END
    return Aim(entry, "CLOSED" if row.closed and unforced else "OPEN")


def wanted(target: Target, lang: Language) -> str:
    """The target's value as a condition, such as `>= 90 tok/s`; said where one cell is enough."""
    condition = f"{target.comparison} {limit_text(target, lang)}" + (f" {lang('target.of_roofline')}" if target.of == "roofline" else "")
    return lang("target.in_any", wanted=condition) if target.quantifier == "any" else condition


def fixed(verdict: Verdict, lang: Language) -> str:
    """When the criterion was fixed: as the experiment's file says, set against the first attempt at one of its cells."""
    since = verdict.hypothesis.since
    if since is None:
        return lang("fixed.first")
    # Oldest first; an attempt whose time cannot be read is sorted before all others and tells nothing.
    starts = sorted({age(record)[0].date() for entry in verdict.entries for record, _ in entry.row.standings})
    first = next((day for day in starts if day.year > 1), None)
    if first is None:
        return lang("fixed.unmeasured", since=since)
    when = "before" if since < first else "after" if since > first else "same_day"
    return lang(f"fixed.{when}", since=since, first=first)


def criterion(rule: OrderCriterion | ValueCriterion, lang: Language) -> str:
    """A criterion as one condition."""
    if isinstance(rule, OrderCriterion):
        return lang("verdict.order_rule", metric=lang.metric(rule.metric), layers=rule.layers, order=" < ".join(rule.order))
    what = lang("verdict.of", metric=lang.metric(rule.metric), place=place(rule.where, lang))
    if rule.base is None:
        return f"{what} {rule.comparison} {as_registered(rule.metric, rule.value, lang)}"
    base = lang.metric(rule.against_metric) if rule.against_metric is not None else place(rule.base[0], lang)
    return f"{what} {rule.comparison} {rule.value:g} × ({base})"
