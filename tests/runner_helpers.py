"""A throw-away project for tests of composition, runner, store and tracking: the real conf/, a folder that looks like a model, own runs/.

Processes are started and waited for by facts (a sign file, an exit), never by sleeping for a guessed time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lab.cell import Cell
from lab.compose import plan
from lab.project import Project
from lab.record import Measurement, Record, Status

ROOT = Path(__file__).resolve().parents[1]
FAKE_LAB = Path(__file__).with_name("fake_lab.py")
PATIENCE_S = 60.0


def make_project(folder: Path) -> Project:
    """A project in `folder` with this repository's configuration and a nano of 12 layers without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "conf").symlink_to(ROOT / "conf")
    nano = folder / "experiments" / "nano"
    nano.mkdir(parents=True)
    (nano / "config.json").write_text(json.dumps({"model_type": "qwen4_exp", "text_config": {"num_hidden_layers": 12}}))
    (nano / "heldout.txt").write_text("text\n")
    return Project(root=folder, runs=folder / "runs")


def cell_of(project: Project, *words: str) -> Cell:
    """The composed cell."""
    return plan(project, [*words, "device=cpu"]).cells[0]


def record_of(cell: Cell, status: Status = Status.OK, **changes: Any) -> Record:
    """A record of `cell`, as short as a valid one can be."""
    gaps = {"kld_mean": {"status": "NOT_RUN" if status is Status.OK else status, "reason": "for a reason", "fill": "python -m lab run"}}
    samples = [50.0, 51.0, 49.0, 50.5, 49.5]
    metrics = {
        "ppl": Measurement(value=9.5, unit="ppl", protocol="ppl/window@1"),
        "tg128_tok_s": Measurement.from_samples(samples, "tok/s", "tg@1", roofline_pct=40.0),
    }
    data: dict[str, Any] = {
        "cell_id": cell.id,
        "cell_hash": cell.hash,
        "attempt": 1,
        "status": status,
        "reason": "" if status is Status.OK else "for a reason",
        "cell": cell.model_dump(mode="json"),
        "metrics": metrics if status is Status.OK else {},
        "gaps": gaps,
        "provenance": {"fill": "python -m lab run path=x"},
        "resume_key": "k" * 64,
        "started_at": "2026-11-29T10:00:00.000+00:00",
        "finished_at": "2026-11-29T10:00:05.000+00:00",
        "elapsed_s": 5.0,
    }
    return Record.model_validate(data | changes)


def python_path() -> str:
    """This repository before whatever the caller's PYTHONPATH holds, without which torch or MLflow may not be found."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def start_lab(project: Project, *words: str, **env: str) -> subprocess.Popen[str]:
    """Start `python -m lab` (with the fake worker) in its own process group, as a shell would."""
    settings = os.environ | {
        "LAB_ROOT": str(project.root),
        "LAB_RUNS": str(project.runs),
        "PYTHONPATH": python_path(),
        "TMPDIR": str(project.root),
        **env,
    }
    settings.pop("MLFLOW_TRACKING_URI", None)
    return subprocess.Popen(
        [sys.executable, str(FAKE_LAB), *words],
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        process_group=0,
    )


def lab(project: Project, *words: str, **env: str) -> tuple[int, str, str]:
    """Run `python -m lab` to its end: exit code, standard output, standard error."""
    process = start_lab(project, *words, **env)
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def until(fact: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    """Return as soon as `fact` holds; fail if the process ends before, or after PATIENCE_S."""
    deadline = time.monotonic() + PATIENCE_S
    while not fact():
        if process is not None and process.poll() is not None:
            raise AssertionError(f"ended with {process.returncode}: {process.communicate()[1]}")
        if time.monotonic() > deadline:
            raise AssertionError("did not happen")
        time.sleep(0.02)


def worker_pid(sign: Path, process: subprocess.Popen[str]) -> int:
    """The process id the fake worker left in its sign file, once it is measuring."""
    until(lambda: sign.exists() and sign.read_text(), process)
    return int(sign.read_text())


def is_gone(pid: int) -> bool:
    """Whether the process has ended (a zombie has)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").exists() and Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"


def interrupt(process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str, str]:
    """Send a signal and wait for the end."""
    process.send_signal(number)
    out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err
