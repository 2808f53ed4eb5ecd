"""Reads numbers from a parsed `config.json` and refuses what is no number, by the name of its field.

Every architecture's config reader goes through it, so that a file with a string, a null or a negative size gives one line and no traceback.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lab.errors import LabError


def config_json(path: Path) -> dict[str, Any]:
    """A checkpoint's config.json, parsed. Raises LabError where it is missing or no JSON object."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise LabError(f"{path}: no such file; an artifact folder needs the checkpoint's config.json") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no JSON, no UTF-8, or a number of thousands of digits
        raise LabError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(data, dict):
        raise LabError(f"{path}: expected an object of fields")
    return data


class Fields:
    """The fields of one model description; `where` names the file in errors. A field set to null counts as left out."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self.data, self.where = data, where

    def refuse(self, message: str) -> LabError:
        """The one-line error about this file."""
        return LabError(f"{self.where}: {message}")

    def whole(self, key: str, default: int | None = None, least: int = 1, most: int | None = None) -> int:
        """An integer of at least `least` (and at most `most`). Raises LabError when it is missing without a default, or anything else."""
        value = default if self.data.get(key) is None else self.data[key]
        if value is None:
            raise self.refuse(f"field {key} is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(f"field {key}: {value!r} is not a whole number")
        if value < least:
            raise self.refuse(f"field {key}: {value} must be at least {least}")
        if most is not None and value > most:
            raise self.refuse(f"field {key}: {value} must be at most {most}")
        return value

    def positive(self, key: str, default: float, first: dict[str, Any] | None = None) -> float:
        """A number above zero, looked up in `first` before the fields themselves. Raises LabError for anything else."""
        value = (first or {}).get(key, self.data.get(key, default))
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.refuse(f"field {key}: {value!r} is not a positive number")
        return float(value)

    def one_of(self, key: str, default: str, choices: tuple[str, ...]) -> str:
        """A word among `choices`. Raises LabError for another."""
        value = self.data.get(key) or default
        if value not in choices:
            raise self.refuse(f"{key} {value!r} is not supported; choose from: {', '.join(choices)}")
        return str(value)
