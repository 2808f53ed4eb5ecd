"""What lies in an attempt's folder, read and written: the record, and beside it what was said about the attempt later.

Below `lab.store`, which knows how folders are numbered and found. A file is written aside and renamed, so that a reader never sees half of it. What is
read is checked for its form (`lab.soundness`); what the numbers are worth is not decided here.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from pydantic import TypeAdapter, ValidationError

from lab.record import Record
from lab.soundness import problems
from lab.standing import Mark, Marks

RECORD, RUNNING, LOG, MIRROR, RESERVE, MARKS = "record.json", "running.json", "log.txt", "mirror.json", ".reserve", "marks.json"
NUMBER = re.compile(r"\d{3,}")
"""The name of an attempt's folder."""
_MARKS = TypeAdapter(tuple[Mark, ...])


@dataclass(frozen=True)
class Stored:
    """A record, where it lies, and what was said about it since."""

    file: Path
    record: Record
    marks: tuple[Mark, ...] = ()


def load_record(file: Path) -> Record:
    """The record in `file`. Raises OSError, or ValueError for content that is not a valid, sound record."""
    try:
        record = Record.model_validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'record'}: {first['msg']}") from None
    for problem in problems(record):
        raise ValueError(problem)
    return record


def load_marks(folder: Path) -> tuple[Mark, ...]:
    """What was said about the attempt in `folder` since it ended. Raises OSError, or ValueError for a file that holds no marks."""
    try:
        return _MARKS.validate_json((folder / MARKS).read_bytes())
    except FileNotFoundError:
        return ()
    except ValidationError as error:
        raise ValueError(f"{MARKS}: {error.errors()[0]['msg']}") from None


def save_marks(folder: Path, marks: Iterable[Mark]) -> None:
    """Write the marks of the attempt in `folder`, in place of those that are there. Raises OSError."""
    write_atomic(folder / MARKS, _MARKS.dump_json(tuple(marks), indent=1).decode() + "\n")


def load_attempt(file: Path) -> Stored:
    """The record in `file` under its folder's number, with its marks. Raises as `load_record` and `load_marks` do.

    Marks that cannot be read spoil the record: nobody could say whether it was invalidated. So does the folder of another cell: number and marks
    would be those of another attempt.
    """
    record, folder = load_record(file), file.parent
    if NUMBER.fullmatch(folder.name):
        if folder.absolute().parent.name != record.cell_id:
            raise ValueError(f"cell_id: the record of {record.cell_id} lies in the folder of another cell; move it to its own")
        if int(folder.name) != record.attempt:
            record = record.model_copy(update={"attempt": int(folder.name)})
    return Stored(file, record, load_marks(folder))


def marks_of(attempts: Iterable[Stored]) -> Marks:
    """Their marks by address, as `lab.standing` takes them."""
    return {(one.record.cell_id, one.record.attempt): one.marks for one in attempts if one.marks}


def record_text(record: Record) -> str:
    """The content of a record's file."""
    return record.model_dump_json(indent=1) + "\n"


def write_atomic(file: Path, text: str | bytes) -> None:
    """Write `text` (UTF-8) or bytes so that `file` is either absent, the old one or the whole new one, also after a power cut. Raises OSError."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{file.name}-", dir=file.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None  # the file meant, not the one beside it
    try:
        with os.fdopen(descriptor, "wb") as stream:
            write_through(stream, text.encode() if isinstance(text, str) else text)
        os.chmod(name, 0o644)
        os.replace(name, file)
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(file)) from None
        raise
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_through(stream: IO[bytes], data: bytes) -> None:
    """Write `data` and wait until the disk has it. Raises OSError."""
    stream.write(data)
    stream.flush()
    os.fsync(stream.fileno())
