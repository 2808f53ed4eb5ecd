"""One GGUF file, mapped and checked: its metadata, and its tensors' types, shapes and bytes. Nothing is handed out before the table has been checked.

Why mapped: a released file is larger than memory, and a table row or an expert is read where it lies. Offsets count from the start of the data,
which differs from file to file: the same tensor lies elsewhere in a merged file than in its shard.
What it does not prove: that the bytes are good weights. Parsing is `gguf_cursor`, the arithmetic of places `gguf_layout`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.artifacts.gguf_cursor import Bytes, Cursor, Value, quoted
from lab.artifacts.gguf_layout import Entry, padded, resolve
from lab.artifacts.mapping import mapped
from lab.codecs.gguf_types import REMOVED_IDS, GgufType, candidates
from lab.errors import LabError

_LEAST_TENSOR, _LEAST_VALUE = 33, 14  # bytes of the shortest line of the table, and of the shortest key with its value
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True)
class GgufTensor:
    """A tensor: `shape` as in NumPy (`shape[-1]` weights a row), `offset` in bytes from the start of the file at `path`."""

    name: str
    shape: tuple[int, ...]
    type: GgufType
    path: Path
    offset: int
    nbytes: int


class GgufFile:
    """A single file. `metadata` by key, `tensors` by name in the order of the table, `data_start` in bytes."""

    def __init__(self, path: Path) -> None:
        """Raises LabError in one line naming the file and what is wrong with it."""
        self.path = path
        self._data = np.frombuffer(mapped(path), dtype=np.uint8)
        cursor = Cursor(path, self._data)
        tensors, values = _counts(cursor)
        self.metadata = _metadata(cursor, values)
        self.alignment = _alignment(cursor, self.metadata)
        entries = [_entry(cursor) for _ in range(tensors)]
        self.data_start = padded(cursor.at, self.alignment)
        placed = resolve(cursor, entries, self.data_start, len(self._data), self.alignment)
        self.tensors = {e.name: GgufTensor(e.name, e.shape, kind, path, self.data_start + e.start, e.nbytes(kind)) for e, kind in placed}

    def raw(self, name: str) -> Bytes:
        """The tensor's bytes, uint8 [..., rows, bytes per row], read-only and not copied. Raises LabError where there is no such tensor.

        Shortening the file while it is in use ends the process (SIGBUS), as with every mapped file.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise LabError(f"{self.path}: no tensor {quoted(name)}")
        flat = self._data[tensor.offset : tensor.offset + tensor.nbytes]
        return flat.reshape(*tensor.shape[:-1], tensor.type.row_bytes(tensor.shape[-1]))


def _counts(cursor: Cursor) -> tuple[int, int]:
    """(tensors, metadata values), after magic and version."""
    magic = cursor.take(4, "the magic").tobytes()
    if magic != b"GGUF":
        cursor.fail(f"not a GGUF file: it begins with {magic!r}, not b'GGUF'")
    version = cursor.u32("the version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in (2, 3)
        cursor.fail(f"GGUF version {version} is not read, only 2 and 3" + ("; this is a big-endian file" if swapped else ""))
    tensors = cursor.count("the number of tensors", _LEAST_TENSOR)
    return tensors, cursor.count("the number of metadata values", _LEAST_VALUE)


def _metadata(cursor: Cursor, count: int) -> dict[str, Value]:
    found: dict[str, Value] = {}
    for _ in range(count):
        key = cursor.name("a metadata key")
        if key in found:
            cursor.fail(f"metadata key {quoted(key)} is there twice")
        found[key] = cursor.value(key)
    return found


def _alignment(cursor: Cursor, metadata: Mapping[str, Value]) -> int:
    """A multiple of 8 by docs/gguf.md; a power of two by ggml."""
    value = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or value < 8 or value & (value - 1):
        found = value if isinstance(value, int) else f"a {type(value).__name__}"
        cursor.fail(f"general.alignment is {found}; expected a power of two of at least 8")
    return value


def _entry(cursor: Cursor) -> Entry:
    name = cursor.name("a tensor name")
    dims = cursor.u32(f"the dimensions of {quoted(name)}")
    if not 1 <= dims <= 4:
        cursor.fail(f"tensor {quoted(name)} has {dims} dimensions; expected 1 to 4")
    shape = tuple(cursor.u64(f"a size of {quoted(name)}") for _ in range(dims))[::-1]
    if 0 in shape:
        cursor.fail(f"tensor {quoted(name)} has shape {list(shape)}; sizes must be positive")
    type_id = cursor.u32(f"the type of {quoted(name)}")
    if not candidates(type_id):
        why = "ggml no longer reads" if type_id in REMOVED_IDS else "the lab does not know"
        cursor.fail(f"tensor {quoted(name)} has type id {type_id}, which {why}; convert the file to another type (lab/codecs/gguf_types.py lists them)")
    return Entry(name, shape, type_id, cursor.u64(f"the offset of {quoted(name)}"))
