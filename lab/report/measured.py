"""Measured data: metric by metric with spread and repeats, how it was taken, and where one path may be called faster than another.

The words faster and slower come from the samples of two cells at the same depth that `lab.likeness` lets stand against each other; what else differs
between the two is said below the table. A statistic of one process's repeats does not know restart-to-restart noise. A metric measured in no cell is
named, not tabulated.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

from lab.likeness import beside, contrast, unlike
from lab.matrix import Entry, Matrix, Row
from lab.metrics import METRICS
from lab.registered import as_text, matches
from lab.report.facts import Fact, fold, listed, said
from lab.report.fillers import gap_word
from lab.report.language import Language
from lab.report.markup import Table, escape
from lab.report.numbers import full, number, short, significant, status_word, unit, with_error
from lab.report.results import title
from lab.report.tables import by_depth, label, named, told_apart
from lab.report.verdicts import Verdict
from lab.stats import Comparison

SPREAD_LIMIT = 0.10
"""(max - min) / median above which repeats are called noisy."""

MOST_LINES = 24
"""Of a table of recorded items; longer lists are told by their length."""


@dataclass(frozen=True)
class Protocol:
    """How one metric is measured, and what its measurements recorded about it."""

    metric: str
    protocol: str
    details: list[Fact]
    tables: list[Table] = field(default_factory=list)


def per_metric(matrix: Matrix, lang: Language) -> list[Table]:
    """One table per metric that any cell measured: paths down, depths across, with spread and repeats; paths with gaps alone are named below it."""
    depths = [layers for layers, _ in by_depth(matrix)]
    tables = []
    for name in matrix.experiment.metrics:
        lines: dict[str, dict[int, Entry]] = defaultdict(dict)
        for row in matrix.rows:
            lines[label(matrix, row)][row.cell.layers] = matrix.entry(row, name)
        told = {text: found for text, found in lines.items() if any(entry.measurement for entry in found.values())}
        if not told:
            continue
        rows = [[escape(text), *(full(found[d], lang("of_roofline")) if d in found else "–" for d in depths)] for text, found in told.items()]
        silent = lang.series(text for text in lines if text not in told)
        notes = [lang("measured.only_gaps", paths=escape(silent))] if silent else []
        heading = f"{lang.metric(name)} (`{name}`" + (f", {unit(name, lang)})" if unit(name) else ")")
        tables.append(Table(heading, [lang("column.path"), *(lang("depth", layers=depth) for depth in depths)], rows, notes=notes))
    return tables


def measured_nowhere(matrix: Matrix, lang: Language) -> list[str]:
    """One line per metric that no cell has measured: its name, and the statuses that stand in its place."""
    lines = []
    for name in matrix.experiment.metrics:
        gaps = [matrix.entry(row, name).gap for row in matrix.rows]
        if all(gaps):
            statuses = Counter(gap_word(gap) for gap in gaps if gap)
            lines.append(lang("measured.owed", metric=lang.metric(name), name=name, statuses=lang.series(f"*{s}* ({n})" for s, n in statuses.items())))
    return lines


def protocols(matrix: Matrix, lang: Language) -> list[Protocol]:
    """Per metric: its protocol, the details its measurements recorded, and the short lists among them as tables. Metrics nobody measured have no details to
    show; a list that an earlier metric has told is pointed to."""
    told: dict[str, str] = {}
    found = []
    for name in matrix.experiment.metrics:
        taken = [(row, m.details) for row in matrix.rows if (m := matrix.entry(row, name).measurement) is not None]
        tables: list[Table] = []
        remarks: dict[str, str] = {}
        for key in dict.fromkeys(key for _, details in taken for key in details):
            shown = _list_table(matrix, key, [(row, details.get(key)) for row, details in taken], lang)
            if shown is None:
                continue
            first = told.setdefault(repr(shown), name)
            remarks[key] = lang("measured.listed_below") if first == name else lang("measured.listed_with", metric=f"`{first}`")
            tables += [shown] if first == name else []
        facts = [replace(fact, text=remarks[fact.key], differs=False) if fact.key in remarks else fact for fact in fold((d for _, d in taken), lang)]
        found.append(Protocol(name, METRICS[name].protocol, facts, tables))
    return found


def _list_table(matrix: Matrix, key: str, values: list[tuple[Row, object]], lang: Language) -> Table | None:
    """The lists that the cells' measurements hold under `key`, an item a line; None where one of them is no short list of mappings, or they are many."""
    lists = [(row, items) for row, value in values if value is not None and (items := listed(value, lang)) is not None]
    if not lists or len(lists) < sum(value is not None for _, value in values) or sum(len(items) for _, items in lists) > MOST_LINES:
        return None
    columns = list(dict.fromkeys(column for _, items in lists for item in items for column in item))
    rows = [[escape(named(matrix, row, lang)), *(escape(said(item.get(c), lang)) for c in columns)] for row, items in lists for item in items]
    return Table(key, [lang("column.path"), *(lang.field(column) for column in columns)], rows)


def steps(matrix: Matrix, verdict: Verdict, lang: Language) -> Table:
    """The cells a hypothesis rests on: the metric, and where measured the weights' cosines and the noise floor that came with it."""
    metric = verdict.hypothesis.criterion.metric
    extra = [
        name
        for name in ("expert_cosine", "ple_cosine")
        if name in matrix.experiment.metrics and name != metric and any(matrix.entry(entry.row, name).measurement for entry in verdict.entries)
    ]
    floors = [noise_floor(entry) for entry in verdict.entries]
    with_floor = any(floor != "–" for floor in floors)
    rows = []
    for entry, name, floor in zip(verdict.entries, told_apart(matrix, verdict.entries, lang), floors, strict=True):
        values = (short(matrix.entry(entry.row, other)) for other in extra)
        rows.append([escape(name), with_error(entry), *values, *([floor] if with_floor else [])])
    one = len({entry.metric for entry in verdict.entries}) == 1
    header = [lang("column.path"), title(metric, lang) if one else unit(metric, lang), *(lang.metric(name) for name in extra)]
    return Table("", [*header, *([lang("column.noise_floor")] if with_floor else [])], rows)


def noise_floor(entry: Entry) -> str:
    """The noise floor recorded with a measurement, in its own unit, or a dash."""
    details = entry.measurement.details if entry.measurement else {}
    found = [v for key, v in sorted(details.items()) if "noise_floor" in key and isinstance(v, int | float) and not isinstance(v, bool)]
    return number(entry.metric, float(found[0])) if found else "–"


def noisy(matrix: Matrix, lang: Language) -> list[str]:
    """One line per cell with repeated measurements whose spread makes their median weak evidence."""
    wide: dict[str, list[str]] = defaultdict(list)
    for entry in matrix.entries.values():
        found = entry.measurement
        if found is None or found.min is None or found.max is None or not found.value:
            continue
        if (found.max - found.min) / abs(found.value) > SPREAD_LIMIT:
            low, high = number(entry.metric, found.min), number(entry.metric, found.max)
            wide[named(matrix, entry.row, lang)].append(f"{title(entry.metric, lang)}: {lang('range', low=low, high=high)}")
    return [f"{escape(cell)}{lang('colon')}{'; '.join(values)}" for cell, values in wide.items()]


def speed_metrics(matrix: Matrix) -> list[str]:
    """The experiment's metrics that are speeds."""
    return [name for name in matrix.experiment.metrics if METRICS[name].unit == "tok/s"]


def bases(matrix: Matrix) -> dict[str, Row]:
    """What each cell is set against, by its key: of the experiment's baseline (without one, of the reference path) the cell that is alike and has the same
    files, or else the files that this cell's were converted from."""
    wanted = matrix.experiment.baseline
    chosen = [row for row in matrix.rows if (matches(row.point, wanted) if wanted else row.cell.path.reference)]
    known = {_peers(row, row.cell.model.artifact): row for row in chosen}
    found = {}
    for row in matrix.rows:
        model = row.cell.model
        base = known.get(_peers(row, model.artifact)) or known.get(_peers(row, model.source))
        if base is not None and base is not row:
            found[row.key] = base
    return found


def base_name(matrix: Matrix, lang: Language) -> str:
    """What speeds are set against, in words."""
    wanted = matrix.experiment.baseline
    return " ".join(f"{key}={as_text(value)}" for key, value in wanted.items()) if wanted else lang("compare.the_reference")


def compare_speeds(matrix: Matrix, lang: Language) -> Table:
    """Every measured speed against its base at the same depth. A cell without any measured speed is left to the list of gaps."""
    names, against = speed_metrics(matrix), bases(matrix)
    rows, notes = [], []
    for row in matrix.rows:
        base = against.get(row.key)
        if base is None or not any(matrix.entry(row, name).measurement for name in names):
            continue
        rows.append([named(matrix, row, lang), *(compare(matrix.entry(row, name), matrix.entry(base, name), lang) for name in names)])
        others = beside(row.current, base.current) if row.current and base.current and base.current.metrics else []
        if others:
            notes.append(lang("compare.beside", cell=escape(named(matrix, row, lang)), what=escape(lang.series(lang.difference(one) for one in others))))
    return Table("", [lang("column.path"), *(title(name, lang) for name in names)], rows, words=1 + len(names), notes=notes)


def _peers(row: Row, files: str) -> tuple[object, ...]:
    """Cells with the same value, each with its files, may be set against each other."""
    return row.cell.model.name, files, row.cell.layers, row.cell.device.name, row.cell.bench, row.cell.placement, row.cell.mode


def compare(mine: Entry, base: Entry, lang: Language) -> str:
    """Faster, slower or not separated, with the ratio of medians and its interval, or why the two are not compared."""
    a, b, record, other = mine.measurement, base.measurement, mine.row.current, base.row.current
    if a is None or record is None:
        return status_word(mine)
    if b is None or other is None:
        return lang("compare.no_reference", status=gap_word(base.gap) if base.gap else "")
    if reasons := unlike(record, other, mine.metric):
        return lang("compare.differ", what=lang.series(dict.fromkeys(lang.field(one.what) for one in reasons)))
    found = contrast(a, b)
    if not isinstance(found, Comparison):
        return lang("compare.no_repeats")
    interval = f" [{significant(found.low)}, {significant(found.high)}]" if found.low is not None and found.high is not None else ""
    return f"{lang('compare.' + found.word.replace(' ', '_'))} ×{significant(found.ratio)}{interval}"
