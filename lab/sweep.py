"""The verb `run`: compose all cells, check all of them, run one after the other, show the results.

The loop is ours and not Hydra's, so that a failed cell does not end a sweep, and so that what is done already is skipped. Cells run one
at a time: two measurements on one machine would measure each other.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TextIO

from lab.compose import plan
from lab.console import print_result, print_sweep, where
from lab.fitting import prepare
from lab.preflight import Inspect, inspect_artifacts
from lab.project import Project, forget_stdout, say
from lab.record import Status
from lab.runner import CellRun, Runner, StoppedError
from lab.selection import names_experiment, plan_experiment
from lab.signals import StopSignals

OK, GAP, INTERRUPTED = 0, 3, 130


def run_cells(
    project: Project,
    overrides: Sequence[str],
    multirun: bool,
    json_out: TextIO | None,
    *,
    runner: Runner | None = None,
    inspect: Inspect | None = None,
) -> int:
    """Run what `overrides` ask for and return the exit code. With `json_out`, the record (or list of records) is written there.

    `runner` and `inspect` stand in for the real ones in tests. Raises LabError before anything has run.
    """
    if names_experiment(overrides):
        multirun, wanted = True, plan_experiment(project, overrides)
    else:
        wanted = plan(project, overrides, multirun)
    artifacts = inspect_artifacts(project, wanted.cells, wanted.force, inspect)
    prepare(project, [cell for cell in wanted.cells if "sha256" in artifacts[cell.hash]])
    runner = runner or Runner(project)
    done: list[CellRun] = []
    with StopSignals() as stop:
        for index, cell in enumerate(wanted.cells, 1):
            position = f"[{index}/{len(wanted.cells)}] " if multirun else ""
            try:
                result = runner.run(cell, artifacts[cell.hash], stop, multirun and not wanted.force, position, wanted.force)
            except StoppedError:
                break
            done.append(result)
            _say_result(result, position)
            if stop.received:
                break
        if stop.received:
            say(f"interrupted by {stop.received}; {len(wanted.cells) - len(done)} of {len(wanted.cells)} cells were not started")
        try:
            _print(project, done, multirun, json_out)
        except BrokenPipeError:
            forget_stdout()  # the records are stored, and the exit code below still tells how the cells ended
    if stop.received:
        return INTERRUPTED
    # Counted, too: a cell that was not reached is no OK, whatever kept it from its turn.
    return OK if len(done) == len(wanted.cells) and all(run.record.status is Status.OK for run in done) else GAP


def _say_result(done: CellRun, position: str) -> None:
    record = done.record
    if not done.skipped:
        reason = f": {record.reason}" if record.reason else ""
        say(f"{position}{record.cell_id}: {record.status}{reason} ({record.elapsed_s:.1f} s)")


def _print(project: Project, done: Sequence[CellRun], multirun: bool, json_out: TextIO | None) -> None:
    if json_out is not None:
        documents = [run.record.model_dump(mode="json") for run in done]
        for run in done:
            for line in where(project, run):
                say(line)
        if multirun or documents:
            json_out.write(json.dumps(documents if multirun else documents[0], indent=1, ensure_ascii=False, allow_nan=False) + "\n")
            json_out.flush()
    elif multirun:
        print_sweep(project, done)
    elif done:
        print_result(project, done[0])
