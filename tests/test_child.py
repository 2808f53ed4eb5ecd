"""How a child's end by SIGKILL is told apart: by the kernel for want of memory, or by anybody else. Other endings: `test_runner`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lab.admission import refuse
from lab.assemble import assemble, ending_problem
from lab.checks.source import Source
from lab.child import KILLED_FOR_MEMORY, run_child
from lab.events import Outcome
from lab.record import Status
from lab.signals import StopSignals
from tests.checks.support import machine
from tests.runner_helpers import cell_of, make_project, record_of

DYING = """
import os, pathlib, signal, sys, time
counter, said, how = sys.argv[1:4]
pathlib.Path(counter).write_text(said)
if how == "hang":
    time.sleep(600)
os.kill(os.getpid(), getattr(signal, how))
"""
V2 = ("0::/lab", "sys/fs/cgroup/lab/memory.events", "low 0\noom 3\noom_kill {}\n")
V1 = ("4:memory:/lab", "sys/fs/cgroup/memory/lab/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n")


def end(folder: Path, group: tuple[str, str, str], after: int, how: str = "SIGKILL", timeout_s: float = 60) -> Outcome:
    """The outcome of a child that ends in this way, while the kernel's count of such kills goes from 2 to `after`."""
    line, file, text = group
    here: Source = machine(folder / "m", {"proc/self/cgroup": line, file: text.format(2)})
    argv = (sys.executable, "-c", DYING, str(here.root / file), text.format(after), how)
    with StopSignals() as stop:
        return run_child(argv, {}, cwd=folder, log=folder / "log", timeout_s=timeout_s, stop=stop, on_phase=lambda *_: None, machine=here)


@pytest.mark.parametrize("group", [V2, V1], ids=["v2", "v1"])
def test_a_kill_that_the_kernel_counted_is_out_of_memory_and_the_record_says_of_which(tmp_path: Path, group: tuple[str, str, str]) -> None:
    cell = cell_of(make_project(tmp_path / "p"), "path=expert_q2", "layers=3")
    outcome = end(tmp_path, group, after=3)
    problem = ending_problem(cell, outcome)
    assert problem == (Status.OOM, f"{KILLED_FOR_MEMORY}, in phase start")
    base = record_of(cell)
    kept = {"cell_id", "cell_hash", "cell", "artifact", "provenance", "resume_key", "started_at"}
    skeleton = {**base.model_dump(mode="json", include=kept), "evidence": {"capacity": {"ledger_bytes": 5}}}
    record = assemble(skeleton, 1, refuse(*problem), outcome)
    assert record.evidence["capacity"] == {"ledger_bytes": 5, "ran_out": "host"}


@pytest.mark.parametrize("group", [V2, V1, ("0::/lab", "elsewhere", "{}")], ids=["v2", "v1", "no counter"])
def test_a_kill_that_the_kernel_did_not_count_is_a_crash(tmp_path: Path, group: tuple[str, str, str]) -> None:
    cell = cell_of(make_project(tmp_path / "p"), "path=expert_q2", "layers=3")
    problem = ending_problem(cell, end(tmp_path, group, after=2))
    assert problem is not None and problem[0] is Status.CRASHED and "SIGKILL" in problem[1]


@pytest.mark.parametrize(("how", "timeout_s", "status"), [("SIGSEGV", 60, Status.CRASHED), ("hang", 1, Status.TIMEOUT)])
def test_a_kill_elsewhere_in_the_group_does_not_excuse_another_end(tmp_path: Path, how: str, timeout_s: float, status: Status) -> None:
    cell = cell_of(make_project(tmp_path / "p"), "path=expert_q2", "layers=3")
    problem = ending_problem(cell, end(tmp_path, V2, 3, how, timeout_s))
    assert problem is not None and problem[0] is status
