"""The matrix: what an experiment expects, set against what the records hold.

Every (cell, metric) is one entry: measured, or a gap with its status, its reason and the command that would fill it. A cell shows its
current attempt; how the others stand (`lab.standing`) is kept beside it. Numbers that cannot both be right (`lab.doubts`) become gaps that say so. The
books must close - expected = measured + gaps - and a matrix that does not close is never returned. The matrix trusts the records: whether a measured
path was the claimed one is judged before a record is written (`lab.admission`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lab.books import Totals
from lab.cell import Cell
from lab.dead_ends import Closed, is_within
from lab.doubts import QUANTITY_OF, Rate, observations
from lab.errors import LabError
from lab.experiment import Experiment
from lab.metrics import METRICS
from lab.plausibility import Flag, flags
from lab.record import Gap, Record, Status
from lab.registered import matches
from lab.rows import Entry, Row, Unreadable
from lab.soundness import refusals
from lab.standing import NO_MARKS, Kind, Marks, age, standings, with_copies

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["ComposeCell", "Entry", "Matrix", "RegisteredChange", "Row", "Unreadable", "build_matrix"]

ComposeCell = Callable[[list[str]], Cell]
"""Overrides to the cell they mean: `lab.compose.compose_cell` of a project."""


@dataclass(frozen=True)
class RegisteredChange:
    """Another version of the experiment's file that records were made under: its sha256, when the first and the last of them started, and how many."""

    sha256: str
    first: str
    last: str
    records: int


@dataclass(frozen=True)
class Matrix:
    """The rows of an experiment and their entries by (cell hash, metric), in the experiment's order; the flags over its numbers."""

    experiment: Experiment
    rows: tuple[Row, ...]
    entries: dict[tuple[str, str], Entry]
    totals: Totals
    unreadable: tuple[Unreadable, ...] = ()
    flags: tuple[Flag, ...] = ()
    registered_changes: tuple[RegisteredChange, ...] = ()

    def entry(self, row: Row, metric: str) -> Entry:
        """The entry of one cell and metric."""
        return self.entries[row.key, metric]

    def frame(self) -> pd.DataFrame:
        """The long form: one line per (cell, metric)."""
        import pandas as pd  # slow to import, and the table on screen does not need it

        return pd.DataFrame(self.long_form())

    def long_form(self) -> list[dict[str, Any]]:
        """The long form as plain values (None where there is none), ready for JSON."""
        return [_flat(entry) for entry in self.entries.values()]


def build_matrix(
    experiment: Experiment,
    records: Iterable[Record],
    compose_cell: ComposeCell,
    unreadable: Iterable[Unreadable] = (),
    marks: Marks = NO_MARKS,
) -> Matrix:
    """Set the experiment against the records. Raises LabError for overrides that are no cell, BooksError if the books do not close."""
    known = with_copies(records)
    by_hash: dict[str, list[Record]] = defaultdict(list)
    for same in known:
        by_hash[same[0].cell_hash] += same
    lost = tuple(sorted(unreadable, key=lambda item: item.path))
    rows = tuple(
        Row(
            cell,
            point,
            standings(by_hash.get(cell.hash, ()), marks, experiment.metrics, experiment.weights),
            tuple(u for u in lost if u.cell_id == cell.id),
            next((Closed(experiment, end).reason() for end in experiment.dead_ends if end.where and is_within(cell, end.where)), ""),
            {metric: exempt.reason for exempt in experiment.not_owed if matches(point, exempt.where) for metric in exempt.metrics},
        )
        for cell, point in _expected(experiment, compose_cell)
    )
    entries = {(row.key, entry.metric): entry for row in rows for entry in _entries(row, experiment.metrics)}
    raised, doubted = _doubt(rows, entries)
    entries |= doubted
    totals = _totals(experiment, rows, entries.values(), known, len(lost))
    totals.close()
    return Matrix(experiment, rows, entries, totals, lost, raised, _registered_changes(experiment, rows))


def _expected(experiment: Experiment, compose_cell: ComposeCell) -> list[tuple[Cell, dict[str, str]]]:
    """The expected cells, composed; two override lists that mean the same cell would be counted twice, and are refused."""
    found: dict[str, tuple[Cell, dict[str, str]]] = {}
    for point, overrides in zip(experiment.points(), experiment.expected_cells(), strict=True):
        try:
            cell = compose_cell(overrides)
        except LabError as err:
            raise LabError(f"{experiment.source}: {' '.join(overrides)}: {err}") from err
        if cell.hash in found:
            raise LabError(f"{experiment.source}: {' '.join(overrides)}: the same cell as {found[cell.hash][1]}")
        found[cell.hash] = (cell, point)
    return list(found.values())


def _entries(row: Row, metrics: Iterable[str]) -> Iterator[Entry]:
    """The row's entries. A number that today's rules refuse is a gap, whatever the rules were when it was recorded."""
    refused = refusals(row.current) if row.current is not None else {}
    for metric in metrics:
        if row.current is not None and metric in refused:
            status, reason = refused[metric]
            gap = Gap(status=status, reason=f"{reason} (attempt {row.current.attempt} recorded it as a number)", fill=row.fill)
            yield Entry(row, metric, None, gap)
        else:
            yield _entry(row, metric)


def _entry(row: Row, metric: str) -> Entry:
    """The current attempt's measurement of the metric, or the gap that stands for it."""
    record = row.current
    if record is not None and metric in record.metrics:
        return Entry(row, metric, record.metrics[metric], None)
    if metric in row.not_owed:
        return Entry(row, metric, None, Gap(status=Status.UNSUPPORTED, reason=f"not applicable: {row.not_owed[metric]}", fill=row.fill))
    if record is not None and metric in record.gaps:
        gap = record.gaps[metric]
        return Entry(row, metric, None, gap if gap.fill.strip() else gap.model_copy(update={"fill": row.fill}))
    if record is not None and record.status is Status.OK:
        return Entry(row, metric, None, Gap(status=Status.NOT_RUN, reason=f"attempt {record.attempt} did not measure it", fill=row.fill))
    return Entry(row, metric, None, Gap(status=row.status, reason=row.reason, fill=row.fill))


def _doubt(rows: tuple[Row, ...], entries: dict[tuple[str, str], Entry]) -> tuple[tuple[Flag, ...], dict[tuple[str, str], Entry]]:
    """The flags over all measured rates, and a gap for every entry that one of them names: which of two is wrong cannot be told, so neither stands."""
    shared = Counter(row.cell.id for row in rows)
    named, rates = {}, []
    for key, entry in entries.items():
        if entry.measurement is not None and entry.row.current is not None and entry.metric in QUANTITY_OF:
            cell = entry.row.cell
            name = f"{cell.id if shared[cell.id] == 1 else entry.row.key}/{entry.metric}"
            named[name] = key
            rates.append(Rate(name, cell, entry.row.current, QUANTITY_OF[entry.metric], entry.measurement))
    raised = flags(observations(rates))
    sentences: dict[tuple[str, str], list[str]] = defaultdict(list)
    for flag in raised:
        for name in flag.names:
            sentences[named[name]].append(flag.sentence())
    gaps = {key: Gap(status=Status.IMPLAUSIBLE, reason="; ".join(said), fill=entries[key].row.fill) for key, said in sentences.items()}
    return tuple(raised), {key: replace(entries[key], measurement=None, gap=gap) for key, gap in gaps.items()}


def _registered_changes(experiment: Experiment, rows: tuple[Row, ...]) -> tuple[RegisteredChange, ...]:
    """The other versions of the file that the records of its cells were made under, by first use. A record that names none tells nothing."""
    starts: dict[str, list[str]] = defaultdict(list)
    for record in sorted((record for row in rows for record, _ in row.standings), key=age):
        registered = (record.provenance.get("experiments") or {}).get(experiment.name)
        if registered is not None and registered != experiment.sha256:
            starts[str(registered)].append(record.started_at)
    return tuple(RegisteredChange(digest, times[0], times[-1], len(times)) for digest, times in starts.items())


def _totals(experiment: Experiment, rows: tuple[Row, ...], found: Iterable[Entry], known: list[tuple[Record, ...]], unreadable: int) -> Totals:
    """Count each side on its own: what is expected from the file, what was found from the entries, attempts from the records."""
    hashes = {row.key for row in rows}
    entries = list(found)
    kinds = Counter(standing.kind for row in rows for _, standing in row.standings)
    return Totals(
        cells=len(rows),
        expected=len(experiment.points()) * len(experiment.metrics),
        measured=sum(entry.measurement is not None for entry in entries),
        gaps=sum(entry.gap is not None for entry in entries),
        not_run=sum(entry.state == "not_run" for entry in entries),
        attempts=sum(len(same) for same in known),
        current=kinds[Kind.CURRENT],
        superseded=kinds[Kind.SUPERSEDED],
        invalidated=kinds[Kind.INVALIDATED],
        stale=kinds[Kind.STALE_PROTOCOL],
        other_weights=kinds[Kind.OTHER_WEIGHTS],
        elsewhere=sum(same[0].cell_hash not in hashes for same in known),
        copies=sum(len(same) - 1 for same in known),
        unreadable=unreadable,
    )


def _flat(entry: Entry) -> dict[str, Any]:
    row, found, gap = entry.row, entry.measurement, entry.gap
    return {
        "cell": row.cell.id,
        "path": row.cell.path.name,
        "layers": row.cell.layers,
        "metric": entry.metric,
        "state": entry.state,
        "value": found.value if found else None,
        "min": found.min if found else None,
        "max": found.max if found else None,
        "unit": METRICS[entry.metric].unit,
        "status": str(gap.status if gap else Status.OK),
        "reason": gap.reason if gap else None,
        "fill": gap.fill if gap else None,
        "record": row.record_path or None,
        "attempt": row.current.attempt if row.current else None,
        "superseded": len(row.superseded),
        "invalidated": len(row.of(Kind.INVALIDATED)),
    }
