"""The list as a whole: it never raises, is quick, fits into a record, and says of packages, variables and stores what is in the way."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.checks import machine_checks, sampled, software, stores
from lab.checks.check import Check, Finding, check, known, ok, size, warn
from lab.checks.source import AbsentError, Source, UnseenError, ask_tool
from lab.project import Project
from lab.provenance import environment
from lab.store import Store
from tests.checks.support import CPU, CUDA, H200_IDLE, answers, machine
from tests.runner_helpers import ROOT, cell_of, make_project, record_of

GPU_CHECKS = ("driver", "gpu_memory", "gpu_clocks")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return make_project(tmp_path / "p")


def test_this_machine_can_be_looked_at_quickly_and_the_result_fits_into_a_record(project: Project) -> None:
    started = time.monotonic()
    found = machine_checks(project, CPU)
    # A tenth of it when nothing else runs; far below what a tool that hangs would take.
    assert time.monotonic() - started < 2.0
    assert len({one.name for one in found}) == len(found) >= 14
    kept = sampled(found)
    assert json.loads(json.dumps(kept, allow_nan=False)) == kept
    assert kept["disk_runs"]["values"]["free_bytes"] > 0 and set(kept["disk_runs"]) == {"state", "found", "values"}
    assert not [one.found for one in found if one.found.startswith("could not look")]
    assert not project.runs.exists() and not project.cache.exists()


def test_gpus_are_looked_at_where_they_matter(tmp_path: Path, project: Project) -> None:
    with_gpu = machine(tmp_path / "m", ask=answers(H200_IDLE))
    for device, wanted in ((CPU, ()), (CUDA, GPU_CHECKS), (None, GPU_CHECKS)):
        assert tuple(one.name for one in machine_checks(project, device, with_gpu) if one.name in GPU_CHECKS) == wanted
    assert not any(one.name in GPU_CHECKS for one in machine_checks(project, None, machine(tmp_path / "n")))


def test_a_machine_that_answers_nothing_at_all_still_raises_nothing(tmp_path: Path, project: Project) -> None:
    def broken(*_args: object) -> None:
        raise RuntimeError("of a kind nobody foresaw")

    source = Source(tmp_path, *[broken] * 6)  # type: ignore[arg-type]
    found = {one.name: one for one in machine_checks(project, CUDA, source)}
    assert found["disk_tmp"].state == "unknown" and found["disk_tmp"].found == "could not look: RuntimeError: of a kind nobody foresaw"
    assert "nobody foresaw" in found["driver"].found
    assert found["environment"].state in ("ok", "warn")


def test_neither_torch_nor_mlflow_is_imported() -> None:
    script = "import sys, lab.checks, lab.doctor; print(sorted({'torch', 'mlflow', 'numpy'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_finding_in_the_way_has_a_fix_and_only_finite_numbers() -> None:
    with pytest.raises(ValueError, match="needs a fix"):
        Finding("warn", "slow")
    with pytest.raises(ValueError, match="finite"):
        ok("fine", share=float("nan"))
    assert known(a=1, b=None, c=0) == {"a": 1, "c": 0}


def test_a_check_carries_its_name_and_turns_a_failure_into_unknown() -> None:
    assert check("x")(lambda: warn("slow", "wait", n=1))() == Check("warn", "slow", "wait", {"n": 1}, name="x")
    failed = check("x")(lambda: ok(str(1 // 0)))()
    assert (failed.name, failed.state, failed.found) == ("x", "unknown", "could not look: ZeroDivisionError: integer division or modulo by zero")


@given(st.integers(0, 1 << 50))
def test_sizes_keep_their_magnitude(count: int) -> None:
    number, unit = size(count).split()
    factor = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]
    assert abs(float(number) * factor - count) <= factor / 2
    assert float(number) <= 1024 or unit == "GiB"


def test_a_tool_that_is_absent_fails_or_hangs_says_so() -> None:
    with pytest.raises(AbsentError, match="no-such-tool is not installed"):
        ask_tool(["no-such-tool"])
    with pytest.raises(UnseenError, match="ended with exit code 9: it failed"):
        ask_tool(["sh", "-c", "echo it failed >&2; exit 9"])
    with pytest.raises(UnseenError, match="did not answer within 0.1 s"):
        ask_tool(["sleep", "5"], within_s=0.1)
    assert ask_tool(["echo", "fine"]) == "fine\n"


def test_a_missing_package_is_bad_unless_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"torch", "triton"}
    monkeypatch.setattr(software, "package_versions", lambda names: {name: None if name in absent else "1.0" for name in names})
    found = software.packages()
    assert found.state == "bad" and "torch not installed" in found.found and found.fix.endswith("pip install torch")
    absent.remove("torch")
    assert software.packages().state == "ok"


@pytest.mark.parametrize(
    ("name", "value", "state"),
    [
        ("HSA_OVERRIDE_GFX_VERSION", "11.0.0", "warn"),
        ("TRITON_INTERPRET", "1", "warn"),
        ("TRITON_INTERPRET", "0", "ok"),
        ("OMP_NUM_THREADS", "1", "ok"),
        ("GPU_MAX_HW_QUEUES", "1", "ok"),
    ],
)
def test_variables_are_named_and_the_harmful_ones_warned_of(monkeypatch: pytest.MonkeyPatch, name: str, value: str, state: str) -> None:
    for other in (*environment(), *software._ALSO, *software._HARMFUL):
        monkeypatch.delenv(other, raising=False)
    assert software.variables().found.startswith("nothing set")
    monkeypatch.setenv(name, value)
    found = software.variables()
    assert found.state == state and f"{name}={value}" in found.found
    assert (f"unset {name}" in found.fix) is (state == "warn")


def test_a_store_that_does_not_answer_costs_no_measurement_and_no_password_is_shown(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9/x")
    found = stores.tracking(project)
    assert found.state == "warn" and found.found.startswith("http://127.0.0.1:9/x: ") and "import" in found.fix
    assert "secret" not in found.found + found.fix
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@[bad")
    found = stores.tracking(project)
    assert (found.state, found.found) == ("warn", "http://[bad: Invalid IPv6 URL")


def test_a_locked_or_unwritable_sqlite_store_is_seen(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "PROBE_S", 0.1)
    assert stores.tracking(project).found.endswith("mlflow.db: made by the first run")
    with sqlite3.connect(project.root / "mlflow.db", isolation_level=None) as other:
        assert stores.tracking(project).found.endswith("mlflow.db answers")
        other.execute("BEGIN IMMEDIATE")
        assert "database is locked" in stores.tracking(project).found
    other.close()
    monkeypatch.setattr(os, "access", lambda *_args: False)
    assert stores.tracking(project).state == "warn"


def test_records_are_counted_and_a_spoilt_one_is_named(project: Project) -> None:
    assert stores.records(project, 0).found == "0 records, 0 unreadable, 0 attempts running, 0 closed now"
    cell = cell_of(project, "path=expert_q2", "layers=3")
    store = Store(project.runs)
    for _ in range(2):
        attempt = store.open_attempt(cell, {})
        file = store.finish(attempt.folder, record_of(cell, attempt=attempt.number))
        attempt.close()
    file.write_text("{}")
    running = store.open_attempt(cell, {})
    found = stores.records(project, 1)
    running.close()
    assert found.state == "warn" and found.values == {"records": 2, "unreadable": 1, "running": 1, "closed": 1}
    assert f"runs/{cell.id}/002/record.json: " in found.found
