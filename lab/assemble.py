"""From what an attempt left behind to its record: the ending judged, findings and origin put in their places.

Apart from the runner, which deals with processes, locks and disks: here is only what stands in a record and why. Nothing is computed from the
numbers; a value that was not admitted is kept as evidence, where no report looks for headlines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lab import provenance
from lab.admission import Decision, refuse
from lab.capacity import place_out_of_memory
from lab.cell import Cell
from lab.child import KILLED_FOR_MEMORY
from lab.devices import is_expected
from lab.events import Outcome
from lab.gates import complete
from lab.record import GateResult, Record, Status, WorkerResult

_SAME_CARD = 0.9
"""Drivers keep a few percent of a card's memory for themselves; the next smaller card of a family has far less."""
_FORCEABLE = frozenset({Status.DEAD_END, Status.OOM_PREDICTED})
"""Statuses that only `force=true` gets past; the fill command then has to carry it."""


def assemble(
    skeleton: dict[str, Any],
    number: int,
    decision: Decision,
    outcome: Outcome | None = None,
    gates: Sequence[GateResult] = (),
    notes: Sequence[str] = (),
) -> Record:
    """The record of attempt `number`. `skeleton` holds cell, artifact, provenance, resume key and start; `gates` those passed before the child."""
    fill = skeleton["provenance"]["fill"] + (" force=true" if decision.status in _FORCEABLE else "")
    result = outcome.result if outcome else None
    evidence: dict[str, Any] = {**skeleton.get("evidence", {}), **(result.evidence if result else {})}
    said = [f"forced past the gate {g.gate}: {g.detail}" for g in gates if g.outcome == "forced"]
    said += [*(result.notes if result else []), *decision.notes]
    origin = dict(skeleton["provenance"])
    if decision.unadmitted:
        evidence["unadmitted_metrics"] = {name: m.model_dump(mode="json") for name, m in decision.unadmitted.items()}
    if outcome:
        said += [outcome.log_error] if outcome.log_error else []
        origin["worker"] = {"ended": outcome.ended, "exit_code": outcome.exit_code, "signal": outcome.killed_by}
        origin["phases"] = outcome.phases
        if decision.status is not Status.OK:
            evidence["log_tail"] = outcome.log_tail
    if decision.status is Status.OOM and "capacity" in evidence:
        evidence["capacity"] = {**evidence["capacity"], "ran_out": place_out_of_memory(decision.reason)}
    if result:
        origin["environment"] = result.environment
    started = skeleton["started_at"]
    return Record(
        **{
            **{key: value for key, value in skeleton.items() if key != "evidence"},
            "artifact": {**skeleton["artifact"], **(result.artifact if result else {})},
            "provenance": origin,
        },
        attempt=number,
        status=decision.status,
        reason=decision.reason,
        metrics=decision.metrics,
        gaps=decision.gaps_with(fill),
        notes=[*said, *notes],
        gates=complete([*gates, *decision.gates], decision.status, decision.reason, decision.stopped_at),
        evidence=evidence,
        finished_at=provenance.utc_now(),
        elapsed_s=round(provenance.seconds_since(started), 3),
    )


def as_infra(record: Record, reason: str) -> Record:
    """The record, with its numbers set aside: what could not be stored where reports look is no result yet."""
    kept = {name: m.model_dump(mode="json") for name, m in record.metrics.items()}
    decision = refuse(Status.INFRA, f"{reason} while writing the record; the cell had ended as {record.status}")
    evidence = {**record.evidence, "unadmitted_metrics": {**record.evidence.get("unadmitted_metrics", {}), **kept}}
    gaps = decision.gaps_with(record.provenance["fill"])
    changed = {"status": decision.status, "reason": decision.reason, "metrics": {}, "gaps": gaps, "evidence": evidence}
    return record.model_copy(update=changed)


def ending_problem(cell: Cell, outcome: Outcome) -> tuple[Status, str] | None:
    """Why the way the child ended leaves no valid result, or None."""
    last = f"; last log line: {outcome.log_tail[-1][:200]}" if outcome.log_tail else ""
    if outcome.ended == "interrupted":
        return Status.CRASHED, f"interrupted by {outcome.stop_signal}"
    if outcome.ended == "timeout":
        return Status.TIMEOUT, f"not finished after bench.timeout_s={cell.bench.timeout_s:g} s, in phase {_phase(outcome)}{last}"
    if outcome.problem == KILLED_FOR_MEMORY:
        return Status.OOM, f"{KILLED_FOR_MEMORY}, in phase {_phase(outcome)}{last}"
    if outcome.killed_by:
        memory = " (out of memory is a common cause)" if outcome.killed_by == "SIGKILL" else ""
        return Status.CRASHED, f"the worker was ended by {outcome.killed_by}{memory} in phase {_phase(outcome)}{last}"
    if outcome.result is None:
        code = f" (exit code {outcome.exit_code})" if outcome.exit_code else ""
        return Status.CRASHED, f"{outcome.problem}{code} in phase {_phase(outcome)}{last}"
    if outcome.exit_code and outcome.result.status is Status.OK:
        return Status.CRASHED, f"the worker reported OK and then ended with exit code {outcome.exit_code}{last}"
    return None


def moved_problem(skeleton: dict[str, Any], result: WorkerResult | None) -> tuple[Status, str] | None:
    """Whether the worker ran other code or other files than the record names: both are read again by the child, minutes later."""
    if result is None:
        return None
    ran, files = result.environment.get("code_sha256"), result.artifact.get("sha256")
    if ran is not None and ran != skeleton["provenance"]["code_sha256"]:
        return Status.INFRA, "the code under lab/ changed between start and measurement; run it again"
    if files is not None and files != skeleton["artifact"].get("sha256"):
        return Status.INFRA, f"{skeleton['cell']['model']['artifact']}: the files changed between check and measurement; run it again"
    return None


def other_device(cell: Cell, result: WorkerResult | None) -> tuple[Status, str] | None:
    """Whether the worker used another card than the one the cell names: a machine may hold several, and the kernel's names tell a chip, not a card."""
    if result is None or "gpu" not in result.environment:
        return None
    used, size = result.environment, result.environment.get("gpu_memory_bytes")
    names = [str(used[key]) for key in ("gpu", "gpu_arch") if used.get(key)]
    if not is_expected(cell.device.expect, names):
        return Status.INFRA, f"it ran on {' '.join(names)}, which is not device={cell.device.name}; choose the card with CUDA_VISIBLE_DEVICES"
    if cell.device.expect and cell.device.memory_bytes and isinstance(size, int) and size < _SAME_CARD * cell.device.memory_bytes:
        here, there = (f"{n / 2**30:.1f} GiB" for n in (size, cell.device.memory_bytes))
        return Status.INFRA, f"it ran on {' '.join(names)} with {here}, but device={cell.device.name} has {there}: another card of the same chip"
    return None


def _phase(outcome: Outcome) -> str:
    return outcome.phases[-1]["name"] if outcome.phases else "start"
