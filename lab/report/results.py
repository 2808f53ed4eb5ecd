"""Paths and results: one table per depth, our value or gap in one column, what others reported in the next.

A metric that no cell of a table has measured and nobody reported takes no column; it is named below the table instead, so that the table fits
a screen and nothing is hidden. A reported figure stands under a heading that says so and is never ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from lab.matrix import Matrix, Row
from lab.metrics import METRICS
from lab.report.claims import Claims
from lab.report.language import Language
from lab.report.markup import Table, escape
from lab.report.numbers import roofline, unit, with_error
from lab.report.sizes import OWN_TABLES
from lab.report.tables import by_depth, label

HEADLINE = ("ppl", "kld_mean", "pp512_tok_s", "tg128_tok_s", "agg4_tg128_tok_s", "resident_bytes")
SHORT = {"ppl": "PPL", "kld_mean": "KLD", "pp512_tok_s": "PP", "tg128_tok_s": "TG", "agg4_tg128_tok_s": "4-way"}
"""Names that need no translation and keep the columns narrow."""


def headline(matrix: Matrix) -> list[str]:
    """The metrics of the short tables: the usual ones, and those that only this kind of experiment owes."""
    return [name for name in matrix.experiment.metrics if name in HEADLINE or (METRICS[name].optional and name not in OWN_TABLES)]


def short_title(metric: str, lang: Language) -> str:
    """The metric's short name."""
    return SHORT.get(metric, lang.metric(metric))


def title(metric: str, lang: Language) -> str:
    """The metric's short name with its unit."""
    return short_title(metric, lang) + (f", {unit(metric, lang)}" if unit(metric) else "")


def results(matrix: Matrix, claims: Claims, references: Mapping[str, str], lang: Language) -> list[Table]:
    """One table per depth."""
    return [_table(matrix, rows, claims, references, lang, lang("depth", layers=layers)) for layers, rows in by_depth(matrix)]


def _table(matrix: Matrix, rows: list[Row], claims: Claims, references: Mapping[str, str], lang: Language, heading: str) -> Table:
    names = headline(matrix)
    reported = {(row.key, name): claims.about(row, name) for row in rows for name in names}
    measured = [name for name in names if any(matrix.entry(row, name).measurement for row in rows)]
    claimed = [name for name in names if any(reported[row.key, name] for row in rows)]
    columns = [column for name in names for column in _columns(name, name in measured, name in claimed)]
    telling = [row for row in rows if any(reported[row.key, name] or matrix.entry(row, name).measurement for name in names)]
    lines = []
    for row in telling:
        line = [escape(label(matrix, row)), references.get(row.key, "–")]
        for name, kind in columns:
            entry = matrix.entry(row, name)
            told = "; ".join(item.shown for item in reported[row.key, name]) or "–"
            line.append({"ours": with_error(entry), "roofline": roofline(entry.measurement), "reported": told}[kind])
        lines.append(line)
    headings = [_heading(name, kind, lang) for name, kind in columns]
    made = Table(heading, [lang("column.path"), lang("column.record"), *headings], lines, words=2, notes=_notes(matrix, rows, telling, measured, lang))
    return _turned(made, lang) if len(made.header) > 2 * len(lines) + 6 else made


def _columns(metric: str, measured: bool, claimed: bool) -> list[tuple[str, str]]:
    """The columns one metric takes: ours beside what is measured or reported, TG's share of the roofline, the reported figure."""
    kinds = ["ours"] if measured or claimed else []
    kinds += ["roofline"] if measured and metric == "tg128_tok_s" else []
    return [(metric, kind) for kind in [*kinds, *(["reported"] if claimed else [])]]


def _heading(metric: str, kind: str, lang: Language) -> str:
    if kind == "ours":
        return title(metric, lang)
    return lang("column.bound_share") if kind == "roofline" else lang("column.reported", what=short_title(metric, lang))


def _notes(matrix: Matrix, rows: list[Row], telling: list[Row], measured: list[str], lang: Language) -> list[str]:
    """What has no place in the table: the cells that are nothing but gaps, by status, and the metrics nobody measured."""
    silent: dict[str, list[str]] = defaultdict(list)
    shown = {row.key for row in telling}
    for row in rows:
        if row.key not in shown:
            silent[str(row.status)].append(label(matrix, row))
    notes = [lang("results.only_gaps", status=f"*{status}*", cells=escape(lang.series(cells))) for status, cells in silent.items()]
    missing = [short_title(name, lang) for name in headline(matrix) if name not in measured]
    return notes + ([lang("results.measured_nowhere", metrics=escape(lang.series(missing)))] if missing else [])


def _turned(wide: Table, lang: Language) -> Table:
    """The table with cells across and metrics down, where there are few cells and many metrics."""
    columns = list(zip(wide.header, *wide.rows, strict=True))
    return Table(wide.title, [lang("column.metric"), *columns[0][1:]], [list(column) for column in columns[1:]], words=1, notes=wide.notes)
