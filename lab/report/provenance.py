"""Where the numbers come from: what makes them comparable, what else was recorded, and the path of every record quoted.

Over the records whose numbers are printed. A fact in which they differ is said to differ; what is only of use beside one record is left there.
"""

from __future__ import annotations

from collections.abc import Mapping

from lab.matrix import Matrix
from lab.record import Record
from lab.report.facts import Fact, fold, identities
from lab.report.language import Language
from lab.report.markup import Table, escape
from lab.report.tables import named

_ONLY_IN_RECORD = frozenset({"command", "worker_argv", "lab_pid", "worker", "fill", "experiments"})
"""Recorded per process or for the findings, with paths of the machine in them: needed to trace one attempt, noise in a list over many."""

_STATES = ("driver", "gpu_memory", "gpu_clocks", "load", "cpu_clocks")


def shown_records(matrix: Matrix) -> list[Record]:
    """The records whose numbers the report prints."""
    return [row.current for row in matrix.rows if row.current and row.current.metrics]


def origin(records: list[Record], lang: Language) -> list[Fact]:
    """What makes the printed numbers comparable: machine, device, torch, code and artifact."""
    return identities(records, lang)


def recorded(records: list[Record], lang: Language) -> list[Fact]:
    """What else the records say of where they come from."""
    sources = [{**record.provenance, "machine_state": _state(record), "artifact": record.artifact} for record in records]
    return fold(({key: value for key, value in source.items() if key not in _ONLY_IN_RECORD} for source in sources), lang)


def _state(record: Record) -> dict[str, str]:
    """What of the machine's state moves a number, before and after: the rest (disks, stores, sizes) is of use beside the record itself."""
    kept = record.provenance.get("machine_state") or {}
    found = {f"{name} {when}": kept[when][name] for when in ("before", "after") for name in _STATES if name in (kept.get(when) or {})}
    return {name: f"{check['state']}: {check['found']}" for name, check in found.items()}


def record_table(matrix: Matrix, references: Mapping[str, str], lang: Language) -> Table:
    """Every cell with a record: its number, how it stands, how much of it is measured, and where the record is."""
    rows = []
    for row in (row for row in matrix.rows if row.current is not None):
        measured = sum(matrix.entry(row, name).measurement is not None for name in matrix.experiment.metrics)
        counts = [str(measured), str(len(matrix.experiment.metrics) - measured), str(len(row.standings))]
        rows.append([references[row.key], escape(named(matrix, row, lang)), str(row.status), f"`{row.record_path}`", *counts])
    names = ("record", "cell", "status", "file", "measured_count", "gap_count", "attempts")
    return Table("", [lang(f"column.{name}") for name in names], rows, words=4)


def cells_without_record(matrix: Matrix, lang: Language) -> list[str]:
    """The other expected cells, by name and id."""
    return [f"{escape(named(matrix, row, lang))}{lang('colon')}`{row.cell.id}` ({row.status})" for row in matrix.rows if row.current is None]
