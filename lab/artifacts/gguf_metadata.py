"""Checked reads of a GGUF file's metadata: every value has the type and range that its key promises, or one line says file and key.

Why: headers are written by many tools, and a string where a count belongs, or a count of two billion, must not become a traceback or an allocation.
What it does not prove: that a value in range is the right one for the weights; shapes tell that (`lab.artifacts.gguf_model`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from lab.errors import LabError

if TYPE_CHECKING:
    from lab.artifacts.gguf import Gguf

_MOST = 1 << 31  # sizes above this are in no model; a lying one is refused before anything is made of it


class Metadata:
    """The metadata of an opened file. `arch` is general.architecture; keys that begin with "." are below it (".block_count")."""

    def __init__(self, gguf: Gguf) -> None:
        """Raises LabError where general.architecture is missing or no string."""
        self.values, self.where = gguf.metadata, str(gguf.files[0].path)
        self.arch = self.text("general.architecture")

    def refuse(self, key: str, problem: str) -> LabError:
        """The one-line error about a key."""
        return LabError(f"{self.where}: {self.full(key)} {problem}")

    def full(self, key: str) -> str:
        """The key as it is in the file."""
        return f"{self.arch}{key}" if key.startswith(".") else key

    def __contains__(self, key: str) -> bool:
        return self.full(key) in self.values

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(self.full(key), default)
        if value is None:
            raise self.refuse(key, "is missing; the file is incomplete or of another architecture")
        return value

    def whole(self, key: str, default: int | None = None, least: int = 1, most: int = _MOST) -> int:
        """An integer in [least, most]. Raises LabError where it is missing without a default, or anything else."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(key, f"is {_said(value)}; expected a whole number")
        if not least <= value <= most:
            raise self.refuse(key, f"is {value}; expected {least} to {most}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero, as the shortest decimal that the file's 32-bit float stands for: 1e-05, not 9.999999747378752e-06."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.refuse(key, f"is {_said(value)}; expected a number above zero")
        narrow = np.float32(value) if isinstance(value, float) and abs(value) < np.finfo(np.float32).max else None
        return float(str(narrow)) if narrow is not None and float(narrow) == value else float(value)

    def flag(self, key: str, default: bool | None = None) -> bool:
        """True or False."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, f"is {_said(value)}; expected true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, f"is {_said(value)}; expected a string")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings."""
        value = self._get(key, None)
        if not isinstance(value, list):
            raise self.refuse(key, f"is {_said(value)}; expected a list of strings")
        return value

    def wholes(self, key: str) -> list[int]:
        """A list of integers, exact at any width."""
        value = self._get(key, None)
        if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
            raise self.refuse(key, f"is {_said(value)}; expected a list of whole numbers")
        return [int(each) for each in value.tolist()]


def _said(value: Any) -> str:
    """A value of any type, short enough for a message."""
    if isinstance(value, list | np.ndarray):
        return f"a list of {len(value)}"
    return repr(value) if len(repr(value)) <= 60 else f"a {type(value).__name__}"
