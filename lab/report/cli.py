"""The verbs `matrix` and `report`: `python -m lab matrix experiment=nano [--json]`, `python -m lab report experiment=nano`.

The only place of the report that knows where records and experiments lie. A record file that cannot be read is a finding, not a crash:
it is listed, and its cell shows INFRA if nothing else is known of it. Printing a matrix measures nothing and changes no record.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lab.errors import LabError
from lab.experiment import load_experiment
from lab.matrix import Matrix, Unreadable, build_matrix
from lab.project import Project
from lab.record import Record, Status
from lab.report.build import build_report
from lab.report.tables import label, screen_word
from lab.store import Store, load_record

_SHORT = {"ppl": "PPL", "kld_mean": "KLD", "pp512_tok_s": "PP", "tg128_tok_s": "TG", "agg4_tg128_tok_s": "4-way", "resident_bytes": "MB"}
"""Columns of the table on screen, narrow enough for 80 characters."""


def matrix_command(project: Project, words: Sequence[str], out: TextIO | None = None) -> int:
    """Print the experiment's matrix to `out` (standard output), as a table or, with --json, in its long form. Returns the exit code."""
    name, as_json = _arguments(words, "matrix", flag="--json")
    matrix = load_matrix(project, name)
    if as_json:
        print(json.dumps(matrix.long_form(), indent=1, allow_nan=False, ensure_ascii=False), file=out)
    else:
        print_matrix(matrix, Console(file=out))
    return 0


def report_command(project: Project, words: Sequence[str]) -> int:
    """Write the experiment's report into `reports/` and print the names of the files written. Returns the exit code."""
    name, _ = _arguments(words, "report")
    matrix = load_matrix(project, name)
    existing = project.root / "reports" / f"{name}.md"
    if existing.exists() and not any(entry["state"] == "measured" for entry in matrix.long_form()):
        raise LabError(f"no record here fills a cell of {name}; {project.short(existing)} is left as it is (python -m lab run experiment={name} measures)")
    for path in build_report(matrix, project.root / "reports"):
        print(project.short(path))
    return 0


def load_matrix(project: Project, name: str) -> Matrix:
    """The matrix of the experiment `name` from this project's files."""
    from lab.compose import compose_cells  # Hydra is slow to import, and a wrong name should fail at once

    experiment = load_experiment(name, project.root / "experiments")
    records, unreadable = read_records(project)
    return build_matrix(experiment, records, lambda words: compose_cells(words, project)[0], unreadable)


def read_records(project: Project) -> tuple[list[Record], list[Unreadable]]:
    """Every record under the project's runs folder, and the record files that are not readable as one."""
    store = Store(project.runs)
    records, unreadable = [], []
    for file in store.record_files():
        try:
            records.append(load_record(file))
        except (OSError, ValueError) as err:
            shown = f"runs/{file.relative_to(project.runs).as_posix()}"  # as everywhere in a report: without the machine's folders
            why = err.strerror if isinstance(err, OSError) else str(err)
            unreadable.append(Unreadable(file.parent.parent.name, shown, why or type(err).__name__))
    return records, unreadable


def _arguments(words: Sequence[str], verb: str, flag: str | None = None) -> tuple[str, bool]:
    """The experiment's name and whether `flag` was given. Anything else is refused."""
    names = [word.removeprefix("experiment=") for word in words if word.startswith("experiment=")]
    rest = [word for word in words if not word.startswith("experiment=") and word != flag]
    usage = f"python -m lab {verb} experiment=NAME" + (f" [{flag}]" if flag else "")
    if rest:
        raise LabError(f"{rest[0]!r} is not understood; usage: {usage}")
    if len(names) != 1 or not names[0]:
        raise LabError(f"name one experiment; usage: {usage}")
    return names[0], flag in words


def print_matrix(matrix: Matrix, console: Console) -> None:
    """A compact table: one row per cell, its status, its headline metrics; then the totals."""
    columns = [name for name in _SHORT if name in matrix.experiment.metrics]
    title = f"{matrix.experiment.name}: {matrix.experiment.title}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1))
    table.add_column("Path", overflow="fold")
    table.add_column("L", justify="right")
    table.add_column("Status", overflow="fold")
    for name in columns:
        table.add_column(_SHORT[name], justify="right", overflow="fold")
    for row in matrix.rows:
        texts = []
        for name in columns:
            entry = matrix.entry(row, name)
            if entry.gap and entry.gap.status is row.status:
                texts.append(Text("–", style="dim"))  # the status column already has the word
            else:
                texts.append(Text(screen_word(entry), style="dim" if entry.gap else ""))
        status = Text(str(row.status), style="" if row.status is Status.OK else "dim")
        table.add_row(label(matrix, row), str(row.cell.layers), status, *texts)
    console.print(table)
    t = matrix.totals
    console.print(f"{t.cells} cells: {t.expected} expected = {t.measured} measured + {t.gaps} gaps ({t.not_run} not run)", highlight=False)
    console.print(f"Attempts: {t.current} current, {t.superseded} superseded, {t.elsewhere} of other cells", highlight=False)
    for item in matrix.unreadable:
        console.print(f"INFRA {item.path}: {item.why}", style="dim", highlight=False, markup=False)
