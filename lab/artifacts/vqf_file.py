"""One VQF file, mapped and checked: header, directory, tensors' bytes by layer, checksum. The layout gate is the artifact's (`lab.artifacts.vqf`).

Why mapped: released files are larger than memory, and a layer is read where it lies. Nothing is handed out before header and directory have been checked
against each other and against the file's size. The checksum reads every byte, so it is a method of its own and not part of opening.
What it does not prove: that values are sound, or that the layout bits are true.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from lab.artifacts.gguf_cursor import quoted
from lab.artifacts.mapping import mapped
from lab.artifacts.vqf_directory import Entry, read_directory
from lab.artifacts.vqf_fnv import OFFSET_BASIS, fnv1a
from lab.artifacts.vqf_header import ENTRY_BYTES, HEADER_BYTES, Header, read_header
from lab.artifacts.vqf_plan import Planned, catalogue, check_entries
from lab.errors import LabError

Bytes = npt.NDArray[np.uint8]
Progress = Callable[[int, int, str], None]
"""(bytes done, bytes in all, what is being done)."""

_PIECE = 1 << 24


class VqfFile:
    """`header`, `entries` by name in file order, `planned` (their true shapes) by name, `unknown` names that the format does not have."""

    def __init__(self, path: Path) -> None:
        """Raises LabError in one line naming the file and what is wrong with it."""
        self.path = path
        self._map = mapped(path)
        self._data: Bytes = np.frombuffer(self._map, dtype=np.uint8)
        self.header: Header = read_header(path, self._data[:HEADER_BYTES].tobytes(), len(self._data))
        directory_end = HEADER_BYTES + ENTRY_BYTES * self.header.n_tensors
        entries = read_directory(path, self._data[:directory_end].tobytes(), self.header)
        self.unknown = check_entries(path, self.header.arch, self.header.flags, entries)
        self.entries = {entry.name: entry for entry in entries}
        self.planned = {name: planned for name, planned in catalogue(self.header.arch, self.header.flags).items() if name in self.entries}

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self._data)

    @property
    def sets(self) -> tuple[str, ...]:
        """The complete sets of matrices: q8, q4 or both. x8 copies do not count: their converter fills them from blocks that are already tiled and
        reads those as rows, so what they hold is not reliable."""
        return tuple(prefix for prefix in ("q8", "q4") if f"{prefix}_q" in self.entries)

    def raw(self, name: str) -> Bytes:
        """A tensor's bytes, uint8 [bytes], read-only and not copied. Raises LabError where there is no such tensor.

        Shortening the file while it is in use ends the process (SIGBUS), as with every mapped file.
        """
        entry = self.entry(name)
        return self._data[entry.offset : entry.offset + entry.nbytes]

    def forget(self, start: int, stop: int) -> None:
        """Takes the bytes [start, stop) of the file out of what counts as resident in this process; they stay in the system's cache and can be read again.
        For one pass over a file larger than memory: pages that were read would otherwise stay mapped until the system is short of them."""
        page = mmap.PAGESIZE
        first, last = start // page * page, min(-(-stop // page) * page, len(self._data))
        if hasattr(mmap, "MADV_DONTNEED") and last > first:
            self._map.madvise(mmap.MADV_DONTNEED, first, last - first)

    def entry(self, name: str) -> Entry:
        """The directory's entry. Raises LabError where there is none."""
        found = self.entries.get(name)
        if found is None:
            raise LabError(f"{self.path}: no tensor {quoted(name)}")
        return found

    def layer(self, name: str, layer: int) -> Bytes:
        """The bytes of one layer of a tensor that holds them all."""
        planned = self.shape(name)
        if not 0 <= layer < planned.shape[0]:
            raise LabError(f"{self.path}: tensor {quoted(name)}: no layer {layer}, the file has {planned.shape[0]}")
        step = planned.nbytes // planned.shape[0]
        return self.raw(name)[layer * step : (layer + 1) * step]

    def shape(self, name: str) -> Planned:
        """A known tensor's true shape. Raises LabError where the file or the format does not have it."""
        self.entry(name)
        found = self.planned.get(name)
        if found is None:
            raise LabError(f"{self.path}: tensor {quoted(name)} is none of the format's; its shape is not known")
        return found

    def stored_sum(self) -> int:
        """The checksum in the trailer; 0 means that the writer made none."""
        return int.from_bytes(self._data[self.header.file_len :].tobytes(), "little")

    def check_sum(self, progress: Progress | None = None) -> bool:
        """Whether the file has a checksum; reads every byte. Raises LabError where it is wrong."""
        stored = self.stored_sum()
        if stored == 0:
            return False
        state, start, end = OFFSET_BASIS, self.header.data_offset, self.header.file_len
        state = fnv1a(self._data[HEADER_BYTES : HEADER_BYTES + ENTRY_BYTES * self.header.n_tensors], state)
        for at in range(start, end, _PIECE):
            state = fnv1a(self._data[at : min(at + _PIECE, end)], state)
            self.forget(at, min(at + _PIECE, end))
            if progress is not None:
                progress(min(at + _PIECE, end) - start, end - start, "checking the sum")
        if state != stored:
            raise LabError(f"{self.path}: checksum (FNV-1a) is {state:#018x}, the file says {stored:#018x}; damaged, fetch or convert it again")
        return True
