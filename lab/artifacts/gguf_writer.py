"""Writes a GGUF file front to back: header and tensor table first, then each tensor's bytes as they come, under a name only when all of it is there.

Why by hand: the `gguf` package knows fewer types and holds or maps what it writes, while a table of 51 GB has to pass through in pieces; and a file that
was cut short by a full disk or a signal must not lie there under the model's name. Where the system has files without a name (Linux), even a killed
process leaves nothing. Format: ggml's docs/gguf.md, version 3, little endian.
What it does not prove: that the bytes are the right ones; the caller reads the file again (`check`).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lab.artifacts.gguf_layout import padded
from lab.artifacts.publish import aside_of, check_room, check_target, folders, publish, sync_folder
from lab.codecs.gguf_types import GgufType
from lab.errors import LabError, flat

MetaValue = bool | str | list[str] | np.generic | npt.NDArray[np.generic]
"""Numbers carry their width (np.uint32(4), an array of np.uint64), because readers ask for one width only."""

ALIGNMENT = 32
_VERSION = 3
_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS = {"u1": 0, "i1": 1, "u2": 2, "i2": 3, "u4": 4, "i4": 5, "f4": 6, "b1": _BOOL, "u8": 10, "i8": 11, "f8": 12}
"""NumPy kind and size -> gguf_metadata_value_type."""


@dataclass(frozen=True)
class Planned:
    """A tensor to come: `shape` as in NumPy, whole blocks a row."""

    name: str
    shape: tuple[int, ...]
    type: GgufType

    @property
    def nbytes(self) -> int:
        """Bytes in the file, without padding."""
        return prod(self.shape[:-1]) * self.type.row_bytes(self.shape[-1])


def header(metadata: Mapping[str, MetaValue], tensors: Sequence[Planned]) -> bytes:
    """Everything before the data, padded. Raises ValueError for a tensor or a value that the format cannot hold."""
    out = [b"GGUF", struct.pack("<IQQ", _VERSION, len(tensors), len(metadata) + 1)]
    for key, value in {"general.alignment": np.uint32(ALIGNMENT), **metadata}.items():
        out += [_string(key), _value(key, value)]
    start = 0
    for tensor in tensors:
        if not 1 <= len(tensor.shape) <= 4 or not tensor.type.fits(tensor.shape[-1]):
            raise ValueError(f"{tensor.name} {list(tensor.shape)} cannot be {tensor.type.name}")
        sizes = struct.pack(f"<{len(tensor.shape)}Q", *reversed(tensor.shape))
        out += [_string(tensor.name), struct.pack("<I", len(tensor.shape)), sizes, struct.pack("<IQ", tensor.type.id, start)]
        start += padded(tensor.nbytes, ALIGNMENT)
    joined = b"".join(out)
    return joined + bytes(padded(len(joined), ALIGNMENT) - len(joined))


def total_bytes(metadata: Mapping[str, MetaValue], tensors: Sequence[Planned]) -> int:
    """Size of the whole file."""
    return len(header(metadata, tensors)) + sum(padded(tensor.nbytes, ALIGNMENT) for tensor in tensors)


class TensorSink:
    """Takes the tensors' bytes in the order of the table."""

    def __init__(self, handle: int, tensors: Sequence[Planned]) -> None:
        self._handle, self._left = handle, list(reversed(tensors))
        self._missing = self._left[-1].nbytes if self._left else 0

    def write(self, name: str, data: npt.NDArray[np.uint8]) -> None:
        """The next bytes of tensor `name`, whose turn it must be. Raises ValueError otherwise, OSError from the disk."""
        if not self._left or self._left[-1].name != name or data.nbytes > self._missing:
            raise ValueError(f"{data.nbytes} bytes of {name} are not what comes next")
        _write_all(self._handle, np.ascontiguousarray(data).reshape(-1).data)
        self._missing -= data.nbytes
        if not self._missing:
            size = self._left.pop().nbytes
            _write_all(self._handle, memoryview(bytes(padded(size, ALIGNMENT) - size)))
            self._missing = self._left[-1].nbytes if self._left else 0

    def finish(self) -> None:
        """Raises ValueError where tensors or bytes are missing."""
        if self._left:
            raise ValueError(f"{self._left[-1].name} lacks {self._missing} bytes")


@contextmanager
def writing(
    path: Path, metadata: Mapping[str, MetaValue], tensors: Sequence[Planned], check: Callable[[Path], None], force: bool = False
) -> Iterator[TensorSink]:
    """A sink for the tensors' bytes. When the block ends well, the file is synced, `check` is called on it, and only then it has its name.

    Makes the folder. Raises LabError where `path` exists (without `force`) or cannot become a file, or the disk is too small or fails; nothing is left then,
    or after any other exception. What `check` raises passes through.
    """
    check_target(path, force)
    check_room(path, total_bytes(metadata, tensors))
    try:
        with folders(path.parent), _aside(path) as (handle, name_it):
            _write_all(handle, memoryview(header(metadata, tensors)))
            sink = TensorSink(handle, tensors)
            yield sink
            sink.finish()
            os.fsync(handle)
            aside = name_it()
            check(aside)
            publish(aside, path, force)
            sync_folder(path.parent)
    except OSError as error:
        raise LabError(f"{path}: cannot be written ({flat(error.strerror or error)}); nothing was left behind") from None


@contextmanager
def _aside(path: Path) -> Iterator[tuple[int, Callable[[], Path]]]:
    """(an open file, a function that gives it a name beside `path`). Without a name so far where the system can; removed when the block fails."""
    named = aside_of(path)
    nameless = _nameless(path.parent)
    handle = os.open(named, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666) if nameless is None else nameless

    def name_it() -> Path:
        if nameless is not None:
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.link(f"/proc/self/fd/{handle}", named.name, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                os.close(folder)
        return named

    try:
        yield handle, name_it
    finally:
        os.close(handle)
        named.unlink(missing_ok=True)  # after a success it has the other name


def _nameless(folder: Path) -> int | None:
    """A file without a name in `folder`, or None where system or file system have none (O_TMPFILE, linked through /proc: open(2))."""
    flag = getattr(os, "O_TMPFILE", None)
    if flag is None or not Path("/proc/self/fd").is_dir():
        return None
    try:
        return os.open(folder, flag | os.O_RDWR, 0o666)
    except OSError:
        return None


def _write_all(handle: int, data: memoryview) -> None:
    """write(2) takes at most 2 GiB at a time and may take less."""
    while data:
        data = data[os.write(handle, data) :]


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(key: str, value: MetaValue) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", _BOOL, value)
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _string(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", _ARRAY, _STRING, len(value)) + b"".join(map(_string, value))
    kind = _NUMBERS.get(f"{value.dtype.kind}{value.dtype.itemsize}")
    if kind is None or value.ndim > 1:
        raise ValueError(f"{key}: {value.dtype} {value.shape} is no GGUF value")
    raw = np.ascontiguousarray(value, dtype=value.dtype.newbyteorder("<")).tobytes()
    return struct.pack("<I", kind) + raw if value.ndim == 0 else struct.pack("<IIQ", _ARRAY, kind, value.size) + raw
