"""The report and the table on screen: nothing expected is missing, no gap looks like a number, verdicts follow the records.

Texts are checked for what a reader relies on, not word by word. The charts are checked for being made, stable and dateless.
"""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import lab.compose
from lab.errors import LabError
from lab.experiment import Experiment
from lab.matrix import Matrix, Unreadable, build_matrix
from lab.project import Project
from lab.record import Gap, Record, Status
from lab.report.build import build_report, code, escape, render
from lab.report.cli import matrix_command, print_matrix, report_command
from lab.report.numbers import number, short, significant
from lab.report.verdicts import compare_speeds, judge, noisy, target_rows
from tests.matrix_helpers import PROVENANCE, SMALL, cell, complete, compose, measured, record, small, write_experiment


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    return small(tmp_path)


def ladder(values: dict[str, float], layers: int = 6) -> list[Record]:
    """Complete records of the given paths with these divergences."""
    return [complete(cell(path, layers), kld) for path, kld in values.items()]


def text_of(matrix: Matrix) -> str:
    return render(matrix, [judge(matrix, h) for h in matrix.experiment.hypotheses], [])


def table_cells(text: str) -> list[str]:
    return [part.strip() for line in text.splitlines() if line.startswith("|") for part in re.split(r"(?<!\\)\|", line)[1:-1]]


def test_every_expected_cell_and_every_fill_command_is_in_the_report(experiment: Experiment) -> None:
    matrix = build_matrix(experiment, ladder({"fine": 0.1}), compose)
    text = text_of(matrix)
    for row in matrix.rows:
        assert row.cell.id in text
    for entry in matrix.entries.values():
        if entry.gap:
            assert f"`{entry.gap.fill}`" in text and entry.gap.reason in text and str(entry.gap.status) in text
    assert "24 expected = 4 measured + 20 gaps" in text


def test_a_gap_never_renders_as_a_number(experiment: Experiment) -> None:
    ended = {("fine", 3): Status.OOM, ("fine", 6): Status.TIMEOUT, ("coarse", 3): Status.UNSUPPORTED}
    records = [record(cell(path, layers), status=status) for (path, layers), status in ended.items()]
    matrix = build_matrix(experiment, records, compose)
    assert all(short(entry) == f"*{entry.gap.status}*" for entry in matrix.entries.values() if entry.gap)
    results = text_of(matrix).split("## Results")[1].split("## Cells")[0]
    numeric = [part for part in table_cells(results) if re.search(r"\d", part) and "layers" not in part and "KLD" not in part]
    assert numeric == []


def test_no_number_without_a_record(experiment: Experiment) -> None:
    matrix = build_matrix(experiment, ladder({"fine": 0.123456, "coarse": 0.7}), compose)
    text = text_of(matrix)
    assert "0.123" in text and "26.50 ± 0.25" in text and "100 [99.0, 101] × 5" in text and "0.98765" in text


def test_the_report_is_the_same_for_the_same_records(experiment: Experiment, tmp_path: Path) -> None:
    records = [*ladder({"reference": 0.0, "fine": 0.1, "coarse": 0.2}), *ladder({"reference": 0.0, "fine": 0.1}, layers=3)]
    first = build_report(build_matrix(experiment, records, compose), tmp_path / "a")
    second = build_report(build_matrix(experiment, reversed(records), compose), tmp_path / "b")
    assert [path.name for path in first] == ["small.md", "small_ladder.svg", "small_ppl_by_depth.svg"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert b"<dc:date>" not in first[1].read_bytes()
    text = first[0].read_text()
    assert "![ladder](small_ladder.svg)" in text and "(small_ppl_by_depth.svg)" in text
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == sorted(path.name for path in first)


def test_without_data_there_is_no_chart_and_an_old_one_goes(experiment: Experiment, tmp_path: Path) -> None:
    build_report(build_matrix(experiment, ladder({"reference": 0.0}), compose), tmp_path)
    assert (tmp_path / "small_ladder.svg").exists()
    (tmp_path / "other_ladder.svg").write_text("another experiment's")
    assert [path.name for path in build_report(build_matrix(experiment, [], compose), tmp_path)] == ["small.md"]
    assert sorted(path.name for path in tmp_path.glob("*.svg")) == ["other_ladder.svg"]


@pytest.mark.parametrize(
    ("values", "word", "why"),
    [
        ({"reference": 0.0, "fine": 0.1, "coarse": 0.2}, "HOLDS", ""),
        ({"reference": 0.0, "fine": 0.2, "coarse": 0.1}, "FAILS", "fine 0.200 is not below coarse 0.100"),
        ({"reference": 0.0, "fine": 0.1, "coarse": 0.1}, "FAILS", "fine 0.100 is not below coarse 0.100"),
        ({"reference": 0.0, "coarse": 0.2}, "OPEN", "not decided: fine is NOT_RUN"),
    ],
)
def test_an_order_hypothesis_holds_fails_or_stays_open(experiment: Experiment, values: dict[str, float], word: str, why: str) -> None:
    matrix = build_matrix(experiment, ladder(values), compose)
    verdict = judge(matrix, experiment.hypotheses[0])
    assert (verdict.word, verdict.why) == (word, why)
    assert f"### ladder: {word}" in text_of(matrix)


def test_a_verdict_within_the_error_says_so(experiment: Experiment) -> None:
    matrix = build_matrix(experiment, ladder({"reference": 0.0, "fine": 0.1, "coarse": 0.102}), compose)
    verdict = judge(matrix, experiment.hypotheses[0])
    assert verdict.word == "HOLDS" and verdict.remarks == ("fine and coarse lie within two standard errors of each other",)


def test_the_ladder_shows_cosines_and_the_noise_floor(experiment: Experiment) -> None:
    section = text_of(build_matrix(experiment, ladder({"fine": 0.1}), compose)).split("## Hypotheses")[1].split("## Speed")[0]
    assert "| fine | 0.100 ± 0.0010 | 0.98765 | 1.00e-06 |" in section
    assert "| coarse | *NOT_RUN* | *NOT_RUN* | – |" in section


def test_targets_are_reached_missed_or_open(tmp_path: Path) -> None:
    target = "targets:\n  - {metric: pp512_tok_s, comparison: '>=', value: 90, unit: tok/s, source: the post, where: {layers: 6}}\n"
    experiment = small(tmp_path, SMALL + target)
    records = [complete(cell("reference", 6), 0.0, speed=95.0), complete(cell("fine", 6), 0.1, speed=50.0)]
    matrix = build_matrix(experiment, records, compose)
    assert [line[4] for line in target_rows(matrix)] == ["REACHED", "MISSED", "OPEN"]
    assert ">= 90.0 tok/s" in text_of(matrix)


@pytest.mark.parametrize(("speed", "word"), [(120.0, "faster"), (80.0, "slower"), (101.0, "not separated")])
def test_faster_and_slower_need_separate_intervals(experiment: Experiment, speed: float, word: str) -> None:
    records = [complete(cell("reference", 6), 0.0, speed=100.0), complete(cell("fine", 6), 0.1, speed=speed)]
    words = {(c.row.cell.path.name, c.row.cell.layers): c.word for c in compare_speeds(build_matrix(experiment, records, compose))}
    assert words["fine", 6] == word and words["coarse", 6] == "*NOT_RUN*" and words["fine", 3] == "*NOT_RUN*"


def test_records_of_two_machines_are_said_to_be_mixed_and_not_compared(experiment: Experiment) -> None:
    other = {**PROVENANCE, "machine": {"cpu": "Other CPU", "cores": 64}, "code_sha256": "beef" * 16}
    records = [complete(cell("reference", 6), 0.0), complete(cell("fine", 6), 0.1, speed=500.0, provenance=other)]
    matrix = build_matrix(experiment, records, compose)
    words = {c.word for c in compare_speeds(matrix) if c.row.cell.path.name == "fine" and c.row.cell.layers == 6}
    assert words == {"not compared: machine, code differ"}
    banner = text_of(matrix).split("## What this report")[0]
    assert "**Mixed records:** they differ in machine" in banner and "Other CPU, 64 cores (1)" in banner and "beefbeefbeef" in banner


def test_uniform_records_are_not_called_mixed(experiment: Experiment) -> None:
    text = text_of(build_matrix(experiment, ladder({"reference": 0.0, "fine": 0.1}), compose))
    assert "Mixed records" not in text and "| torch | 2.9.0 |" in text and experiment.sha256 in text


def test_noise_later_failures_and_notes_are_findings(experiment: Experiment) -> None:
    of = cell("fine")
    wide = record(of, {"pp512_tok_s": measured("pp512_tok_s", 100.0, spread=0.2)}, notes=["clocks were unsteady"])
    matrix = build_matrix(experiment, [wide, record(of, status=Status.OOM, attempt=2, reason="no memory left")], compose)
    assert noisy(matrix) == [f"{of.id}: pp512_tok_s lies between 90.0 and 110 tok/s"]
    text = text_of(matrix)
    assert "attempt 2 ended OOM: no memory left" in text and "clocks were unsteady" in text


def test_free_text_cannot_break_a_table_or_inject_markup(experiment: Experiment) -> None:
    reason = "a | b\nc <b>*d*</b>"
    gap = Gap(status=Status.CRASHED, reason=reason, fill="python -m lab run 'a|b'")
    text = text_of(build_matrix(experiment, [record(cell(), gaps={"ppl": gap})], compose))
    assert r"a \| b c &lt;b>\*d\*&lt;/b>" in text and "`python -m lab run 'a|b'`" in text
    assert escape("x\ny") == "x y" and code("a `b` c") == "`` a `b` c ``"


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


@pytest.mark.parametrize(
    ("metric", "value", "text"),
    [
        ("ppl", 23.4567, "23.46"),
        ("kld_mean", 0.0, "0"),
        ("kld_mean", 0.0000123, "1.23e-05"),
        ("pp512_tok_s", 1234.5, "1234"),
        ("resident_bytes", 12_345_678.0, "12.3"),
        ("top1_agreement", 0.98765, "98.77"),
        ("expert_cosine", 0.999994, "0.99999"),
    ],
)
def test_numbers_have_sensible_digits(metric: str, value: float, text: str) -> None:
    assert number(metric, value) == text


def test_significant_digits_keep_the_sign_and_size() -> None:
    assert [significant(v) for v in (-0.5, 9.996, 123456.0, 1e9)] == ["-0.500", "10.00", "123456", "1.00e+09"]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project with the small experiment, one good and one spoilt record, and plain composition."""

    def composed(words: list[str], project: Any = None) -> list[Any]:
        return [compose(words)]

    monkeypatch.setattr(lab.compose, "compose_cells", composed)
    write_experiment(tmp_path)
    good = complete(cell("fine"), 0.1)
    for of, content in ((cell("fine"), good.model_dump_json()), (cell("coarse"), '{"cell_id": "half')):
        folder = tmp_path / "runs" / of.id / "001"
        folder.mkdir(parents=True)
        (folder / "record.json").write_text(content)
    return Project(root=tmp_path, runs=tmp_path / "runs")


def test_an_unreadable_record_is_listed_and_the_rest_is_reported(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert report_command(project, ["experiment=small"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "reports/small.md"
    text = (project.root / "reports" / "small.md").read_text()
    lost = cell("coarse").id
    assert f"- `runs/{lost}/001/record.json`: " in text and "### INFRA: record file unreadable" in text
    assert "24 expected = 4 measured + 20 gaps" in text and str(project.root) not in text


def test_matrix_on_screen_and_as_json(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix_command(project, ["experiment=small"]) == 0
    shown = capsys.readouterr().out
    assert "24 expected = 4 measured + 20 gaps" in shown and "INFRA" in shown
    assert matrix_command(project, ["experiment=small", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)
    stream = io.StringIO()
    assert matrix_command(project, ["--json", "experiment=small"], stream) == 0
    assert json.loads(stream.getvalue()) == lines and capsys.readouterr().out == ""
    assert len(lines) == 24 and {line["state"] for line in lines} == {"measured", "gap", "not_run"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name one experiment; usage: python -m lab matrix experiment=NAME"),
        (["experiment="], "name one experiment"),
        (["experiment=small", "experiment=small"], "name one experiment"),
        (["experiment=small", "lang=en"], "'lang=en' is not understood"),
        (["experiment=big"], "unknown experiment 'big'; choose from: small"),
    ],
)
def test_wrong_words_are_one_line(project: Project, words: list[str], message: str) -> None:
    with pytest.raises(LabError, match=re.escape(message)):
        matrix_command(project, words)


def test_the_infra_finding_is_in_the_rendered_text(experiment: Experiment) -> None:
    spoilt = Unreadable("elsewhere", "runs/elsewhere/001/record.json", "record: cut off")
    assert "`runs/elsewhere/001/record.json`: record: cut off" in text_of(build_matrix(experiment, [], compose, [spoilt]))


def test_a_report_is_not_replaced_by_one_without_any_number(project: Project) -> None:
    """A checkout ships reports made elsewhere; asking for one before anything was measured must not erase it."""
    shipped = project.root / "reports" / "small.md"
    shipped.parent.mkdir(exist_ok=True)
    shipped.write_text("made elsewhere")
    for file in project.runs.glob("*/*/record.json"):
        file.unlink()
    with pytest.raises(LabError, match="no record here fills a cell of small; reports/small.md is left as it is"):
        report_command(project, ["experiment=small"])
    assert shipped.read_text() == "made elsewhere"
