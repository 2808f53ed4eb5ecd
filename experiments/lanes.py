"""Runs cells of an experiment on several GPUs of one machine within a time limit, one lane of cells per GPU:

    python -m experiments.lanes flash_next_h200 --seconds 560 --out out --lane "200: path=tiered layers=48" --lane "path=ple_q2" --then "layers=6 / layers=3"

Each lane is a list of `lab run experiment=NAME WORDS` in order (a list of values, layers=3,6, makes several cells of one), with a GPU and a runs folder of its
own, because one runs folder measures one cell at a time. What stands after `--then` is taken by whichever lane has done its own. `200:` says that a run needs
so many seconds: it is not started with less. What still runs at the end is interrupted and has GRACE_S to write its record; nothing is started in the last
seconds. Ctrl-C, SIGTERM and SIGHUP end all lanes in the same way. Everything in a lane's folder is exported at the end, to be taken in elsewhere with
`lab import`. The lanes share the host: what is bound by the CPU belongs in a lane that runs alone.
What it does not prove: that a neighbour on the other GPU costs nothing; the records hold the machine's state before and after.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lab.errors import LabError
from lab.experiment import load_experiment
from lab.project import find_project
from lab.signals import StopSignals

GRACE_S = 25.0
"""Kept for a cell that is interrupted to write its record; a few seconds more than a loaded machine was seen to need."""
EXPORT_S = 5.0
LEAST_S = 30.0
"""Nothing is started with less than this before it would be interrupted."""
_LAB = (sys.executable, "-m", "lab")
_WORD = re.compile(r"[\w.+~@/-]+=")
_VISIBLE = ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Wanted:
    """One `lab run`: its words, and the seconds without which it is not started."""

    words: tuple[str, ...]
    least_s: float = 0.0

    def fits(self, seconds: float) -> bool:
        """Whether it may be started with so many seconds left."""
        return max(self.least_s, LEAST_S) <= seconds


def cells_of(lane: str) -> list[Wanted]:
    """`a=1 b=2 / 90: c=3` -> [(a=1, b=2), (c=3) in 90 s]. Raises ValueError where a cell is empty or a word is no override."""
    found = []
    for part in lane.split(" / "):
        words = part.split()
        number = words[0][:-1] if words and words[0].endswith(":") else ""
        least_s, words = (float(number), words[1:]) if number.isdecimal() else (0.0, words)
        if not words or not all(_WORD.match(word) for word in words):
            raise ValueError(f"{lane!r}: cells are KEY=VALUE words after SECONDS: or nothing; they stand between slashes with spaces around them")
        found.append(Wanted(tuple(words), least_s))
    return found


class Queue:
    """What is left for any lane, in order."""

    def __init__(self, cells: Sequence[Wanted] = ()) -> None:
        self.left, self._lock = list(cells), threading.Lock()

    def take(self, seconds: float) -> Wanted | None:
        """The first that so many seconds are enough for, or None."""
        with self._lock:
            place = next((place for place, one in enumerate(self.left) if one.fits(seconds)), None)
            return None if place is None else self.left.pop(place)


def gpus_of(lanes: int, environment: Mapping[str, str]) -> list[str]:
    """What each lane's processes shall see: the GPUs that this process may see, in order. Raises ValueError where there are fewer than lanes."""
    given = next((environment[name] for name in _VISIBLE if name in environment), None)
    if given is None:
        return [str(number) for number in range(lanes)]
    gpus = list(dict.fromkeys(gpu for gpu in map(str.strip, given.split(",")) if gpu not in ("", "-1")))
    if len(gpus) < lanes:
        raise ValueError(f"{lanes} lanes and {len(gpus)} visible GPUs ({given or 'none are visible'}): give as many lanes as GPUs")
    return gpus


@dataclass
class Lane:
    """One GPU's cells. `outcomes`: each cell's words with the exit code of `lab run`, or what became of it instead."""

    experiment: str
    number: int
    gpu: str
    cells: Sequence[Wanted]
    out: Path
    lab: Sequence[str] = _LAB
    then: Queue = field(default_factory=Queue)
    outcomes: list[tuple[str, int | str]] = field(default_factory=list)

    def run(self, end: float, stop: StopSignals) -> None:
        """Until `end` (time.monotonic) or a signal; then exports. A lane that cannot go on says why in its outcomes."""
        try:
            self._run(end, stop)
        except OSError as error:  # a full disk, a log that cannot be written, a command that cannot be started
            self.outcomes.append((f"lane {self.number}", f"failed: {error}"))
            print(f"lane {self.number}: failed: {error}", flush=True)

    def _run(self, end: float, stop: StopSignals) -> None:
        runs = self.out / f"runs-{self.number}"
        environment = {**os.environ, "LAB_RUNS": str(runs), **dict.fromkeys(_VISIBLE, self.gpu)}
        last = end - EXPORT_S - GRACE_S
        with (self.out / f"lane-{self.number}.log").open("w") as log:
            for cell in self._cells(last, stop):
                started = time.monotonic()
                # A session of its own: Ctrl-C in a terminal reaches this process alone, which then interrupts each child once.
                command = [*self.lab, "run", f"experiment={self.experiment}", *cell.words]
                child = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
                self._ended(cell, _outcome(child, last, stop), time.monotonic() - started)
            if runs.exists():
                target = str(self.out / f"records-{self.number}.jsonl.gz")
                subprocess.run(
                    [*self.lab, "export", target, f"experiment={self.experiment}"], env=environment, stdout=log, stderr=log, check=False, start_new_session=True
                )

    def _cells(self, last: float, stop: StopSignals) -> Iterator[Wanted]:
        """Its own in order, then what is left for any; of those what there is time for."""
        for cell in self.cells:
            if not stop.received and cell.fits(last - time.monotonic()):
                yield cell
            else:
                self._ended(cell, "not started", 0.0)
        while not stop.received and (taken := self.then.take(last - time.monotonic())) is not None:
            yield taken

    def _ended(self, cell: Wanted, outcome: int | str, seconds: float) -> None:
        words = " ".join(cell.words)
        self.outcomes.append((words, outcome))
        print(f"lane {self.number}: {words}: {outcome}" + (f", {seconds:.0f} s" if seconds else ""), flush=True)


def _outcome(child: subprocess.Popen[bytes], last: float, stop: StopSignals) -> int | str:
    """The child's exit code, or what was done to it at `last` or after a signal."""
    while not stop.received and time.monotonic() < last:
        try:
            return child.wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    if (code := child.poll()) is not None:
        return code
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
    told: list[int | str] = [outcome for lane in lanes for _, outcome in lane.outcomes]
    late = [words for lane in lanes for words, outcome in lane.outcomes if outcome == "not started"]
    for queue in dict.fromkeys(lane.then for lane in lanes):  # one, as a rule
        late += [" ".join(one.words) for one in queue.left]
        told += ["not started"] * len(queue.left)
    print(f"{len(told)} cells: {told.count(0)} OK, {told.count(3)} recorded gaps, {len(told) - told.count(0) - told.count(3)} others")
    if late:
        print(f"not started: {'; '.join(late)}")
    return 130 if stop.received else 0 if told and set(told) <= {0, 3} else 1


def main(argv: Sequence[str] | None = None) -> int:
    """See `run_lanes`; 2 for a wrong command."""
    said = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(description=said[0], epilog="\n".join(said[2:]), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment")
    parser.add_argument(
        "--lane", action="append", required=True, help="cells of one GPU: KEY=VALUE words, ' / ' between cells, SECONDS: before one that needs them"
    )
    parser.add_argument("--then", help="cells that any lane takes when its own are done, in order")
    parser.add_argument("--seconds", type=float, default=3600, help="time limit of everything")
    parser.add_argument("--out", type=Path, required=True, help="folder for runs, logs and exported records")
    asked = parser.parse_args(argv)
    if not asked.seconds >= (least := LEAST_S + GRACE_S + EXPORT_S):
        parser.error(f"--seconds {asked.seconds:g}: at least {least:g}, or nothing would be started")
    try:
        cells, then = [cells_of(lane) for lane in asked.lane], Queue(() if asked.then is None else cells_of(asked.then))
        gpus = gpus_of(len(cells), os.environ)
        load_experiment(asked.experiment, find_project().root / "experiments")
        late = [one for one in (*then.left, *(one for lane in cells for one in lane)) if one.least_s > asked.seconds - GRACE_S - EXPORT_S]
        if late:
            raise ValueError(f"{' '.join(late[0].words)} needs {late[0].least_s:g} s, and --seconds {asked.seconds:g} leaves fewer")
        asked.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, LabError, OSError) as error:
        parser.error(str(error))
    out = asked.out.resolve()
    return run_lanes([Lane(asked.experiment, number, gpus[number], lane, out, then=then) for number, lane in enumerate(cells)], asked.seconds)


if __name__ == "__main__":
    sys.exit(main())
