"""The capacity gate of a run on real ledgers: a misfit is predicted, can be forced, and a real failure raises the next estimate."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab import fitting
from lab.capacity import Ledger, ledgers, needed_bytes
from lab.cell import Cell
from lab.compose import compose_cells
from lab.errors import GapError
from lab.fitting import capacity_gate
from lab.project import Project
from lab.record import Status
from lab.store import Store
from tests.runner_helpers import ROOT, record_of


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(root=ROOT, runs=tmp_path / "runs")


@pytest.fixture
def cells(project: Project) -> dict[int, Cell]:
    return {cell.layers: cell for cell in compose_cells(["path=expert_q2", "layers=3,6,12", "device=cpu"], project)}


def need(project: Project, cell: Cell) -> int:
    ledger = ledgers(project, [cell])[cell.hash]
    assert isinstance(ledger, Ledger)
    return needed_bytes(ledger)


def free(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(fitting, "machine_memory", lambda project, cell: (size, size))


def test_what_fits_passes_and_is_kept(project: Project, cells: dict[int, Cell], monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, need(project, cells[6]))
    result, kept = capacity_gate(project, cells[6], force=False)
    assert (result.gate, result.outcome) == ("capacity", "passed")
    assert kept["ledger_bytes"] == kept["estimate_bytes"] == kept["device_free_bytes"]


def test_a_misfit_is_predicted_to_the_byte_and_can_be_forced(project: Project, cells: dict[int, Cell], monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, need(project, cells[6]) - 1)
    with pytest.raises(GapError, match="does not fit: memory is short by .*lab plan says what would fit") as caught:
        capacity_gate(project, cells[6], force=False)
    assert caught.value.status is Status.OOM_PREDICTED
    result, kept = capacity_gate(project, cells[6], force=True)
    assert result.outcome == "forced" and "does not fit" in result.detail
    assert kept["device_free_bytes"] == kept["ledger_bytes"] - 1


def test_a_real_failure_raises_the_estimate_of_what_is_as_deep_or_deeper(project: Project, cells: dict[int, Cell], monkeypatch: pytest.MonkeyPatch) -> None:
    size = need(project, cells[6])
    free(monkeypatch, 2 * size)
    _, kept = capacity_gate(project, cells[6], force=False)
    record = record_of(cells[6], Status.OOM, evidence={"capacity": kept})
    folder, record = Store(project.runs).place_for(record)
    Store(project.runs).finish(folder, record)
    with pytest.raises(GapError, match="raised by 2.000: out of memory at 6 layers"):
        capacity_gate(project, cells[6], force=False)
    with pytest.raises(GapError, match="raised by 2.000"):
        capacity_gate(project, cells[12], force=False)
    result, kept = capacity_gate(project, cells[3], force=False)
    assert result.outcome == "passed" and not kept["raised"], "a shallower cell is not touched"


def test_a_cell_without_known_sizes_is_not_called_passed(project: Project, cells: dict[int, Cell]) -> None:
    unknown = cells[3].model_copy(update={"model": cells[3].model.model_copy(update={"artifact": "nowhere", "geometry": ""})})
    result, kept = capacity_gate(project, unknown, force=False)
    assert result.outcome == "not_checked" and result.detail and not kept
