"""The verbs `export` and `import`: records travel in a file, and MLflow is rebuilt from `runs/` alone.

A GPU host often cannot reach the tracking server, so its records are carried. A record is known by its content, not by its attempt number, which two
machines may both have given out: importing twice, in any order or from overlapping files gives the same set. A file is checked as a whole before
anything of it is written. Log files stay behind. An imported record is as trustworthy as the machine that it came from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lab.console import console
from lab.errors import LabError
from lab.experiment import load_experiment
from lab.mlflow_store import sqlite_file
from lab.parcels import Parcel, is_export, merge, read_parcels, to_text
from lab.project import Project, say
from lab.reconcile import reconcile
from lab.standing import age, record_id
from lab.store import Store, write_atomic
from lab.tracking import Tracker, one_line

OK, GAP = 0, 3
HANDFUL = 10
"""Up to so many records are done before anybody looks for a progress bar."""


def export_command(project: Project, words: Sequence[str]) -> int:
    """The verb `export`. Returns the exit code; raises LabError, OSError."""
    files = [word for word in words if not word.startswith(("experiment=", "-"))]
    names = [word.removeprefix("experiment=") for word in words if word.startswith("experiment=")]
    if len(files) != 1 or len(names) > 1 or len(files) + len(names) != len(words):
        raise LabError("name one file to write; usage: python -m lab export FILE [experiment=NAME]")
    target = Path(files[0])
    if target.exists() and not is_export(target):
        raise LabError(f"{target}: is there and is no export of the lab; choose another name")
    if not target.resolve().parent.is_dir():
        raise LabError(f"{target}: the folder {target.parent} is not there; make it first")
    hashes = _cells_of(project, names[0]) if names else None
    store = Store(project.runs)
    reconcile(store)
    found, bad = store.read()
    for file, why in bad:
        say(f"left out: {project.short(file)} is unreadable ({why})")
    wanted = [one for one in found if hashes is None or one.record.cell_hash in hashes]
    if not wanted:
        raise LabError(f"no record to export: {project.short(project.runs)} has {len(found)}" + (f", none of {names[0]}'s cells" if names else ""))
    write_atomic(target, to_text([Parcel(one.record, one.marks) for one in sorted(wanted, key=lambda one: age(one.record))]))
    print(f"{target}: {len(wanted)} records, {sum(len(one.marks) for one in wanted)} marks; logs stay here")
    return OK


def _cells_of(project: Project, name: str) -> set[str]:
    """The hashes of the experiment's cells."""
    from lab.compose import compose_cells  # Hydra is slow to import

    experiment = load_experiment(name, project.root / "experiments")
    return {compose_cells(words, project)[0].hash for words in experiment.expected_cells()}


def import_command(project: Project, words: Sequence[str]) -> int:
    """The verb `import`. Returns the exit code; raises LabError, before anything is written, and OSError."""
    if flags := [word for word in words if word.startswith("-")]:
        raise LabError(f"{flags[0]}: unknown flag of `import` (python -m lab import --help)")
    store = Store(project.runs)
    if words:
        _receive(store, words)
    else:
        reconcile(store)
    return _mirror(project, store)


def _receive(store: Store, words: Sequence[str]) -> None:
    """Take in the records of these files. All are checked before `runs/` is touched."""
    parcels = merge(parcel for word in words for parcel in read_parcels(Path(word)))
    reconcile(store)
    new, marked = take_in(store, parcels)
    print(f"{len(parcels)} records in {', '.join(words)}: {new} new, {len(parcels) - new} were here; marks changed on {marked}")


def take_in(store: Store, parcels: Sequence[Parcel]) -> tuple[int, int]:
    """Add what is not here yet, numbered by time of start, and every new mark: (records added, records here whose marks changed). Raises OSError."""
    new = marked = 0
    here: dict[str, dict[str, Path]] = {}
    free: dict[str, int] = {}
    with store.changing(), _progress("reading in", len(parcels)) as advance:
        for parcel in sorted(parcels, key=lambda parcel: (age(parcel.record), parcel.record_id)):
            cell = parcel.record.cell_id
            if cell not in here:
                here[cell] = {record_id(one.record): one.file.parent for one in store.read(cell)[0]}
                free[cell] = store.next_number(cell)
            folder = here[cell].get(parcel.record_id)
            if folder is None:
                added = store.add(parcel.record.model_copy(update={"attempt": free[cell]}), parcel.marks)
                here[cell][parcel.record_id] = added.file.parent
                free[cell] = added.record.attempt + 1
                new += 1
            else:
                marked += store.mark(folder, parcel.marks)
            advance()
    return new, marked


def _mirror(project: Project, store: Store) -> int:
    """Bring MLflow up to date with `runs/`; the exit code."""
    found, bad = store.read()
    for file, why in bad:
        say(f"unreadable, not mirrored: {project.short(file)}: {why}")
    tracker = Tracker(project)
    with _progress("mirroring", len(found)) as advance:
        answers = tracker.mirror_all(found, advance=advance)
    failed = sum(answer.error is not None for answer in answers)
    ended = 0
    if not failed and _has_store(tracker):
        try:
            ended = tracker.end_left_running()
        except Exception as error:
            # As for every record: whatever the store raises costs a line and the exit code, never a record.
            say(f"mlflow: runs left RUNNING were not looked for ({one_line(error)}); python -m lab import tries again")
            failed += 1
    if ended:
        say(f"{ended} runs were left RUNNING and no record explains them; they are KILLED now, and their tag `mirror` says so")
    mirrored = sum(answer.new for answer in answers if answer.error is None)
    print(f"{len(answers)} records: {mirrored} mirrored now, {sum(answer.error is not None for answer in answers)} not, the rest were there")
    return GAP if failed else OK


def _has_store(tracker: Tracker) -> bool:
    """Whether there is a store to look into: an empty project gets none made."""
    file = sqlite_file(tracker.uri)
    return file is None or file.exists()


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error while many records are done; what it yields is called once for each."""
    if total <= HANDFUL:
        yield lambda: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console(sys.stderr)) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)
