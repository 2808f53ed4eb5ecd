"""Findings: what a reader must know beside the numbers - attempts set aside, later failures, forced gates, unreadable files, a changed experiment file.

Nothing measured is thrown away, so nothing that displaced or voided a number may go unmentioned. Reasons stand as they were recorded. An empty list
means that nothing of its kind happened, not that the numbers are right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lab.dead_ends import is_within
from lab.matrix import Matrix, Row
from lab.record import Record, Status
from lab.registered import DeadEnd
from lab.report.language import Language
from lab.report.markup import code, escape
from lab.report.measured import noisy
from lab.report.tables import named
from lab.standing import Kind


@dataclass(frozen=True)
class Finding:
    """One kind of finding, as a heading and its lines in Markdown."""

    title: str
    lines: list[str]


@dataclass(frozen=True)
class Closed:
    """A dead end, the expected cells it closes, and the attempts that were forced past it."""

    dead_end: DeadEnd
    cells: int
    forced: list[str]


def findings(matrix: Matrix, lang: Language) -> list[Finding]:
    """Every kind of finding that has a line, gravest first."""
    kinds = (
        ("changed", _changes(matrix, lang)),
        ("unreadable", [f"{code(item.path)}{lang('colon')}{escape(item.why)}" for item in matrix.unreadable]),
        ("flags", [escape(flag.sentence(lang.code)) for flag in matrix.flags]),
        ("set_aside", _set_aside(matrix, lang)),
        ("later_failures", _later_failures(matrix, lang)),
        ("forced", [f"{cell}{lang('colon')}{gate}" for row in matrix.rows for cell, gate in _forced(matrix, row, lang)]),
        ("noisy", noisy(matrix, lang)),
        ("notes", [f"{_cell(matrix, row, lang)}{lang('colon')}{escape(note)}" for row in matrix.rows if row.current for note in row.current.notes]),
    )
    return [Finding(lang(f"findings.{name}"), lines) for name, lines in kinds if lines]


def _cell(matrix: Matrix, row: Row, lang: Language) -> str:
    return escape(named(matrix, row, lang))


def _changes(matrix: Matrix, lang: Language) -> list[str]:
    return [
        lang("findings.change", sha256=change.sha256[:12], now=matrix.experiment.sha256[:12], records=change.records, first=change.first, last=change.last)
        for change in matrix.registered_changes
    ]


def _set_aside(matrix: Matrix, lang: Language) -> list[str]:
    """Invalidated, stale and foreign attempts with their reasons, then what newer attempts took the place of, in one line."""
    lines, superseded = [], []
    for row in matrix.rows:
        groups: dict[str, list[int]] = defaultdict(list)
        for record, standing in row.standings:
            if standing.kind not in {Kind.CURRENT, Kind.SUPERSEDED}:
                groups[standing.text].append(record.attempt)
        cell = _cell(matrix, row, lang)
        lines += [lang("findings.aside", cell=cell, attempts=spans(numbers), how=escape(text)) for text, numbers in groups.items()]
        if row.superseded:
            superseded.append(lang("findings.attempts", cell=cell, attempts=spans(record.attempt for record in row.superseded)))
    return [*lines, *([lang("findings.superseded", cells=lang.clauses(superseded))] if superseded else [])]


def _later_failures(matrix: Matrix, lang: Language) -> list[str]:
    """Cells that show an OK attempt although a newer one failed: the number is real, the path may no longer be."""
    lines = []
    for row in (row for row in matrix.rows if row.status is Status.OK):
        groups: dict[tuple[Status, str], list[int]] = defaultdict(list)
        for record in row.later:
            if record.status is not Status.OK:
                groups[record.status, record.reason].append(record.attempt)
        for (status, reason), numbers in groups.items():
            lines.append(lang("findings.later", cell=_cell(matrix, row, lang), attempts=spans(numbers), status=status, reason=escape(reason)))
    return lines


def _forced(matrix: Matrix, row: Row, lang: Language) -> Iterator[tuple[str, str]]:
    for gate in row.current.gates if row.current else ():
        if gate.outcome == "forced":
            yield _cell(matrix, row, lang), f"{gate.gate}{lang('colon')}{escape(gate.detail)}"


def closed_ways(matrix: Matrix, lang: Language) -> list[Closed]:
    """Every dead end the experiment registers, with what was measured there all the same."""
    found = []
    for dead_end in matrix.experiment.dead_ends:
        rows = [row for row in matrix.rows if dead_end.where and is_within(row.cell, dead_end.where)]
        forced = [
            lang("findings.attempts", cell=_cell(matrix, row, lang), attempts=spans(record.attempt for record in past))
            for row in rows
            if (past := [record for record, _ in row.standings if _went_past(record)])
        ]
        found.append(Closed(dead_end, len(rows), forced))
    return found


def _went_past(record: Record) -> bool:
    return any(gate.gate == "dead_end" and gate.outcome == "forced" for gate in record.gates)


def spans(numbers: Iterable[int]) -> str:
    """Whole numbers in short: `1-3, 7`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
