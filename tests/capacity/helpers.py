"""Ledgers made in the test's own process, since torch is loaded here anyway; how the real process is asked has a test of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.capacity import Ledger, ledgers, service
from lab.capacity.__main__ import answer
from lab.cell import Cell
from lab.compose import compose_cells
from lab.project import Project


def _ask(project: Project, wanted: Sequence[tuple[Cell, Path, Path]]) -> list[dict[str, Any]]:
    return [answer(service.question(project, cell, sizes)) for cell, sizes, _ in wanted]


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ledgers` without a second process."""
    monkeypatch.setattr(service, "_ask", _ask)


def ledger_of(project: Project, *words: str) -> Ledger:
    """The ledger of the one cell that `words` compose to."""
    (cell,) = compose_cells(words, project)
    found = ledgers(project, [cell])[cell.hash]
    assert isinstance(found, Ledger), found
    return found
