"""The verbs `matrix` and `report`: `python -m lab matrix experiment=nano [--json]`, `python -m lab report experiment=nano [lang=en|zh]`.

The only place of the report that knows where records and experiments lie. A record file that cannot be read is a finding, not a crash:
it is listed, and its cell shows INFRA if nothing else is known of it. Printing a matrix measures nothing and changes no record.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console

from lab.errors import LabError
from lab.experiment import load_experiment
from lab.matrix import Matrix, Unreadable, build_matrix
from lab.project import Project, say
from lab.record import Record
from lab.registered import LANGUAGES
from lab.report.language import load_language
from lab.report.screen import print_matrix
from lab.report.seal import outdated, read_seal, refuse_loss, seal_of
from lab.standing import Mark
from lab.store import Store, load_attempt


def matrix_command(project: Project, words: Sequence[str], out: TextIO | None = None) -> int:
    """Print the experiment's matrix to `out` (standard output), as a table or, with --json, in its long form. Returns the exit code."""
    given = _arguments([word for word in words if word != "--json"], "matrix experiment=NAME [--json]", ("experiment",))
    with _collector_paused():
        matrix = load_matrix(project, given["experiment"])
        if "--json" in words:
            print(json.dumps(matrix.long_form(), indent=1, allow_nan=False, ensure_ascii=False), file=out)
        else:
            print_matrix(matrix, Console(file=out))
    return 0


def report_command(project: Project, words: Sequence[str]) -> int:
    """Write the experiment's report in one language into `reports/` and print the names of the files written. Returns the exit code.

    Raises LabError instead of replacing measured values by none.
    """
    from lab.report.build import build_report, report_name  # Jinja and the charts are slow to import, and a wrong name should fail at once
    from lab.report.capacity import load_capacity

    given = _arguments(words, f"report experiment=NAME [lang={'|'.join(LANGUAGES)}]", ("experiment", "lang"))
    name, language = given["experiment"], load_language(given.get("lang", "en"))
    folder = project.root / "reports"
    reports = {code: folder / report_name(name, code) for code in LANGUAGES}
    with _collector_paused():
        matrix = load_matrix(project, name)
        seal = seal_of(matrix)
        refuse_loss({project.short(file): file for file in reports.values()}, seal, matrix.totals.attempts - matrix.totals.elsewhere)
        written = build_report(matrix, folder, language, load_capacity(project, matrix))
    for path in written:
        print(project.short(path))
    for code, other in reports.items():
        if code != language.code and other.exists() and (how := outdated(read_seal(other), seal)):
            say(f"{project.short(other)} {how}; write it again (lang={code}), the charts are shared")
    return 0


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Thousands of records stay in memory to the end; the garbage collector would walk all of them again and again (half the time of 10,000)."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def load_matrix(project: Project, name: str) -> Matrix:
    """The matrix of the experiment `name` from this project's files."""
    from lab.compose import compose_cells  # Hydra is slow to import, and a wrong name should fail at once

    experiment = load_experiment(name, project.root / "experiments")
    records, marks, unreadable = read_attempts(project)
    return build_matrix(experiment, records, lambda words: compose_cells(words, project)[0], unreadable, marks)


def read_attempts(project: Project) -> tuple[list[Record], dict[tuple[str, int], tuple[Mark, ...]], list[Unreadable]]:
    """Every record under the project's runs folder, what was said about it since, and the record files that are not readable as one."""
    store = Store(project.runs)
    records, marks, unreadable = [], {}, []
    for file in store.record_files():
        try:
            stored = load_attempt(file)
        except (OSError, ValueError) as err:
            shown = f"runs/{file.relative_to(project.runs).as_posix()}"  # as everywhere in a report: without the machine's folders
            why = err.strerror if isinstance(err, OSError) else str(err)
            unreadable.append(Unreadable(file.parent.parent.name, shown, why or type(err).__name__))
            continue
        records.append(stored.record)
        if stored.marks:
            marks[stored.record.cell_id, stored.record.attempt] = stored.marks
    return records, marks, unreadable


def _arguments(words: Sequence[str], usage: str, keys: tuple[str, ...]) -> dict[str, str]:
    """The `key=value` words by key; `experiment` is required. Raises LabError for anything else, and for a key given twice."""
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or key not in keys:
            raise LabError(f"{word!r} is not understood; usage: python -m lab {usage}")
        if key in found:
            raise LabError(f"{key}= is given twice; usage: python -m lab {usage}")
        found[key] = value
    if not found.get("experiment"):
        raise LabError(f"name one experiment; usage: python -m lab {usage}")
    return found
