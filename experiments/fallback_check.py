"""Makes each fallback happen on nano and shows what the record says of it: `python -m experiments.fallback_check` on a machine with a GPU.

Why: evidence that was never seen to object proves nothing. Kernels switched off, a capture that fails (once with mode=auto, once with mode=graph), page-locked
memory that is refused, slots that are too few; and first the same cell untouched, which must be OK. Each line is a cell that `python -m lab run` takes too,
where it leaves a record; here all run in one process, which is quicker, and leave none. What it does not prove: that every fallback there can be is noticed.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from experiments.gpu_parts import missing_gpu
from lab.admission import Decision, decide
from lab.attempt import one_line
from lab.cell import Cell
from lab.compose import compose_cells
from lab.engines.local_attempt import LocalAttempt
from lab.errors import LabError
from lab.project import find_project
from lab.record import Status, WorkerResult

COMMON = ("model=nano", "layers=3", "bench=quick", "bench.ppl_windows=1")


@dataclass(frozen=True)
class Case:
    """What is made to happen, by which words, the status that must follow and what its reason or a note must say."""

    what: str
    words: tuple[str, ...]
    status: Status
    said: str


CASES = (
    Case("nothing", ("path=expert_q2",), Status.OK, ""),
    Case("kernels disabled", ("path=expert_q2", "disable=kernels"), Status.DEGRADED, "q2_g32 ran as torch"),
    Case("capture fails, mode=auto", ("path=expert_q2", "disable=graph"), Status.OK, "not as a graph: not captured"),
    Case("capture fails, mode=graph", ("path=expert_q2", "disable=graph", "mode=graph"), Status.PATH_NOT_EXECUTED, "mode=graph was asked for"),
    Case("pinned memory refused", ("path=tiered", "placement.slots=8", "disable=pinned"), Status.UNSUPPORTED, "pinned host memory were refused"),
    Case("slots too few", ("path=tiered", "placement.slots=2"), Status.UNSUPPORTED, "placement.slots=2"),
)


class _Attempt(LocalAttempt):
    """Without the machine's bounds, which take longer than all the rest: no roofline is looked at here."""

    def machine(self, device: torch.device, threads: int) -> dict[str, Any] | None:
        return None


def attempt(cell: Cell, root: Path, cache: Path) -> tuple[Decision, WorkerResult]:
    """One attempt in this process, judged as the lab judges it."""
    events = io.StringIO()
    _Attempt(cell, root, cache, events).run()
    result = WorkerResult.model_validate(json.loads(events.getvalue().splitlines()[-1])["result"])
    return decide(cell, result), result


def seen(case: Case, decision: Decision, result: WorkerResult) -> bool:
    """Whether the status is the expected one and its reason, a gap or a note names what happened."""
    told = [decision.reason, *decision.notes, *result.notes, *(reason for _, reason in decision.gaps.values())]
    return decision.status is case.status and (not case.said or any(case.said in text for text in told))


def main() -> int:
    """Returns 0 where every case was seen, 1 where one was not, 2 for a device that is not there or not known."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="a device file of conf/device; on a CPU most cases have nothing to fall back from")
    device = parser.parse_args().device
    project, missed = find_project(), 0
    try:
        first = compose_cells([*COMMON, f"device={device}", *CASES[0].words], project)[0]
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if first.device.torch_device != "cpu" and missing_gpu("fallback_check"):
        return 2
    with tempfile.TemporaryDirectory() as cache:
        for case in CASES:
            words = [*COMMON, f"device={device}", *case.words]
            started = time.perf_counter()
            try:
                decision, result = attempt(compose_cells(words, project)[0], project.root, Path(cache))
            except Exception as error:  # whatever one case ends with, the others are to be seen, too
                traceback.print_exc()
                decision, result = Decision(Status.CRASHED, one_line(error)), WorkerResult(status=Status.CRASHED, reason=one_line(error))
            found = seen(case, decision, result)
            missed += not found
            print(
                f"{'seen  ' if found else 'MISSED'} {case.what}: {decision.status} (expected {case.status}), {time.perf_counter() - started:.1f} s", flush=True
            )
            print(f"       python -m lab run {' '.join(words)}")
            if decision.reason:
                print(f"       reason: {decision.reason}")
            for note in dict.fromkeys([*result.notes, *decision.notes]):
                print(f"       note: {note}")
            if found:
                continue
            print(f"       graph: {result.evidence.get('graph')}; kernels: {result.evidence.get('gpu_kernels')}; tiers: {result.evidence.get('tiers')}")
    print(f"{len(CASES) - missed} of {len(CASES)} seen")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
