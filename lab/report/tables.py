"""What the report's tables share: the name of a row, the order of rows, the numbers of records, and one gap told in words.

A record is quoted by a short number (R1, R2, ...) whose path stands in the closing section, so that every measured value can be traced
without a path in each cell of a table. Layout says nothing about validity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from lab.matrix import Entry, Matrix, Row
from lab.registered import as_text
from lab.report.language import Language
from lab.report.numbers import short, status_word


def label(matrix: Matrix, row: Row) -> str:
    """What tells the row from others of the same depth: its path, and any override its table does not share."""
    return " ".join([row.cell.path.name, *(f"{key}={value}" for key, value in own_overrides(matrix, row).items())])


def own_overrides(matrix: Matrix, row: Row) -> dict[str, str]:
    """The row's overrides that its experiment does not share, without path and depth."""
    return {key: value for key, value in row.point.items() if key not in {"path", "layers"} and key not in matrix.experiment.overrides}


def named(matrix: Matrix, row: Row, lang: Language) -> str:
    """The row's label with its depth."""
    return lang("at_depth", what=label(matrix, row), layers=row.cell.layers)


def told_apart(matrix: Matrix, entries: Sequence[Entry], lang: Language) -> list[str]:
    """The entries' rows by name, with the metric where they are of more than one: of one cell, two metrics would read alike."""
    several = len({entry.metric for entry in entries}) > 1
    names = [named(matrix, entry.row, lang) for entry in entries]
    return [lang("verdict.of", metric=lang.metric(entry.metric), place=name) if several else name for entry, name in zip(entries, names, strict=True)]


def place(where: Mapping[str, str | int | float | bool], lang: Language) -> str:
    """Overrides in words: the path by its name, the depth as a depth, the rest as written; every cell where there are none."""
    words = [as_text(value) if key == "path" else f"{key}={as_text(value)}" for key, value in where.items() if key != "layers"]
    if "layers" not in where:
        return " ".join(words) or lang("every_cell")
    depth = lang("depth", layers=as_text(where["layers"]))
    return lang.series([" ".join(words), depth]) if words else depth


def by_depth(matrix: Matrix) -> list[tuple[int, list[Row]]]:
    """Rows grouped by layers, shallow first, in the experiment's order inside."""
    ordered = sorted(matrix.rows, key=lambda row: row.cell.layers)
    return [(layers, list(rows)) for layers, rows in groupby(ordered, key=lambda row: row.cell.layers)]


def references(matrix: Matrix) -> dict[str, str]:
    """The short number of each shown record, by the hash of its cell, in the experiment's order."""
    shown = [row for row in matrix.rows if row.current is not None]
    return {row.key: f"R{number}" for number, row in enumerate(shown, start=1)}


def screen_word(entry: Entry) -> str:
    """For the table on screen: the value, or the bare status word."""
    return short(entry) if entry.measurement else status_word(entry).strip("*")
