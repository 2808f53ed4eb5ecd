"""The closing of the books: a matrix in which an expected entry is neither measured nor a gap must not be shown.

Two sums: expected = measured + gaps, over (cell, metric) entries, and attempts = current + superseded + invalidated + stale + other weights +
elsewhere + copies, over record files. Each side is counted on its own by the caller. Closed books prove that nothing was dropped or counted twice, not that
what was counted is right.
"""

from __future__ import annotations

from dataclasses import dataclass


class BooksError(RuntimeError):
    """The matrix does not add up. A bug in the lab, never a property of the records."""


@dataclass(frozen=True)
class Totals:
    """Both sides of both sums. `not_run` is the part of `gaps` that only needs its command run; `elsewhere` are attempts at other cells,
    `copies` records that are there under another number as well.

    Record files that are `unreadable` are in neither sum.
    """

    cells: int
    expected: int
    measured: int
    gaps: int
    not_run: int
    attempts: int
    current: int
    superseded: int
    invalidated: int
    stale: int
    other_weights: int
    elsewhere: int
    copies: int
    unreadable: int

    @property
    def parts(self) -> dict[str, int]:
        """What the attempts are made of, by name."""
        names = ("current", "superseded", "invalidated", "stale", "other_weights", "elsewhere", "copies")
        return {name: getattr(self, name) for name in names}

    def close(self) -> None:
        """Raise BooksError unless both sums hold."""
        if self.expected != self.measured + self.gaps or self.not_run > self.gaps:
            raise BooksError(f"{self.expected} expected are not {self.measured} measured + {self.gaps} gaps ({self.not_run} not run)")
        if self.attempts != sum(self.parts.values()):
            counted = " + ".join(f"{count} {name.replace('_', ' ')}" for name, count in self.parts.items())
            raise BooksError(f"{self.attempts} attempts are not {counted}")
