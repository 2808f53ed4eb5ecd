"""Records that `runs/` did not take - a full disk, a folder that may not be written - kept in the system's temporary folder until it does.

Each lies in a folder of its own beside a note of the `runs/` it belongs to; `lab.reconcile` moves it there. A temporary folder may be
emptied at any restart: this is the last resort, and the command says where the record is.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lab.record import Record
from lab.stored import RECORD, Stored, load_record, record_text, write_atomic

_ORIGIN = "origin.json"


def fallback_folder() -> Path:
    """Where the records are kept: one folder per user in the system's temporary folder."""
    return Path(tempfile.gettempdir()) / f"migration-lab-records-{os.getuid()}"


def write_fallback(record: Record, runs: Path) -> Path:
    """Keep a record that `runs/` did not take. `lab import` moves it there later. Raises OSError if this fails too."""
    base = fallback_folder()
    base.mkdir(mode=0o700, exist_ok=True)
    if not _is_ours(base):
        raise PermissionError(errno.EACCES, "belongs to somebody else", str(base))
    folder = Path(tempfile.mkdtemp(prefix=f"{record.cell_id}-", dir=base))
    write_atomic(folder / RECORD, record_text(record))
    write_atomic(folder / _ORIGIN, json.dumps({"runs": str(runs)}))
    return folder / RECORD


def fallback_records(runs: Path) -> Iterator[Stored]:
    """The kept records that belong to this `runs/` folder. What somebody else put there is not looked at."""
    base = fallback_folder()
    if not base.is_dir() or not _is_ours(base):
        return
    for origin in sorted(base.glob(f"*/{_ORIGIN}")):
        try:
            if json.loads(origin.read_text()) == {"runs": str(runs)}:
                yield Stored(origin.parent / RECORD, load_record(origin.parent / RECORD))
        except (OSError, ValueError):
            continue  # half-written, when the temporary folder was full as well


def _is_ours(base: Path) -> bool:
    """Everybody may make a folder of that name in the temporary folder, or a link."""
    return not base.is_symlink() and base.stat().st_uid == os.getuid()
