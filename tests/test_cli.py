"""The command line as a person or a script meets it: verbs, help, exit codes, one-line errors, and a pure standard output."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lab import cli
from lab.errors import LabError
from lab.project import Project, find_project
from lab.record import Record
from tests.runner_helpers import FAKE_LAB, ROOT, lab, make_project, python_path

CELL = ("path=expert_q2", "layers=3", "device=cpu")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    made = make_project(tmp_path / "p")
    monkeypatch.setenv("LAB_ROOT", str(made.root))
    monkeypatch.delenv("LAB_RUNS", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return made


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rum"], "'rum' is no verb; choose one of: run, ls, show"),
        (["run", "path=expert_q3"], "choose one of: cpu_cold, expert_q2"),
        (["run", "layers=13"], "layers=13: nano has 12 layers; choose 1 to 12"),
        (["run", "layers=abc"], "layers=abc: not a whole number"),
        (["run", "bench.ppl_stride=512"], "error: bench.ppl_stride=512 must be below bench.ppl_context=512\n"),
        (["run", "model.arch=gpt2"], "error: model.arch=gpt2: no such architecture; choose one of: qwen4_exp"),
        (["run", "benhc=quick"], "benhc: unknown key (did you mean bench"),
        (["run", "--jsno"], "--jsno: unknown flag of `run`"),
        (["run", "-m", "path=reference,expert_q3"], "path=expert_q3: no such path"),
        (["show", "layers=13"], "layers=13"),
        (["ls", "toys"], "toys: nothing to list by that name; choose from: models"),
        (["doctor", "now"], "'now': `doctor` takes nothing more"),
        (["import", "all"], "error: all: cannot be read: No such file or directory\n"),
    ],
)
def test_a_wrong_command_is_one_line_and_exit_2(project: Project, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert cli.main(words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert not project.runs.exists()


@pytest.mark.parametrize("words", [["--help"], ["help"], *[[verb, "--help"] for verb in cli.VERBS]])
def test_help_names_what_there_is(project: Project, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert f"python -m lab {words[0] if words[0] in cli.VERBS else ''}".strip() in out
    if words[0] not in cli.VERBS:
        assert all(f"\n  {verb} " in out for verb in cli.VERBS)


def test_no_verb_is_a_wrong_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "run      measure one cell" in capsys.readouterr().out


def test_a_missing_model_is_refused_before_anything_is_written(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert lab(project, "run", "model.artifact=nowhere", "layers=3", "device=cpu")[0] == 2
    code, _, err = lab(project, "run", *CELL, "model.corpus=experiments")
    assert (code, err) == (2, "error: experiments: the held-out text (model.corpus) cannot be read: Is a directory\n")
    (project.root / "experiments" / "nano" / "heldout.txt").unlink()
    code, _, err = lab(project, "run", *CELL)
    assert (code, "held-out text (model.corpus) is missing" in err) == (2, True)
    assert not project.runs.exists()


@pytest.mark.parametrize(("content", "message"), [(b" \n", "is empty"), (b"good \xff", "is not UTF-8: invalid start byte at byte 5")])
def test_a_text_that_cannot_be_scored_is_refused_before_anything_is_written(project: Project, content: bytes, message: str) -> None:
    (project.root / "experiments" / "nano" / "heldout.txt").write_bytes(content)
    code, _, err = lab(project, "run", *CELL)
    assert (code, err) == (2, f"error: experiments/nano/heldout.txt: the held-out text (model.corpus) {message}\n")
    assert not project.runs.exists()


def test_standard_output_is_one_json_document_and_nothing_else(project: Project) -> None:
    code, out, err = lab(project, "run", *CELL, "--json", FAKE_MLFLOW="1")
    assert code == 0
    record = Record.model_validate(json.loads(out))
    assert "load: expert_q2" in err
    assert f"record: {project.runs}" in err or "record: runs/" in err
    assert "mlflow: sqlite:///" in err
    assert record.metrics["pp512_tok_s"].roofline_pct == 12.5


def test_what_libraries_print_stays_out_of_the_json() -> None:
    # In a process of its own: pytest's stand-in for sys.stdout does not write to descriptor 1.
    script = """
import os, subprocess, sys
from lab import cli
with cli._pure_stdout(True) as out:
    subprocess.run([sys.executable, "-c", "print('a child talks')"], check=True)
    os.write(1, b"C code talks\\n")
    print("Python talks")
    out.write("{}\\n")
print("afterwards")
"""
    env = os.environ | {"PYTHONPATH": python_path()}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "{}\nafterwards\n"
    assert sorted(done.stderr.splitlines()) == ["C code talks", "Python talks", "a child talks"]


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/far/runs"), "error: /far/runs: Permission denied\n"),
        (OSError(errno.EROFS, "Read-only file system", "/x/reports/nano.md"), "error: /x/reports/nano.md: Read-only file system\n"),
        (OSError("the disk\nis gone"), "error: the disk is gone\n"),
    ],
)
def test_a_folder_that_refuses_is_one_line_and_exit_2(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError, line: str
) -> None:
    def refuse(*_: object) -> int:
        raise error

    monkeypatch.setitem(cli.VERBS, "report", (refuse, ""))
    assert cli.main(["report", "experiment=nano"]) == 2
    assert capsys.readouterr() == ("", line)


def test_a_runs_folder_that_may_not_be_searched_is_one_line(project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    real = Path.is_dir

    def is_dir(path: Path) -> bool:
        if path == project.runs:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))  # as Python 3.11 to 3.13 do; root is never refused
        return real(path)

    monkeypatch.setattr(Path, "is_dir", is_dir)
    assert cli.main(["matrix", "experiment=nano"]) == 2
    assert capsys.readouterr() == ("", f"error: {project.runs}: Permission denied\n")


def test_the_result_table_shows_numbers_gaps_and_where_everything_is(project: Project) -> None:
    code, out, _ = lab(project, "run", *CELL)
    assert code == 0
    for text in (
        "505 tok/s",
        "[499, 510]",
        "12.5 %",
        "GAP",
        "UNSUPPORTED: no reference at this depth",
        "experts as q2_g32 on cpu: 3.00 MiB",
    ):
        assert text in " ".join(out.split())
    assert "record: runs/" in out
    code, out, _ = lab(project, "run", *CELL, FAKE_MODE="oom")
    assert code == 3
    assert "every metric is a gap: OOM: needs 9 GB, 2 GB are free" in out


def test_a_reader_that_goes_away_changes_neither_record_nor_exit_code(project: Project) -> None:
    shell = f'"{sys.executable}" "{FAKE_LAB}" run {" ".join(CELL)} | true; exit ${{PIPESTATUS[0]}}'
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": python_path(), "LAB_ROOT": str(project.root), "FAKE_MODE": "oom"}
    done = subprocess.run(["bash", "-c", shell], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 3, done.stderr
    assert "BrokenPipe" not in done.stderr
    assert len(list(project.runs.glob("*/001/record.json"))) == 1


def test_show_prints_the_cell_and_measures_nothing(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["show", *CELL]) == 0
    out = capsys.readouterr().out
    assert "codec: q2_g32" in out
    assert "run: python -m lab run model=nano path=expert_q2 layers=3 device=cpu bench=quick" in out
    assert not project.runs.exists()


def test_ls_names_every_choice(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls"]) == 0
    out = capsys.readouterr().out
    for text in ("model=nano", "path=expert_q2 ", "path=tiered ", "device=auto", "bench=thorough", "  q2_g32"):
        assert text in out
    assert cli.main(["ls", "benches"]) == 0
    assert "paths:" not in capsys.readouterr().out


def test_doctor_warns_of_what_costs_no_measurement_and_exits_1_for_what_does(
    project: Project, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "WARN  mlflow " in out and "BAD" not in out
    monkeypatch.setenv("TMPDIR", str(project.root / "gone"))
    assert cli.main(["doctor"]) == 1
    assert "BAD   disk_tmp " in capsys.readouterr().out


def test_the_project_is_found_from_the_package_and_a_wrong_root_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LAB_ROOT", str(tmp_path))
    with pytest.raises(LabError, match="LAB_ROOT"):
        find_project()
    monkeypatch.setenv("LAB_ROOT", str(ROOT))
    monkeypatch.setenv("LAB_RUNS", str(tmp_path / "r"))
    assert find_project() == Project(ROOT, tmp_path / "r")


def test_python_m_lab_is_this_command(project: Project) -> None:
    done = subprocess.run([sys.executable, "-m", "lab", "nonsense"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


def test_a_callers_python_path_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere/torch")
    assert python_path() == f"{ROOT}:/somewhere/torch"
    monkeypatch.delenv("PYTHONPATH")
    assert python_path() == str(ROOT)
