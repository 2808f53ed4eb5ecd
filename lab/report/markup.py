"""Markdown made by hand: escaping of free text, code spans, and tables whose columns line up in a terminal.

Free text comes from records and experiment files and may hold anything; none of it may open a column, a tag or an emphasis. Widths count
East Asian characters as two, as terminals do. Nothing here knows what the text says.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, field

MAX_ALIGNED = 150
"""Columns: a wider table is written without padding, which would only make every line wrap."""


@dataclass(frozen=True)
class Table:
    """A titled table; the first `words` columns are text, set to the left, the others are set to the right. `notes` stand below it."""

    title: str
    header: list[str]
    rows: list[list[str]]
    words: int = 1
    notes: list[str] = field(default_factory=list)


def escape(text: object) -> str:
    """Free text for a Markdown line or table cell: no column breaks, no line breaks, no HTML, no links, no accidental emphasis.

    Code spans in it are kept, as recorded reasons quote commands.
    """
    flat = " ".join(str(text).split())
    parts = re.split(r"(`[^`]+`)", flat)
    return "".join(part.replace("|", r"\|") if index % 2 else _plain(part) for index, part in enumerate(parts))


def _plain(text: str) -> str:
    marked = re.sub(r"([|*~`\\])", r"\\\1", text).replace("](", r"]\(")
    # An underscore inside a word is no emphasis, and names are full of them.
    marked = re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", marked)
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", marked)  # a tag begins so; a comparison stays readable


def code(text: object) -> str:
    """Text as a code span, with a fence longer than any run of backticks in it."""
    flat = " ".join(str(text).split())
    fence = "`" * (1 + max((len(run) for run in re.findall(r"`+", flat)), default=0))
    return f"{fence} {flat} {fence}" if len(fence) > 1 else f"`{flat}`"


def table(t: Table) -> str:
    """The table as Markdown, its columns padded where the result still fits a screen. Cells are Markdown already."""
    lines = [t.header, *t.rows]
    widths = [max(3, *(width(line[column]) for line in lines)) for column in range(len(t.header))]
    aligned = sum(widths) + 3 * len(widths) + 1 <= MAX_ALIGNED
    left = [column < t.words for column in range(len(widths))]

    def row(cells: list[str]) -> str:
        padded = [_pad(text, widths[at], left[at]) for at, text in enumerate(cells)] if aligned else cells
        return f"| {' | '.join(padded)} |"

    sizes = widths if aligned else [3] * len(widths)
    rule = [":" + "-" * (size - 1) if to_left else "-" * (size - 1) + ":" for size, to_left in zip(sizes, left, strict=True)]
    return "\n".join([row(t.header), f"| {' | '.join(rule)} |", *(row(cells) for cells in t.rows)])


def width(text: str) -> int:
    """Columns the text takes in a terminal."""
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in text if not unicodedata.combining(char))


def _pad(text: str, size: int, left: bool) -> str:
    space = " " * (size - width(text))
    return text + space if left else space + text


def anchor(heading: str) -> str:
    """The fragment under which GitHub reaches a heading: lower case, punctuation gone, blanks as dashes."""
    kept = "".join(char for char in heading.strip().lower() if char.isalnum() or char in " -_")
    return kept.replace(" ", "-")
