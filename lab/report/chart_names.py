"""What a cell is called in charts: as in the tables, without what says nothing there, so that a name leaves room for the drawing.

A table has a line for a path of forty letters; a chart has not. Left out is the path's name where all cells share it, folders before a file, and the keys of
choices that are known by their value. Two cells that tables tell apart are told apart here too: where the short names do not, the full ones stand.
"""

from __future__ import annotations

from lab.matrix import Matrix, Row
from lab.report.tables import label, own_overrides

_BY_VALUE = frozenset({"artifact", "model", "device", "engine", "bench"})
"""Overrides whose value says what it is."""


def chart_names(matrix: Matrix) -> dict[str, str]:
    """The name of every row without its depth, by its key."""
    one_path = len({row.cell.path.name for row in matrix.rows}) == 1
    short = {row.key: _short(matrix, row, one_path) for row in matrix.rows}
    full = {row.key: label(matrix, row) for row in matrix.rows}
    if len({(short[key], full[key]) for key in full}) > len(set(short.values())):
        return full
    return short


def _short(matrix: Matrix, row: Row, one_path: bool) -> str:
    words = [] if one_path else [row.cell.path.name]
    for key, value in own_overrides(matrix, row).items():
        tail = value.rstrip("/").rsplit("/", 1)[-1]
        words.append(tail if key in _BY_VALUE else f"{key.rsplit('.', 1)[-1]}={tail}")
    return " ".join(words) or row.cell.path.name
