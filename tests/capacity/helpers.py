"""Ledgers for tests: made up, or made in the test's own process, since torch is loaded here anyway; how the real process is asked has a test of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lab.capacity import Ledger, ledgers, service
from lab.capacity.__main__ import answer
from lab.capacity.ledger import Line, Place, Reads, Workspace
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


def ledger(device: int, host: int = 0, layers: int = 12, **changes: object) -> Ledger:
    """A ledger of so many weight bytes at each place and none beside them."""
    sizes: dict[Place, int] = {"device": device, "host": host}
    lines = [Line(component="trunk", codec="bf16", placement=where, where=where, weights=size // 2, bytes=size) for where, size in sizes.items()]
    data: dict[str, object] = {
        "model": "nano",
        "path": "expert_q2",
        "device": "cpu",
        "layers": layers,
        "one_memory": False,
        "lines": tuple(line for line in lines if line.bytes),
        "state_bytes": 0,
        "state_basis": "none",
        "workspace": Workspace(device_bytes=0, host_bytes=0, basis="none"),
        "decode_bytes_per_token": Reads(device_bytes=1, bus_bytes=0, host_bytes=0),
        "flops_per_token": 1.0,
        "basis": "none",
    }
    return Ledger.model_validate({**data, **changes})
