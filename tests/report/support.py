"""Matrices and texts for the tests of the report: the small experiment, the two registered stages, and a stage with every kind of entry.

The stages are the real files from `experiments/` with the real cells of `conf/`; those of the small experiment come from a plain function. Records are
invented.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from lab.cell import Cell
from lab.compose import compose_cells
from lab.exchange import take_in
from lab.experiment import load_experiment
from lab.matrix import Matrix, build_matrix
from lab.metrics import METRICS
from lab.parcels import Parcel, read_parcels
from lab.project import Project
from lab.record import Record
from lab.report.build import assess, render
from lab.report.capacity import NO_CAPACITY, Capacity
from lab.report.language import load_language
from lab.report.outline import outline
from lab.store import Store
from tests.matrix_helpers import cell, complete

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
EN, ZH = load_language("en"), load_language("zh")


@cache
def _composed(words: tuple[str, ...]) -> Cell:
    return compose_cells(words, Project(root=EXPERIMENTS.parent, runs=EXPERIMENTS.parent / "runs"))[0]


def stage(name: str, records: list[Record] | None = None) -> Matrix:
    """A registered stage set against these records."""
    return build_matrix(load_experiment(name, EXPERIMENTS), records or [], lambda words: _composed(tuple(words)))


def first_gpu_records() -> list[Record]:
    """The first records of kestrel_small - a cell on a GPU and the two on its host's CPU - as today's protocols would have them: what a report says of
    multiples, flips and machines has to be tested whether or not a GPU was at hand since a protocol changed. Later records do not change them."""
    records = [parcel.record for parcel in read_parcels(EXPERIMENTS / "kestrel_small" / "records.jsonl.gz")]
    return [_as_of_today(one) for one in records if one.started_at < "2026-11-30T17"]


def _as_of_today(record: Record) -> Record:
    now = {name: METRICS[name].protocol for name in record.metrics}
    return record.model_copy(update={"metrics": {name: one.model_copy(update={"protocol": now[name]}) for name, one in record.metrics.items()}})


@cache
def stage_text(name: str, language: str = "en") -> str:
    """The report of a registered stage without any record."""
    return text_of(stage(name), language)


def project_with(parcels: list[Parcel], folder: Path) -> Project:
    """The project as a fresh clone has it, over a runs folder in `folder` that holds these records; without any there is no such folder. A clone has no model
    files but those that ship: sizes read from files that happen to lie in models/ would give another report than the committed one."""
    root = folder / "clone"
    root.mkdir()
    for shipped in ("conf", "experiments", "lab"):
        (root / shipped).symlink_to(EXPERIMENTS.parent / shipped)
    made = Project(root=root, runs=folder / "runs")
    if parcels:
        made.runs.mkdir()
        take_in(Store(made.runs), parcels)
    return made


def ladder(values: dict[str, float], layers: int = 6) -> list[Record]:
    """Complete records of the small experiment's paths with these divergences."""
    return [complete(cell(path, layers), kld) for path, kld in values.items()]


def text_of(matrix: Matrix, language: str = "en", capacity: Capacity = NO_CAPACITY) -> str:
    """The report's Markdown, without charts, which take most of the time."""
    return render(assess(matrix, load_language(language), capacity), [])


def section(text: str, number: int) -> str:
    """One numbered section of a report."""
    return text.split(f"\n## {number}. ")[1].split("\n## ", maxsplit=1)[0]


def named_section(text: str, matrix: Matrix, language: str, name: str) -> str:
    """One section of a report by its name, wherever the experiment's chapters put it."""
    heading = next(heading for part in outline(matrix.experiment.chapters) for heading in part.headings if heading.section == name)
    level, _, rest = re.split(rf"\n(##+) {re.escape(load_language(language).heading(heading))}(\n)", text, maxsplit=1)[1:]
    return re.split(rf"\n#{{2,{len(level)}}} ", rest, maxsplit=1)[0]


def table_cells(text: str) -> list[str]:
    """Every cell of every table in the text, headings and rules included."""
    return [part.strip() for line in text.splitlines() if line.startswith("|") for part in re.split(r"(?<!\\)\|", line)[1:-1]]


def table_rows(text: str) -> list[list[str]]:
    """The rows of every table in the text, as cells."""
    return [[part.strip() for part in re.split(r"(?<!\\)\|", line)[1:-1]] for line in text.splitlines() if line.startswith("|")]
