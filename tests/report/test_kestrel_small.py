"""The stage that was run at small size: its committed report is what its committed records give, every measure of the stage is a number in it, and the records
hold nothing of a machine's folders.

Until there are records the report is what none give. `python -m lab import FILE` into an empty runs folder and `python -m lab report experiment=kestrel_small
lang=en|zh` write it again.
"""

from __future__ import annotations

import pytest

from lab.matrix import Matrix
from lab.measure.stage import STAGE
from lab.parcels import Parcel, read_parcels
from lab.places import absolute_paths
from lab.project import Project
from lab.record import Status
from lab.report.build import assess, render, report_name
from lab.report.capacity import load_capacity
from lab.report.charts import draw
from lab.report.cli import load_matrix
from tests.report.support import EN, EXPERIMENTS, ZH, project_with

NAME = "kestrel_small"
ROOT = EXPERIMENTS.parent
FILE = EXPERIMENTS / NAME / "records.jsonl.gz"


@pytest.fixture(scope="module")
def parcels() -> list[Parcel]:
    return read_parcels(FILE) if FILE.exists() else []


@pytest.fixture(scope="module")
def project(parcels: list[Parcel], tmp_path_factory: pytest.TempPathFactory) -> Project:
    return project_with(parcels, tmp_path_factory.mktemp(NAME))


@pytest.fixture(scope="module")
def matrix(project: Project) -> Matrix:
    return load_matrix(project, NAME)


def test_the_committed_report_is_what_the_committed_records_give(project: Project, matrix: Matrix) -> None:
    capacity = load_capacity(project, matrix)
    for lang in (EN, ZH):
        assessed = assess(matrix, lang, capacity)
        drawn = draw(matrix, assessed.verdicts, assessed.targets, assessed.claims, capacity)
        committed = ROOT / "reports" / report_name(NAME, lang.code)
        assert committed.read_text(encoding="utf-8") == render(assessed, drawn), f"{committed.name} is out of date: write it again"


@pytest.mark.skipif(not FILE.exists(), reason="no records yet")
def test_every_measure_of_the_stage_is_a_number_on_the_device(parcels: list[Parcel]) -> None:
    found = [record for record in (parcel.record for parcel in parcels) if record.status is Status.OK and "h200" in record.cell_id]
    assert found
    for record in found:
        assert "H200" in record.provenance["environment"]["gpu"]
        assert set(STAGE) <= record.metrics.keys(), f"{record.cell_id}: {sorted(set(STAGE) - record.metrics.keys())}"


def test_the_records_are_small_and_say_nothing_of_a_machines_folders(parcels: list[Parcel]) -> None:
    assert not FILE.exists() or FILE.stat().st_size < 500_000
    for parcel in parcels:
        found = list(absolute_paths(parcel.record.model_dump(mode="json")))
        assert not found, f"{parcel.record.cell_id}: {found[0]}"
