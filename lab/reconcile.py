"""Clean-up of what a killed lab process left: attempts without a record, and records that had to be kept elsewhere.

Every command that reads or writes `runs/` does this first. An attempt whose process is gone gets its record, once, with the status CRASHED;
one whose process lives is left alone. Whether a process lives is read from the lock on its running marker, which ends with it.
"""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lab.admission import refuse
from lab.locks import hold, is_locked
from lab.project import say
from lab.record import Gap, Record, Status
from lab.store import LOG, RUNNING, Store, Stored, fallback_records

KILLED = "the lab process was killed"


def reconcile(store: Store) -> list[Stored]:
    """Bring `runs/` in order and return the records that were added. A disk that refuses leaves things as they are, and is reported."""
    if not store.runs.is_dir() or not (store.unfinished() or any(True for _ in fallback_records(store.runs))):
        return []
    added: list[Stored] = []
    try:
        with hold(store.runs / ".reconcile.lock", "reconcile", lambda owner: None, _never):
            for kept in list(fallback_records(store.runs)):
                added.append(_adopt(store, kept))
            for folder in store.unfinished():
                if not is_locked(folder / RUNNING):
                    added.extend(_close(store, folder))
    except OSError as error:
        say(f"clean-up of {store.runs} is not possible now: {error}")
    return added


def _close(store: Store, folder: Path) -> list[Stored]:
    """Write the record of an attempt whose process died."""
    try:
        marker: dict[str, Any] = json.loads((folder / RUNNING).read_text())
        skeleton = marker["record"]
    except (ValueError, KeyError) as error:
        # After a power cut the marker may be empty; nobody can say then which cell this was, and a guess would be a false record.
        say(f"{folder / RUNNING}: not readable ({error}); no record can be made of this attempt, remove the folder")
        return []
    sign_of_life = max(f.stat().st_mtime for f in (folder / RUNNING, folder / LOG) if f.exists())
    finished = datetime.fromtimestamp(sign_of_life, UTC)
    reason = f"{KILLED} (pid {marker['pid']}) and with it the measurement"
    fill = skeleton["provenance"]["fill"]
    record = Record(
        **skeleton,
        attempt=marker["attempt"],
        status=Status.CRASHED,
        reason=reason,
        gaps={name: Gap(status=s, reason=r, fill=fill) for name, (s, r) in refuse(Status.CRASHED, reason).gaps.items()},
        notes=["closed by a later lab process; finished_at is the last sign of life"],
        finished_at=finished.isoformat(timespec="milliseconds"),
        elapsed_s=max(0.0, round((finished - datetime.fromisoformat(skeleton["started_at"])).total_seconds(), 3)),
    )
    record.provenance["worker"] = {"ended": "lab_killed"}
    say(f"{record.cell_id}: attempt {record.attempt:03d} was left by a killed lab process; recorded as CRASHED")
    return [Stored(store.finish(folder, record), record)]


def _adopt(store: Store, kept: Stored) -> Stored:
    """Move a record from the fallback folder to its place."""
    folder, record = store.place_for(kept.record)
    file = store.finish(folder, record)
    shutil.rmtree(kept.file.parent)
    say(f"{record.cell_id}: record moved from {kept.file.parent} to {file}")
    return Stored(file, record)


def _never(_seconds: float) -> bool:
    return False
