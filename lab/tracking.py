"""MLflow as a mirror of the records, written by the parent only and only when a record is final.

A run is created, filled and ended in one go, so that none is left RUNNING by a measurement; a mirroring that was itself interrupted is
completed by the next one, which finds the run by what the record is known by (`record_id`). How an attempt stands changes later: then the tag
`standing` of its cell's runs is brought up to date. MLflow never decides an outcome: where its store is locked or away, one line says so and
`python -m lab import` makes up for it.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

import yaml

from lab.errors import flat
from lab.mlflow_store import EXPERIMENT, Turn, all_runs, get_run, tracking_uri
from lab.project import Project, say
from lab.provenance import utc_now
from lab.record import Record
from lab.run_fields import judged_tags, metric_values, params, run_status, standing_tag, tags
from lab.standing import Standing, record_id, standings
from lab.store import MIRROR, RECORD, Store, Stored, marks_of

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

PATIENCE_S = 12.0
"""How long one mirroring tries before it leaves the record for `lab import`."""
_INCOMPLETE, _COMPLETE = "incomplete", "complete"
_UNEXPLAINED = "ended by `lab import`: it was left RUNNING and no record explains it"
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_T = TypeVar("_T")


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

    def mirror_all(self, records: Iterable[Stored], patience_s: float | None = None, advance: Callable[[], None] = lambda: None) -> list[Mirrored]:
        """Mirror records in order, skipping none; of one that is there already only the standing is brought up to date.

        A record file that went away or cannot be read is an answer with an error, too: the records after it are mirrored all the same. `advance` is called
        after each.
        """
        batch = list(records)
        at_hand = {stored.file: stored for stored in batch}
        stand = self._standings({stored.record.cell_id for stored in batch}, at_hand)
        answers: list[Mirrored] = []
        patience = PATIENCE_S if patience_s is None else patience_s
        with Turn(self.uri, self.project) as turn:
            for stored in batch:
                try:
                    digest = hashlib.sha256(stored.file.read_bytes()).hexdigest()
                except OSError as error:
                    answers.append(Mirrored(self.uri, "", utc_now(), error=f"{self.project.short(stored.file)}: {error.strerror}"))
                else:
                    answers.append(self._answer(turn, stored, digest, stand.get(stored.file), patience))
                    # Patience is for the first failure; after it the others get one try each.
                    patience = 0.0 if answers[-1].error else patience
                if answers[-1].error:
                    say(f"{stored.record.cell_id}: {answers[-1].line()}")
                advance()
            # A new attempt may have changed how the others of its cell stand; those in the batch have their tag already.
            touched = {stored.record.cell_hash for stored, answer in zip(batch, answers, strict=True) if answer.new and not answer.error}
            self._restate(turn, [pair for file, pair in stand.items() if file not in at_hand and pair[0].cell_hash in touched], patience)
        return answers

    def restate(self, cell_id: str) -> bool:
        """Bring the `standing` tags of one cell's runs up to date. False, and a line on standard error, where the store is in trouble."""
        with Turn(self.uri, self.project) as turn:
            return self._restate(turn, self._standings({cell_id}, {}).values(), PATIENCE_S)

    def end_left_running(self) -> int:
        """End, as KILLED and with a tag that says so, every run left RUNNING, and return how many. For when all records are mirrored: no record explains these.

        Raises what MLflow raises.
        """
        with Turn(self.uri, self.project) as turn:
            client, experiment = turn.take(time.monotonic() + PATIENCE_S)
            left = [run for run in all_runs(client, experiment, "attributes.status = 'RUNNING'") if run.info.lifecycle_stage != "deleted"]
            for run in left:
                client.set_tag(run.info.run_id, "mirror", _UNEXPLAINED)
                client.set_terminated(run.info.run_id, status="KILLED")
        return len(left)

    def _standings(self, cell_ids: Iterable[str], known: Mapping[Path, Stored]) -> dict[Path, tuple[Record, Standing]]:
        """Every stored attempt at these cells and how it stands, by record file. Those that are `known` are not read again."""
        store, found = Store(self.project.runs), {}
        for cell_id in cell_ids:
            cells: dict[str, list[Stored]] = defaultdict(list)
            for one in store.read(cell_id, known)[0]:
                cells[one.record.cell_hash].append(one)
            for attempts in cells.values():
                for record, standing in standings([one.record for one in attempts], marks_of(attempts)):
                    found[self.project.runs / cell_id / f"{record.attempt:03d}" / RECORD] = (record, standing)
        return found

    def _answer(self, turn: Turn, stored: Stored, digest: str, stand: tuple[Record, Standing] | None, patience: float) -> Mirrored:
        """Mirror one record, patiently; every failure of the store becomes the answer's error."""
        try:
            answer = self._patiently(turn, lambda client, experiment: self._upload(client, experiment, stored, digest, stand), patience)
        except Exception as error:
            # Whatever MLflow, SQLAlchemy or the network raise: the record is safe, and the exit code must not depend on a mirror.
            answer = Mirrored(self.uri, digest, utc_now(), error=one_line(error))
        self._remember(stored.file.parent, answer)
        return answer

    def _patiently(self, turn: Turn, action: Callable[[MlflowClient, str], _T], patience: float) -> _T:
        """Try until it works or the time is up; then raise what stood in the way."""
        deadline, pause = time.monotonic() + patience, 0.5
        while True:
            try:
                return action(*turn.take(deadline))
            except ImportError:
                turn.give_back()
                raise  # a host without MLflow only measures: no patience makes the package appear, and `export` carries the records away
            except Exception:
                turn.give_back()
                if time.monotonic() + pause > deadline:
                    raise
                time.sleep(pause)
                pause *= 2

    def _upload(self, client: MlflowClient, experiment: str, stored: Stored, digest: str, stand: tuple[Record, Standing] | None) -> Mirrored:
        record = stored.record
        run = self._find(client, experiment, stored, digest)
        told = judged_tags(record) | (standing_tag(stand[1]) if stand else {})
        if run is not None and _is_complete(run):
            _update(client, run, told, params(record))
            return Mirrored(self.uri, digest, utc_now(), experiment_id=experiment, run_id=run.info.run_id, new=False)
        if run is None:
            name = f"{record.cell_id}#{record.attempt:03d}"
            begun = {**tags(record), **told, "record_sha256": digest, "record": self.project.short(stored.file), "mirror": _INCOMPLETE}
            run = client.create_run(experiment, start_time=_millis(record.started_at), tags=begun, run_name=name)
        run_id = run.info.run_id
        try:
            self._fill(client, run_id, stored, {**told, "mirror": _COMPLETE})
        except BaseException:
            # Ended all the same: a run left RUNNING would look like a measurement in progress. `mirror` still says incomplete.
            client.set_terminated(run_id, status="FAILED", end_time=_millis(record.finished_at))
            raise
        client.set_terminated(run_id, status=run_status(record), end_time=_millis(record.finished_at))
        return Mirrored(self.uri, digest, utc_now(), experiment_id=experiment, run_id=run_id)

    def _fill(self, client: MlflowClient, run_id: str, stored: Stored, last: dict[str, str]) -> None:
        """Files, numbers and params, and the tags `last` in the same go: without them the run counts as incomplete."""
        from mlflow.entities import Metric, Param, RunTag

        record = stored.record
        with tempfile.TemporaryDirectory() as folder:
            config = yaml.dump(record.cell, Dumper=_DUMPER, sort_keys=False, allow_unicode=True)
            Path(folder, "config.yaml").write_text(config, encoding="utf-8")
            Path(folder, RECORD).write_bytes(stored.file.read_bytes())
            client.log_artifacts(run_id, folder)
        at = _millis(record.finished_at)
        client.log_batch(
            run_id,
            metrics=[Metric(name, value, at, 0) for name, value in metric_values(record).items()],
            params=[Param(name, value) for name, value in params(record).items()],
            tags=[RunTag(name, value) for name, value in last.items()],
        )

    def _find(self, client: MlflowClient, experiment: str, stored: Stored, digest: str) -> Run | None:
        """The record's run: where mirror.json says, or by what the record is known by; runs of an earlier lab are known by the sha256 of the file.

        Deleted runs count as there: somebody took them out of sight.
        """
        identity = record_id(stored.record)
        hint = self._remembered(stored.file.parent)
        run = get_run(client, hint) if hint else None
        if run is not None and (run.data.tags.get("record_id") == identity or run.data.tags.get("record_sha256") == digest):
            return run
        known_by = (f"tags.record_id = '{identity}'", f"tags.record_sha256 = '{digest}'")
        return next((run for condition in known_by for run in all_runs(client, experiment, condition)), None)

    def _restate(self, turn: Turn, stands: Iterable[tuple[Record, Standing]], patience: float) -> bool:
        """Set the `standing` tag of these records' runs where it is another now; one search for each cell."""
        cells: dict[str, dict[str, Standing]] = defaultdict(dict)
        for record, standing in stands:
            cells[record.cell_hash][record_id(record)] = standing

        def update(client: MlflowClient, experiment: str) -> None:
            for cell_hash, wanted in cells.items():
                for run in all_runs(client, experiment, f"tags.cell_hash = '{cell_hash}'"):
                    if (standing := wanted.get(run.data.tags.get("record_id"))) is not None:
                        _update(client, run, standing_tag(standing))

        try:
            if cells:
                self._patiently(turn, update, patience)
        except Exception as error:
            say(f"mlflow: how earlier attempts stand was not updated ({one_line(error)}); python -m lab import tries again")
            return False
        return True

    def _remembered(self, folder: Path) -> str | None:
        """The run that mirror.json names, if it is in this store. It is a hint and no more: whatever is wrong with it, the run is searched for."""
        try:
            found = json.loads((folder / MIRROR).read_bytes())
            return str(found["run_id"]) if found["uri"] == self.uri and found["run_id"] else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _remember(self, folder: Path, answer: Mirrored) -> None:
        if answer.run_id is not None and not answer.new and self._remembered(folder) == answer.run_id:
            return
        try:
            # Renamed, but not waited for: MLflow itself knows what it has; the file only saves the search.
            aside = folder / f".{MIRROR}"
            aside.write_text(json.dumps(asdict(answer), indent=1) + "\n", encoding="utf-8")
            os.replace(aside, folder / MIRROR)
        except OSError as error:
            say(f"{folder.name}: {MIRROR} not written ({error.strerror})")


def _update(client: MlflowClient, run: Run, tags: Mapping[str, str], params: Mapping[str, str] = MappingProxyType({})) -> None:
    """Set the tags that differ and the params that are missing; MLflow never changes a param. A deleted run is left as it is."""
    from mlflow.entities import Param, RunTag

    changed = [RunTag(name, value) for name, value in tags.items() if run.data.tags.get(name) != value]
    missing = [Param(name, value) for name, value in params.items() if name not in run.data.params]
    if (changed or missing) and run.info.lifecycle_stage != "deleted":
        client.log_batch(run.info.run_id, tags=changed, params=missing)


def _is_complete(run: Run) -> bool:
    return bool(run.info.lifecycle_stage == "deleted" or (run.info.status != "RUNNING" and run.data.tags.get("mirror") == _COMPLETE))


def _millis(time_text: str) -> int:
    return int(datetime.fromisoformat(time_text).timestamp() * 1000)


def one_line(error: Exception) -> str:
    """What the store raised, as one line of moderate length."""
    return flat(f"{type(error).__name__}: {error}", 200)
