"""The verbs `matrix` and `report`: what they print and write, and what they refuse in one line."""

from __future__ import annotations

import gc
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import lab.compose
import lab.report.capacity
from lab.errors import LabError
from lab.experiment import Experiment
from lab.matrix import Matrix, build_matrix
from lab.project import Project
from lab.record import Gap, Status
from lab.report.capacity import NO_CAPACITY, Capacity
from lab.report.cli import matrix_command, report_command
from lab.report.screen import print_matrix
from tests.matrix_helpers import cell, complete, compose, measured, record, small, write_experiment


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    return small(tmp_path)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project with the small experiment, one good and one spoilt record, plain composition, and no sizes."""

    def composed(words: list[str], project: Any = None) -> list[Any]:
        return [compose(words)]

    def no_capacity(project: Project, matrix: Matrix) -> Capacity:
        return NO_CAPACITY

    monkeypatch.setattr(lab.compose, "compose_cells", composed)
    monkeypatch.setattr(lab.report.capacity, "load_capacity", no_capacity)
    write_experiment(tmp_path)
    for of, content in ((cell("fine"), complete(cell("fine"), 0.1).model_dump_json()), (cell("coarse"), '{"cell_id": "half')):
        folder = tmp_path / "runs" / of.id / "001"
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(content)
    return Project(root=tmp_path, runs=tmp_path / "runs")


def test_an_unreadable_record_is_listed_and_the_rest_is_reported(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert report_command(project, ["experiment=small"]) == 0
    assert capsys.readouterr().out.splitlines()[:2] == ["reports/small.md", "reports/small.html"]
    text = (project.root / "reports" / "small.md").read_text(encoding="utf-8")
    lost = cell("coarse").id
    assert f"- `runs/{lost}/001/record.json`: " in text and "Reason: record file unreadable" in text
    assert "24 expected = 4 measured + 20 gaps" in text and str(project.root) not in text
    assert gc.isenabled(), "the collector is only paused"


def test_a_mark_beside_a_record_takes_its_numbers_out(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    mark = [{"what": "invalidated", "reason": "the fan stopped", "at": "2026-08-02T00:00:00+00:00", "by": "someone"}]
    (project.runs / cell("fine").id / "001" / "marks.json").write_text(json.dumps(mark))
    assert matrix_command(project, ["experiment=small", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)
    assert {line["status"] for line in lines if line["path"] == "fine" and line["layers"] == 3} == {"INVALIDATED"}


def test_the_languages_are_written_apart_and_a_stale_one_is_named(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert report_command(project, ["experiment=small", "lang=zh"]) == 0
    assert report_command(project, ["lang=en", "experiment=small"]) == 0
    assert capsys.readouterr().err == ""
    folder = project.runs / cell("reference").id / "001"
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(complete(cell("reference"), 0.0).model_dump_json())
    assert report_command(project, ["experiment=small"]) == 0
    assert capsys.readouterr().err.startswith("reports/small.zh.md was made from other records")


def test_a_report_with_numbers_is_not_replaced_by_one_without_any(project: Project) -> None:
    """A checkout ships reports made elsewhere; asking for one before anything was measured must not erase it."""
    report_command(project, ["experiment=small"])
    shipped = project.root / "reports" / "small.md"
    before = shipped.read_bytes()
    for file in project.runs.glob("*/*/record.json"):
        file.unlink()
    with pytest.raises(LabError, match="no record here fills a cell of small, and reports/small.md shows 4 measured values"):
        report_command(project, ["experiment=small"])
    assert shipped.read_bytes() == before
    shipped.write_text("a report from before there were seals", encoding="utf-8")
    with pytest.raises(LabError, match=r"reports/small.md does not say what it shows"):
        report_command(project, ["experiment=small", "lang=zh"])
    shipped.unlink()
    assert report_command(project, ["experiment=small", "lang=zh"]) == 0, "a report of gaps is a report"
    assert report_command(project, ["experiment=small", "lang=zh"]) == 0, "and may be written again"


def test_a_report_of_gaps_in_one_language_leaves_the_charts_of_the_other(project: Project) -> None:
    """The charts are shared: written without records, they would be gone from the measured report beside them."""
    for of in (cell("reference", 6), cell("fine", 6)):
        (project.runs / of.id / "001").mkdir(parents=True)
        (project.runs / of.id / "001" / "record.json").write_text(complete(of, 0.1).model_dump_json())
    report_command(project, ["experiment=small"])
    before = {file.name: file.read_bytes() for file in (project.root / "reports").iterdir()}
    assert "small_ladder.svg" in before
    shutil.rmtree(project.runs)
    with pytest.raises(LabError, match="reports/small.md shows 12 measured values; it is left as it is, with its charts"):
        report_command(project, ["experiment=small", "lang=zh"])
    assert {file.name: file.read_bytes() for file in (project.root / "reports").iterdir()} == before


def test_matrix_on_screen_and_as_json(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix_command(project, ["experiment=small"]) == 0
    shown = capsys.readouterr().out
    assert "24 expected = 4 measured + 20 gaps" in shown and "1 attempts = 1 current" in shown and "INFRA" in shown
    assert matrix_command(project, ["experiment=small", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)
    stream = io.StringIO()
    assert matrix_command(project, ["--json", "experiment=small"], stream) == 0
    assert json.loads(stream.getvalue()) == lines and capsys.readouterr().out == ""
    assert len(lines) == 24 and {line["state"] for line in lines} == {"measured", "gap", "not_run"}


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        (matrix_command, [], "name one experiment; usage: python -m lab matrix experiment=NAME [--json]"),
        (matrix_command, ["experiment="], "name one experiment"),
        (matrix_command, ["experiment=small", "experiment=small"], "experiment= is given twice"),
        (matrix_command, ["experiment=small", "lang=en"], "'lang=en' is not understood"),
        (matrix_command, ["experiment=big"], "unknown experiment 'big'; choose from: small"),
        (report_command, ["experiment=small", "lang=fr"], "lang=fr: no such report language; choose lang=en or lang=zh"),
        (report_command, ["experiment=small", "lang="], "lang=: no such report language"),
        (report_command, ["experiment=small", "--json"], "'--json' is not understood; usage: python -m lab report experiment=NAME [lang=en|zh]"),
    ],
)
def test_wrong_words_are_one_line(project: Project, command: Any, words: list[str], message: str) -> None:
    with pytest.raises(LabError, match=re.escape(message)) as refused:
        command(project, words)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("width", [80, 120, 160])
def test_the_table_on_screen_fits_and_shows_status_words(experiment: Experiment, width: int) -> None:
    records = [complete(cell("fine", 6), 0.1), record(cell("coarse", 6), status=Status.PATH_NOT_EXECUTED)]
    gaps = {"pp512_tok_s": Gap(status=Status.IMPLAUSIBLE, reason="no", fill="x")}
    records.append(record(cell("reference", 6), {"ppl": measured("ppl", 22.5)}, gaps=gaps))
    out = Console(file=io.StringIO(), width=width)
    print_matrix(build_matrix(experiment, records, compose), out)
    assert isinstance(out.file, io.StringIO)
    shown = out.file.getvalue()
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= width
    for word in ("26.50", "NOT_RUN", "PATH_NOT_EXECUTED", "IMPLAUSIBLE", "24 expected = 5 measured + 19 gaps"):
        assert word in shown
