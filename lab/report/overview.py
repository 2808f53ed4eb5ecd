"""Problem and verdict, and the targets reached: what the stage asked, and what the measured cells answer.

One line per target and per hypothesis, each with the value and the record it rests on, or the gap. Reported figures are set against the same target apart
from the verdict, since whoever reported them may have measured something else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.matrix import Entry, Matrix
from lab.registered import Target
from lab.report.claims import Claims, Reported
from lab.report.fillers import gap_word
from lab.report.language import Language
from lab.report.markup import Table, escape
from lab.report.numbers import status_word, with_unit
from lab.report.results import short_title
from lab.report.tables import by_depth, label, named, place
from lab.report.verdicts import COMPARE, Aim, TargetResult, Verdict, across, aimed, criterion, limit_text, shown, wanted


@dataclass(frozen=True)
class TargetSection:
    """One target with its heading, what it applies to, its cells (no rows where all are gaps, then said in words), remarks, and the reported figures
    for its cells and for other configurations."""

    number: int
    heading: str
    applies: str
    cells: Table
    all_gaps: str
    remarks: list[str]
    inside: list[str]
    outside: list[str]


def questions(matrix: Matrix, judged: Sequence[Verdict], targets: Sequence[TargetResult], references: Mapping[str, str], lang: Language) -> Table:
    """One row per target and per hypothesis: what was asked, what decides it, what was measured, the verdict."""
    rows = []
    for result in targets:
        source = lang.text(result.target.source)
        asked = lang("verdict.target", metric=lang.metric(result.target.metric), place=place(result.target.where, lang), source=source)
        rows.append([escape(asked), escape(wanted(result.target, lang)), _answer(result, references, lang), lang(f"word.{result.word}")])
    for verdict in judged:
        values = [_value(entry, references, lang) for entry in verdict.entries]
        rule = verdict.hypothesis.criterion
        rows.append([f"`{verdict.hypothesis.id}`", escape(criterion(rule, lang)), "; ".join(dict.fromkeys(values)), lang(f"word.{verdict.word}")])
    return Table("", [lang(f"column.{name}") for name in ("question", "criterion", "measured", "verdict")], rows, words=4)


def _answer(result: TargetResult, references: Mapping[str, str], lang: Language) -> str:
    """The value of a target's only cell, or how many of several are measured and the best of them; the gaps' statuses where none is."""
    entries = [aim.entry for aim in result.aims]
    target = result.target
    found = [(part, entry.measurement, entry) for entry in entries if entry.measurement and (part := aimed(entry.measurement, target)) is not None]
    if len(entries) == 1 or not found:
        return "; ".join(dict.fromkeys(_value(entry, references, lang, target) for entry in entries))
    best = max if target.comparison in {">=", ">"} else min
    _, measurement, entry = best(found, key=lambda one: one[0])
    return lang("verdict.best", measured=len(found), cells=len(entries), value=shown(measurement, target, lang), record=references[entry.row.key])


def _value(entry: Entry, references: Mapping[str, str], lang: Language, target: Target | None = None) -> str:
    if entry.measurement is not None:
        value = with_unit(entry.metric, entry.measurement.value, lang) if target is None else shown(entry.measurement, target, lang)
        return f"{value} ({references[entry.row.key]})"
    return lang("verdict.gap", status=gap_word(entry.gap) if entry.gap else "")


def target_sections(matrix: Matrix, targets: Sequence[TargetResult], claims: Claims, lang: Language) -> list[TargetSection]:
    """Every target with the cells it applies to."""
    return [_section(matrix, number, result, claims, lang) for number, result in enumerate(targets, start=1)]


def _section(matrix: Matrix, number: int, result: TargetResult, claims: Claims, lang: Language) -> TargetSection:
    target = result.target
    heading = lang("target.heading", metric=short_title(target.metric, lang), wanted=wanted(target, lang), word=lang(f"word.{result.word}"))
    closed = sum(aim.outcome == "CLOSED" for aim in result.aims)
    applies = lang("target.applies", source=escape(lang.text(target.source)), cells=len(result.aims), place=escape(place(target.where, lang)))
    applies += lang("target.closed", cells=closed) if closed else ""
    remarks = [
        f"{escape(named(matrix, aim.entry.row, lang))}{lang('colon')}{lang('verdict.straddles', limit=limit_text(target, lang))}"
        for aim in result.aims
        if aim.entry.measurement is not None and across(aim.entry.measurement, target)
    ]
    statuses = Counter(gap_word(aim.entry.gap) for aim in result.aims if aim.entry.gap)
    gaps = lang("target.all_gaps", cells=len(result.aims), statuses=lang.series(f"*{status}* ({count})" for status, count in statuses.items()))
    cells = {aim.entry.row.key for aim in result.aims}
    reported = claims.beside(target.metric) if target.of == "value" else []
    sides = [[i for i in reported if (i.row is not None and i.row.key in cells) is own] for own in (True, False)]
    inside, outside = ([_reported(result, item, lang) for item in side] for side in sides)
    return TargetSection(number, heading, applies, _cells(matrix, result, lang), gaps, remarks, inside, outside)


def _cells(matrix: Matrix, result: TargetResult, lang: Language) -> Table:
    """Paths down, depths across: the value and its outcome, or the status of the gap. No rows where nothing is measured."""
    if not any(aim.entry.measurement for aim in result.aims):
        return Table("", [], [])
    depths = [layers for layers, _ in by_depth(matrix) if any(aim.entry.row.cell.layers == layers for aim in result.aims)]
    lines: dict[str, dict[int, str]] = {}
    for aim in result.aims:
        lines.setdefault(label(matrix, aim.entry.row), {})[aim.entry.row.cell.layers] = _outcome(aim, result.target, lang)
    rows = [[escape(name), *(found.get(depth, "–") for depth in depths)] for name, found in lines.items()]
    return Table("", [lang("column.path"), *(lang("depth", layers=depth) for depth in depths)], rows, words=1)


def _outcome(aim: Aim, target: Target, lang: Language) -> str:
    found = aim.entry.measurement
    if found is None:
        return status_word(aim.entry)
    return f"{shown(found, target)} {lang(f'word.{aim.outcome}')}"


def _reported(result: TargetResult, item: Reported, lang: Language) -> str:
    """One reported figure of the target's quantity, and what it would come to if it were ours."""
    reached = COMPARE[result.target.comparison](item.claim.value, result.target.value)
    side = lang("target.void") if item.claim.void else lang("target.would_reach" if reached else "target.would_miss")
    return lang("target.reported", value=item.shown, unit=lang.unit(item.claim.unit), what=escape(lang.text(item.claim.what)), side=side)
