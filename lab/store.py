"""The records on disk: `runs/<cell>/<attempt>/record.json`, the truth that MLflow and the reports are made from.

An attempt's folder appears at once with its running marker inside, and its record is written aside and renamed, so that a reader never sees
half of either. Space for the record is reserved before the measurement. Where the disk refuses anyway, the record goes to a fallback folder
and says so. What the numbers are worth is not decided here.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from lab.cell import Cell
from lab.locks import is_locked, try_lock
from lab.record import Record

RESERVE_BYTES = 256 * 1024
"""Kept free in an attempt's folder for its record."""

RECORD, RUNNING, LOG, MIRROR, RESERVE = "record.json", "running.json", "log.txt", "mirror.json", ".reserve"
NEW = ".new-"
"""Begins the name of an attempt's folder until it is complete."""
SETTLED_S = 60.0
"""A folder younger than this may just be between its making and its lock."""
_NUMBER = re.compile(r"\d{3,}")


@dataclass
class Attempt:
    """One attempt's folder while it is being filled. The open, locked marker tells others that its process lives."""

    folder: Path
    number: int
    marker: int | None

    def close(self) -> None:
        """Give the running marker back. Safe to call twice."""
        if self.marker is not None:
            os.close(self.marker)
            self.marker = None


@dataclass(frozen=True)
class Stored:
    """A record and where it lies."""

    file: Path
    record: Record


class Store:
    """The records below one `runs/` folder."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs

    def open_attempt(self, cell: Cell, marker: dict[str, Any]) -> Attempt:
        """A new, numbered folder for one attempt, with its locked marker and reserved space in it. Raises OSError if the disk refuses."""
        parent = self.runs / cell.id
        parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=NEW, dir=parent))
        descriptor: int | None = None
        try:
            # The lock comes first: it is what keeps others from taking the folder for a dead process's.
            descriptor = try_lock(aside / RUNNING)
            assert descriptor is not None, "a fresh file cannot be locked by anyone else"
            aside.chmod(0o755)
            reserve(aside / RESERVE)
            while True:
                number = max((n for n, _ in self._numbered(parent)), default=0) + 1
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps({**marker, "attempt": number}).encode(), 0)
                try:
                    aside.rename(parent / f"{number:03d}")
                except OSError as error:
                    if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                        raise
                    continue  # another process took this number in between; an attempt is never overwritten
                return Attempt(parent / f"{number:03d}", number, descriptor)
        except BaseException:
            if descriptor is not None:
                os.close(descriptor)
            shutil.rmtree(aside, ignore_errors=True)
            raise

    def finish(self, folder: Path, record: Record) -> Path:
        """Write the record into its attempt's folder and take the marker away. Raises OSError if the disk refuses."""
        (folder / RESERVE).unlink(missing_ok=True)
        write_atomic(folder / RECORD, record.model_dump_json(indent=1) + "\n")
        (folder / RUNNING).unlink(missing_ok=True)
        return folder / RECORD

    def abandon(self, folder: Path) -> None:
        """Empty the folder of an attempt whose record is kept elsewhere, as far as the disk lets us."""
        for name in (RESERVE, RUNNING):
            try:
                (folder / name).unlink(missing_ok=True)
            except OSError:
                continue  # a disk that became read-only; the kept record takes this attempt's place when it is moved back

    def place_for(self, record: Record) -> tuple[Path, Record]:
        """The folder for a record that was kept elsewhere: its own attempt's if still without a record, else a new one. Raises OSError."""
        parent = self.runs / record.cell_id
        number = record.attempt
        if number == 0 or (parent / f"{number:03d}" / RECORD).exists():
            number = max((n for n, _ in self._numbered(parent)), default=0) + 1
        folder = parent / f"{number:03d}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder, record.model_copy(update={"attempt": number})

    def records(self) -> Iterator[Stored]:
        """Every readable record, by cell and attempt. Unreadable ones are skipped; `unreadable` names them."""
        for file in self.record_files():
            try:
                yield Stored(file, load_record(file))
            except (OSError, ValueError):
                continue  # listed by `unreadable`; one spoilt file must not hide the others

    def unreadable(self) -> list[tuple[Path, str]]:
        """The record files that do not hold a valid record, each with the reason in one line."""
        bad = []
        for file in self.record_files():
            try:
                load_record(file)
            except (OSError, ValueError) as error:
                bad.append((file, " ".join(str(error).split())[:200]))
        return bad

    def record_files(self) -> list[Path]:
        """The record files of all attempts, sorted by cell and attempt number."""
        if not self.runs.is_dir():
            return []
        cells = sorted(p for p in self.runs.iterdir() if p.is_dir() and not p.name.startswith("."))
        return [folder / RECORD for cell in cells for _, folder in self._numbered(cell) if (folder / RECORD).is_file()]

    def newest(self, cell: Cell) -> Stored | None:
        """The cell's newest valid attempt."""
        for _, folder in reversed(self._numbered(self.runs / cell.id)):
            try:
                found = load_record(folder / RECORD)
            except (OSError, ValueError):
                continue  # running, or spoilt: neither is a result
            if found.cell_hash == cell.hash:
                return Stored(folder / RECORD, found)
        return None

    def unfinished(self) -> list[Path]:
        """Attempt folders with a running marker and no record: running now, or left by a process that was killed."""
        folders = [marker.parent for marker in sorted(self.runs.glob(f"*/*/{RUNNING}"))]
        return [f for f in folders if _NUMBER.fullmatch(f.name) and not (f / RECORD).exists()]

    def half_made(self) -> list[Path]:
        """Attempt folders that a process left before they got their number, because it died."""
        folders = [f for f in sorted(self.runs.glob(f"*/{NEW}*")) if f.is_dir() and time.time() - f.stat().st_mtime > SETTLED_S]
        return [f for f in folders if not is_locked(f / RUNNING)]

    @staticmethod
    def _numbered(parent: Path) -> list[tuple[int, Path]]:
        if not parent.is_dir():
            return []
        return sorted((int(p.name), p) for p in parent.iterdir() if _NUMBER.fullmatch(p.name) and p.is_dir())


def load_record(file: Path) -> Record:
    """The record in `file`. Raises OSError, or ValueError for content that is not a valid record."""
    try:
        return Record.model_validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'record'}: {first['msg']}") from None


def write_atomic(file: Path, text: str) -> None:
    """Write `text` so that `file` is either absent, the old one or the whole new one, also after a power cut. Raises OSError."""
    descriptor, name = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(name, 0o644)
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def reserve(file: Path) -> None:
    """Really occupy RESERVE_BYTES with `file`, so that they cannot be used up during a measurement. Raises OSError."""
    with file.open("wb") as stream:
        stream.write(b"\0" * RESERVE_BYTES)
        stream.flush()
        os.fsync(stream.fileno())


def fallback_folder() -> Path:
    """Where records go that `runs/` does not take: one folder per user in the system's temporary folder."""
    return Path(tempfile.gettempdir()) / f"migration-lab-records-{os.getuid()}"


def write_fallback(record: Record, runs: Path) -> Path:
    """Keep a record that `runs/` did not take. `lab import` moves it there later. Raises OSError if this fails too."""
    base = fallback_folder()
    base.mkdir(mode=0o700, exist_ok=True)
    if base.is_symlink() or base.stat().st_uid != os.getuid():
        raise PermissionError(errno.EACCES, "belongs to somebody else", str(base))
    folder = Path(tempfile.mkdtemp(prefix=f"{record.cell_id}-", dir=base))
    write_atomic(folder / RECORD, record.model_dump_json(indent=1) + "\n")
    write_atomic(folder / "origin.json", json.dumps({"runs": str(runs)}))
    return folder / RECORD


def fallback_records(runs: Path) -> Iterator[Stored]:
    """The kept records that belong to this `runs/` folder."""
    for origin in sorted(fallback_folder().glob("*/origin.json")):
        try:
            if json.loads(origin.read_text()) == {"runs": str(runs)}:
                yield Stored(origin.parent / RECORD, load_record(origin.parent / RECORD))
        except (OSError, ValueError):
            continue  # half-written, when the temporary folder was full as well
