"""The file that records travel in: JSON lines, a header first, then one record a line with its marks and what it is known by; gzipped under a name in .gz.

Every line is checked before any is used: a copy cut short, another program's file, a newer lab's or a line that somebody changed is one error naming
file and line. The check shows that the file is as it was written, not that its records are true.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from lab.errors import LabError
from lab.provenance import utc_now
from lab.record import Record
from lab.soundness import problems
from lab.standing import Mark, record_id

FORMAT, VERSION = "migration-lab-records", 1
GZIPPED = ".gz"


@dataclass(frozen=True)
class Parcel:
    """A record on its way, with its marks."""

    record: Record
    marks: tuple[Mark, ...] = ()

    @cached_property
    def record_id(self) -> str:
        """See `lab.standing.record_id`."""
        return record_id(self.record)


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid")

    record: Record
    marks: tuple[Mark, ...]
    record_id: str


def to_text(parcels: Iterable[Parcel]) -> str:
    """The content of an export file."""
    lines = [_Line(record=p.record, marks=p.marks, record_id=p.record_id).model_dump_json() for p in parcels]
    header = {"format": FORMAT, "version": VERSION, "exported_at": utc_now(), "count": len(lines)}
    return "\n".join([json.dumps(header), *lines]) + "\n"


def to_file(parcels: Iterable[Parcel], file: Path) -> bytes:
    """The bytes of an export file of that name. Gzipped ones carry no time or name, so that the same records give the same bytes but for the header."""
    content = to_text(parcels).encode()
    return gzip.compress(content, 9, mtime=0) if file.suffix == GZIPPED else content


def is_export(file: Path) -> bool:
    """Whether the file's first line is the header of an export, of whatever version."""
    try:
        with gzip.open(file) if file.suffix == GZIPPED else file.open("rb") as stream:
            return _is_header(json.loads(stream.readline(1000)))
    except (OSError, ValueError, EOFError, zlib.error):
        return False


def read_parcels(file: Path) -> list[Parcel]:
    """Every record of an export file. Raises LabError, naming file and line, unless the whole file is sound."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise LabError(f"{file}: cannot be read: {error.strerror}") from error
    try:
        lines = (gzip.decompress(content) if file.suffix == GZIPPED else content).splitlines()
    except (OSError, EOFError, zlib.error) as error:
        raise LabError(f"{file}: no whole gzip file ({error}); it was cut short or changed: export it again") from error
    count = _count(file, lines[0] if lines else b"")
    parcels = [_parcel(file, number, line) for number, line in enumerate(lines[1:], 2)]
    if len(parcels) != count:
        raise LabError(f"{file}:{len(lines)}: holds {len(parcels)} records where its header says {count}; it was cut short or joined: export it again")
    return parcels


def merge(parcels: Iterable[Parcel]) -> list[Parcel]:
    """Each record once, with the marks of all its copies."""
    found: dict[str, Parcel] = {}
    for parcel in parcels:
        known = found.get(parcel.record_id)
        found[parcel.record_id] = Parcel(parcel.record, tuple({*known.marks, *parcel.marks})) if known else parcel
    return list(found.values())


def _count(file: Path, line: bytes) -> int:
    """How many records the header promises."""
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not _is_header(header):
        raise LabError(f"{file}:1: no export of the lab (python -m lab export FILE writes one)")
    version, count = header.get("version"), header.get("count")
    if version != VERSION:
        raise LabError(f"{file}:1: format version {version}; this lab reads version {VERSION}: update it, or export with this version")
    if not isinstance(count, int):
        raise LabError(f"{file}:1: count: not a whole number; export it again")
    return count


def _is_header(header: Any) -> bool:
    return isinstance(header, dict) and header.get("format") == FORMAT


def _parcel(file: Path, number: int, line: bytes) -> Parcel:
    try:
        found = _Line.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "line"
        raise LabError(f"{file}:{number}: {place}: {first['msg']}; the file was cut short or changed, or is a newer lab's: export it again") from error
    parcel = Parcel(found.record, found.marks)
    if parcel.record_id != found.record_id:
        raise LabError(f"{file}:{number}: record_id: does not fit the record, so the line was changed; export it again")
    for problem in problems(found.record):
        raise LabError(f"{file}:{number}: record.{problem}")
    return parcel
