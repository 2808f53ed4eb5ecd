"""Attempts by their address, and the verb `invalidate`: an attempt that turned out wrong is marked, and stays.

A mistake is often found after the record was written: the wrong text, a busy machine, a bug in a kernel. Deleting the record would hide that the
measurement was ever made and believed; so a mark with the reason is put beside it, and from then on none of its numbers is current. A mark is what
somebody said; it proves nothing about the number.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from lab.errors import LabError
from lab.project import Project
from lab.provenance import utc_now
from lab.reconcile import reconcile
from lab.record import Status
from lab.standing import Kind, Mark, standings
from lab.store import RECORD, Store, Stored, load_attempt, marks_of
from lab.tracking import Tracker

_INVALIDATE = "python -m lab invalidate CELL_ID/ATTEMPT --reason TEXT"


def find_attempt(project: Project, word: str) -> Stored:
    """The attempt that `word` names: CELL_ID/ATTEMPT, a record file, or CELL_ID for the OK attempt that is current.

    Raises LabError, in one line that says what there is instead.
    """
    file = next((path for path in (Path(word), project.path(word)) if path.is_file()), None)
    if file is None:
        cell_id, slash, number = word.removesuffix("/").partition("/")
        folder = project.runs / cell_id
        if not cell_id or cell_id.startswith(".") or not folder.is_dir():
            raise LabError(f"{word}: {_no_such_cell(project, cell_id)}")
        if not slash:
            return _current(project, cell_id)
        file = folder / f"{int(number):03d}" / RECORD if number.isdecimal() else folder / number / RECORD
        if not file.is_file():
            there = [path.parent.name for path in Store(project.runs).record_files(cell_id)]
            raise LabError(f"{word}: no such attempt; {cell_id} has {len(there)} with a record{': ' + ', '.join(there[-5:]) if there else ''}")
    try:
        return load_attempt(file)
    except ValueError as error:
        raise LabError(f"{project.short(file)}: not a record that can be read: {error}") from error


def _no_such_cell(project: Project, cell_id: str) -> str:
    known = sorted(path.name for path in project.runs.iterdir() if path.is_dir()) if project.runs.is_dir() else []
    near = get_close_matches(cell_id, known, 1)
    return f"neither a cell in {project.short(project.runs)} nor a record file" + (f" (did you mean {near[0]}?)" if near else "")


def _current(project: Project, cell_id: str) -> Stored:
    """The OK attempt whose numbers the cell shows."""
    found = Store(project.runs).read(cell_id)[0]
    good = [one for one in found if one.record.status is Status.OK and not one.marks]
    if len({one.record.cell_hash for one in good}) > 1:
        raise LabError(f"{cell_id}: two different cells share this id; name the attempt, e.g. {cell_id}/{good[-1].record.attempt}")
    judged = standings([one.record for one in found], marks_of(found))
    current = next((record for record, standing in judged if standing.kind is Kind.CURRENT and record.status is Status.OK), None)
    if current is not None:
        return next(one for one in found if one.record.attempt == current.attempt)
    stale = [standing.reason for record, standing in judged if standing.kind is Kind.STALE_PROTOCOL and record.status is Status.OK]
    if stale:
        raise LabError(f"{cell_id}: no OK attempt under today's protocols; {stale[-1]}")
    last = f"; attempt {found[-1].record.attempt} is {'invalidated' if found[-1].marks else found[-1].record.status}" if found else ""
    raise LabError(f"{cell_id}: no OK attempt that was not invalidated{last}")


def invalidate_command(project: Project, words: Sequence[str]) -> int:
    """The verb `invalidate`. Returns the exit code; raises LabError."""
    word, reason = _arguments(words)
    store = Store(project.runs)
    reconcile(store)
    attempt = find_attempt(project, word)
    folder = attempt.file.resolve().parent
    if folder.parent.parent != project.runs.resolve():
        raise LabError(f"{word}: not in {project.short(project.runs)}; bring it here first (python -m lab import FILE)")
    if any(mark.reason == reason for mark in attempt.marks):
        raise LabError(f"{word}: is invalidated already, for that very reason")
    with store.changing():
        store.mark(folder, [Mark(what="invalidated", reason=reason, at=utc_now(), by=_user())])
    record = attempt.record
    print(f"{record.cell_id}/{folder.name}: invalidated: {reason}")
    print(_what_stands(store, attempt))
    Tracker(project).restate(record.cell_id)
    return 0


def _arguments(words: Sequence[str]) -> tuple[str, str]:
    """(the attempt, the reason in one line). Raises LabError."""
    given, reasons, rest = [], [], iter(words)
    for word in rest:
        if word == "--reason":
            reasons.append(next(rest, ""))
        elif word.startswith("--reason="):
            reasons.append(word.removeprefix("--reason="))
        elif word.startswith("-"):
            raise LabError(f"{word}: unknown flag of `invalidate`; usage: {_INVALIDATE}")
        else:
            given.append(word)
    if len(given) != 1 or "/" not in given[0].rstrip("/"):
        raise LabError(f"name one attempt; usage: {_INVALIDATE}")
    reason = " ".join(" ".join(reasons).split())
    if len(reasons) != 1 or not reason:
        raise LabError(f"--reason TEXT is missing or given twice: why is {given[0]} not valid? Usage: {_INVALIDATE}")
    return given[0], reason


def _what_stands(store: Store, attempt: Stored) -> str:
    """What the cell shows from now on, in one line."""
    record = attempt.record
    same = [one for one in store.read(record.cell_id)[0] if one.record.cell_hash == record.cell_hash]
    for other, standing in standings([one.record for one in same], marks_of(same)):
        if standing.kind is Kind.CURRENT:
            return f"current now: attempt {other.attempt}, {other.status}"
    return f"no attempt of this cell counts now; to measure it again: {record.provenance.get('fill', 'python -m lab run ...')}"


def _user() -> str:
    """Who says so, as the system knows them."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid {os.getuid()}"  # a container may run under a number without a name
