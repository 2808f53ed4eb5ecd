"""Reads the header of a GGUF file from mapped bytes, value by value, never past its end and never more than it holds.

Why our own: the `gguf` package's reader trusts counts and lengths; a count of 2^60 makes it loop for years. Here every count is compared with the
bytes that are left before anything is made of it. Format: ggml's docs/gguf.md, version 3 (2 has the same layout), little endian.
What it does not prove: that a value means what its key says.
"""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from lab.errors import LabError

Bytes = npt.NDArray[np.uint8]
Value = bool | int | float | str | list[str] | npt.NDArray[np.generic]
"""A metadata value; arrays of numbers and bools are NumPy views of the file, arrays of strings are lists."""

_MAX_HEADER = 1 << 28  # bytes; the largest vocabularies with merges and template take under 2^25
_MAX_NAME = 1 << 16  # bytes of a key (docs/gguf.md) or of a tensor's name

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
"""gguf_metadata_value_type -> NumPy dtype."""


def quoted(name: str) -> str:
    """A name from a file as it may stand in a message: one line, printable, short."""
    return repr(name if len(name) <= 80 else name[:77] + "...")


class Cursor:
    """A position in the header. Every method raises LabError naming the file where the bytes do not hold what they should."""

    def __init__(self, path: Path, data: Bytes) -> None:
        self.path, self.at = path, 0
        self._data = data[:_MAX_HEADER]
        self._whole = len(self._data) == len(data)

    def fail(self, problem: str) -> NoReturn:
        """Raises LabError: the file, then the problem."""
        raise LabError(f"{self.path}: {problem}")

    @property
    def left(self) -> int:
        """Bytes from here to the end of the file, or of the largest header that is read."""
        return len(self._data) - self.at

    def take(self, count: int, what: str) -> Bytes:
        """The next `count` bytes as a view."""
        if count > self.left:
            end = f"the file ends {self.left} later" if self._whole else f"headers are read up to {_MAX_HEADER} bytes and {self.left} are left"
            self.fail(f"{what} at byte {self.at} needs {count} bytes, but {end}; truncated or damaged")
        self.at += count
        return self._data[self.at - count : self.at]

    def u32(self, what: str) -> int:
        """An unsigned 32-bit number."""
        return int.from_bytes(self.take(4, what).tobytes(), "little")

    def u64(self, what: str) -> int:
        """An unsigned 64-bit number."""
        return int.from_bytes(self.take(8, what).tobytes(), "little")

    def count(self, what: str, least: int) -> int:
        """How many of something follow, each of at least `least` bytes."""
        number = self.u64(what)
        if number * least > self.left:
            self.fail(f"{what} is {number}, more than the {self.left} bytes left can hold; truncated or damaged")
        return number

    def string(self, what: str) -> str:
        """A length and UTF-8 bytes."""
        start = self.at
        length = self.u64(f"length of {what}")
        try:
            return self.take(length, what).tobytes().decode()
        except UnicodeDecodeError:
            self.fail(f"{what} at byte {start} is not UTF-8; damaged")

    def name(self, what: str) -> str:
        """A string that names a key or a tensor: not empty, and not longer than the format allows."""
        start = self.at
        text = self.string(what)
        if not text or self.at - start - 8 > _MAX_NAME:
            self.fail(f"{what} at byte {start} has {len(text)} characters; expected 1 to {_MAX_NAME} bytes")
        return text

    def value(self, key: str) -> Value:
        """A metadata value with its type before it."""
        kind = self.u32(f"type of {quoted(key)}")
        if kind == _STRING:
            return self.string(quoted(key))
        if kind == _ARRAY:
            return self._array(key)
        array = self._numbers(key, kind, 1)
        scalar: Value = array[0].item()
        return scalar

    def _array(self, key: str) -> Value:
        kind = self.u32(f"element type of {quoted(key)}")
        if kind == _STRING:
            return [self.string(quoted(key)) for _ in range(self.count(f"length of {quoted(key)}", 8))]
        if kind == _ARRAY:
            self.fail(f"{quoted(key)} is an array of arrays, which ggml does not read either")
        return self._numbers(key, kind, self.u64(f"length of {quoted(key)}"))

    def _numbers(self, key: str, kind: int, count: int) -> npt.NDArray[np.generic]:
        if kind not in _SCALARS:
            self.fail(f"{quoted(key)} has value type {kind}; known: 0 to 12")
        dtype = np.dtype(_SCALARS[kind])
        raw = self.take(count * dtype.itemsize, quoted(key))
        if kind == _BOOL and raw.size and raw.max() > 1:
            self.fail(f"{quoted(key)} is a bool with a byte other than 0 and 1; damaged")
        return raw.view(dtype)
