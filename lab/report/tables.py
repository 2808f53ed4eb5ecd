"""The report's tables, as rows of text: what stands where, before any Markdown.

Each function reads the matrix and returns a header and rows; the template only sets them. A cell of a table is a measured number or a
status word, so a reader never has to guess what an empty place means. Layout says nothing about validity.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

from lab.matrix import Entry, Matrix, Row
from lab.metrics import METRICS
from lab.record import Record, Status
from lab.report.facts import Fact, fold, identity
from lab.report.numbers import full, number, roofline, short, status_word, unit, with_error
from lab.report.verdicts import Comparison, Verdict, speed_metrics

HEADLINE = (
    ("ppl", "PPL"),
    ("kld_mean", "KLD, nat"),
    ("pp512_tok_s", "PP, tok/s"),
    ("tg128_tok_s", "TG, tok/s"),
    ("agg4_tg128_tok_s", "4-way, tok/s"),
    ("resident_bytes", "Resident, MB"),
)
"""The short table's columns, where the experiment has them."""


_ONLY_IN_RECORD = frozenset({"command", "worker_argv", "lab_pid", "worker", "fill"})
"""Recorded per process, with paths of the machine in them: needed to trace one attempt, noise in a table over many."""


@dataclass(frozen=True)
class Table:
    """A titled table; the first `words` columns are text, set to the left, the others are set to the right."""

    title: str
    header: list[str]
    rows: list[list[str]]
    words: int = 1


@dataclass(frozen=True)
class GapGroup:
    """Gaps with one status and reason; each line is a cell, its metrics in words, and the command that fills them."""

    status: Status
    reason: str
    count: int
    lines: list[tuple[str, str, str]]


def label(matrix: Matrix, row: Row) -> str:
    """What tells the row from others of the same depth: its path, and any override its table does not share."""
    shared = matrix.experiment.overrides
    own = [f"{key}={value}" for key, value in row.point.items() if key not in {"path", "layers"} and key not in shared]
    return " ".join([row.cell.path.name, *own])


def by_depth(matrix: Matrix) -> list[tuple[int, list[Row]]]:
    """Rows grouped by layers, shallow first, in the experiment's order inside."""
    ordered = sorted(matrix.rows, key=lambda row: row.cell.layers)
    return [(layers, list(rows)) for layers, rows in groupby(ordered, key=lambda row: row.cell.layers)]


def headline(matrix: Matrix) -> list[Table]:
    """One short table per depth."""
    columns = [(name, title) for name, title in HEADLINE if name in matrix.experiment.metrics]
    rooflines = "tg128_tok_s" in matrix.experiment.metrics
    tables = []
    for layers, rows in by_depth(matrix):
        lines = []
        for row in rows:
            line = [label(matrix, row), *(with_error(matrix.entry(row, name)) for name, _ in columns)]
            lines.append([*line, roofline(matrix.entry(row, "tg128_tok_s").measurement)] if rooflines else line)
        header = ["Path", *(title for _, title in columns), *(["TG roofline"] if rooflines else [])]
        tables.append(Table(f"{layers} layers", header, lines))
    return tables


def per_metric(matrix: Matrix) -> list[Table]:
    """One table per metric: paths down, depths across, with spread and repeats. A metric nobody measured has no rows."""
    depths = [layers for layers, _ in by_depth(matrix)]
    tables = []
    for name in matrix.experiment.metrics:
        entries = [matrix.entry(row, name) for row in matrix.rows]
        lines: dict[str, dict[int, str]] = defaultdict(dict)
        if any(entry.measurement for entry in entries):
            for entry in entries:
                lines[label(matrix, entry.row)][entry.row.cell.layers] = full(entry)
        title = f"{METRICS[name].title} (`{name}`" + (f", {unit(name)})" if unit(name) else ")")
        rows = [[text, *(values.get(depth, "") for depth in depths)] for text, values in lines.items()]
        tables.append(Table(title, ["Path", *(f"{depth} layers" for depth in depths)], rows))
    return tables


def ladder(matrix: Matrix, verdict: Verdict) -> Table:
    """The steps of an order hypothesis: the metric, the weights' cosines, and the noise floor that came with it."""
    metric = verdict.hypothesis.criterion.metric
    extra = [name for name in ("expert_cosine", "ple_cosine") if name in matrix.experiment.metrics and name != metric]
    rows = []
    for row in verdict.steps:
        entry = matrix.entry(row, metric)
        rows.append([row.cell.path.name, with_error(entry), *(short(matrix.entry(row, name)) for name in extra), noise_floor(entry)])
    head = METRICS[metric].title + (f", {unit(metric)}" if unit(metric) else "")
    return Table("", ["Path", head, *(METRICS[name].title for name in extra), "Noise floor"], rows)


def noise_floor(entry: Entry) -> str:
    """The noise floor recorded with a measurement, in its own unit, or a dash."""
    details = entry.measurement.details if entry.measurement else {}
    found = [v for key, v in sorted(details.items()) if "noise_floor" in key and isinstance(v, int | float) and not isinstance(v, bool)]
    return number(entry.metric, float(found[0])) if found else "–"


def cells(matrix: Matrix) -> Table:
    """Every expected cell once: how it stands, how much of it is measured, and where its record is."""
    rows = []
    for row in matrix.rows:
        entries = [matrix.entry(row, name) for name in matrix.experiment.metrics]
        measured = sum(entry.measurement is not None for entry in entries)
        attempt = str(row.current.attempt) if row.current else "–"
        record = f"`{row.record_path}`" if row.record_path else "–"
        counts = [str(measured), str(len(entries) - measured), attempt, str(len(row.superseded))]
        rows.append([f"`{row.cell.id}`", str(row.status), record, *counts])
    return Table("", ["Cell", "Status", "Record", "Measured", "Gaps", "Attempt", "Superseded"], rows, words=3)


def gap_groups(matrix: Matrix) -> list[GapGroup]:
    """All gaps, those with the same status and reason together."""
    groups: dict[tuple[Status, str], dict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    for entry in matrix.entries.values():
        if entry.gap:
            groups[entry.gap.status, entry.gap.reason][entry.row.cell.id, entry.gap.fill].append(entry.metric)
    every = len(matrix.experiment.metrics)
    found = []
    for (status, reason), lines in groups.items():
        words = {key: f"all {every} metrics" if len(names) == every else ", ".join(names) for key, names in lines.items()}
        listed = [(cell, words[cell, fill], fill) for cell, fill in lines]
        found.append(GapGroup(status, reason, sum(len(names) for names in lines.values()), listed))
    return found


def compared(matrix: Matrix, comparisons: Iterable[Comparison]) -> Table:
    """Speed against the reference path, in words; a cell without any measured speed is left to the list of gaps."""
    lines: dict[str, dict[str, str]] = defaultdict(dict)
    for item in comparisons:
        if any(matrix.entry(item.row, name).measurement for name in speed_metrics(matrix)):
            lines[f"{label(matrix, item.row)}, {item.row.cell.layers} layers"][item.metric] = item.word
    names = speed_metrics(matrix)
    rows = [[text, *(words.get(name, "") for name in names)] for text, words in lines.items()]
    return Table("", ["Path", *(METRICS[name].title for name in names)], rows, words=1 + len(names))


def shown_records(matrix: Matrix) -> list[Record]:
    """The records whose numbers the report prints."""
    return [row.current for row in matrix.rows if row.current and row.current.metrics]


def origin(matrix: Matrix) -> list[Fact]:
    """What makes the printed numbers comparable: machine, device, torch, code and artifact, over the records shown."""
    return fold(identity(record) for record in shown_records(matrix))


def recorded(matrix: Matrix) -> list[Fact]:
    """What else the shown records say of where they come from, without what is only of use beside the record itself."""
    sources = [{**record.provenance, "artifact": record.artifact} for record in shown_records(matrix)]
    return fold({key: value for key, value in source.items() if key not in _ONLY_IN_RECORD} for source in sources)


def protocols(matrix: Matrix) -> list[tuple[str, str, list[Fact]]]:
    """Per metric: its protocol, and the details its measurements recorded. Metrics nobody measured have no details to show."""
    found = []
    for name in matrix.experiment.metrics:
        details = [e.measurement.details for e in matrix.entries.values() if e.metric == name and e.measurement]
        found.append((name, METRICS[name].protocol, fold(details)))
    return found


def later_failures(matrix: Matrix) -> list[str]:
    """Cells that show an OK attempt although a newer one failed: the number is real, the path may no longer be."""
    failed = [(row.cell.id, r) for row in matrix.rows if row.status is Status.OK for r in row.later if r.status is not Status.OK]
    return [f"{cell}: attempt {record.attempt} ended {record.status}: {record.reason}" for cell, record in failed]


def screen_word(entry: Entry) -> str:
    """For the table on screen: the value, or the bare status word."""
    return short(entry) if entry.measurement else status_word(entry).strip("*")
