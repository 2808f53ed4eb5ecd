"""The stage at true size: its report and the table of its goals are what the exported records in the repository give, and those hold nothing of a machine.

Until there are records both are what none give. `python -m lab import FILE` into an empty runs folder, `lab report` and `experiments.goals_h200` write them.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments.goals_h200 import EXPERIMENT, WORDS, _entry, _ratio, text_of
from lab.matrix import Matrix
from lab.parcels import Parcel, read_parcels
from lab.places import absolute_paths
from lab.project import Project
from lab.report.build import assess, render, report_name
from lab.report.capacity import load_capacity
from lab.report.charts import draw
from lab.report.cli import load_matrix
from tests.report.support import EN, EXPERIMENTS, ZH, project_with

ROOT = EXPERIMENTS.parent
FOLDER = EXPERIMENTS / EXPERIMENT
MOST_BYTES = 2_000_000


@pytest.fixture(scope="module")
def parcels() -> list[Parcel]:
    file = FOLDER / "records.jsonl.gz"
    return read_parcels(file) if file.exists() else []


@pytest.fixture(scope="module")
def project(parcels: list[Parcel], tmp_path_factory: pytest.TempPathFactory) -> Project:
    return project_with(parcels, tmp_path_factory.mktemp("h200"))


@pytest.fixture(scope="module")
def matrix(project: Project) -> Matrix:
    return load_matrix(project, EXPERIMENT)


def test_the_committed_report_is_what_the_committed_records_give(project: Project, matrix: Matrix) -> None:
    capacity = load_capacity(project, matrix)
    first = assess(matrix, EN, capacity)
    drawn = draw(matrix, first.verdicts, first.targets, first.claims, capacity)  # by name the same in both languages
    for lang in (EN, ZH):
        assessed = assess(matrix, lang, capacity)
        committed = ROOT / "reports" / report_name(EXPERIMENT, lang.code)
        assert committed.read_text(encoding="utf-8") == render(assessed, drawn), f"{committed.name} is out of date: write it again"


@pytest.mark.parametrize(("code", "name"), [("en", "goals_h200.md"), ("zh", "goals_h200.zh.md")])
def test_the_committed_goals_are_what_the_committed_results_give(code: str, name: str) -> None:
    assert (ROOT / "reports" / name).read_text(encoding="utf-8") == text_of(Project(root=ROOT, runs=ROOT / "runs"), FOLDER, code)


def test_the_records_say_nothing_of_a_machines_folders_and_are_small(parcels: list[Parcel]) -> None:
    for file in FOLDER.glob("*") if FOLDER.is_dir() else ():
        assert file.stat().st_size < MOST_BYTES, f"{file.name} is large for a repository"
    for parcel in parcels:
        found = list(absolute_paths(parcel.record.model_dump(mode="json")))
        assert not found, f"{parcel.record.cell_id}: {found[0]}"


def test_every_record_is_of_an_expected_cell_on_an_h200(parcels: list[Parcel], matrix: Matrix) -> None:
    expected = {row.key for row in matrix.rows}
    for parcel in parcels:
        assert parcel.record.cell_hash in expected, parcel.record.cell_id
        environment = parcel.record.provenance.get("environment", {})  # an attempt that was interrupted, or ended before a GPU was looked at, says nothing
        assert "H200" in str(environment.get("gpu", "H200"))


def test_goals_are_told_apart_from_what_was_not_measured(tmp_path: Path) -> None:
    """A result file with two rows: one goal met, one missed, and every other without a result."""
    rows = [
        {"what": "gate+up", "tokens": 1, "name": "q2_g32", "us": 8.0, "ratio": 1.0},
        {"what": "gate+up", "tokens": 1, "name": "humming int2", "us": 12.0, "ratio": 1.5},
        {"what": "down", "tokens": 1, "name": "q2_g32", "us": 8.0, "ratio": 1.0},
        {"what": "down", "tokens": 1, "name": "humming int2", "us": 11.9, "ratio": 1.4875},
        {"what": "gate+up", "tokens": 1, "name": "q2_levels", "us": 6.0, "ratio": 1.0},
    ]
    (tmp_path / "humming.json").write_text(json.dumps({"rows": rows}), encoding="utf-8")
    text = text_of(Project(root=ROOT, runs=tmp_path), tmp_path, "en")
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert f"1 met, 1 missed, 0 not decided, {len(lines) - 2} not measured, of {len(lines)}." in text
    assert any("q2_g32, gate+up, M = 1" in line and "1.50 x (8.00 / 12.0 us) | met" in line for line in lines)
    assert any("q2_g32, down, M = 1" in line and "1.49 x (8.00 / 11.9 us) | missed" in line for line in lines)
    assert any("q2_levels, gate+up, M = 1" in line and "no such row | not measured" in line for line in lines)
    assert sum("NOT_RUN | not measured" in line for line in lines) == 7


def test_a_goal_between_two_machines_is_neither_met_nor_missed(matrix: Matrix) -> None:
    """The stage report does not decide such a hypothesis, so the table of goals does not either; of one machine's two numbers it does."""
    entries = [_entry(matrix, {"path": "reference", "layers": 6, **engine}, "pp512_tok_s") for engine in ({}, {"engine": "transformers"})]
    ours, theirs = (entry.row.current for entry in entries)
    assert ours is not None and theirs is not None
    for cores, word in ((ours.provenance["machine"]["cores"], "met"), (7, "open")):
        machine = {**ours.provenance["machine"], "cores": cores}
        moved = theirs.model_copy(update={"provenance": {**ours.provenance, "machine": machine}})
        base = SimpleNamespace(metric=entries[1].metric, measurement=entries[1].measurement, row=SimpleNamespace(current=moved))
        line = _ratio(WORDS["en"], "PP", 10, entries[0], base)  # type: ignore[arg-type]
        assert line.word == word and (line.apart == "" if word == "met" else line.apart == "not comparable: machine.cores (16 / 7)")
    assert _ratio(WORDS["en"], "PP", 1.5, entries[0], entries[0]).word == "missed"
