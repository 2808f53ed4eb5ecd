"""MLflow as a mirror of the records, written by the parent only and only when a record is final.

A run is created, filled and ended in one go, so that none is left RUNNING by a measurement; a mirroring that was itself interrupted is
completed by the next one, which finds the run by its `record_sha256` tag. MLflow never decides an outcome: where its store is locked or
away, one line says so and `python -m lab import` makes up for it. A gap is a tag `gap.<metric>`, never a number.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from lab.locks import hold
from lab.mlflow_store import EXPERIMENT, artifact_location, client_for, lock_file, probe, tracking_uri
from lab.project import Project, say
from lab.provenance import utc_now
from lab.record import Record, Status
from lab.store import MIRROR, Stored, write_atomic

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

PATIENCE_S = 12.0
"""How long one mirroring tries before it leaves the record for `lab import`."""
_TAG_LIMIT = 5000
_COMPLETE = "complete"


@dataclass(frozen=True)
class Mirrored:
    """Where a record went in MLflow, or why it did not (`error`); not `new` if it was there already. Kept as mirror.json."""

    uri: str
    record_sha256: str
    at: str
    experiment_id: str | None = None
    run_id: str | None = None
    error: str | None = None
    new: bool = True

    def line(self) -> str:
        """As the result table ends."""
        if self.error:
            return f"mlflow: not mirrored ({self.error}); python -m lab import tries again"
        return f"mlflow: {self.uri} experiment {EXPERIMENT} ({self.experiment_id}) run {self.run_id}"


class Tracker:
    """Mirrors records of one project into the tracking store that the environment names, or the project's own."""

    def __init__(self, project: Project) -> None:
        self.project, self.uri = project, tracking_uri(project)

    def mirror(self, stored: Stored, patience_s: float | None = None) -> Mirrored:
        """Mirror one record; what fails is in the answer and in one line on standard error. Never raises for a store in trouble."""
        return self.mirror_all([stored], patience_s)[0]

    def mirror_all(self, records: Iterable[Stored], patience_s: float | None = None) -> list[Mirrored]:
        """Mirror records in order, skipping none; a record that is there already is only looked up.

        A record file that went away or cannot be read is an answer with an error, too: the records after it are mirrored all the same.
        """
        answers: list[Mirrored] = []
        trouble = False
        patience = PATIENCE_S if patience_s is None else patience_s
        for stored in records:
            try:
                digest = hashlib.sha256(stored.file.read_bytes()).hexdigest()
            except OSError as error:
                answers.append(Mirrored(self.uri, "", utc_now(), error=f"{self.project.short(stored.file)}: {error.strerror}"))
                say(f"{stored.record.cell_id}: {answers[-1].line()}")
                continue
            try:
                # Patience is for the first failure; after it the others get one try each.
                answer = self._patiently(stored, digest, time.monotonic() + (0.0 if trouble else patience))
            except Exception as error:
                # Whatever MLflow, SQLAlchemy or the network raise: the record is safe, and the exit code must not depend on a mirror.
                trouble = True
                answer = Mirrored(self.uri, digest, utc_now(), error=" ".join(f"{type(error).__name__}: {error}".split())[:200])
                say(f"{stored.record.cell_id}: {answer.line()}")
            self._remember(stored.file.parent, answer)
            answers.append(answer)
        return answers

    def _patiently(self, stored: Stored, digest: str, deadline: float) -> Mirrored:
        """Try until it works or the time is up; then raise what stood in the way."""
        pause = 0.5
        while True:
            try:
                with hold(lock_file(self.uri, self.project), f"pid {os.getpid()}", lambda owner: None, _until(deadline)):
                    probe(self.uri, max(1.0, deadline - time.monotonic()))
                    return self._upload(stored, digest)
            except Exception:
                if time.monotonic() + pause > deadline:
                    raise
                time.sleep(pause)
                pause *= 2

    def _upload(self, stored: Stored, digest: str) -> Mirrored:
        client = client_for(self.uri)
        experiment = self._experiment(client)
        record = stored.record
        run = _find(client, experiment, digest)
        new = run is None or not _is_complete(run)
        if run is None or new:
            if run is None:
                tags = {"record_sha256": digest, "mirror": "incomplete"}
                name = f"{record.cell_id}#{record.attempt:03d}"
                run = client.create_run(experiment, start_time=_millis(record.started_at), tags=tags, run_name=name)
            run_id = run.info.run_id
            try:
                self._fill(client, run_id, record, stored.file)
            except BaseException:
                # Ended all the same: a run left RUNNING would look like a measurement in progress. `mirror` still says incomplete.
                client.set_terminated(run_id, status="FAILED", end_time=_millis(record.finished_at))
                raise
            client.set_terminated(run_id, status=run_status(record), end_time=_millis(record.finished_at))
            client.set_tag(run_id, "mirror", _COMPLETE)
        return Mirrored(self.uri, digest, utc_now(), experiment_id=experiment, run_id=run.info.run_id, new=new)

    def _fill(self, client: MlflowClient, run_id: str, record: Record, file: Path) -> None:
        from mlflow.entities import Metric, Param, RunTag

        at = _millis(record.finished_at)
        client.log_batch(
            run_id,
            metrics=[Metric(name, value, at, 0) for name, value in metric_values(record).items()],
            params=[Param(name, value) for name, value in params(record).items()],
            tags=[RunTag(name, value) for name, value in {**tags(record), "record": self.project.short(file)}.items()],
        )
        client.log_text(run_id, yaml.safe_dump(record.cell, sort_keys=False, allow_unicode=True), "config.yaml")
        client.log_text(run_id, file.read_text(), "record.json")

    def _experiment(self, client: MlflowClient) -> str:
        found = client.get_experiment_by_name(EXPERIMENT)
        if found is not None:
            return str(found.experiment_id)
        return str(client.create_experiment(EXPERIMENT, artifact_location=artifact_location(self.uri)))

    def _remember(self, folder: Path, answer: Mirrored) -> None:
        try:
            write_atomic(folder / MIRROR, json.dumps(asdict(answer), indent=1) + "\n")
        except OSError as error:
            # MLflow itself knows what it has; the file only saves people the search.
            say(f"{folder.name}: {MIRROR} not written ({error.strerror})")


def run_status(record: Record) -> str:
    """MLflow's terminal status: FINISHED for OK, KILLED for what was stopped from outside, FAILED for every other gap."""
    if record.status is Status.OK:
        return "FINISHED"
    worker = record.provenance.get("worker", {})
    stopped = worker.get("ended") in ("timeout", "interrupted", "lab_killed") or worker.get("signal") in ("SIGKILL", "SIGTERM")
    return "KILLED" if stopped else "FAILED"


def params(record: Record) -> dict[str, str]:
    """The flat, short choices to group and compare runs by. The whole configuration is the artifact config.yaml."""
    cell = record.cell
    flat = {key: cell[key]["name"] for key in ("model", "path", "device", "bench")} | {"layers": cell["layers"], "engine": cell["engine"]}
    flat |= {f"codec.{component}": part["codec"] for component, part in cell["path"]["components"].items()}
    return {name: _fit(str(value)) for name, value in flat.items()}


def tags(record: Record) -> dict[str, str]:
    """What identifies the attempt, and one tag for every gap."""
    found = {
        "cell_id": record.cell_id,
        "cell_hash": record.cell_hash,
        "resume_key": record.resume_key,
        "status": record.status.value,
        "reason": record.reason or "-",
        "path": str(record.cell["path"]["name"]),
        "layers": str(record.cell["layers"]),
        "attempt": str(record.attempt),
        "fill": str(record.provenance.get("fill", "-")),
        "mlflow.source.name": "python -m lab run",
    }
    commit = (record.provenance.get("git") or {}).get("commit")
    found |= {"mlflow.source.git.commit": commit} if commit else {}
    found |= {f"gap.{name}": f"{gap.status}: {gap.reason}" for name, gap in record.gaps.items()}
    return {name: _fit(value) for name, value in found.items()}


def metric_values(record: Record) -> dict[str, float]:
    """The admitted numbers, with the extremes of repeated ones and the share of the physical bound."""
    values: dict[str, float] = {}
    for name, found in record.metrics.items():
        extra = {"": found.value, "_min": found.min, "_max": found.max, "_roofline_pct": found.roofline_pct}
        values |= {name + suffix: value for suffix, value in extra.items() if value is not None}
    return values


def _find(client: MlflowClient, experiment: str, digest: str) -> Run | None:
    from mlflow.entities import ViewType

    # Deleted runs count as there: somebody took them out of sight on purpose.
    found = client.search_runs([experiment], f"tags.record_sha256 = '{digest}'", run_view_type=ViewType.ALL, max_results=1)
    return found[0] if found else None


def _is_complete(run: Run) -> bool:
    return bool(run.info.lifecycle_stage == "deleted" or (run.info.status != "RUNNING" and run.data.tags.get("mirror") == _COMPLETE))


def _until(deadline: float) -> Callable[[float], bool]:
    def wait(seconds: float) -> bool:
        time.sleep(seconds)
        return time.monotonic() > deadline

    return wait


def _millis(time_text: str) -> int:
    return int(datetime.fromisoformat(time_text).timestamp() * 1000)


def _fit(text: str) -> str:
    """`text` within MLflow's limit for tags, cut where everybody sees it."""
    return text if len(text) <= _TAG_LIMIT else text[: _TAG_LIMIT - 40] + " ... [cut; whole in record.json]"
