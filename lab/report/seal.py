"""The seal: a report's last line, which says to a program what the report shows.

It keeps a report with measured values from being replaced by one without any - a checkout ships reports made on machines that had the records - and tells
when the two languages were made from different records, or by other templates. It is no signature: it proves nothing about who made the report.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from lab.errors import LabError
from lab.matrix import Matrix

_MAKERS = frozenset({".py", ".j2", ".css", ".yaml"})
_LINE = re.compile(r"<!-- lab-report (\{.*\}) -->\s*\Z")


@dataclass(frozen=True)
class Seal:
    """What a report shows: entries expected and measured, a digest of the experiment file and the records behind it, and one of what made it of them."""

    experiment: str
    expected: int
    measured: int
    digest: str
    made_by: str = ""
    """Empty in reports from before there was this field."""

    @property
    def line(self) -> str:
        """The seal as a comment that Markdown does not show."""
        return f"<!-- lab-report {json.dumps(asdict(self))} -->"


def seal_of(matrix: Matrix) -> Seal:
    """The seal of a report of this matrix."""
    attempts = (pair for row in matrix.rows for pair in row.standings)
    parts = [matrix.experiment.sha256, *(f"{r.cell_hash} {r.attempt} {r.resume_key} {r.started_at} {standing.text}" for r, standing in attempts)]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return Seal(matrix.experiment.name, matrix.totals.expected, matrix.totals.measured, digest, maker_sha256())


@cache
def maker_sha256() -> str:
    """sha256 (hex) over the names and contents of what turns a matrix into a report: the code, templates and texts of this package."""
    package, digest = Path(__file__).parent, hashlib.sha256()
    for file in sorted(path for path in package.rglob("*") if path.suffix in _MAKERS):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(package).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def outdated(old: Seal | None, new: Seal) -> str:
    """In what a report with the seal `old` was made differently from one with `new`; empty where in nothing."""
    if old is None:
        return "does not say what it was made from"
    if (old.experiment, old.digest) != (new.experiment, new.digest):
        return "was made from other records or another experiment file"
    return "" if old.made_by == new.made_by else "was made by other report code, templates or texts"


def read_seal(file: Path) -> Seal | None:
    """The seal of an existing report; None where the file carries none that can be read."""
    found = _LINE.search(file.read_text(encoding="utf-8", errors="replace"))
    try:
        return Seal(**json.loads(found[1])) if found else None
    except (ValueError, TypeError):
        return None


def refuse_loss(reports: Mapping[str, Path], new: Seal, attempts: int) -> None:
    """Raise LabError where one of the `reports` (by the name to call it) shows measured values, or may show some, and the new one has none.

    `attempts` at the experiment's cells that are known here: with any, the report of now is the true one, also where all were invalidated.
    All languages count, whichever is written: they share their charts, and a chart without its values would be lost to every one.
    """
    if new.measured or attempts:  # attempts that were made here and no longer count must take their numbers down
        return
    for shown, file in reports.items():
        old = read_seal(file) if file.exists() else None
        if not file.exists() or (old is not None and not old.measured):
            continue
        has = f"shows {old.measured} measured values" if old else "does not say what it shows"
        raise LabError(
            f"no record here fills a cell of {new.experiment}, and {shown} {has}; it is left as it is, with its charts: bring its records "
            f"(python -m lab import FILE), measure (python -m lab run experiment={new.experiment}), or delete it for a report of gaps"
        )
