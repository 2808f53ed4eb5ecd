"""The records on disk: `runs/<cell>/<attempt>/record.json`, the truth that MLflow and the reports are made from.

An attempt's folder appears at once with its running marker inside, and its number is never given out twice, whoever asks at the same time. A record is
never edited: what is said about it later stands beside it (`lab.stored`). Space for the record is reserved before the measurement; where the disk
refuses anyway, it goes elsewhere (`lab.fallback`). What the numbers are worth is not decided here.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lab.cell import Cell
from lab.errors import flat
from lab.locks import hold, is_locked, try_lock
from lab.record import Record
from lab.standing import Mark, age, record_id
from lab.stored import (
    LOG,
    MARKS,
    MIRROR,
    NUMBER,
    RECORD,
    RESERVE,
    RUNNING,
    Stored,
    load_attempt,
    load_marks,
    load_record,
    marks_of,
    record_text,
    save_marks,
    write_atomic,
    write_through,
)

__all__ = [
    "LOG",
    "MARKS",
    "MIN_FREE_BYTES",
    "MIRROR",
    "RECORD",
    "RESERVE",
    "RUNNING",
    "Attempt",
    "Store",
    "Stored",
    "load_attempt",
    "load_marks",
    "load_record",
    "marks_of",
    "wait_on",
    "write_atomic",
]

RESERVE_BYTES = 256 * 1024
"""Kept free in an attempt's folder for its record."""
MIN_FREE_BYTES = 2 << 20
"""Needed on the disk of runs/ for an attempt's log; the record has its own reserve."""

NEW = ".new-"
"""Begins the name of an attempt's folder until it is complete."""
SETTLED_S = 60.0
"""A folder younger than this may just be between its making and its lock."""


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
            marked = descriptor

            def mark(number: int) -> None:
                os.ftruncate(marked, 0)
                os.pwrite(marked, json.dumps({**marker, "attempt": number}).encode(), 0)

            number = _place(aside, self.next_number(cell.id), mark)
            return Attempt(parent / f"{number:03d}", number, descriptor)
        except BaseException:
            if descriptor is not None:
                os.close(descriptor)
            shutil.rmtree(aside, ignore_errors=True)
            raise

    def finish(self, folder: Path, record: Record) -> Path:
        """Write the record into its attempt's folder and take the marker away. Raises OSError if the disk refuses."""
        (folder / RESERVE).unlink(missing_ok=True)
        write_atomic(folder / RECORD, record_text(record))
        (folder / RUNNING).unlink(missing_ok=True)
        return folder / RECORD

    def add(self, record: Record, marks: Iterable[Mark] = ()) -> Stored:
        """Take in a record made elsewhere, as the first free attempt from its own number on: whole or not at all. Raises OSError."""
        parent = self.runs / record.cell_id
        parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=NEW, dir=parent))
        try:
            aside.chmod(0o755)
            self.mark(aside, marks)

            def write(number: int) -> None:
                with (aside / RECORD).open("wb") as stream:
                    write_through(stream, record_text(record.model_copy(update={"attempt": number})).encode())

            number = _place(aside, record.attempt, write)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        return load_attempt(parent / f"{number:03d}" / RECORD)

    def mark(self, folder: Path, marks: Iterable[Mark]) -> bool:
        """Add marks to those of an attempt; the same mark twice is one. True if any was new. Hold `changing` meanwhile. Raises OSError, ValueError."""
        known = load_marks(folder)
        merged = sorted({*known, *marks}, key=lambda mark: (mark.at, mark.by, mark.reason))
        if len(merged) == len(known):
            return False
        save_marks(folder, merged)
        return True

    def changing(self) -> AbstractContextManager[None]:
        """Held by whoever adds records of others or marks, so that two of them neither double nor lose one."""
        self.runs.mkdir(parents=True, exist_ok=True)
        return hold(self.runs / ".history.lock", f"pid {os.getpid()}", lambda owner: None, wait_on)

    def abandon(self, folder: Path) -> None:
        """Empty the folder of an attempt whose record is kept elsewhere, as far as the disk lets us."""
        for name in (RESERVE, RUNNING):
            try:
                (folder / name).unlink(missing_ok=True)
            except OSError:
                continue  # a disk that became read-only; the kept record takes this attempt's place when it is moved back

    def folders(self, cell_id: str) -> dict[str, Path]:
        """The attempt's folder of each record of the cell, by what the record is known by; of copies, the one with the lowest number.

        Whether the marks beside a record can be read does not matter; a record that cannot be read itself is left out.
        """
        found: dict[str, Path] = {}
        for file in self.record_files(cell_id):
            try:
                found.setdefault(record_id(load_record(file)), file.parent)
            except (OSError, ValueError):
                continue  # `read` names it
        return found

    def read(self, cell_id: str | None = None, known: Mapping[Path, Stored] = MappingProxyType({})) -> tuple[list[Stored], list[tuple[Path, str]]]:
        """Every attempt (of one cell), by cell and number, and the record files that cannot be read, each with the reason in one line.

        Attempts that are `known`, by record file, are not read again.
        """
        found: list[Stored] = []
        bad: list[tuple[Path, str]] = []
        for file in self.record_files(cell_id):
            try:
                found.append(known.get(file) or load_attempt(file))
            except (OSError, ValueError) as error:
                bad.append((file, flat(error, 200)))  # one spoilt file must not hide the others
        return found, bad

    def records(self) -> list[Stored]:
        """Every readable record, by cell and attempt. Unreadable ones are left out; `unreadable` names them."""
        return self.read()[0]

    def unreadable(self) -> list[tuple[Path, str]]:
        """The record files that do not hold a valid record, each with the reason in one line."""
        return self.read()[1]

    def record_files(self, cell_id: str | None = None) -> list[Path]:
        """The record files of all attempts (of one cell), sorted by cell and attempt number."""
        if not self.runs.is_dir():
            return []
        cells = sorted(p for p in self.runs.iterdir() if p.is_dir() and not p.name.startswith(".")) if cell_id is None else [self.runs / cell_id]
        return [folder / RECORD for cell in cells for _, folder in self._numbered(cell) if (folder / RECORD).is_file()]

    def newest(self, cell: Cell) -> Stored | None:
        """The cell's newest attempt that can be read and was not invalidated: by time, since records from elsewhere get later numbers."""
        found = [one for one in self.read(cell.id)[0] if one.record.cell_hash == cell.hash]
        marked = {record_id(one.record) for one in found if one.marks}
        valid = [one for one in found if not marked or record_id(one.record) not in marked]  # a mark on a copy is a mark on the record
        return max(valid, key=lambda one: (age(one.record), one.record.attempt), default=None)

    def next_number(self, cell_id: str) -> int:
        """The number of the cell's next attempt."""
        return max((number for number, _ in self._numbered(self.runs / cell_id)), default=0) + 1

    def unfinished(self) -> list[Path]:
        """Attempt folders with a running marker and no record: running now, or left by a process that was killed."""
        folders = [marker.parent for marker in sorted(self.runs.glob(f"*/*/{RUNNING}"))]
        return [f for f in folders if NUMBER.fullmatch(f.name) and not (f / RECORD).exists()]

    def half_made(self) -> list[Path]:
        """Attempt folders that a process left before they got their number, because it died."""
        folders = [f for f in sorted(self.runs.glob(f"*/{NEW}*")) if f.is_dir() and time.time() - f.stat().st_mtime > SETTLED_S]
        return [f for f in folders if not is_locked(f / RUNNING)]

    @staticmethod
    def _numbered(parent: Path) -> list[tuple[int, Path]]:
        if not parent.is_dir():
            return []
        return sorted((int(p.name), p) for p in parent.iterdir() if NUMBER.fullmatch(p.name) and p.is_dir())


def reserve(file: Path) -> None:
    """Really occupy RESERVE_BYTES with `file`, so that they cannot be used up during a measurement. Raises OSError."""
    with file.open("wb") as stream:
        write_through(stream, b"\0" * RESERVE_BYTES)


def _place(aside: Path, number: int, prepare: Callable[[int], None]) -> int:
    """Rename the folder `aside` to the first free attempt number from `number` on, prepared for it, and return that number. Raises OSError."""
    while True:
        prepare(number)
        try:
            aside.rename(aside.with_name(f"{number:03d}"))
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
            number += 1  # another process took this number in between; an attempt is never overwritten
        else:
            return number


def wait_on(seconds: float) -> bool:
    """For `lab.locks.hold`: wait that long, and never give up."""
    time.sleep(seconds)
    return False
