"""Lays a VQF file out and takes its tensors' bytes in any order; the file has its name only when all of it is there, summed and synced.

Why any order: an entry holds all layers of one matrix, while a model is converted layer by layer, so that memory holds about one layer. Places are known
before the first byte, since sizes follow from the model's numbers alone. The checksum is made from what can be read back.
What it does not prove: that the bytes mean the weights they came from; the writers check that tensor by tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lab.artifacts.publish import aside_of, check_room, check_target, folders, sync_folder
from lab.artifacts.vqf_beside import published_with
from lab.artifacts.vqf_file import Bytes, Progress, VqfFile
from lab.artifacts.vqf_fnv import fnv1a
from lab.artifacts.vqf_header import DENSE, MIXTURE, TRAILER_BYTES, Arch, Header
from lab.artifacts.vqf_plan import Planned, placed
from lab.errors import LabError, flat

_PIECE = 1 << 24


class VqfSink:
    """Takes the bytes of the planned tensors. `total` is the bytes of all tensors."""

    def __init__(self, handle: int, header: bytes, tensors: Sequence[Planned], progress: Progress | None) -> None:
        """Writes header and directory and gives the file its length; pads are zero from then on."""
        self.entries, self.data_offset, self.file_len = placed(tensors)
        self._handle, self._progress = handle, progress
        self._by_name = {entry.name: entry for entry in self.entries}
        self._missing = {entry.name: entry.nbytes for entry in self.entries}
        self.total = sum(self._missing.values())
        os.ftruncate(handle, self.file_len + TRAILER_BYTES)
        self._directory = b"".join(entry.packed() for entry in self.entries)
        _write_all(handle, header + self._directory, 0)

    def put(self, name: str, at: int, data: npt.NDArray[np.uint8]) -> None:
        """Bytes of tensor `name` from its byte `at`; each byte once. Raises ValueError for what does not fit, OSError from the disk."""
        entry = self._by_name[name]
        if at < 0 or at + data.nbytes > entry.nbytes or data.nbytes > self._missing[name]:
            raise ValueError(f"{data.nbytes} bytes at {at} do not fit tensor {name} of {entry.nbytes}, of which {self._missing[name]} are missing")
        _write_all(self._handle, np.ascontiguousarray(data).reshape(-1).data, entry.offset + at)
        self._missing[name] -= data.nbytes
        if self._progress is not None:
            self._progress(self.total - sum(self._missing.values()), self.total, name)

    def finish(self) -> None:
        """Writes the checksum. Raises ValueError where bytes are missing."""
        for name, missing in self._missing.items():
            if missing:
                raise ValueError(f"tensor {name} lacks {missing} bytes")
        state = fnv1a(np.frombuffer(self._directory, np.uint8))
        for at in range(self.data_offset, self.file_len, _PIECE):
            state = fnv1a(_read(self._handle, at, min(_PIECE, self.file_len - at)), state)
            if self._progress is not None:
                self._progress(min(at + _PIECE, self.file_len) - self.data_offset, self.file_len - self.data_offset, "checksum")
        _write_all(self._handle, state.to_bytes(8, "little"), self.file_len)


def check_place(path: Path, tensors: Sequence[Planned], force: bool) -> None:
    """Asked before any work. Raises LabError where `path` exists (without `force`) or cannot be a file, or the disk is too small for these tensors."""
    check_target(path, force)
    check_room(path, placed(tensors)[2] + TRAILER_BYTES)


@contextmanager
def writing(
    path: Path,
    arch: Arch,
    flags: int,
    tensors: Sequence[Planned],
    progress: Progress | None = None,
    force: bool = False,
    beside: Mapping[Path, str] | None = None,
) -> Iterator[VqfSink]:
    """A sink for the tensors of a new file. When the block ends well, the file is summed, synced, opened again as any reader does, and only then named,
    together with the small files `beside` it. Its folder is made where it is missing.

    Raises LabError where `path` exists (without `force`), also where it does so only by the end, or the disk is too small or fails. Nothing is left then, or
    after any other exception.
    """
    check_place(path, tensors, force)
    _, data_offset, file_len = placed(tensors)
    header = Header(MIXTURE if arch.n_experts else DENSE, flags, len(tensors), arch, data_offset, file_len)
    aside = aside_of(path)
    try:
        with folders(path.parent):
            handle = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                sink = VqfSink(handle, header.packed(), tensors, progress)
                yield sink
                sink.finish()
                os.fsync(handle)
                VqfFile(aside)
                with published_with(aside, path, beside or {}, force):
                    sync_folder(path.parent)
            finally:
                os.close(handle)
                aside.unlink(missing_ok=True)  # after a success it has its name
    except OSError as error:
        raise LabError(f"{path}: cannot be written ({flat(error.strerror or error)}); nothing was left behind") from None


def _write_all(handle: int, data: bytes | memoryview, at: int) -> None:
    """pwrite(2) takes at most 2 GiB at a time and may take less."""
    left = memoryview(data)
    while left:
        count = os.pwrite(handle, left, at)
        left, at = left[count:], at + count


def _read(handle: int, at: int, count: int) -> Bytes:
    found = bytearray()
    while len(found) < count:
        piece = os.pread(handle, count - len(found), at + len(found))
        if not piece:
            raise OSError(f"the file became shorter at byte {at + len(found)}")
        found += piece
    return np.frombuffer(found, np.uint8)
