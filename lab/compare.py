"""The verb `compare`: two attempts side by side, and a word only where the samples support one.

What was measured differently is not compared (`lab.likeness`), an attempt that was invalidated or ran an older protocol is refused whole, and a number
that the matrix would not show, alone or beside the other, gets no word. Repeats are judged by ranks, perplexity and divergence by their standard errors,
and a single value by nothing. Both attempts are one process each: what a restart changes is not in the samples.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from rich.markup import escape
from rich.table import Table

from lab.cell import Cell
from lab.console import console, number
from lab.doubts import QUANTITY_OF, Rate, observations
from lab.errors import LabError
from lab.history import find_attempt
from lab.likeness import beside, contrast, unlike
from lab.metrics import METRICS
from lab.plausibility import flags
from lab.project import Project
from lab.reconcile import reconcile
from lab.record import Measurement, Record, Status
from lab.soundness import refusals
from lab.standing import Kind, record_id, standings
from lab.stats import ALPHA, NOT_SEPARATED, Comparison, Difference
from lab.store import Store, Stored, marks_of

_NEITHER = "not judged"


@dataclass(frozen=True)
class Line:
    """One metric of both attempts: `word` says how A stands to B, `found` what it rests on, `refused` why the two are not compared."""

    metric: str
    unit: str
    a: float | None
    b: float | None
    word: str = ""
    found: Comparison | Difference | None = None
    refused: str = ""
    why: str = ""


def compare_command(project: Project, words: Sequence[str], out: TextIO) -> int:
    """The verb `compare`. Returns the exit code; raises LabError where nothing can be compared."""
    switches = [word for word in words if word.startswith("-")]
    named = [word for word in words if not word.startswith("-")]
    if len(named) != 2 or any(switch != "--json" for switch in switches):
        raise LabError("name two attempts; usage: python -m lab compare A B [--json], each CELL_ID, CELL_ID/ATTEMPT or a record file")
    reconcile(Store(project.runs))
    first, second = (_usable(project, word) for word in named)
    lines = compare_records(first.record, second.record)
    if switches:
        out.write(json.dumps(_document(first, second, lines), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    else:
        _print(first.record, second.record, lines, out)
    return 0


def _usable(project: Project, word: str) -> Stored:
    found = find_attempt(project, word)
    name = f"{word} ({_name(found.record)})" if word != _name(found.record) else word
    record = found.record
    if record.status is not Status.OK:
        raise LabError(f"{name}: {record.status}: {record.reason}; only an OK attempt has numbers to compare")
    copies = [a for a in Store(project.runs).read(record.cell_id)[0] if record_id(a.record) == record_id(record)] or [found]
    standing = standings([a.record for a in copies], marks_of(copies))[0][1]  # a mark on any copy is about the record
    if standing.kind is not Kind.CURRENT:
        raise LabError(f"{name}: {standing.text}; there is nothing to compare")
    return found


def compare_records(a: Record, b: Record) -> list[Line]:
    """Every metric that either OK record holds, compared or refused. Raises LabError where nothing of the two can be set against each other."""
    if record_id(a) == record_id(b):
        raise LabError(f"{_name(a)}: A and B are the same attempt")
    doubted = _doubted(a, b)
    lines = [_line(name, a, b, doubted) for name in METRICS if name in a.metrics or name in b.metrics]
    if all(line.refused for line in lines):
        raise LabError(f"not compared: {_why_nothing(lines)}")
    return lines


def _doubted(a: Record, b: Record) -> dict[str, str]:
    """By metric, what today's rules say against the numbers of the two, each alone and beside each other: the matrix would show none of them."""
    said: dict[str, list[str]] = defaultdict(list)
    rates = []
    for side, record in (("A", a), ("B", b)):
        refused = refusals(record)
        for name, (status, reason) in refused.items():
            said[name].append(f"{side} is {status}: {reason}")
        cell, sound = Cell.model_validate(record.cell), [name for name in record.metrics if name in QUANTITY_OF and name not in refused]
        rates += [Rate(f"{side}/{name}", cell, record, QUANTITY_OF[name], record.metrics[name]) for name in sound]
    for flag in flags(observations(rates)):
        for name in dict.fromkeys(name.partition("/")[2] for name in flag.names):
            said[name].append(f"{Status.IMPLAUSIBLE}: {flag.sentence()}")
    return {name: "; ".join(sentences) for name, sentences in said.items()}


def _why_nothing(lines: Sequence[Line]) -> str:
    """Why every metric is refused, each reason once with its metrics; for a reason that they share, without them."""
    reasons: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        reasons[line.refused].append(line.metric)
    if len(reasons) == 1:
        return next(iter(reasons))
    return "; ".join(f"{', '.join(metrics)}: {reason}" for reason, metrics in reasons.items()) or "neither holds a metric that the lab knows"


def _line(name: str, a: Record, b: Record, doubted: Mapping[str, str]) -> Line:
    """One metric, compared or refused."""
    x, y, unit = a.metrics.get(name), b.metrics.get(name), METRICS[name].unit
    if x is None or y is None:
        gap = (a if x is None else b).gaps.get(name)
        reason = f"{'A' if x is None else 'B'} has a gap: {gap.status}: {gap.reason}" if gap else f"{'A' if x is None else 'B'} did not measure it"
        return Line(name, unit, x.value if x else None, y.value if y else None, refused=reason)
    refused = "; ".join(map(str, unlike(a, b, name))) or doubted.get(name, "")
    return Line(name, x.unit, x.value, y.value, refused=refused) if refused else _judged(name, x, y)


def _judged(name: str, x: Measurement, y: Measurement) -> Line:
    better, found = METRICS[name].better, contrast(x, y)
    if found is None:
        return Line(name, x.unit, x.value, y.value, _NEITHER, why="one value each, without repeats or a standard error")
    if isinstance(found, Difference):
        word = found.word if found.word == NOT_SEPARATED else _quality(found.word == "higher", better)
        return Line(name, x.unit, x.value, y.value, word, found)
    rate = x.unit == "tok/s" or found.word == NOT_SEPARATED
    return Line(name, x.unit, x.value, y.value, found.word if rate else _quality(found.word == "faster", better), found, why=found.why)


def _quality(higher: bool, better: str) -> str:
    if better == "neither":
        return "higher" if higher else "lower"
    return "better" if higher == (better == "higher") else "worse"


def _name(record: Record) -> str:
    return f"{record.cell_id}/{record.attempt:03d}"


def _document(a: Stored, b: Stored, lines: list[Line]) -> dict[str, Any]:
    """The comparison as plain values; None where there is none."""
    sides = {key: {"attempt": _name(one.record), "record_id": record_id(one.record)} for key, one in (("a", a), ("b", b))}
    return {**sides, "alpha": ALPHA, "notes": [str(one) for one in beside(a.record, b.record)], "metrics": [asdict(line) for line in lines]}


def _print(a: Record, b: Record, lines: list[Line], out: TextIO) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for heading, justify in (("metric", "left"), ("A", "right"), ("B", "right"), ("A to B, 95 %", "right"), ("p", "right"), ("A is", "left")):
        table.add_column(heading, justify="right" if justify == "right" else "left", overflow="fold")
    for line in lines:
        values = ["gap" if value is None else number(value) for value in (line.a, line.b)]
        title = f"{line.metric}, {line.unit}" if line.unit != line.metric else line.metric
        word = line.word or escape(f"not compared: {line.refused}")
        table.add_row(title, *values, _interval(line.found), f"{line.found.p:.2g}" if line.found else "", word)
    screen = console(out)
    for side, record in (("A", a), ("B", b)):
        screen.print(f"{side}  {_name(record)}  started {record.started_at}", markup=False, soft_wrap=True)
    screen.print(table)
    for note in (*(f"{line.metric}: {line.why}" for line in lines if line.why), *beside(a, b)):
        screen.print(f"note: {note}", markup=False, soft_wrap=True)
    rule = f"A word needs p < {ALPHA:g} and an interval without 1 (repeats: rank test) or p < {ALPHA:g} (standard errors: z test, as for independent texts)."
    screen.print(rule, markup=False, soft_wrap=True)


def _interval(found: Comparison | Difference | None) -> str:
    """The ratio, or the difference, with its interval."""
    if found is None:
        return ""
    if isinstance(found, Difference):
        return f"{found.difference:+.3g} ({found.low:+.3g} to {found.high:+.3g})"
    return f"x{found.ratio:.3f}" + (f" ({found.low:.3f} to {found.high:.3f})" if found.low is not None and found.high is not None else "")
