"""The section of reported claims: each beside our entry, then its flags, what voids it, and what its source does not tell.

What several claims share is told once, with their numbers. Nothing in this section enters a verdict or a measured cell.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from lab.registered import QUANTITIES
from lab.report.claims import Claims, Reported
from lab.report.findings import spans
from lab.report.language import Language
from lab.report.markup import Table, escape
from lab.report.numbers import short, unit


@dataclass(frozen=True)
class ClaimSection:
    """The claims as a table, and the lines below it in Markdown."""

    table: Table
    flags: list[str]
    void: list[str]
    unknown: list[str]


def claim_section(claims: Claims, lang: Language) -> ClaimSection:
    """Everything there is to say about the claims, in the file's order."""
    header = ["", lang("column.claim"), lang("column.reported_plain"), lang("column.ours"), lang("column.flags")]
    rows = [[i.number, _about(i, lang), f"{i.figure} {lang.unit(i.claim.unit)}", _ours(i, lang), ", ".join(i.marks) or "–"] for i in claims.items]
    flags = [lang("claims.flag", number=number, sentence=escape(flag.sentence(lang.code))) for number, flag in claims.flags]
    void = [
        lang("claims.void_line", what=_about(i, lang), value=i.figure, unit=lang.unit(i.claim.unit), reason=escape(lang.text(i.claim.void)))
        for i in claims.items
        if i.claim.void
    ]
    return ClaimSection(Table("", header, rows, words=2), flags, void, _unknown(claims, lang))


def _about(item: Reported, lang: Language) -> str:
    return f"{escape(lang.text(item.claim.what))}{lang('colon')}{lang.quantity(item.claim.quantity)}"


def _ours(item: Reported, lang: Language) -> str:
    """Our value or the gap's status; else why none can stand here: no metric of ours is like it, it is about another setup, or about a cell we have not."""
    if item.ours is None:
        return lang(f"claims.{_not_ours(item)}")
    return f"{short(item.ours)} {unit(item.ours.metric, lang)}".rstrip() if item.ours.measurement else short(item.ours)


def _not_ours(item: Reported) -> str:
    if item.claim.where:
        return "no_cell" if item.row is None else "no_metric"
    return "no_metric" if QUANTITIES[item.claim.quantity].beside is None else "another_setup"


def _unknown(claims: Claims, lang: Language) -> list[str]:
    """What is not told of each claim, those with the same source and the same unknowns together."""
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for position, item in enumerate(claims.items, start=1):
        groups[lang.text(item.claim.source), lang.text(item.claim.unknown)].append(position)
    return [
        lang("claims.unknown_line", claims=f"C{spans(numbers)}", source=escape(source), unknown=escape(unknown))
        for (source, unknown), numbers in groups.items()
    ]
