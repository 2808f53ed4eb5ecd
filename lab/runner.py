"""One attempt at one cell, from the lock to the stored record.

The parent takes the measuring lock, opens the attempt's folder, starts the child, judges what it says and writes the record; whatever goes
wrong on the way, a record with a status is left. It never computes a metric itself. A record proves that this child said so under these
circumstances; `lab.admission` holds the doubts.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from lab import admission, provenance
from lab.admission import Decision, EvidenceCheck, refuse
from lab.assemble import as_infra, assemble, ending_problem, moved_problem, other_device
from lab.cell import Cell
from lab.checks import machine_checks, sampled
from lab.child import run_child
from lab.dead_ends import registered_files
from lab.errors import GapError, LabError, flat
from lab.events import Outcome
from lab.fallback import write_fallback
from lab.fill import fill_command
from lab.fitting import capacity_gate
from lab.gates import not_checked, passed
from lab.locks import GaveUpError, hold
from lab.places import without_places
from lab.preflight import Clearance, clear
from lab.project import Project, say
from lab.reconcile import reconcile
from lab.record import GateResult, Record, Status
from lab.signals import StopSignals
from lab.store import LOG, Attempt, Store, Stored
from lab.tracking import Mirrored, Tracker

WORKER_ARGV = (sys.executable, "-m", "lab.worker")


class StoppedError(Exception):
    """A stop was asked for before the attempt began, so that there is nothing to record."""


@dataclass(frozen=True)
class CellRun:
    """What became of one cell: its record, where it lies, whether an earlier result was taken over (`skipped`), and its mirror."""

    record: Record
    file: Path | None
    skipped: bool = False
    mirrored: Mirrored | None = None


class Runner:
    """Runs cells of one project, one after the other. `worker_argv` and `evidence` are other than the defaults only in tests."""

    def __init__(self, project: Project, worker_argv: Sequence[str] = WORKER_ARGV, evidence: EvidenceCheck | None = None) -> None:
        self.project, self.store, self.tracker = project, Store(project.runs), Tracker(project)
        self.worker_argv, self.evidence = tuple(worker_argv), evidence

    def resume_key(self, cell: Cell, artifact: dict[str, Any]) -> str:
        """See `lab.provenance.resume_key`. `artifact` is what `lab.preflight` found."""
        files = {name: str(artifact.get(name, "not inspected")) for name in ("sha256", "corpus_sha256")}
        return provenance.resume_key(cell, files, self.worker_argv)

    def run(self, cell: Cell, artifact: dict[str, Any], stop: StopSignals, skip_ok: bool, position: str = "", force: bool = False) -> CellRun:
        """Measure `cell`, or with `skip_ok` take over its newest result if that is OK under the same resume key.

        `force` goes past a dead end and a predicted misfit; the record says so. Waits for its turn. Raises StoppedError if a stop is asked for meanwhile.
        """
        label = f"{position}{cell.id}"
        with ExitStack() as turn:
            try:
                self._take_turn(turn, cell, label, stop)
                left_over = reconcile(self.store)
                # What a server runs is not in the resume key: its result is never taken over.
                earlier = self.store.newest(cell) if skip_ok and cell.engine != "server" else None
            except GaveUpError:
                raise StoppedError(stop.received or "stop") from None
            except OSError as error:
                return self._unopened(self._skeleton(cell, artifact), error)
            # Only now: while it waited, the code may have changed, and the wait is no part of the attempt.
            skeleton = self._skeleton(cell, artifact)
            if earlier and earlier.record.status is Status.OK and earlier.record.resume_key == skeleton["resume_key"]:
                if not (again := provenance.repairable_gaps(earlier.record)):
                    say(f"{label}: skipped, already OK with the same configuration, code, artifact, protocols and machine")
                    return CellRun(earlier.record, earlier.file, skipped=True)
                say(f"{label}: attempt {earlier.record.attempt:03d} is OK but left gaps that may be filled ({', '.join(again)}); measured again")
            if stop.received:
                raise StoppedError(stop.received)
            say(f"{label}: started")
            done = self._attempt(cell, skeleton, stop, force)
            # Still under the lock: loading MLflow takes a core for seconds, which would disturb the next one's measurement.
            return self._mirror(done, left_over)

    def _take_turn(self, turn: ExitStack, cell: Cell, label: str, stop: StopSignals) -> None:
        """Hold the measuring lock until `turn` ends. Raises GaveUpError when a stop is asked for, OSError if the folder or the lock fails."""
        self.project.runs.mkdir(parents=True, exist_ok=True)
        owner = f"pid {os.getpid()}, {cell.id}"
        turn.enter_context(
            hold(self.project.runs / ".lock", owner, lambda other: say(f"{label}: waiting, another measurement is running ({other})"), stop.wait)
        )

    def _unopened(self, skeleton: dict[str, Any], error: OSError) -> CellRun:
        """The record of an attempt that got no folder in `runs/`."""
        refused = refuse(Status.INFRA, f"{self.project.short(self.project.runs)}: {_reason(error)}")
        return self._fallback(self._record(skeleton, 0, refused))

    def _attempt(self, cell: Cell, skeleton: dict[str, Any], stop: StopSignals, force: bool) -> CellRun:
        me = psutil.Process()
        try:
            attempt = self.store.open_attempt(cell, {"pid": me.pid, "process_started": me.create_time(), "record": skeleton})
        except OSError as error:
            return self._unopened(skeleton, error)
        gates = [passed("identity", f"cell {cell.hash[:12]}, code {skeleton['provenance']['code_sha256'][:12]}")]
        try:
            try:
                clearance = clear(self.project, cell, force, skeleton["artifact"])
                gates += clearance.gates
                if clearance.stop is not None:
                    return self._store(attempt, self._stopped(skeleton, attempt.number, clearance, gates))
                gates += self._before_loading(cell, skeleton, force)
                outcome = self._child(cell, attempt, stop)
                skeleton["provenance"]["machine_state"]["after"] = sampled(machine_checks(self.project, cell.device))
                decision = self._judge(cell, outcome, skeleton)
                record = self._record(skeleton, attempt.number, decision, outcome, gates)
            except OSError as error:
                refused = refuse(Status.INFRA, f"the worker could not be started: {_reason(error)}")
                record = self._record(skeleton, attempt.number, refused, gates=gates)
            except GapError as gap:
                record = self._record(skeleton, attempt.number, refuse(gap.status, gap.reason), gates=gates)
            except LabError as error:
                # Found before the sweep began, this would have been exit 2; now it is this cell's gap, and the others go on.
                record = self._record(skeleton, attempt.number, refuse(Status.INFRA, f"changed since the start: {flat(error)}"), gates=gates)
            except BaseException as error:
                # A bug of the lab itself: it keeps its traceback, and the attempt its record.
                bug = refuse(Status.CRASHED, f"the lab itself failed: {type(error).__name__}: {flat(error)}")
                self._store(attempt, self._record(skeleton, attempt.number, bug, gates=gates))
                raise
            return self._store(attempt, record)
        finally:
            attempt.close()

    def _stopped(self, skeleton: dict[str, Any], number: int, clearance: Clearance, gates: list[GateResult]) -> Record:
        """The record of a cell that a gate stopped before any work, with the reason on the screen."""
        assert clearance.stop is not None
        for line in clearance.lines:
            say(line)
        return self._record(skeleton, number, refuse(*clearance.stop), gates=gates)

    def _before_loading(self, cell: Cell, skeleton: dict[str, Any], force: bool) -> list[GateResult]:
        """The gates between the files and the child. Raises GapError where one of them stops the cell."""
        artifact = skeleton["artifact"]
        checks = machine_checks(self.project, cell.device)
        skeleton["provenance"]["machine_state"] = {"before": sampled(checks)}
        for check in checks:
            if check.state == "bad":
                raise GapError(Status.INFRA, f"{check.name}: {check.found}; {check.fix}")
            if check.state == "warn":
                say(f"  warning: {check.name}: {check.found}")
        if cell.engine == "server":
            return [not_checked(gate, "the server's own files and memory") for gate in ("artifact", "capacity")]
        fits, kept = capacity_gate(self.project, cell, force)
        skeleton["evidence"] = {"capacity": kept} if kept else {}
        return [passed("artifact", f"sha256 {str(artifact.get('sha256'))[:12]}"), fits]

    def _child(self, cell: Cell, attempt: Attempt, stop: StopSignals) -> Outcome:
        job = {"cell": cell.model_dump(mode="json"), "cache_dir": str(self.project.cache), "root": str(self.project.root)}
        log, timeout_s = attempt.folder / LOG, cell.bench.timeout_s
        return run_child(self.worker_argv, job, cwd=self.project.root, log=log, timeout_s=timeout_s, stop=stop, on_phase=_progress)

    def _judge(self, cell: Cell, outcome: Outcome, skeleton: dict[str, Any]) -> Decision:
        found = outcome.result.metrics if outcome.result else outcome.metrics
        if problem := ending_problem(cell, outcome):
            return refuse(*problem, found)
        if other := moved_problem(skeleton, outcome.result) or other_device(cell, outcome.result):
            return replace(refuse(*other, found), stopped_at="identity")
        assert outcome.result is not None
        return admission.decide(cell, outcome.result, self.evidence)

    def _skeleton(self, cell: Cell, artifact: dict[str, Any]) -> dict[str, Any]:
        """What is known of a record before the child starts; also kept in the running marker, in case this process is killed."""
        started = provenance.utc_now()
        return {
            "cell_id": cell.id,
            "cell_hash": cell.hash,
            "cell": cell.model_dump(mode="json"),
            "artifact": artifact or {"path": cell.model.artifact},
            "provenance": {
                **provenance.provenance(self.project.root, self.worker_argv),
                "experiments": registered_files(self.project),
                "fill": fill_command(self.project, cell),
            },
            "resume_key": self.resume_key(cell, artifact),
            "started_at": started,
        }

    def _record(self, skeleton: dict[str, Any], number: int, decision: Decision, outcome: Outcome | None = None, gates: Sequence[GateResult] = ()) -> Record:
        other = () if self.worker_argv == WORKER_ARGV else (f"measured by another worker than lab.worker: {' '.join(self.worker_argv)}",)
        return without_places(assemble(skeleton, number, decision, outcome, gates, other))

    def _store(self, attempt: Attempt, record: Record) -> CellRun:
        try:
            return CellRun(record, self.store.finish(attempt.folder, record))
        except OSError as error:
            return self._fallback(as_infra(record, _reason(error)), attempt)

    def _fallback(self, record: Record, attempt: Attempt | None = None) -> CellRun:
        """Keep the record outside runs/. It is mirrored when it is moved back, under its final attempt number."""
        try:
            file = write_fallback(record, self.project.runs)
        except OSError as error:
            say(f"{record.cell_id}: {record.reason}; the record could not be kept in the temporary folder either ({_reason(error)}):")
            say(record.model_dump_json())
            return CellRun(record, None)
        if attempt:
            self.store.abandon(attempt.folder)
        say(f"{record.cell_id}: {record.reason}; the record is kept in {file} (python -m lab import moves it back)")
        return CellRun(record, file)

    def _mirror(self, done: CellRun, left_over: list[Stored]) -> CellRun:
        if done.file is None or not done.file.is_relative_to(self.project.runs):
            return done
        *_, mirrored = self.tracker.mirror_all([*left_over, Stored(done.file, done.record)])
        return replace(done, mirrored=mirrored)


def _progress(name: str, detail: str, elapsed_s: float) -> None:
    say(f"  [{elapsed_s:7.1f} s] {name}{': ' + detail if detail else ''}")


def _reason(error: OSError) -> str:
    return "disk full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else flat(error.strerror or error)
