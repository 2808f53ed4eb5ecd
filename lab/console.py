"""What a person sees at the end: the result table of a run, the summary of a sweep.

Everything is read from the record, so that the table cannot say more than the record does. A gap stands where its number would, with status
and reason. Results go to standard output, progress does not.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lab.cell import Cell
from lab.metrics import METRICS
from lab.preflight import unsupported
from lab.project import Project
from lab.record import Measurement, Status
from lab.report.fillers import NOT_ASKED, asked, filler
from lab.runner import CellRun

_MIN_WIDTH = 140
"""Columns to use where the output is no terminal, so that a file or a pipe gets whole lines."""


class _Console(Console):
    """Rich ends the process with exit code 1 when the reader of the output goes away; our exit code says how the cells ended."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(stream: TextIO | None = None) -> Console:
    """A console on standard output (or `stream`), wide enough for reasons and without colour codes in files."""
    stream = stream or sys.stdout
    width = shutil.get_terminal_size().columns if stream.isatty() else _MIN_WIDTH
    return _Console(file=stream, width=max(width, 80), highlight=False)


def print_result(project: Project, done: CellRun, stream: TextIO | None = None) -> None:
    """The result table of one cell, what is resident where, and where record and MLflow run are."""
    out, record = console(stream), done.record
    table = Table(title=f"{record.cell_id}  attempt {record.attempt:03d}  {record.status}", box=box.SIMPLE_HEAD, title_justify="left")
    for name, right in (("metric", False), ("value", True), ("\\[min, max]", False), ("roofline", True), ("", False)):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    told = ""
    for name, metric in METRICS.items():
        if metric.optional and name not in record.metrics and name not in record.gaps:
            continue
        if name in record.metrics:
            found = record.metrics[name]
            share = f"{found.roofline_pct:.1f} %" if found.roofline_pct is not None else ""
            table.add_row(metric.title, _value(found), _spread(found), share, "")
        elif record.status is Status.OK and name in record.gaps:
            gap = record.gaps[name]
            why = f"{gap.status}: {gap.reason}" if asked(gap) else gap.reason
            table.add_row(metric.title, "GAP" if asked(gap) else NOT_ASKED, "", "", "as above" if why == told else escape(why))
            told = why
        else:
            table.add_row(metric.title, "GAP", "", "", "")
    out.print(table)
    if record.status is not Status.OK:
        out.print(f"every metric is a gap: [bold]{record.status}[/]: {escape(record.reason)}")
    rows = list(_residency(record.evidence))
    if rows:
        out.print("resident: " + escape("; ".join(rows)), soft_wrap=True)
    for note in record.notes:
        out.print(f"note: {escape(note)}", soft_wrap=True)
    if record.status is Status.UNSUPPORTED and unsupported(Cell.model_validate(record.cell)):
        out.print("no command fills these gaps as the cell stands: the reason says what to change")
        commands = []
    else:  # a failed cell's gaps have one reason; of an OK one each has its own, and some no command fills
        commands = list(dict.fromkeys(fill for gap in record.gaps.values() if (fill := filler(gap))))
    for command in commands:
        out.print(f"to fill the gaps: {escape(command)}", soft_wrap=True)
    for line in where(project, done):
        out.print(escape(line), soft_wrap=True)


def print_sweep(project: Project, runs: Sequence[CellRun], stream: TextIO | None = None) -> None:
    """One row for each cell of a sweep, and the sum: cells = OK + gaps."""
    shown = ("ppl", "kld_mean", "pp512_tok_s", "tg128_tok_s")
    table = Table(box=box.SIMPLE_HEAD)
    for heading in ("cell", "status", *shown, "reason"):
        table.add_column(heading, justify="right" if heading in shown else "left", overflow="fold")
    for done in runs:
        record = done.record
        values = [number(record.metrics[m].value) if m in record.metrics else "gap" for m in shown]
        reason = "skipped: already measured" if done.skipped else record.reason
        table.add_row(record.cell_id, record.status.value, *values, escape(reason))
    out = console(stream)
    out.print(table)
    good = sum(done.record.status is Status.OK for done in runs)
    skipped = sum(done.skipped for done in runs)
    books = f"{len(runs)} cells = {good} OK ({skipped} of them skipped) + {len(runs) - good} gaps"
    out.print(f"{books}; records in {project.short(project.runs)}")


def where(project: Project, done: CellRun) -> list[str]:
    """The closing lines: the record's file and the MLflow run."""
    lines = [f"record: {project.short(done.file) if done.file else 'could not be stored, see above'}"]
    if done.mirrored:
        lines.append(done.mirrored.line())
    return lines


def number(value: float) -> str:
    """Six significant digits, whole numbers in full."""
    return f"{value:.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.6g}"


def _value(found: Measurement) -> str:
    """Value with its standard error and unit; bytes in MiB."""
    if found.unit == "B":
        return f"{found.value / 2**20:.2f} MiB"
    error = "" if found.stderr is None else f" ± {number(float(f'{found.stderr:.2g}'))}"
    return f"{number(found.value)}{error} {found.unit}"


def _spread(found: Measurement) -> str:
    return f"\\[{number(found.min)}, {number(found.max)}]" if found.min is not None and found.max is not None else ""


def _residency(evidence: dict[str, Any]) -> Iterator[str]:
    """`component as codec on device: MiB`, summed over the entries of the evidence's `resident` list."""
    sums: dict[tuple[str, str, str], int] = {}
    for entry in evidence.get("resident", ()):
        place = (str(entry["component"]), str(entry["codec"]), str(entry["device"]))
        sums[place] = sums.get(place, 0) + int(entry["bytes"])
    for (component, codec, device), size in sums.items():
        yield f"{component} as {codec} on {device}: {size / 2**20:.2f} MiB"
