"""From a matrix to files: gather, render the template, set the page, draw the charts, write each file whole.

The words live in `lang/`, their order in `templates/`, the numbers in the modules beside this one. No clock is read: the report is a function of the
records, the experiment file, the sizes and the metric table, so the same input gives the same bytes. It does not check the records' truth.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from lab.matrix import Matrix
from lab.metrics import METRICS
from lab.report import charts, facts, measured, provenance
from lab.report.capacity import NO_CAPACITY, Capacity, account_tables, capacity_table
from lab.report.claims import Claims, judge_claims
from lab.report.closing import sums
from lab.report.findings import closed_ways, findings
from lab.report.gaps import gap_groups, glossary
from lab.report.html import page
from lab.report.language import Language
from lab.report.likelihoods import token_likelihoods
from lab.report.markup import code, escape, table
from lab.report.outline import outline
from lab.report.overview import questions, target_sections
from lab.report.reported import claim_section
from lab.report.results import results
from lab.report.seal import seal_of
from lab.report.sizes import share_tables, size_tables, tier_tables
from lab.report.tables import references
from lab.report.verdicts import TargetResult, Verdict, criterion, fixed, judge, judge_target
from lab.store import write_atomic

TEMPLATES = Path(__file__).parent / "templates"


def report_name(experiment: str, language: str) -> str:
    """The name of a report's Markdown file; its page has the same name with `.html`."""
    return f"{experiment}.md" if language == "en" else f"{experiment}.{language}.md"


@dataclass(frozen=True)
class Assessed:
    """A matrix in one language with everything that is judged over it."""

    matrix: Matrix
    lang: Language
    capacity: Capacity
    verdicts: list[Verdict]
    targets: list[TargetResult]
    claims: Claims


def build_report(matrix: Matrix, folder: Path, lang: Language, capacity: Capacity = NO_CAPACITY) -> list[Path]:
    """Write the Markdown, the page and the charts into `folder`; returns what was written, the report first.

    Raises BooksError where the report's lists do not add up to the matrix, LabError for a hypothesis whose chart would take another's name.
    """
    name = report_name(matrix.experiment.name, lang.code)
    assessed = assess(matrix, lang, capacity)
    drawn = charts.draw(matrix, assessed.verdicts, assessed.targets, assessed.claims, capacity)
    text = render(assessed, drawn)
    pictures = {charts.file_name(matrix.experiment.name, chart): drawing for chart, drawing in drawn.items()}
    files = {name: text, f"{name.removesuffix('.md')}.html": page(text, pictures, lang("html_lang")), **pictures}
    folder.mkdir(parents=True, exist_ok=True)
    for path in charts.owned(matrix.experiment, folder):
        if path.name not in files:
            path.unlink()  # an earlier report's chart would otherwise stand beside tables it no longer agrees with
    for file, content in files.items():
        write_atomic(folder / file, content)
    return [folder / file for file in files]


def assess(matrix: Matrix, lang: Language, capacity: Capacity = NO_CAPACITY) -> Assessed:
    """Judge hypotheses, targets and claims."""
    experiment = matrix.experiment
    lang = lang.numbered(outline(experiment.chapters))
    verdicts = [judge(matrix, hypothesis, lang) for hypothesis in experiment.hypotheses]
    return Assessed(matrix, lang, capacity, verdicts, [judge_target(matrix, target) for target in experiment.targets], judge_claims(matrix, capacity, lang))


def render(assessed: Assessed, drawn: Collection[str]) -> str:
    """The report as Markdown; `drawn` are the names of the charts that stand beside it."""
    text = _environment().get_template("report.md.j2").render(_context(assessed, drawn))
    spaced = re.sub(r"\n(?=#+ )", "\n\n", text)
    return re.sub(r"\n{3,}", "\n\n", spaced).lstrip()


@cache
def _environment() -> Environment:
    made = Environment(loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    made.filters.update(md=escape, code=code, table=table, deeper=_deeper)
    return made


def _deeper(text: str) -> str:
    """The text with its headings one level down: those of a section inside a chapter."""
    return re.sub(r"(?m)^(#+) ", r"#\1 ", text)


def _context(assessed: Assessed, drawn: Collection[str]) -> dict[str, Any]:
    """Everything the template sets."""
    matrix, lang, capacity = assessed.matrix, assessed.lang, assessed.capacity
    judged, targets, claims, experiment = assessed.verdicts, assessed.targets, assessed.claims, matrix.experiment
    groups = gap_groups(matrix, lang)
    numbers = references(matrix)
    records = provenance.shown_records(matrix)
    protocols = measured.protocols(matrix, lang)
    return {
        "lang": lang,
        "t": lang,
        "experiment": experiment,
        "outline": outline(experiment.chapters),
        "named": {section for chapter in experiment.chapters for section in chapter.sections},
        "models": sorted({row.cell.model.name for row in matrix.rows}),
        "totals": matrix.totals,
        "changes": matrix.registered_changes,
        "mixed": facts.differences(records, lang),
        "metrics": METRICS,
        "charts": {name: charts.file_name(experiment.name, name) for name in drawn},
        "questions": questions(matrix, judged, targets, numbers, lang),
        "results": results(matrix, claims, numbers, lang),
        "sizes": size_tables(matrix, numbers, lang),
        "tiers": tier_tables(matrix, lang),
        "shares": share_tables(matrix, lang),
        "targets": target_sections(matrix, targets, claims, lang),
        "per_metric": measured.per_metric(matrix, lang),
        "nowhere": measured.measured_nowhere(matrix, lang),
        "compared": measured.compare_speeds(matrix, lang),
        "base": measured.base_name(matrix, lang),
        "tokens": token_likelihoods(matrix, lang),
        "protocols": protocols,
        "undetailed": [f"`{item.metric}` ({item.protocol})" for item in protocols if not item.details],
        "judged": [(verdict, fixed(verdict, lang), criterion(verdict.hypothesis.criterion, lang), measured.steps(matrix, verdict, lang)) for verdict in judged],
        "gaps": groups,
        "glossary": glossary(matrix, [flag.rule for _, flag in claims.flags], lang),
        "closed": closed_ways(matrix, lang),
        "claims": claim_section(claims, lang),
        "accounts": account_tables(capacity, lang),
        "capacity": capacity_table(matrix, capacity, lang),
        "findings": findings(matrix, lang),
        "dates": (min(r.started_at for r in records), max(r.finished_at for r in records)) if records else None,
        "origin": provenance.origin(records, lang),
        "recorded": provenance.recorded(records, lang),
        "sums": [item.text(lang) for item in sums(matrix, groups, targets, judged, claims)],
        "record_table": provenance.record_table(matrix, numbers, lang),
        "without_record": provenance.cells_without_record(matrix, lang),
        "seal": seal_of(matrix),
    }
