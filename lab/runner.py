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
from lab.cell import Cell
from lab.child import run_child
from lab.errors import GapError
from lab.events import Outcome
from lab.fill import fill_command
from lab.locks import GaveUpError, hold
from lab.preflight import check_cell
from lab.project import Project, say
from lab.reconcile import reconcile
from lab.record import Gap, Record, Status, WorkerResult
from lab.signals import StopSignals
from lab.store import LOG, Attempt, Store, Stored, write_fallback
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

    def run(self, cell: Cell, artifact: dict[str, Any], stop: StopSignals, skip_ok: bool, position: str = "") -> CellRun:
        """Measure `cell`, or with `skip_ok` take over its newest result if that is OK under the same resume key.

        Waits for its turn. Raises StoppedError if a stop is asked for meanwhile.
        """
        label = f"{position}{cell.id}"
        with ExitStack() as turn:
            try:
                self._take_turn(turn, cell, label, stop)
                left_over = reconcile(self.store)
                earlier = self.store.newest(cell) if skip_ok else None
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
            done = self._attempt(cell, skeleton, stop)
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

    def _attempt(self, cell: Cell, skeleton: dict[str, Any], stop: StopSignals) -> CellRun:
        me = psutil.Process()
        try:
            attempt = self.store.open_attempt(cell, {"pid": me.pid, "process_started": me.create_time(), "record": skeleton})
        except OSError as error:
            return self._unopened(skeleton, error)
        try:
            try:
                check_cell(self.project, cell)
                outcome = self._child(cell, attempt, stop)
                decision = self._judge(cell, outcome, skeleton)
                record = self._record(skeleton, attempt.number, decision, outcome)
            except OSError as error:
                record = self._record(skeleton, attempt.number, refuse(Status.INFRA, f"the worker could not be started: {_reason(error)}"))
            except GapError as gap:
                record = self._record(skeleton, attempt.number, refuse(gap.status, gap.reason))
            except BaseException as error:
                # A bug of the lab itself: it keeps its traceback, and the attempt its record.
                bug = refuse(Status.CRASHED, f"the lab itself failed: {type(error).__name__}: {_one_line(error)}")
                self._store(attempt, self._record(skeleton, attempt.number, bug))
                raise
            return self._store(attempt, record)
        finally:
            attempt.close()

    def _child(self, cell: Cell, attempt: Attempt, stop: StopSignals) -> Outcome:
        job = {"cell": cell.model_dump(mode="json"), "cache_dir": str(self.project.cache), "root": str(self.project.root)}
        log, timeout_s = attempt.folder / LOG, cell.bench.timeout_s
        return run_child(self.worker_argv, job, cwd=self.project.root, log=log, timeout_s=timeout_s, stop=stop, on_phase=_progress)

    def _judge(self, cell: Cell, outcome: Outcome, skeleton: dict[str, Any]) -> Decision:
        problem = _ending(cell, outcome) or _moved(skeleton, outcome.result)
        if problem:
            return refuse(*problem, outcome.result.metrics if outcome.result else outcome.metrics)
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
            "provenance": {**provenance.provenance(self.project.root, self.worker_argv), "fill": fill_command(self.project, cell)},
            "resume_key": self.resume_key(cell, artifact),
            "started_at": started,
        }

    def _record(self, skeleton: dict[str, Any], number: int, decision: Decision, outcome: Outcome | None = None) -> Record:
        fill = skeleton["provenance"]["fill"]
        result = outcome.result if outcome else None
        evidence: dict[str, Any] = dict(result.evidence) if result else {}
        notes = [*(result.notes if result else []), *decision.notes]
        origin = dict(skeleton["provenance"])
        if decision.unadmitted:
            evidence["unadmitted_metrics"] = {name: m.model_dump(mode="json") for name, m in decision.unadmitted.items()}
        if outcome:
            notes += [outcome.log_error] if outcome.log_error else []
            origin["worker"] = {"ended": outcome.ended, "exit_code": outcome.exit_code, "signal": outcome.killed_by}
            origin["phases"] = outcome.phases
            if decision.status is not Status.OK:
                evidence["log_tail"] = outcome.log_tail
        if result:
            origin["environment"] = result.environment
        if self.worker_argv != WORKER_ARGV:
            notes.append(f"measured by another worker than lab.worker: {' '.join(self.worker_argv)}")
        started = skeleton["started_at"]
        return Record(
            **{**skeleton, "artifact": {**skeleton["artifact"], **(result.artifact if result else {})}, "provenance": origin},
            attempt=number,
            status=decision.status,
            reason=decision.reason,
            metrics=decision.metrics,
            gaps={name: Gap(status=s, reason=r, fill=fill) for name, (s, r) in decision.gaps.items()},
            notes=notes,
            evidence=evidence,
            finished_at=provenance.utc_now(),
            elapsed_s=round(provenance.seconds_since(started), 3),
        )

    def _store(self, attempt: Attempt, record: Record) -> CellRun:
        try:
            return CellRun(record, self.store.finish(attempt.folder, record))
        except OSError as error:
            return self._fallback(_as_infra(record, _reason(error)), attempt)

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


def _ending(cell: Cell, outcome: Outcome) -> tuple[Status, str] | None:
    """Why the way the child ended leaves no valid result, or None."""
    last = f"; last log line: {outcome.log_tail[-1][:200]}" if outcome.log_tail else ""
    if outcome.ended == "interrupted":
        return Status.CRASHED, f"interrupted by {outcome.stop_signal}"
    if outcome.ended == "timeout":
        return Status.TIMEOUT, f"not finished after bench.timeout_s={cell.bench.timeout_s:g} s, in phase {_phase(outcome)}{last}"
    if outcome.killed_by:
        memory = " (out of memory is a common cause)" if outcome.killed_by == "SIGKILL" else ""
        return Status.CRASHED, f"the worker was ended by {outcome.killed_by}{memory} in phase {_phase(outcome)}{last}"
    if outcome.result is None:
        code = f" (exit code {outcome.exit_code})" if outcome.exit_code else ""
        return Status.CRASHED, f"{outcome.problem}{code} in phase {_phase(outcome)}{last}"
    if outcome.exit_code and outcome.result.status is Status.OK:
        return Status.CRASHED, f"the worker reported OK and then ended with exit code {outcome.exit_code}{last}"
    return None


def _moved(skeleton: dict[str, Any], result: WorkerResult | None) -> tuple[Status, str] | None:
    """Whether the worker ran other code or other files than the record names: both are read again by the child, minutes later."""
    if result is None:
        return None
    ran, files = result.environment.get("code_sha256"), result.artifact.get("sha256")
    if ran is not None and ran != skeleton["provenance"]["code_sha256"]:
        return Status.INFRA, "the code under lab/ changed between start and measurement; run it again"
    if files is not None and files != skeleton["artifact"].get("sha256"):
        return Status.INFRA, f"{skeleton['cell']['model']['artifact']}: the files changed between check and measurement; run it again"
    return None


def _phase(outcome: Outcome) -> str:
    return outcome.phases[-1]["name"] if outcome.phases else "start"


def _progress(name: str, detail: str, elapsed_s: float) -> None:
    say(f"  [{elapsed_s:7.1f} s] {name}{': ' + detail if detail else ''}")


def _as_infra(record: Record, reason: str) -> Record:
    """The record, with its numbers set aside: what could not be stored where reports look is no result yet."""
    kept = {name: m.model_dump(mode="json") for name, m in record.metrics.items()}
    decision = refuse(Status.INFRA, f"{reason} while writing the record; the cell had ended as {record.status}")
    evidence = {**record.evidence, "unadmitted_metrics": {**record.evidence.get("unadmitted_metrics", {}), **kept}}
    fill = record.provenance["fill"]
    gaps = {name: Gap(status=s, reason=r, fill=fill) for name, (s, r) in decision.gaps.items()}
    changed = {"status": decision.status, "reason": decision.reason, "metrics": {}, "gaps": gaps, "evidence": evidence}
    return record.model_copy(update=changed)


def _reason(error: OSError) -> str:
    return "disk full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else _one_line(error.strerror or error)


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:300]
