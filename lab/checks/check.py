"""One thing looked at on the machine: what was found, whether that is in the way of a measurement, and the fix.

A check never raises: one that cannot look says `unknown` and why, since a machine without some file is common and no fault. `ok` means that
nothing was seen to be wrong there. Tools and counters are known to lie (a busy counter that reads 0 under load), so every text says which was asked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, ParamSpec

State = Literal["ok", "warn", "bad", "unknown"]
"""warn: numbers may suffer, or one kind of cell fails; bad: what was asked for cannot be measured here now."""
P = ParamSpec("P")


@dataclass(frozen=True)
class Finding:
    """What one look gave. `values` are plain numbers whose names carry the unit; what is not known has no entry."""

    state: State
    found: str
    fix: str = ""
    values: Mapping[str, int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.state in ("warn", "bad") and not self.fix:
            raise ValueError(f"a finding that is {self.state} needs a fix: {self.found}")
        if not all(math.isfinite(value) for value in self.values.values()):
            raise ValueError(f"a finding's values are finite numbers: {dict(self.values)}")


@dataclass(frozen=True)
class Check(Finding):
    """A finding under the name of what was looked at."""

    name: str = field(kw_only=True)


def check(name: str) -> Callable[[Callable[P, Finding]], Callable[P, Check]]:
    """Make of a function that returns a finding one that returns a check called `name` and never raises."""

    def named(look: Callable[P, Finding]) -> Callable[P, Check]:
        @functools.wraps(look)
        def guarded(*args: P.args, **kwargs: P.kwargs) -> Check:
            try:
                finding = look(*args, **kwargs)
            except Exception as error:
                # Whatever this machine's files or tools hold that nobody foresaw: it must not cost a measurement.
                return Check("unknown", f"could not look: {type(error).__name__}: {' '.join(str(error).split())[:200]}", name=name)
            return Check(finding.state, finding.found, finding.fix, dict(finding.values), name=name)

        return guarded

    return named


def ok(found: str, **values: int | float) -> Finding:
    """Nothing seen to be wrong."""
    return Finding("ok", found, values=values)


def warn(found: str, fix: str, **values: int | float) -> Finding:
    """Numbers may suffer."""
    return Finding("warn", found, fix, values)


def bad(found: str, fix: str, **values: int | float) -> Finding:
    """What was asked for cannot be measured."""
    return Finding("bad", found, fix, values)


def unknown(found: str, fix: str = "", **values: int | float) -> Finding:
    """Nothing here tells."""
    return Finding("unknown", found, fix, values)


def known(**values: int | float | None) -> dict[str, int | float]:
    """The values that are known; the others have no entry."""
    return {name: value for name, value in values.items() if value is not None}


def size(count: float) -> str:
    """A number of bytes as people read it, in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
