"""Runs cells of an experiment on several GPUs of one machine within a time limit, one lane of cells per GPU:

    python -m experiments.lanes flash_next_h200 --seconds 560 --out records --lane "path=expert_q2 layers=48 / path=tiered layers=6" --lane "path=reference"

Each lane is a list of `lab run experiment=NAME WORDS` in order, with a GPU and a runs folder of its own, because one runs folder measures one cell at a time.
A cell that still runs at the end is interrupted and has GRACE_S to write its record; nothing is started in the last seconds. Ctrl-C, SIGTERM and SIGHUP end
all lanes in the same way. Everything in a lane's folder is exported at the end, to be taken in elsewhere with `lab import`. The lanes share the host: what is
bound by the CPU belongs in a lane that runs alone.
What it does not prove: that a neighbour on the other GPU costs nothing; the records hold the machine's state before and after.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab.signals import StopSignals

GRACE_S = 25.0
"""Kept for a cell that is interrupted to write its record; a few seconds more than a loaded machine was seen to need."""
EXPORT_S = 5.0
LEAST_S = 30.0
"""Nothing is started with less than this before it would be interrupted."""
_LAB = (sys.executable, "-m", "lab")
_VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


def cells_of(lane: str) -> list[list[str]]:
    """`a=1 b=2 / c=3` -> [[a=1, b=2], [c=3]]. Raises ValueError where a cell is empty or a word is no override."""
    cells = [part.split() for part in lane.split(" / ")]
    for cell in cells:
        if not cell or any("=" not in word for word in cell):
            raise ValueError(f"--lane {lane!r}: cells are KEY=VALUE words, cells stand between slashes with spaces around them")
    return cells


def gpus_of(lanes: int, environment: Mapping[str, str]) -> list[str]:
    """What each lane's processes shall see: the GPUs that this process may see, in order. Raises ValueError where there are fewer than lanes."""
    given = next((environment[name] for name in _VISIBLE if environment.get(name)), None)
    gpus = [str(number) for number in range(lanes)] if given is None else [gpu.strip() for gpu in given.split(",") if gpu.strip()]
    if len(gpus) < lanes:
        raise ValueError(f"{lanes} lanes and {len(gpus)} visible GPUs ({given}): give as many lanes as GPUs")
    return gpus


@dataclass
class Lane:
    """One GPU's cells. `outcomes`: each cell's words with the exit code of `lab run`, or what became of it instead."""

    experiment: str
    number: int
    gpu: str
    cells: Sequence[Sequence[str]]
    out: Path
    lab: Sequence[str] = _LAB
    outcomes: list[tuple[str, int | str]] = field(default_factory=list)

    def run(self, end: float, stop: StopSignals) -> None:
        """Until `end` (time.monotonic) or a signal; then exports."""
        runs = self.out / f"runs-{self.number}"
        environment = {**os.environ, "LAB_RUNS": str(runs), **dict.fromkeys(_VISIBLE, self.gpu)}
        last = end - EXPORT_S - GRACE_S
        with (self.out / f"lane-{self.number}.log").open("w") as log:
            for cell in self.cells:
                if stop.received or last - time.monotonic() < LEAST_S:
                    self._ended(cell, "not started", 0.0)
                    continue
                started = time.monotonic()
                # A session of its own: Ctrl-C in a terminal reaches this process alone, which then interrupts each child once.
                child = subprocess.Popen(
                    [*self.lab, "run", f"experiment={self.experiment}", *cell], env=environment, stdout=log, stderr=log, start_new_session=True
                )
                self._ended(cell, _outcome(child, last, stop), time.monotonic() - started)
            if runs.exists():
                target = str(self.out / f"records-{self.number}.jsonl.gz")
                subprocess.run(
                    [*self.lab, "export", target, f"experiment={self.experiment}"], env=environment, stdout=log, stderr=log, check=False, start_new_session=True
                )

    def _ended(self, cell: Sequence[str], outcome: int | str, seconds: float) -> None:
        words = " ".join(cell)
        self.outcomes.append((words, outcome))
        print(f"lane {self.number}: {words}: {outcome}" + (f", {seconds:.0f} s" if seconds else ""), flush=True)


def _outcome(child: subprocess.Popen[bytes], last: float, stop: StopSignals) -> int | str:
    """The child's exit code, or what was done to it at `last` or after a signal."""
    while not stop.received and time.monotonic() < last:
        try:
            return child.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    child.send_signal(signal.SIGINT)
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        return "killed, its record is closed by the next command"
    return "interrupted"


def run_lanes(lanes: Sequence[Lane], seconds: float) -> int:
    """All lanes side by side. Exit code 0 where every cell ended as OK or as a recorded gap (3), 130 after a signal, else 1."""
    end = time.monotonic() + seconds
    with StopSignals() as stop:
        threads = [threading.Thread(target=lane.run, args=(end, stop)) for lane in lanes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    told = [outcome for lane in lanes for _, outcome in lane.outcomes]
    late = [words for lane in lanes for words, outcome in lane.outcomes if outcome == "not started"]
    print(f"{len(told)} cells: {told.count(0)} OK, {told.count(3)} recorded gaps, {len(told) - told.count(0) - told.count(3)} others")
    if late:
        print(f"not started: {'; '.join(late)}")
    return 130 if stop.received else 0 if set(told) <= {0, 3} else 1


def main(argv: Sequence[str] | None = None) -> int:
    """See `run_lanes`; 2 for a wrong command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("experiment")
    parser.add_argument("--lane", action="append", required=True, help="cells of one GPU: KEY=VALUE words, ' / ' between cells; may be given again")
    parser.add_argument("--seconds", type=float, default=3600, help="time limit of everything")
    parser.add_argument("--out", type=Path, required=True, help="folder for runs, logs and exported records")
    asked = parser.parse_args(argv)
    if asked.seconds < (least := LEAST_S + GRACE_S + EXPORT_S):
        parser.error(f"--seconds {asked.seconds:g}: at least {least:g}, or nothing would be started")
    try:
        cells = [cells_of(lane) for lane in asked.lane]
        gpus = gpus_of(len(cells), os.environ)
    except ValueError as error:
        parser.error(str(error))
    asked.out.mkdir(parents=True, exist_ok=True)
    out = asked.out.resolve()
    return run_lanes([Lane(asked.experiment, number, gpus[number], lane, out) for number, lane in enumerate(cells)], asked.seconds)


if __name__ == "__main__":
    sys.exit(main())
