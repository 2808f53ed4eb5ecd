"""Clean-up of what a killed lab process left: attempts without a record, and records that had to be kept elsewhere.

Every command that reads or writes `runs/` does this first. An attempt whose process is gone gets its record, once, with the status CRASHED;
one whose process lives is left alone. Whether a process lives is read from the lock on its running marker, which ends with it. What cannot
be brought in order is said in one line, and stops neither the rest of the clean-up nor the command.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab.admission import refuse
from lab.cell import Cell
from lab.fallback import fallback_records
from lab.locks import hold, is_locked
from lab.places import without_places
from lab.project import say
from lab.record import Record, Status
from lab.standing import record_id
from lab.store import LOG, RECORD, RESERVE, RUNNING, Store, Stored, load_record, wait_on

KILLED = "the lab process was killed"


def reconcile(store: Store) -> list[Stored]:
    """Bring `runs/` in order and return the records that were added. A disk that refuses leaves things as they are, and is reported."""
    if not store.runs.is_dir() or not (store.unfinished() or store.half_made() or any(True for _ in fallback_records(store.runs))):
        return []
    added: list[Stored] = []
    with _reported(store.runs), hold(store.runs / ".reconcile.lock", "reconcile", lambda owner: None, wait_on):
        # Oldest first, so that attempt numbers follow the order of the runs.
        for kept in sorted(fallback_records(store.runs), key=lambda stored: stored.record.started_at):
            with _reported(kept.file):
                added.extend(_adopt(store, kept))
                # Only now. One that the disk does not let go is known by its content, and is not taken in again.
                shutil.rmtree(kept.file.parent)
        for folder in store.unfinished():
            with _reported(folder):
                if not is_locked(folder / RUNNING):
                    added.extend(_close(store, folder))
        for folder in store.half_made():
            with _reported(folder):
                shutil.rmtree(folder)
    return added


@contextmanager
def _reported(what: Path) -> Iterator[None]:
    """Say in one line what the disk refuses for `what`, and go on with the rest."""
    try:
        yield
    except OSError as error:
        say(f"clean-up of {what} is not possible now: {error}")


def _close(store: Store, folder: Path) -> list[Stored]:
    """Write the record of an attempt whose process died, from its marker or else from what its folder tells."""
    record: Record | None
    try:
        record = _from_marker(folder, json.loads((folder / RUNNING).read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        # Empty after a power cut, or in the shape of another version.
        record = _from_folder(folder, f"its running marker was not usable ({type(error).__name__})")
    if record is None:
        # Nobody can say which cell this was, and a guess would be a false record. The folder keeps its number and its log.
        aside = folder / f"{RUNNING}.unusable"
        (folder / RUNNING).rename(aside)
        (folder / RESERVE).unlink(missing_ok=True)
        say(f"warning: {folder}: no record can be made of this attempt of a killed lab process; its running marker is now {aside.name}")
        return []
    file = store.finish(folder, record)
    say(f"{record.cell_id}: attempt {record.attempt:03d} was left by a killed lab process; recorded as CRASHED")
    return [Stored(file, record)]


def _from_marker(folder: Path, marker: Any) -> Record:
    """The record that the marker prepared. Raises ValueError, KeyError, TypeError or AttributeError for a marker of another shape."""
    reason = f"{KILLED} (pid {marker['pid']}) and with it the measurement"
    return _crashed(folder, dict(marker["record"]), int(marker["attempt"]), reason)


def _from_folder(folder: Path, why: str) -> Record | None:
    """The least that is true of the attempt. Its cell is known from another attempt beside it, if the folder's name, which ends in the hash, agrees."""
    for sibling in sorted(folder.parent.glob(f"*/{RECORD}"), reverse=True):
        try:
            known = load_record(sibling)
            cell = Cell.model_validate(known.cell)
            fill = str(known.provenance["fill"])
        except (OSError, ValueError, KeyError):
            continue  # spoilt, or of another schema: the next one may do
        if cell.id == folder.parent.name:
            identity = {"cell_id": cell.id, "cell_hash": cell.hash, "cell": known.cell, "provenance": {"fill": fill}}
            begun = {"resume_key": "unknown", "started_at": _moment((folder / RUNNING).stat().st_mtime)}
            return _crashed(folder, identity | begun, int(folder.name), f"{KILLED} and with it the measurement", why, "started_at is the marker's time")
    return None


def _crashed(folder: Path, skeleton: dict[str, Any], attempt: int, reason: str, *notes: str) -> Record:
    """`skeleton` as a CRASHED record that ended with the last sign of life. Raises as `_from_marker` does."""
    sign_of_life = max(f.stat().st_mtime for f in (folder / RUNNING, folder / LOG) if f.exists())
    fill = skeleton["provenance"]["fill"]
    record = Record(
        **skeleton,
        attempt=attempt,
        status=Status.CRASHED,
        reason=reason,
        gaps=refuse(Status.CRASHED, reason).gaps_with(fill),
        notes=["closed by a later lab process; finished_at is the last sign of life", *notes],
        finished_at=_moment(sign_of_life),
        elapsed_s=max(0.0, round(sign_of_life - datetime.fromisoformat(skeleton["started_at"]).timestamp(), 3)),
    )
    record.provenance["worker"] = {"ended": "lab_killed"}
    return without_places(record)


def _moment(timestamp: float) -> str:
    return datetime.fromtimestamp(timestamp, UTC).isoformat(timespec="milliseconds")


def _adopt(store: Store, kept: Stored) -> list[Stored]:
    """Take in a record from the fallback folder, unless it is here already: into its own attempt's folder if that waits for it, else as another attempt.

    Like an import, and never beside one: both ask what is here and which number is free. Raises OSError.
    """
    record = kept.record
    with store.changing():
        if record_id(record) in store.folders(record.cell_id):
            return []
        own = store.runs / record.cell_id / f"{record.attempt:03d}"
        if own.is_dir() and not (own / RECORD).exists() and _left_by(own, record):
            found = Stored(store.finish(own, record), record)
        else:
            found = store.add(record if record.attempt else record.model_copy(update={"attempt": store.next_number(record.cell_id)}))
    say(f"{record.cell_id}: record moved from {kept.file.parent} to {found.file}")
    return [found]


def _left_by(folder: Path, record: Record) -> bool:
    """Whether the record's own attempt left `folder`: no marker is in it any more, or that of a dead process which names the record's start."""
    marker = folder / RUNNING
    if not marker.exists():
        return True
    try:
        return not is_locked(marker) and bool(json.loads(marker.read_bytes())["record"]["started_at"] == record.started_at)
    except (ValueError, KeyError, TypeError):
        return False
