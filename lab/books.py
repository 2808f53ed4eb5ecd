"""The closing of the books: a matrix in which an expected entry is neither measured nor a gap must not be shown.

Two sums: expected = measured + gaps, over (cell, metric) entries, and attempts = current + superseded + elsewhere, over records. Each
side is counted on its own by the caller. Closed books prove that nothing was dropped or counted twice, not that what was counted is right.
"""

from __future__ import annotations

from dataclasses import dataclass


class BooksError(RuntimeError):
    """The matrix does not add up. A bug in the lab, never a property of the records."""


@dataclass(frozen=True)
class Totals:
    """Both sides of both sums. `not_run` is the part of `gaps` that only needs its command run; `elsewhere` are attempts at other cells."""

    cells: int
    expected: int
    measured: int
    gaps: int
    not_run: int
    attempts: int
    current: int
    superseded: int
    elsewhere: int
    unreadable: int

    def close(self) -> None:
        """Raise BooksError unless both sums hold."""
        if self.expected != self.measured + self.gaps or self.not_run > self.gaps:
            raise BooksError(f"{self.expected} expected are not {self.measured} measured + {self.gaps} gaps ({self.not_run} not run)")
        if self.attempts != self.current + self.superseded + self.elsewhere:
            counted = f"{self.current} current + {self.superseded} superseded + {self.elsewhere} elsewhere"
            raise BooksError(f"{self.attempts} attempts are not {counted}")
