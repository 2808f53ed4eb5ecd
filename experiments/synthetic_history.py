"""A made-up history of many records, to time `matrix`, `report` and `import` on it. Nothing in it was measured.

`python -m experiments.synthetic_history --runs FOLDER --records 10000` writes attempts at the cells of an experiment into a new runs folder: good ones,
failures, gaps and invalidations, each about as large as a real record and with a note that says what it is. It never writes into the project's own
runs/. Then `LAB_RUNS=FOLDER python -m lab matrix experiment=nano` and so on. What it shows is how the lab copes with size, and nothing about any path.
"""

from __future__ import annotations

import argparse
import random
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from rich.progress import track

from lab.admission import refuse
from lab.cell import Cell
from lab.compose import compose_cells
from lab.experiment import load_experiment
from lab.metrics import CORE, METRICS
from lab.project import find_project
from lab.record import Gap, Measurement, Record, Status
from lab.standing import Mark
from lab.store import RECORD, Store

NOTE = "synthetic: made by experiments.synthetic_history, not measured"
_FAILURES = (Status.OOM, Status.TIMEOUT, Status.CRASHED, Status.PATH_NOT_EXECUTED, Status.UNSUPPORTED, Status.NUMERIC_INVALID)
_START = datetime(2026, 1, 1, tzinfo=UTC)


def main() -> int:
    """Write the history. Exit code 2 where the folder is not new."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=Path, required=True, help="a folder that does not exist yet")
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--experiment", default="nano")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.runs.exists():
        print(f"--runs {args.runs}: exists already; made-up records are not mixed with others", file=sys.stderr)
        return 2
    project, random_ = find_project(), random.Random(args.seed)
    experiment = load_experiment(args.experiment, project.root / "experiments")
    cells = [compose_cells(words, project)[0] for words in experiment.expected_cells()]
    store, numbers = Store(args.runs), dict.fromkeys((cell.id for cell in cells), 0)
    for index in track(range(args.records), description="records"):
        cell = random_.choice(cells)
        numbers[cell.id] += 1
        folder = args.runs / cell.id / f"{numbers[cell.id]:03d}"
        folder.mkdir(parents=True)
        weights = experiment.weights.get(cell.model.name, "0" * 64)  # the pinned ones, or no record would count
        record = synthetic(cell, numbers[cell.id], _START + timedelta(minutes=index), weights, random_)
        (folder / RECORD).write_text(record.model_dump_json(indent=1) + "\n")
        if random_.random() < 0.02:
            store.mark(folder, (Mark(what="invalidated", reason="made up, too", at=record.finished_at, by="nobody"),))
    print(f"{args.records} synthetic records of {len(cells)} cells in {args.runs}")
    return 0


def synthetic(cell: Cell, attempt: int, started: datetime, weights: str, random_: random.Random) -> Record:
    """One made-up attempt, four of five of them good."""
    status = Status.OK if random_.random() < 0.8 else random_.choice(_FAILURES)
    reason = "" if status is Status.OK else f"made-up failure {random_.randrange(20)}"
    fill = f"python -m lab run path={cell.path.name} layers={cell.layers}"
    finished = started + timedelta(seconds=40)
    return Record(
        cell_id=cell.id,
        cell_hash=cell.hash,
        attempt=attempt,
        status=status,
        reason=reason,
        cell=cell.model_dump(mode="json"),
        metrics={name: _measurement(name, cell, random_) for name in CORE} if status is Status.OK else {},
        gaps={} if status is Status.OK else {name: Gap(status=s, reason=r, fill=fill) for name, (s, r) in refuse(status, reason).gaps.items()},
        notes=[NOTE],
        evidence={"ops": [_op(component, layer) for layer in range(cell.layers) for component in ("experts", "trunk", "ple", "head")]},
        artifact={"sha256": weights, "format": "synthetic"},
        provenance={"fill": fill, "code_sha256": "0" * 64, "machine": {"cpu": "none", "cores": 0, "system": "none"}, "packages": {"torch": "none"}},
        resume_key=f"{random_.getrandbits(256):064x}",
        started_at=started.isoformat(timespec="milliseconds"),
        finished_at=finished.isoformat(timespec="milliseconds"),
        elapsed_s=40.0,
    )


def _measurement(name: str, cell: Cell, random_: random.Random) -> Measurement:
    known = METRICS[name]
    if known.unit == "tok/s":
        # Deeper is slower and four together faster, as in real histories: flagged numbers would be gaps.
        base = {"pp512_tok_s": 9000.0, "tg128_tok_s": 240.0, "agg4_tg128_tok_s": 700.0}[name] / cell.layers
        samples = [base * random_.uniform(0.97, 1.03) for _ in range(5)]
        return Measurement.from_samples(samples, known.unit, known.protocol, details={"repeats": 5, "roofline_tok_s": base * 50}, roofline_pct=2.0)
    value = random_.uniform(0.5, 1.0) if known.unit in ("fraction", "cosine") else random_.uniform(2.0, 3.0)
    return Measurement(value=value, unit=known.unit, protocol=known.protocol, details={"context": 512, "stride": 256})


def _op(component: str, layer: int) -> dict[str, Any]:
    return {"component": component, "layer": layer, "op": "none", "device": "cpu", "calls": 1, "rows": 512, "weight_bytes": 1 << 20}


if __name__ == "__main__":
    sys.exit(main())
