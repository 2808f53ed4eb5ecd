"""What a run says of its record, without a store: cells that differ look different, and only what is known is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.cell import Placement
from lab.project import Project
from lab.record import Status
from lab.run_fields import metric_values, params, tags
from tests.runner_helpers import cell_of, make_project, record_of

CELL = ("path=expert_q2", "layers=3")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path / "p")


def test_what_is_too_long_for_a_tag_is_cut_visibly(project: Project) -> None:
    record = record_of(cell_of(project, *CELL), Status.CRASHED, reason="x" * 9000)
    assert len(tags(record)["reason"]) <= 5000
    assert tags(record)["reason"].endswith("[cut; whole in record.json]")
    assert metric_values(record) == {}


def test_cells_that_differ_look_different(project: Project) -> None:
    cell = cell_of(project, *CELL)
    tiered = cell.model_copy(update={"placement": Placement(slots=20)})
    experts = cell.path.components["experts"].model_copy(update={"options": {"scale": "global"}})
    other = cell.model_copy(update={"path": cell.path.model_copy(update={"components": {**cell.path.components, "experts": experts}})})
    shown = [params(record_of(one)) for one in (cell, tiered, tiered.model_copy(update={"mode": "eager"}), other)]
    assert all(one != another for index, one in enumerate(shown) for another in shown[:index])
    assert shown[1].items() - shown[0].items() == {("placement.slots", "20")}
    assert shown[2].items() - shown[1].items() == {("mode", "eager")}
    assert shown[3]["options.experts"] == '{"scale": "global"}'


def test_a_cell_of_before_there_was_a_choice_has_its_default(project: Project) -> None:
    record = record_of(cell_of(project, *CELL))
    before = {key: value for key, value in record.cell.items() if key not in ("mode", "placement")}
    assert params(record.model_copy(update={"cell": before})) == params(record)


def test_weights_are_a_tag_only_where_they_are_known(project: Project) -> None:
    record = record_of(cell_of(project, *CELL))
    assert "weights_sha256" not in tags(record)
    assert tags(record.model_copy(update={"artifact": {"sha256": "ab" * 32}}))["weights_sha256"] == "ab" * 32
