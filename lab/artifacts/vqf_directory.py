"""The directory of a VQF file: where each tensor lies. Read with every offset checked, and written byte for byte as Kestrel's converter does.

Why so strict: Kestrel's own loader checks only that a tensor ends inside the file. A tensor that begins in its neighbour or off the 64-byte grid loads there
and decodes to noise. `rows` and `cols` are for people: for most matrices they are not the stored shape (notes on VQF, section 1.4), so nothing is derived from
them here.
What it does not prove: that a tensor's length is right; `lab.artifacts.vqf_plan` computes it from the model's sizes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from lab.artifacts.gguf_cursor import quoted
from lab.artifacts.vqf_header import ALIGNMENT, ENTRY_BYTES, HEADER_BYTES, Header
from lab.errors import LabError

F32, Q8, Q4, Q4_8X8L, F16 = 1, 2, 3, 4, 5
"""qtype of an entry."""
QTYPES = {F32: "F32", Q8: "Q8_0", Q4: "Q4_0", Q4_8X8L: "Q4_8X8L", F16: "F16"}

_ENTRY = struct.Struct("<32s3I4xQQ")


@dataclass(frozen=True)
class Entry:
    """A tensor: `offset` and `nbytes` in bytes, the offset from the start of the file."""

    name: str
    qtype: int
    rows: int
    cols: int
    offset: int
    nbytes: int

    def packed(self) -> bytes:
        """The entry's 64 bytes. `rows` and `cols` are cut to 32 bits, as C does."""
        return _ENTRY.pack(self.name.encode(), self.qtype, self.rows & 0xFFFFFFFF, self.cols & 0xFFFFFFFF, self.offset, self.nbytes)


def padded(size: int) -> int:
    """The least multiple of 64 at or above `size`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def read_directory(path: Path, data: bytes, header: Header) -> list[Entry]:
    """The entries in file order; `data` holds the file up to the end of the directory. Raises LabError naming file, tensor and reason."""
    entries: list[Entry] = []
    seen: set[str] = set()
    for number in range(header.n_tensors):
        entry = _entry(path, number, data)
        if entry.name in seen:
            raise LabError(f"{path}: tensor {quoted(entry.name)} is in the directory twice; damaged")
        seen.add(entry.name)
        entries.append(entry)
        _check_place(path, entry, header)
    _check_overlaps(path, entries)
    return entries


def _entry(path: Path, number: int, data: bytes) -> Entry:
    raw, qtype, rows, cols, offset, nbytes = _ENTRY.unpack_from(data, HEADER_BYTES + ENTRY_BYTES * number)
    text, _, rest = raw.partition(b"\0")
    name = text.decode("ascii", "replace")
    if not name.isascii() or not name.isprintable() or not name or rest.strip(b"\0"):
        raise LabError(f"{path}: entry {number} of the directory has the name {raw!r}; expected printable ASCII and zeros behind it; damaged")
    if qtype not in QTYPES:
        kinds = ", ".join(f"{key} {kind}" for key, kind in QTYPES.items())
        raise LabError(f"{path}: tensor {quoted(name)} has qtype {qtype}; known: {kinds}")
    return Entry(name, qtype, rows, cols, offset, nbytes)


def _check_place(path: Path, entry: Entry, header: Header) -> None:
    name = quoted(entry.name)
    if not entry.nbytes:
        raise LabError(f"{path}: tensor {name} has no bytes; damaged")
    if entry.offset % ALIGNMENT:
        raise LabError(f"{path}: tensor {name} begins at byte {entry.offset}, no multiple of {ALIGNMENT}")
    if entry.offset < header.data_offset:
        raise LabError(f"{path}: tensor {name} begins at byte {entry.offset}, before the data at {header.data_offset}")
    if entry.offset + entry.nbytes > header.file_len:
        raise LabError(f"{path}: tensor {name} ends at byte {entry.offset + entry.nbytes}, behind the end of the data at {header.file_len}")


def _check_overlaps(path: Path, entries: Sequence[Entry]) -> None:
    for one, other in pairwise(sorted(entries, key=lambda entry: entry.offset)):
        if one.offset + one.nbytes > other.offset:
            raise LabError(f"{path}: tensors {quoted(one.name)} and {quoted(other.name)} overlap at byte {other.offset}")
