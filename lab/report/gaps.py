"""Gaps: every one with its status, its reason and the command that fills it, those that share both told together.

The plain-language meaning of each status and rule that a report met is collected here too, so that a reader needs no other document. A rule is
recognised by the words that admission and evidence use; a reason that none of them used is quoted and left at that.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lab.matrix import Matrix
from lab.record import Status
from lab.report.language import Language
from lab.report.markup import Table
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
    """Gaps with one status and reason; each line is a cell, its metrics in words, and the command that fills them."""

    status: Status
    reason: str
    count: int
    lines: list[tuple[str, str, str]]


def gap_groups(matrix: Matrix, lang: Language) -> list[GapGroup]:
    """All gaps, those with the same status and reason together."""
    groups: dict[tuple[Status, str], dict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in matrix.rows:
        cell = named(matrix, row, lang)
        for name in matrix.experiment.metrics:
            if gap := matrix.entry(row, name).gap:
                groups[gap.status, gap.reason][cell, gap.fill].append(name)
    every = len(matrix.experiment.metrics)
    own = {flag.sentence("en"): flag.sentence(lang.code) for flag in matrix.flags}
    found = []
    for (status, reason), lines in groups.items():
        listed = [(cell, _metrics(names, every, lang), fill) for (cell, fill), names in lines.items()]
        found.append(GapGroup(status, lang.reason(reason, own), sum(len(names) for names in lines.values()), listed))
    return found


def _metrics(names: list[str], every: int, lang: Language) -> str:
    return lang("gaps.all_metrics", count=every) if len(names) == every else ", ".join(names)


def rule_of(status: Status, reason: str) -> str | None:
    """The rule that left this reason, or None where none of RULES did."""
    return next((name for name, (own, words) in RULES.items() if own is status and words.search(reason)), None)


def glossary(matrix: Matrix, raised: Iterable[str], lang: Language) -> Table:
    """The statuses and rules this report met, with what they mean; `raised` are the rules that reported claims broke."""
    gaps = {(entry.gap.status, entry.gap.reason) for entry in matrix.entries.values() if entry.gap}
    statuses = {status for status, _ in gaps} | {row.status for row in matrix.rows}
    rules = {rule for status, reason in gaps if (rule := rule_of(status, reason))} | {flag.rule for flag in matrix.flags} | set(raised)
    lines = [[f"`{status}`", lang.gloss(status)] for status in Status if status in statuses]
    lines += [[lang(f"rule_name.{name}"), lang(f"rule.{name}")] for name in RULES if name in rules]
    return Table("", [lang("column.word"), lang("column.meaning")], lines, words=2)
