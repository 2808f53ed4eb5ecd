"""From a matrix to files: render the template, draw the charts, write both whole or not at all.

The text lives in `templates/`, the numbers in `tables` and `verdicts`; this file only brings them together. No clock is read: the report
is a function of the records, the experiment file and the metric table. It does not check the records' truth.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lab.matrix import Matrix
from lab.metrics import METRICS
from lab.report import charts, facts, numbers, tables, verdicts
from lab.store import write_atomic

TEMPLATES = Path(__file__).parent / "templates"


def build_report(matrix: Matrix, folder: Path) -> list[Path]:
    """Write `<experiment>.md` and its charts into `folder`; returns what was written, the report first."""
    judged = [verdicts.judge(matrix, hypothesis) for hypothesis in matrix.experiment.hypotheses]
    drawn = charts.draw(matrix, judged)
    folder.mkdir(parents=True, exist_ok=True)
    for path in charts.owned(matrix, folder):
        if path.name not in drawn:
            path.unlink()  # an earlier report's chart would otherwise stand beside tables it no longer agrees with
    files = {f"{matrix.experiment.name}.md": render(matrix, judged, list(drawn)), **drawn}
    for name, text in files.items():
        write_atomic(folder / name, text)
    return [folder / name for name in files]


def render(matrix: Matrix, judged: list[verdicts.Verdict], chart_files: list[str]) -> str:
    """The report as Markdown."""
    environment = Environment(loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters.update(md=escape, code=code)
    text = environment.get_template("report.md.j2").render(_context(matrix, judged, chart_files))
    return re.sub(r"\n{3,}", "\n\n", text)


def escape(text: object) -> str:
    """Free text for a Markdown line or table cell: no column breaks, no line breaks, no HTML, no accidental emphasis."""
    flat = " ".join(str(text).split())
    return re.sub(r"([|*\\])", r"\\\1", flat).replace("<", "&lt;")


def code(text: object) -> str:
    """Text as a code span, with a fence longer than any run of backticks in it."""
    flat = " ".join(str(text).split())
    fence = "`" * (1 + max((len(run) for run in re.findall(r"`+", flat)), default=0))
    return f"{fence} {flat} {fence}" if len(fence) > 1 else f"`{flat}`"


def _context(matrix: Matrix, judged: list[verdicts.Verdict], chart_files: list[str]) -> dict[str, Any]:
    records = tables.shown_records(matrix)
    return {
        "experiment": matrix.experiment,
        "models": sorted({row.cell.model.name for row in matrix.rows}),
        "totals": matrix.totals,
        "dates": (min(r.started_at for r in records), max(r.finished_at for r in records)) if records else None,
        "mixed": facts.differences(records),
        "origin": tables.origin(matrix),
        "recorded": tables.recorded(matrix),
        "headline": tables.headline(matrix),
        "judged": [(verdict, tables.ladder(matrix, verdict)) for verdict in judged],
        "targets": verdicts.target_rows(matrix),
        "metrics": METRICS,
        "per_metric": tables.per_metric(matrix),
        "protocols": tables.protocols(matrix),
        "compared": tables.compared(matrix, verdicts.compare_speeds(matrix)),
        "noisy": verdicts.noisy(matrix),
        "noisy_percent": numbers.significant(verdicts.SPREAD_LIMIT * 100, 2),
        "later_failures": tables.later_failures(matrix),
        "notes": [(row.cell.id, note) for row in matrix.rows if row.current for note in row.current.notes],
        "cells": tables.cells(matrix),
        "gaps": tables.gap_groups(matrix),
        "unreadable": matrix.unreadable,
        "charts": chart_files,
    }
