"""Gaps: every one with its status, its reason and the command that fills it, those that share both told together. Where no command fills it, none stands there
(`lab.report.fillers`); where a command would end at once as it stands, it is said what it needs first.

The plain-language meaning of each status and rule that a report met is collected here too, so that a reader needs no other document. A rule is
recognised by the words that admission and evidence use; a reason that none of them used is quoted and left at that.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lab.dead_ends import Closed
from lab.matrix import Matrix, Row
from lab.record import Status
from lab.registered import DeadEnd
from lab.report.fillers import NOT_ASKED, asked, filler, gap_word
from lab.report.language import Language
from lab.report.markup import Table, escape
from lab.report.tables import named

RULES: Mapping[str, tuple[Status, re.Pattern[str]]] = {
    "fallback_op": (Status.PATH_NOT_EXECUTED, re.compile(r"ran where only|ran on|operation was counted|rows were computed")),
    "residency": (Status.DEGRADED, re.compile(r"resident")),
    "beside_invalid": (Status.NUMERIC_INVALID, re.compile(r"does not stand beside invalid output")),
    "not_finite": (Status.NUMERIC_INVALID, re.compile(r"not finite|no finite|\bNaN\b|infinite")),
    "impossible": (Status.NUMERIC_INVALID, re.compile(r"is impossible")),
    "above_bound": (Status.IMPLAUSIBLE, re.compile(r"physical bound")),
    "above_vocabulary": (Status.IMPLAUSIBLE, re.compile(r"above the vocabulary size")),
    "zero_spread": (Status.IMPLAUSIBLE, re.compile(r"without any spread")),
    "zero_rate": (Status.IMPLAUSIBLE, re.compile(r"rate of zero")),
    "realised_lengths": (Status.IMPLAUSIBLE, re.compile(r"tokens were processed where")),
    "aggregate_below_single": (Status.IMPLAUSIBLE, re.compile(r"sequences together")),
    "depth_inversion": (Status.IMPLAUSIBLE, re.compile(r"is faster than")),
}
"""How a rule is told from its status and the reason it leaves in a record, the first that fits (a reason may quote another); the names of
`lab.plausibility` where it has them."""


@dataclass(frozen=True)
class GapGroup:
    """Gaps with one status and reason. `word`: what stands for them in tables, with its meaning `gloss`; each line is a cell, its metrics in words, and the
    command that fills them, empty where none does; `needs` tells what the commands need first."""

    status: Status
    word: str
    gloss: str
    reason: str
    count: int
    lines: list[tuple[str, str, str]]
    needs: list[str]


def gap_groups(matrix: Matrix, lang: Language) -> list[GapGroup]:
    """All gaps, those with the same status and reason together."""
    groups: dict[tuple[Status, str], dict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    words: dict[tuple[Status, str], tuple[str, str]] = {}
    needs: dict[tuple[Status, str], dict[str, dict[str, None]]] = defaultdict(lambda: defaultdict(dict))
    for row in matrix.rows:
        cell, stopped = named(matrix, row, lang), _stopped(row)
        for name in matrix.experiment.metrics:
            if gap := matrix.entry(row, name).gap:
                key, fill = (gap.status, gap.reason), filler(gap, row.fill)
                groups[key][cell, fill].append(name)
                words[key] = gap_word(gap), lang.gloss(gap.status) if asked(gap) else lang("gaps.not_asked")
                if stopped and fill and gap.status is Status.NOT_RUN:
                    needs[key][stopped][cell] = None
    every = len(matrix.experiment.metrics)
    own = _own(matrix, lang)
    found = []
    for key, lines in groups.items():
        (status, reason), (word, gloss) = key, words[key]
        listed = [(cell, _metrics(names, every, lang), fill) for (cell, fill), names in lines.items()]
        first = [_need(why, list(cells), len({cell for cell, _, _ in listed}), lang) for why, cells in needs[key].items()]
        count = sum(len(names) for names in lines.values())
        found.append(GapGroup(status, word, gloss, lang.reason(reason, own), count, listed, first))
    return found


def _need(why: str, cells: list[str], listed: int, lang: Language) -> str:
    """What is in the way of the commands, and of which where it is not all that are listed."""
    if len(cells) == listed:
        return lang("gaps.needs", why=escape(lang.recorded(why)))
    return lang("gaps.needs_of", cells=escape(lang.clauses(cells)), why=escape(lang.recorded(why)))


def _own(matrix: Matrix, lang: Language) -> dict[str, str]:
    """What the lab words itself in a reason, English to this language: flags over its numbers, and the dead ends of the experiment."""
    flagged = {flag.sentence("en"): flag.sentence(lang.code) for flag in matrix.flags}
    return flagged | {Closed(matrix.experiment, end).reason(): _closed(matrix, end, lang) for end in matrix.experiment.dead_ends}


def _closed(matrix: Matrix, end: DeadEnd, lang: Language) -> str:
    told = {name: lang.text(text) for name, text in (("what", end.what), ("evidence", end.evidence), ("source", end.source), ("reopen", end.reopen))}
    return lang("gaps.closed", id=end.id, file=matrix.experiment.source, since=end.since, **told)


def _stopped(row: Row) -> str:
    """Why the cell's own command would end as UNSUPPORTED on any machine, as the gates say it; empty where it would not."""
    from lab.preflight import unsupported  # slow to import, and most commands print no gap

    return unsupported(row.cell) or ""


def _metrics(names: list[str], every: int, lang: Language) -> str:
    return lang("gaps.all_metrics", count=every) if len(names) == every else ", ".join(names)


def rule_of(status: Status, reason: str) -> str | None:
    """The rule that left this reason, or None where none of RULES did."""
    return next((name for name, (own, words) in RULES.items() if own is status and words.search(reason)), None)


def glossary(matrix: Matrix, raised: Iterable[str], lang: Language) -> Table:
    """The statuses and rules this report met, with what they mean; `raised` are the rules that reported claims broke."""
    found = [entry.gap for entry in matrix.entries.values() if entry.gap]
    statuses = {gap.status for gap in found if asked(gap)} | {row.status for row in matrix.rows}
    rules = {rule for gap in found if (rule := rule_of(gap.status, gap.reason))} | {flag.rule for flag in matrix.flags} | set(raised)
    lines = [[f"`{status}`", lang.gloss(status)] for status in Status if status in statuses]
    lines += [[f"`{NOT_ASKED}`", lang("gaps.not_asked")]] if not all(asked(gap) for gap in found) else []
    lines += [[lang(f"rule_name.{name}"), lang(f"rule.{name}")] for name in RULES if name in rules]
    return Table("", [lang("column.word"), lang("column.meaning")], lines, words=2)
