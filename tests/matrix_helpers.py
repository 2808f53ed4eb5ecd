"""Small experiments, cells and records for the tests of experiment, matrix and report.

Cells come from a plain function instead of Hydra, so that these tests need neither configuration files nor a model. The records are
well-formed but invented; they test bookkeeping and text, never a measurement.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lab.cell import BenchSpec, Cell, ComponentPlan, DeviceSpec, ModelSpec, PathSpec
from lab.experiment import Experiment, load_experiment
from lab.metrics import METRICS
from lab.project import Project
from lab.record import Gap, Measurement, Record, Status
from lab.standing import Mark
from lab.store import Store, Stored

SMALL = """\
name: small
title: A small matrix
description: Three paths at two depths.
overrides: {model: nano, device: cpu, bench: standard}
axes:
  path: [reference, fine, coarse]
  layers: [3, 6]
metrics: [ppl, kld_mean, pp512_tok_s, expert_cosine]
hypotheses:
  - id: ladder
    statement: Fewer bits, more divergence.
    criterion: {order: [reference, fine, coarse], metric: kld_mean, layers: 6}
"""

PROVENANCE: dict[str, Any] = {
    "machine": {"cpu": "Bench CPU", "cores": 2, "system": "Linux", "accelerators": []},
    "packages": {"torch": "2.9.0"},
    "git": {"commit": "abc1234", "dirty": False},
    "code_sha256": "c0de" * 16,
    "command": ["python", "-m", "lab"],
}


def write_experiment(folder: Path, text: str = SMALL, name: str = "small") -> Path:
    """Write an experiment file below `folder` and return the directory to load from."""
    directory = folder / "experiments"
    directory.mkdir(exist_ok=True)
    (directory / f"{name}.yaml").write_text(text, encoding="utf-8")
    return directory


def small(folder: Path, text: str = SMALL) -> Experiment:
    """The small experiment, loaded."""
    return load_experiment("small", write_experiment(folder, text))


def compose(overrides: list[str]) -> Cell:
    """Stands in for `lab.compose`: the cell these overrides name."""
    point = dict(word.split("=", 1) for word in overrides)
    name = point["path"]
    return Cell(
        model=ModelSpec(name=point["model"], arch="qwen4_exp", artifact="weights", corpus="text"),
        path=PathSpec(name=name, title=name, components={"experts": ComponentPlan(codec="source")}, reference=name == "reference"),
        layers=int(point["layers"]),
        device=DeviceSpec(name="cpu", torch_device="cpu", compute_dtype="float32"),
        bench=BenchSpec(name="standard", ppl_context=512, ppl_stride=256, ppl_windows=4, warmup=1, repeats=5, timeout_s=60.0),
    )


def cell(path: str = "reference", layers: int = 3) -> Cell:
    """One cell of the small experiment."""
    return compose(["model=nano", "device=cpu", "bench=standard", f"path={path}", f"layers={layers}"])


def measured(name: str, value: float, spread: float = 0.02, **rest: Any) -> Measurement:
    """A measurement of `name` under today's protocol; speeds get five samples around the value."""
    metric = METRICS[name]
    fields = {"unit": metric.unit, "protocol": metric.protocol, **rest}
    if metric.unit == "tok/s":
        return Measurement.from_samples([value * (1 + spread * (step - 2) / 4) for step in range(5)], **fields)
    return Measurement(value=value, **fields)


def record(
    of: Cell,
    metrics: dict[str, Measurement] | None = None,
    *,
    attempt: int = 1,
    status: Status = Status.OK,
    reason: str = "",
    gaps: dict[str, Gap] | None = None,
    **rest: Any,
) -> Record:
    """A record of one attempt; later attempts started later."""
    fields: dict[str, Any] = {
        "artifact": {"sha256": "f00d" * 16},
        "provenance": PROVENANCE,
        "started_at": f"2026-08-01T10:{attempt:02d}:00+00:00",
        "finished_at": f"2026-08-01T10:{attempt:02d}:30+00:00",
        "resume_key": f"key{attempt}",
        **rest,
    }
    return Record(
        cell_id=of.id,
        cell_hash=of.hash,
        attempt=attempt,
        status=status,
        reason=reason or ("" if status is Status.OK else f"it ended as {status.lower()}"),
        cell=of.model_dump(mode="json"),
        metrics=metrics or {},
        gaps=gaps or {},
        elapsed_s=30.0,
        **fields,
    )


def project_at(folder: Path) -> Project:
    """A project of that folder with the small experiment in it, and no records."""
    folder.mkdir(parents=True, exist_ok=True)
    write_experiment(folder)
    return Project(root=folder, runs=folder / "runs")


def keep(project: Project, *records: Record) -> list[Stored]:
    """The records, stored as the project's own attempts."""
    store = Store(project.runs)
    return [store.add(one.model_copy(update={"attempt": store.next_number(one.cell_id)})) for one in records]


def invalidated(reason: str = "the machine was busy", at: str = "2026-08-02T00:00:00.000+00:00") -> Mark:
    """A mark that somebody put on an attempt."""
    return Mark(what="invalidated", reason=reason, at=at, by="somebody")


def complete(of: Cell, kld: float, speed: float = 100.0, **rest: Any) -> Record:
    """An OK record that holds every metric of the small experiment."""
    metrics = {
        "ppl": measured("ppl", 20.5 + of.layers, stderr=0.25, details={"context": 512, "corpus_sha256": "c0ffee"}),
        "kld_mean": measured("kld_mean", kld, stderr=0.001, details={"noise_floor": 1e-6}),
        "pp512_tok_s": measured("pp512_tok_s", speed),
        "expert_cosine": measured("expert_cosine", 0.98765),
    }
    return record(of, metrics, **rest)
