"""Runs cells of an experiment on several GPUs of one machine within a time limit, one lane of cells per GPU:

    python -m experiments.lanes flash_next_h200 --seconds 560 --out records --lane "path=expert_q2 layers=48 / path=tiered layers=6" --lane "path=reference"

Each lane is a list of `lab run experiment=NAME WORDS` in order, with a GPU and a runs folder of its own, because one runs folder measures one cell at a time.
A cell that is still running at the end is interrupted and leaves its record; nothing is started in the last seconds. Each lane's records are exported at the
end, to be taken in elsewhere with `lab import`. The same lanes at once share the host: what is bound by the CPU belongs in a lane that runs alone.
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
from collections.abc import Sequence
from pathlib import Path

GRACE_S = 20.0
"""Kept for a cell that is interrupted to write its record, and for the export."""
LEAST_S = 30.0
"""Nothing is started with less than this before the end."""
_LAB = (sys.executable, "-m", "lab")


def cells_of(lane: str) -> list[list[str]]:
    """`a=1 b=2 / c=3` -> [[a=1, b=2], [c=3]]. Raises ValueError where a cell is empty or a word is no override."""
    cells = [part.split() for part in lane.split(" / ")]
    for cell in cells:
        if not cell or any("=" not in word for word in cell):
            raise ValueError(f"--lane {lane!r}: cells are KEY=VALUE words, cells stand between slashes with spaces around them")
    return cells


def run_lane(experiment: str, number: int, cells: Sequence[Sequence[str]], end: float, out: Path, lab: Sequence[str] = _LAB) -> list[tuple[str, int | str]]:
    """Runs one lane until `end` (time.monotonic). Returns each cell's words with the exit code of `lab run`, "interrupted" or "not started"."""
    runs = out / f"runs-{number}"
    environment = {**os.environ, "LAB_RUNS": str(runs)}
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        given = os.environ.get(name)
        environment[name] = given.split(",")[number] if given and "," in given else str(number)
    found: list[tuple[str, int | str]] = []
    with (out / f"lane-{number}.log").open("w") as log:
        for cell in cells:
            words = " ".join(cell)
            if end - time.monotonic() < LEAST_S + GRACE_S:
                found.append((words, "not started"))
                continue
            started = time.monotonic()
            child = subprocess.Popen([*lab, "run", f"experiment={experiment}", *cell], env=environment, stdout=log, stderr=log)
            try:
                outcome: int | str = child.wait(max(0.0, end - GRACE_S - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.send_signal(signal.SIGINT)
                try:
                    child.wait(GRACE_S / 2)
                except subprocess.TimeoutExpired:
                    child.kill()
                    child.wait()
                outcome = "interrupted"
            found.append((words, outcome))
            print(f"lane {number}: {words}: {outcome}, {time.monotonic() - started:.0f} s", flush=True)
        if runs.exists():
            subprocess.run(
                [*lab, "export", str(out / f"records-{number}.jsonl.gz"), f"experiment={experiment}"], env=environment, stdout=log, stderr=log, check=False
            )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0 where every cell ended as OK or as a recorded gap (3), 1 otherwise, 2 for a wrong command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("experiment")
    parser.add_argument("--lane", action="append", required=True, help="cells of one GPU: KEY=VALUE words, ' / ' between cells; may be given again")
    parser.add_argument("--seconds", type=float, default=3600, help="time limit of everything")
    parser.add_argument("--out", type=Path, required=True, help="folder for runs, logs and exported records")
    asked = parser.parse_args(argv)
    try:
        lanes = [cells_of(lane) for lane in asked.lane]
    except ValueError as error:
        parser.error(str(error))
    asked.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + asked.seconds
    results: dict[int, list[tuple[str, int | str]]] = {}

    def work(number: int) -> None:
        results[number] = run_lane(asked.experiment, number, lanes[number], end, asked.out.resolve())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(lanes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told = [outcome for number in sorted(results) for _, outcome in results[number]]
    print(f"{len(told)} cells: {told.count(0)} OK, {told.count(3)} recorded gaps, {len(told) - told.count(0) - told.count(3)} others")
    return 0 if set(told) <= {0, 3} else 1


if __name__ == "__main__":
    sys.exit(main())
