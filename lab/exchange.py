"""The verbs `export` and `import`: records travel in a file, and MLflow is rebuilt from `runs/` alone.

A GPU host often cannot reach the tracking server, so its records are carried. A record is known by its content, not by its attempt number, which two
machines may both have given out: importing twice, in any order or from overlapping files gives the same set. A file is checked as a whole before
anything of it is written. Log files stay behind. A record here that cannot be read is never passed over in silence: exit code 3. An imported record is as
trustworthy as the machine that it came from.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lab.console import console
from lab.errors import LabError
from lab.experiment import load_experiment
from lab.mlflow_store import sqlite_file
from lab.parcels import Parcel, is_export, merge, read_parcels, to_file
from lab.project import Project, say
from lab.reconcile import reconcile
from lab.standing import age
from lab.store import MARKS, Store, load_marks, load_record, write_atomic
from lab.tracking import Tracker, one_line

OK, GAP = 0, 3
HANDFUL = 10
"""Up to so many records are done before anybody looks for a progress bar."""


def export_command(project: Project, words: Sequence[str]) -> int:
    """The verb `export`. Returns the exit code, 3 where a record that belongs in the file could not be read; raises LabError, OSError."""
    files = [word for word in words if not word.startswith(("experiment=", "-"))]
    names = [word.removeprefix("experiment=") for word in words if word.startswith("experiment=")]
    if len(files) != 1 or len(names) > 1 or len(files) + len(names) != len(words):
        raise LabError("name one file to write; usage: python -m lab export FILE [experiment=NAME]")
    target = Path(files[0])
    if target.exists() and not is_export(target):
        raise LabError(f"{target}: is there and is no export of the lab; choose another name")
    if not target.resolve().parent.is_dir():
        raise LabError(f"{target}: the folder {target.parent} is not there; make it first")
    cells = _cells_of(project, names[0]) if names else None
    store = Store(project.runs)
    reconcile(store)
    found, bad = store.read()
    # Of an unreadable record only its folder tells the cell.
    lost = [(file, why) for file, why in bad if cells is None or file.parent.parent.name in cells.values()]
    for file, why in lost:
        say(f"left out: {project.short(file)} is unreadable ({why})")
    wanted = [one for one in found if cells is None or one.record.cell_hash in cells]
    if not wanted:
        raise LabError(f"no record to export: {project.short(project.runs)} has {len(found)}" + (f", none of {names[0]}'s cells" if names else ""))
    write_atomic(target, to_file([Parcel(one.record, one.marks) for one in sorted(wanted, key=lambda one: age(one.record))], target))
    missing = f"{len(lost)} that cannot be read are NOT in it; " if lost else ""
    print(f"{target}: {len(wanted)} records, {sum(len(one.marks) for one in wanted)} marks; {missing}logs stay here")
    return GAP if lost else OK


def _cells_of(project: Project, name: str) -> dict[str, str]:
    """The ids of the experiment's cells, by their hashes."""
    from lab.compose import compose_cells  # Hydra is slow to import

    experiment = load_experiment(name, project.root / "experiments")
    cells = [compose_cells(words, project)[0] for words in experiment.expected_cells()]
    return {cell.hash: cell.id for cell in cells}


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
    """Add what is not here yet, numbered by time of start, and every new mark: (records added, records here whose marks changed).

    Raises OSError, and LabError before anything is written where what was said about a record here cannot be read.
    """
    new = marked = 0
    cells = {parcel.record.cell_id for parcel in parcels}
    with store.changing(), _progress("reading in", len(parcels)) as advance:
        here = {cell: store.folders(cell) for cell in cells}
        free = {cell: store.next_number(cell) for cell in cells}
        _refuse_revival(store, parcels, here)
        for parcel in sorted(parcels, key=lambda parcel: (age(parcel.record), parcel.record_id)):
            cell = parcel.record.cell_id
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


def _refuse_revival(store: Store, parcels: Sequence[Parcel], here: Mapping[str, Mapping[str, Path]]) -> None:
    """Raise LabError where a number that somebody invalidated could become current again, because what was said about it can no longer be read."""
    unmarked = set()
    for parcel in parcels:
        folder = here[parcel.record.cell_id].get(parcel.record_id)
        if folder is not None:
            try:
                load_marks(folder)
            except (OSError, ValueError) as error:
                fix = "repair it, or delete it if nobody invalidated the attempt"
                raise LabError(f"{_address(folder)}: holds a record of the import, but its marks cannot be read ({error}); {fix}") from error
        elif not parcel.marks:
            unmarked.add(parcel.record.cell_id)
    for cell in sorted(unmarked):
        readable = set(here[cell].values())
        for file in store.record_files(cell):
            if file.parent not in readable and (file.parent / MARKS).exists():
                try:
                    load_record(file)
                except (OSError, ValueError) as error:
                    fix = "repair it, or move the folder out of runs"
                    raise LabError(f"{_address(file.parent)}: is marked, but which record it holds cannot be read ({error}); {fix}") from error


def _address(folder: Path) -> str:
    """An attempt's folder, from the project's root."""
    return "/".join(folder.parts[-3:])


def _mirror(project: Project, store: Store) -> int:
    """Bring MLflow up to date with `runs/`; the exit code, 3 where a record is not mirrored."""
    found, bad = store.read()
    for file, why in bad:
        say(f"unreadable, not mirrored: {project.short(file)}: {why}")
    tracker = Tracker(project)
    with _progress("mirroring", len(found)) as advance:
        answers = tracker.mirror_all(found, advance=advance)
    failed = sum(answer.error is not None for answer in answers)
    ended = 0
    if bad:
        say("mlflow: runs left RUNNING are left alone as long as a record that may explain them cannot be read")
    elif not failed and _has_store(tracker):
        try:
            ended = tracker.end_left_running()
        except Exception as error:
            # As for every record: whatever the store raises costs a line and the exit code, never a record.
            say(f"mlflow: runs left RUNNING were not looked for ({one_line(error)}); python -m lab import tries again")
            failed += 1
    if ended:
        say(f"{ended} runs were left RUNNING and no record explains them; they are KILLED now, and their tag `mirror` says so")
    mirrored = sum(answer.new for answer in answers if answer.error is None)
    lost = f"; {len(bad)} more cannot be read" if bad else ""
    print(f"{len(answers)} records: {mirrored} mirrored now, {sum(answer.error is not None for answer in answers)} not, the rest were there{lost}")
    return GAP if failed or bad else OK


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
