"""The matrix: what an experiment expects, set against what the records hold.

Every (cell, metric) is one entry: measured, or a gap with its status, its reason and the command that would fill it. A cell shows its
current attempt: the newest that is OK under today's protocol versions, else the newest. The others are counted as superseded and
stay on disk. The books must close - expected = measured + gaps - and a matrix that does not close is never returned. The matrix trusts the
records: whether a measured path was the claimed one is judged before a record is written (`lab.admission`).
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from lab.books import Totals
from lab.cell import Cell
from lab.errors import LabError
from lab.experiment import Experiment
from lab.metrics import METRICS
from lab.record import Gap, Measurement, Record, Status

if TYPE_CHECKING:
    import pandas as pd

State = Literal["measured", "gap", "not_run"]
ComposeCell = Callable[[list[str]], Cell]
"""Overrides to the cell they mean: `lab.compose.compose_cell` of a project."""


@dataclass(frozen=True)
class Unreadable:
    """A record file that could not be read: an attempt happened, and what it found is lost until the file is repaired."""

    cell_id: str
    path: str
    why: str


@dataclass(frozen=True)
class Row:
    """One expected cell: its current attempt (None: nothing counts), the attempts set aside, and why the newest one does not count."""

    cell: Cell
    point: dict[str, str]
    current: Record | None
    superseded: tuple[Record, ...]
    unreadable: tuple[Unreadable, ...] = ()
    stale: str = ""

    @property
    def fill(self) -> str:
        """The command that measures this cell."""
        return "python -m lab run " + shlex.join(f"{key}={value}" for key, value in self.point.items())

    @property
    def status(self) -> Status:
        """How the cell stands, as one word."""
        if self.current is not None:
            return self.current.status
        return Status.INFRA if self.unreadable and not self.superseded else Status.NOT_RUN

    @property
    def later(self) -> tuple[Record, ...]:
        """Attempts newer than the current one, oldest first: they did not displace it, and a reader should know of them."""
        return tuple(r for r in self.superseded if self.current is not None and _age(r) > _age(self.current))

    @property
    def record_path(self) -> str:
        """Where the current attempt's record lies, from the project root; empty without one."""
        return f"runs/{self.current.cell_id}/{self.current.attempt:03d}/record.json" if self.current else ""


@dataclass(frozen=True)
class Entry:
    """One (cell, metric): either a measurement or a gap, never both."""

    row: Row
    metric: str
    measurement: Measurement | None
    gap: Gap | None

    @property
    def state(self) -> State:
        """`not_run` is a gap too: the one that only needs the command to be run."""
        if self.gap is None:
            return "measured"
        return "not_run" if self.gap.status is Status.NOT_RUN else "gap"


@dataclass(frozen=True)
class Matrix:
    """The rows of an experiment and their entries, in the experiment's order."""

    experiment: Experiment
    rows: tuple[Row, ...]
    entries: dict[tuple[str, str], Entry]
    totals: Totals
    unreadable: tuple[Unreadable, ...] = ()

    def entry(self, row: Row, metric: str) -> Entry:
        """The entry of one cell and metric."""
        return self.entries[row.cell.id, metric]

    def frame(self) -> pd.DataFrame:
        """The long form: one line per (cell, metric)."""
        import pandas as pd  # slow to import, and the table on screen does not need it

        return pd.DataFrame(self.long_form())

    def long_form(self) -> list[dict[str, Any]]:
        """The long form as plain values (None where there is none), ready for JSON."""
        return [_flat(entry) for entry in self.entries.values()]


def build_matrix(experiment: Experiment, records: Iterable[Record], compose_cell: ComposeCell, unreadable: Iterable[Unreadable] = ()) -> Matrix:
    """Set the experiment against the records. Raises LabError for overrides that are no cell, BooksError if the books do not close."""
    by_hash: dict[str, list[Record]] = defaultdict(list)
    distinct = {(r.cell_hash, r.attempt, r.started_at, r.resume_key): r for r in records}
    for record in distinct.values():
        by_hash[record.cell_hash].append(record)
    lost = tuple(sorted(unreadable, key=lambda item: item.path))
    rows = tuple(
        _row(cell, point, by_hash.get(cell.hash, []), tuple(u for u in lost if u.cell_id == cell.id), experiment.metrics)
        for cell, point in _expected(experiment, compose_cell)
    )
    entries = {(row.cell.id, metric): _entry(row, metric) for row in rows for metric in experiment.metrics}
    totals = _totals(experiment, rows, entries.values(), list(distinct.values()), len(lost))
    totals.close()
    return Matrix(experiment, rows, entries, totals, lost)


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


def _row(cell: Cell, point: dict[str, str], records: list[Record], lost: tuple[Unreadable, ...], metrics: tuple[str, ...]) -> Row:
    ordered = sorted(records, key=_age)
    admissible = [r for r in ordered if r.status is Status.OK and not _stale(r, metrics)]
    current = admissible[-1] if admissible else (ordered[-1] if ordered else None)
    stale = _stale(current, metrics) if current is not None and current.status is Status.OK else ""
    kept = None if stale else current
    return Row(cell, point, kept, tuple(r for r in ordered if r is not kept), lost, stale)


def _age(record: Record) -> tuple[datetime, int, str]:
    """Sort key, oldest first. Time goes before the attempt number, which two machines may both have given out."""
    try:
        when = datetime.fromisoformat(record.started_at)
    except ValueError:
        when = datetime.min  # an unknown time never displaces a known one
    return when if when.tzinfo else when.replace(tzinfo=UTC), record.attempt, record.resume_key


def _stale(record: Record, metrics: tuple[str, ...]) -> str:
    """Why the record's numbers are not today's: another protocol version or unit in a metric of the experiment. Empty if none."""
    for name in metrics:
        found, now = record.metrics.get(name), METRICS[name]
        if found is not None and (found.protocol, found.unit) != (now.protocol, now.unit):
            was, is_now = f"{found.protocol} in {found.unit}", f"{now.protocol} in {now.unit}"
            return f"attempt {record.attempt} measured {name} under {was}; it is now {is_now}"
    return ""


def _entry(row: Row, metric: str) -> Entry:
    """The current attempt's measurement of the metric, or the gap that stands for it."""
    record = row.current
    if record is None:
        reason = row.stale or (f"record file unreadable: {row.unreadable[-1].path}" if row.unreadable else "never attempted")
        return Entry(row, metric, None, Gap(status=row.status, reason=reason, fill=row.fill))
    if record.status is Status.OK and metric in record.metrics:
        return Entry(row, metric, record.metrics[metric], None)
    if metric in record.gaps:
        gap = record.gaps[metric]
        return Entry(row, metric, None, gap if gap.fill.strip() else gap.model_copy(update={"fill": row.fill}))
    if record.status is Status.OK:
        return Entry(row, metric, None, Gap(status=Status.NOT_RUN, reason=f"attempt {record.attempt} did not measure it", fill=row.fill))
    return Entry(row, metric, None, Gap(status=record.status, reason=record.reason, fill=row.fill))


def _totals(experiment: Experiment, rows: tuple[Row, ...], found: Iterable[Entry], known: list[Record], unreadable: int) -> Totals:
    """Count each side on its own: what is expected from the file, what was found from the entries, attempts from the records."""
    hashes = {row.cell.hash for row in rows}
    entries = list(found)
    return Totals(
        cells=len(rows),
        expected=len(experiment.points()) * len(experiment.metrics),
        measured=sum(entry.measurement is not None for entry in entries),
        gaps=sum(entry.gap is not None for entry in entries),
        not_run=sum(entry.state == "not_run" for entry in entries),
        attempts=len(known),
        current=sum(row.current is not None for row in rows),
        superseded=sum(len(row.superseded) for row in rows),
        elsewhere=sum(record.cell_hash not in hashes for record in known),
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
    }
