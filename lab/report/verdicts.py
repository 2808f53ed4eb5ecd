"""Verdicts: what the registered hypotheses and targets come to, and which path may be called faster.

A hypothesis with a gap in it is OPEN, whatever its other values say. The words faster and slower are used only where the sample intervals
do not overlap and both records come from one machine and one code. The samples are repeats inside one process: restart-to-restart
noise is not in them, so even then a verdict is about these runs.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from lab.registered import Hypothesis, OrderCriterion, matches
from lab.matrix import Entry, Matrix, Row
from lab.metrics import METRICS
from lab.record import Measurement
from lab.report.facts import differences
from lab.report.numbers import number, unit

SPREAD_LIMIT = 0.10
"""(max - min) / median above which repeats are called noisy."""

_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}


@dataclass(frozen=True)
class Verdict:
    """The outcome of one hypothesis: the steps it rests on, in the registered order, and what limits it."""

    hypothesis: Hypothesis
    word: Literal["HOLDS", "FAILS", "OPEN"]
    why: str
    steps: tuple[Row, ...]
    remarks: tuple[str, ...]


@dataclass(frozen=True)
class Comparison:
    """One speed metric of one cell against the reference path at the same depth."""

    row: Row
    metric: str
    word: str


def judge(matrix: Matrix, hypothesis: Hypothesis) -> Verdict:
    """Evaluate an order criterion on the current attempts."""
    rule = hypothesis.criterion
    assert isinstance(rule, OrderCriterion)
    steps = tuple(next(r for r in matrix.rows if matches(r.point, {"path": path, "layers": rule.layers})) for path in rule.order)
    entries = [matrix.entry(row, rule.metric) for row in steps]
    missing = [f"{e.row.point['path']} is {e.gap.status}" for e in entries if e.gap]
    if missing:
        return Verdict(hypothesis, "OPEN", f"not decided: {', '.join(missing)}", steps, ())
    broken, remarks = [], []
    for a, b in pairwise(entries):
        x, y, (low, high) = a.measurement, b.measurement, (a.row.point["path"], b.row.point["path"])
        if x is not None and y is not None and x.value >= y.value:
            broken.append(f"{low} {number(rule.metric, x.value)} is not below {high} {number(rule.metric, y.value)}")
        if x is not None and y is not None and _within_error(x, y):
            remarks.append(f"{low} and {high} lie within two standard errors of each other")
    remarks += [f"the records differ in {fact.key}: {fact.text}" for fact in differences(r.current for r in steps if r.current)]
    return Verdict(hypothesis, "FAILS" if broken else "HOLDS", "; ".join(broken), steps, tuple(remarks))


def _within_error(a: Measurement, b: Measurement) -> bool:
    """True when the difference is below twice its standard error, taken as for independent samples (wider than the paired one)."""
    if a.stderr is None or b.stderr is None:
        return False
    return abs(a.value - b.value) < 2.0 * math.hypot(a.stderr, b.stderr)


def target_rows(matrix: Matrix) -> list[list[str]]:
    """Each target against each cell it applies to: REACHED, MISSED, or the gap's status."""
    lines = []
    for target in matrix.experiment.targets:
        wanted = f"{target.comparison} {number(target.metric, target.value)} {unit(target.metric)}".rstrip()
        for row in (r for r in matrix.rows if matches(r.point, target.where)):
            entry = matrix.entry(row, target.metric)
            if entry.measurement is None:
                word, value = "OPEN", f"*{entry.gap.status}*" if entry.gap else ""
            else:
                reached = _COMPARE[target.comparison](entry.measurement.value, target.value)
                word, value = ("REACHED" if reached else "MISSED"), number(target.metric, entry.measurement.value)
            lines.append([METRICS[target.metric].title, row.cell.id, wanted, value, word, target.source])
    return lines


def speed_metrics(matrix: Matrix) -> list[str]:
    """The experiment's metrics that are speeds."""
    return [name for name in matrix.experiment.metrics if METRICS[name].unit == "tok/s"]


def compare_speeds(matrix: Matrix) -> list[Comparison]:
    """Every measured speed against the reference path at the same depth."""
    bases = {(r.cell.model.name, r.cell.layers, r.cell.device, r.cell.bench): r for r in matrix.rows if r.cell.path.reference}
    found = []
    for row in matrix.rows:
        base = bases.get((row.cell.model.name, row.cell.layers, row.cell.device, row.cell.bench))
        if base is None or base is row:
            continue
        found += [Comparison(row, name, _compare(matrix.entry(row, name), matrix.entry(base, name))) for name in speed_metrics(matrix)]
    return found


def _compare(mine: Entry, base: Entry) -> str:
    a, b = mine.measurement, base.measurement
    if a is None or b is None:
        gap = mine.gap or base.gap
        return f"*{gap.status}*" if gap else ""
    unlike = [f.key for f in differences(r for r in (mine.row.current, base.row.current) if r) if f.key != "artifact"]
    if unlike:
        return f"not compared: {', '.join(unlike)} differ"
    if a.min is None or a.max is None or b.min is None or b.max is None:
        return "not compared: no repeats"
    if a.min > b.max:
        return "faster"
    return "slower" if a.max < b.min else "not separated"


def noisy(matrix: Matrix) -> list[str]:
    """One sentence per repeated measurement whose spread makes its median weak evidence."""
    lines = []
    for entry in matrix.entries.values():
        found = entry.measurement
        if found is None or found.min is None or found.max is None or not found.value:
            continue
        if (found.max - found.min) / abs(found.value) > SPREAD_LIMIT:
            low, high = number(entry.metric, found.min), number(entry.metric, found.max)
            lines.append(f"{entry.row.cell.id}: {entry.metric} lies between {low} and {high} {unit(entry.metric)}".rstrip())
    return lines
