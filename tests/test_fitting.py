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
from lab.standing import Mark
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
    Store(project.runs).add(record_of(cells[6], Status.OOM, evidence={"capacity": kept}))
    with pytest.raises(GapError, match="raised by 2.000: out of memory at 6 layers"):
        capacity_gate(project, cells[6], force=False)
    with pytest.raises(GapError, match="raised by 2.000"):
        capacity_gate(project, cells[12], force=False)
    result, kept = capacity_gate(project, cells[3], force=False)
    assert result.outcome == "passed" and not kept["raised"], "a shallower cell is not touched"


def test_an_invalidated_failure_teaches_nothing(project: Project, cells: dict[int, Cell], monkeypatch: pytest.MonkeyPatch) -> None:
    free(monkeypatch, 2 * need(project, cells[6]))
    _, kept = capacity_gate(project, cells[6], force=False)
    store = Store(project.runs)
    failed = store.add(record_of(cells[6], Status.OOM, evidence={"capacity": kept}))
    with pytest.raises(GapError, match="raised by"):
        capacity_gate(project, cells[6], force=False)
    with store.changing():
        store.mark(failed.file.parent, [Mark(what="invalidated", reason="a neighbour held it", at="2026-11-30T10:00:00+00:00", by="me")])
    result, kept = capacity_gate(project, cells[6], force=False)
    assert result.outcome == "passed" and kept["raised"] == "" and kept["estimate_bytes"] == kept["ledger_bytes"]


def test_main_memory_that_ran_out_does_not_raise_the_devices_estimate(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    (cell,) = compose_cells(["path=expert_q2", "layers=3", "device=cuda"], project)
    monkeypatch.setattr(fitting, "machine_memory", lambda project, cell: (64 << 30, 2 << 30))
    _, kept = capacity_gate(project, cell, force=False)
    Store(project.runs).add(record_of(cell, Status.OOM, evidence={"capacity": kept | {"ran_out": "host"}}))
    with pytest.raises(GapError, match="device has .* to spare.*; host is short by .*raised by .*: out of host memory at 3 layers"):
        capacity_gate(project, cell, force=False)
    _, raised = capacity_gate(project, cell, force=True)
    assert raised["estimate_bytes"] == kept["estimate_bytes"] and raised["host_estimate_bytes"] > 2 << 30 > kept["host_estimate_bytes"]


def test_a_memory_that_is_not_known_is_not_called_passed(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    (cell,) = compose_cells(["path=expert_q2", "layers=3", "device=cuda"], project)
    monkeypatch.setattr(fitting, "machine_memory", lambda project, cell: (None, 64 << 30))
    result, kept = capacity_gate(project, cell, force=False)
    assert result.outcome == "not_checked" and "not known whether it fits: device needs" in result.detail
    assert kept["ledger_bytes"] > 0 and kept["device_free_bytes"] is None


def test_a_cell_without_known_sizes_is_not_called_passed(project: Project, cells: dict[int, Cell]) -> None:
    unknown = cells[3].model_copy(update={"model": cells[3].model.model_copy(update={"artifact": "nowhere", "geometry": ""})})
    result, kept = capacity_gate(project, unknown, force=False)
    assert result.outcome == "not_checked" and result.detail and not kept


def test_a_strip_cache_that_is_too_small_is_foretold(project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    free(monkeypatch, 1 << 40)
    words = ["model=qwen3_8b", "path=kestrel_vqf", "artifact=synthetic", "device=cpu", "placement.slots=256"]
    small, large = (compose_cells([*words, f"placement.host_budget_mb={size}"], project)[0] for size in (4096, 8192))
    result, _ = capacity_gate(project, small, force=False)
    foretold = "host: only 136 of 252 weights will stay resident (placement.host_budget_mb=4096, placement.slots=256)"
    assert result.detail.endswith(f"; {foretold}")
    assert f"expected to end as DEGRADED: {foretold}" in capsys.readouterr().err
    result, _ = capacity_gate(project, large, force=False)
    assert "will stay" not in result.detail and "DEGRADED" not in capsys.readouterr().err
