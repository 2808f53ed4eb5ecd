"""The seal: a report's last line, which says to a program what the report shows.

It keeps a report with measured values from being replaced by one without any - a checkout ships reports made on machines that had the records - and tells
when the two languages were made from different records. It is no signature: it proves nothing about who made the report.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from lab.errors import LabError
from lab.matrix import Matrix

_LINE = re.compile(r"<!-- lab-report (\{.*\}) -->\s*\Z")


@dataclass(frozen=True)
class Seal:
    """What a report shows: entries expected and measured, and a digest of the experiment file and the records behind it."""

    experiment: str
    expected: int
    measured: int
    digest: str

    @property
    def line(self) -> str:
        """The seal as a comment that Markdown does not show."""
        return f"<!-- lab-report {json.dumps(asdict(self))} -->"


def seal_of(matrix: Matrix) -> Seal:
    """The seal of a report of this matrix."""
    attempts = (pair for row in matrix.rows for pair in row.standings)
    parts = [matrix.experiment.sha256, *(f"{r.cell_hash} {r.attempt} {r.resume_key} {r.started_at} {standing.text}" for r, standing in attempts)]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return Seal(matrix.experiment.name, matrix.totals.expected, matrix.totals.measured, digest)


def read_seal(file: Path) -> Seal | None:
    """The seal of an existing report; None where the file carries none that can be read."""
    found = _LINE.search(file.read_text(encoding="utf-8", errors="replace"))
    try:
        return Seal(**json.loads(found[1])) if found else None
    except (ValueError, TypeError):
        return None


def refuse_loss(file: Path, shown: str, new: Seal) -> None:
    """Raise LabError where `file` (called `shown` in the message) holds measured values, or may hold some, and the new report has none."""
    if new.measured or not file.exists():
        return
    old = read_seal(file)
    if old is not None and not old.measured:
        return
    has = f"shows {old.measured} measured values" if old else "does not say what it shows"
    raise LabError(
        f"no record here fills a cell of {new.experiment}, and {shown} {has}; it is left as it is: bring its records (python -m lab import FILE), "
        f"measure (python -m lab run experiment={new.experiment}), or delete it for a report of gaps"
    )
