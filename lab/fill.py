"""The command that measures a given cell: the inverse of composition.

A gap promises the exact command that would fill it. Choices come first, then whatever differs from them, and the result is composed again:
a command that would not lead back to the same cell is a bug and raises, instead of being printed.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from lab.cell import SYNTHETIC, Cell
from lab.compose import compose_cells, known_keys
from lab.errors import LabError
from lab.project import Project


def fill_command(project: Project, cell: Cell) -> str:
    """`python -m lab run ...` for `cell`, quoted for a POSIX shell. Raises RuntimeError if it would measure another cell."""
    return "python -m lab run " + shlex.join(fill_words(project, cell))


def fill_words(project: Project, cell: Cell) -> tuple[str, ...]:
    """The overrides that compose to this cell, choices first."""
    words = [f"{key}={spec.name}" for key, spec in (("model", cell.model), ("path", cell.path))]
    words += [f"layers={cell.layers}", f"device={cell.device.name}", f"bench={cell.bench.name}"]
    files = f"artifact={_quoted(cell.model.artifact)}"
    try:
        base = _composed(project, words)
    except LabError:  # a model that has no files of its own
        words.append(files)
        base = _composed(project, words)
    if (cell.model.source or cell.model.artifact == SYNTHETIC) and cell.model.artifact != base.model.artifact:
        words.append(files)  # the short word for both fields it sets
        base = _composed(project, words)
    if base == cell:
        return tuple(words)
    known = known_keys(project, words)
    single = _differences(base.model_dump(mode="json"), cell.model_dump(mode="json"), known, lists=False)
    # Lists last: a list may follow from single values by interpolation, and then needs no word of its own. Where the single values alone
    # are no cell (a component is gone that a list still names), the lists are compared with the plain choices.
    with suppress(LabError):
        base = _composed(project, words + single)
    words += single + _differences(base.model_dump(mode="json"), cell.model_dump(mode="json"), known, lists=True)
    if _composed(project, words) != cell:
        raise RuntimeError(f"bug: the fill command for {cell.id} composes to another cell: {' '.join(words)}")
    return tuple(words)


def _composed(project: Project, words: list[str]) -> Cell:
    return compose_cells(words, project)[0]


def _differences(base: Any, want: Any, known: Collection[str], lists: bool, key: str = "") -> list[str]:
    """Overrides that turn `base` into `want`: single values, or (with `lists`) whole lists."""
    if isinstance(base, dict) and isinstance(want, dict):
        words = [] if lists else [f"~{key}.{gone}" for gone in base.keys() - want.keys()]
        for name, value in want.items():
            dotted = f"{key}.{name}" if key else name
            if name in base:
                words += _differences(base[name], value, known, lists, dotted)
            elif not lists:
                words.append(f"++{dotted}={_quoted(value)}")
        return words
    if base == want or isinstance(want, list) != lists:
        return []
    return [f"{'' if key in known else '++'}{key}={_quoted(want)}"]


def _quoted(value: Any) -> str:
    """`value` in Hydra's override grammar."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_quoted(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(_quoted(item) for item in value) + "]"
    if isinstance(value, str):
        plain = value and all(c.isalnum() or c in "_./-" for c in value) and not _looks_like_another_type(value)
        return value if plain else "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return json.dumps(value)


def _looks_like_another_type(text: str) -> bool:
    """Whether Hydra would read the bare word as a number, boolean or null."""
    try:
        float(text)
    except ValueError:
        return text.lower() in ("true", "false", "null", "nan", "inf") or text.isdigit()
    return True
