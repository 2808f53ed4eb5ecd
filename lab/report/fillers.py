"""How a gap is called and what fills it: some gaps no command can fill, and then none is offered.

A metric that makes no sense for a cell, or that the experiment does not ask of it, is a gap for the books alone. A refused file is refused again by the same
command; where the reason holds the conversion, that is what helps. It knows a gap by its status and by the words that the lab leaves in its reason.
"""

from __future__ import annotations

import re
import shlex

from lab.record import Gap, Status

NOT_ASKED = "N/A"
"""Stands for the status of a gap that is not asked for."""
_NOT_ASKED_REASON = "not applicable"
_CONVERT = re.compile(r"python -m lab convert .*\S")


def asked(gap: Gap) -> bool:
    """False where the metric is not owed: it has no meaning for the cell, or the experiment exempts it."""
    return not (gap.status is Status.UNSUPPORTED and gap.reason.startswith(_NOT_ASKED_REASON))


def gap_word(gap: Gap) -> str:
    """The word that stands in place of a number."""
    return str(gap.status) if asked(gap) else NOT_ASKED


def filler(gap: Gap, run: str = "") -> str:
    """The command that helps, empty where none does. `run`: the cell's own command, which is how a recorded one is spelled that says the same."""
    if not asked(gap):
        return ""
    if gap.status is Status.ARTIFACT_REFUSED:
        found = _CONVERT.search(gap.reason)
        return found[0] if found else ""
    return run if run and sorted(_words(gap.fill)) == sorted(_words(run)) else gap.fill


def _words(command: str) -> list[str]:
    """The command's words; one that is not well quoted is a single word."""
    try:
        return shlex.split(command)
    except ValueError:
        return [command]
