"""The command line: one function per verb, each with its own help, all with the same exit codes.

Our own small dispatcher, because Hydra has no sub-commands and argparse would fight over `key=value`. A wrong command or configuration
is one line and exit 2; a bug keeps its traceback. With `--json`, standard output carries the JSON document and nothing else, whatever
libraries print.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

import yaml

from lab.errors import LabError
from lab.project import Project, find_project, forget_stdout, say

OK, WRONG, GAP, INTERRUPTED = 0, 2, 3, 130

USAGE = """python -m lab VERB [key=value ...]

  run      measure one cell, or with -m a sweep of cells
  ls       what can be chosen: models, paths, devices, benches, codecs, experiments
  show     the composed cell, its id and hash, and the command that measures it
  doctor   versions, device, disk, MLflow store, attempts left by killed processes
  plan     bytes per component and device before anything loads: fits or not, roofline, and what would make it fit
  matrix   measured, gap and not run, for an experiment
  report   write the stage report of an experiment, in English or Chinese
  compare  two cells: faster or slower only where the samples support it
  invalidate  mark a measured attempt as not valid, with the reason; nothing is deleted
  export   write records to one file, to carry them to another machine
  import   take records from such files, and bring MLflow up to date with runs/

python -m lab VERB --help says more. Exit codes: 0 OK, 2 wrong command or configuration, 3 recorded gap, 130 interrupted."""

RUN_HELP = """python -m lab run [-m] [--json] [key=value ...]

Measures one cell in a child process and stores a record under runs/ (LAB_RUNS), mirrored into MLflow (MLFLOW_TRACKING_URI).
Choices: model= path= device= (auto: cuda if there is one, else cpu) bench=; layers=N keeps the first N layers; any value by its dotted
key, as printed by `show`, e.g. path.components.experts.codec=q2_levels or bench.repeats=9.

  -m, --multirun  sweep over commas, range() and glob(), e.g. path=reference,expert_q2 layers=3,6. All cells are checked before the first
                  runs. A cell whose newest result is OK with the same resume key (configuration, code, artifact, protocols, versions,
                  machine) is skipped, unless another attempt may fill a gap of it, or force=true. Without -m a cell is always measured.
  experiment=NAME a sweep over the cells that experiments/NAME.yaml expects; path=..., layers=... beside it choose among them
  --json          print the record (for a sweep: the list of records) as one JSON document on standard output, everything else on standard error

Exit: 0 every cell OK (single metrics may be gaps), 3 a cell without any number, 2 wrong command or configuration (nothing was run), 130 interrupted."""

SHOW_HELP = """python -m lab show [key=value ...]

Prints the cell that `run` would measure as YAML, then its id, hash and the command that leads to it. Measures nothing. Exit: 0, 2."""

LS_HELP = """python -m lab ls [models|paths|devices|benches|codecs|experiments]

Prints what can be chosen, with a word on paths that cannot run yet. Exit: 0, 2."""

DOCTOR_HELP = """python -m lab doctor

Looks at versions, GPUs (driver, memory in use by others, clocks and what holds them down), host memory, swap, load, cores, CPU clocks, pinned memory,
disk, temporary folder, /dev/shm, environment variables, MLflow store and records, and prints what it found, with the fix where something is in the
way (WARN, BAD; ? is not known). Every run makes the same checks and keeps them in its record. Also closes attempts left by killed processes.
Exit: 0 ready to measure (warnings included), 1 something needed is missing or full."""

PLAN_HELP = """python -m lab plan [-m] [--json] [--memory=GIB,...] [key=value ...]

The capacity ledger of a cell, from the model's sizes and the codecs' byte counts alone: bytes per component and place, fits / does not fit / by how
much, the roofline of TG and PP, and what would make it fit. Loads nothing and needs no model files where model.geometry names the sizes.

  -m, --multirun   one line per cell of a sweep, as for `run`; experiment=NAME takes the cells of an experiment
  --memory=32,104  judge against these device memories, in GiB, instead of what is free on this machine or stands in the device's file
  --json           one JSON document on standard output

Exit: 0 everything fits, 3 something does not or is not known, 2."""

COMPARE_HELP = """python -m lab compare A B [--json]

A and B are attempts: CELL_ID (its newest OK attempt), CELL_ID/ATTEMPT or a record file. Says that A is faster or slower than B only where a rank test
over the samples (p < 0.01) and the interval of the ratio (95 %) support it, and better or worse where standard errors do. Another device, machine or
bench refuses the comparison, another protocol, cache state or text the metric.

  --json          print the comparison as one JSON document

Exit: 0, 2."""

INVALIDATE_HELP = """python -m lab invalidate CELL_ID/ATTEMPT --reason TEXT

Marks one attempt as not valid: it stays on disk, in MLflow (tag) and in reports, marked, and no number of it is shown as current any more. The mark
is kept beside the record with the time and the user's name, and travels with it. Exit: 0, 2."""

EXPORT_HELP = """python -m lab export FILE [experiment=NAME]

Writes every record (or those of an experiment's cells), with their marks, to one file of JSON lines for `import` on another machine. Log files do not
travel. An earlier export of that name is replaced, any other file is not. Exit: 0, 2."""

IMPORT_HELP = """python -m lab import [FILE ...]

Takes the records of exported files into runs/, as attempts numbered by time of start; what is there already is left alone, so that it can be repeated
and done in any order. A file with any fault is refused as a whole. With or without a file, it closes attempts left by killed processes, moves back
records that had to be kept in the temporary folder, mirrors into MLflow every record that is not there yet, brings the standing of each run up to date,
and ends runs left RUNNING. MLflow can be rebuilt from runs/ alone.
Exit: 0, 3 if the store did not take everything, 2."""

MATRIX_HELP = """python -m lab matrix experiment=NAME [--json]

Sets an experiment's expected cells against the records: measured, gap or not run. Measures nothing. Exit: 0, 2."""

REPORT_HELP = """python -m lab report experiment=NAME [lang=en|zh]

Writes the experiment's stage report into reports/, as Markdown and as one self-contained HTML file, and prints the names of the files. Measures nothing.
An existing report that shows measured values is not replaced by one that would show none. Exit: 0, 2."""


def main(argv: Sequence[str]) -> int:
    """Run one command and return its exit code. Only bugs leave as exceptions."""
    verb, words = (argv[0], list(argv[1:])) if argv else ("", [])
    if verb in ("-h", "--help", "help") or not argv:
        print(USAGE)
        return OK if argv else WRONG
    if verb not in VERBS:
        say(f"{verb!r} is no verb; choose one of: {', '.join(VERBS)} (python -m lab --help)")
        return WRONG
    action, help_text = VERBS[verb]
    if "-h" in words or "--help" in words:
        print(help_text)
        return OK
    try:
        return action(find_project(), words)
    except LabError as error:
        say(f"error: {error}")
        return WRONG
    except KeyboardInterrupt:
        if verb == "run":
            say("interrupted before a measurement began; nothing was recorded")
        else:
            say(f"interrupted: what {verb} had written by then is kept; run it again for the rest, and `python -m lab import` brings MLflow up to date")
        return INTERRUPTED
    except BrokenPipeError:
        forget_stdout()
        return OK
    except OSError as error:
        # Files around the lab, not the lab: a read-only checkout, a folder that may not be searched. Attempts keep their own errors as records.
        where = f"{error.filename}: " if error.filename is not None else ""
        say(f"error: {where}{' '.join(str(error.strerror or error).split())}")
        return WRONG


def run(project: Project, words: Sequence[str]) -> int:
    """The verb `run`; see RUN_HELP. Raises LabError."""
    from lab.sweep import run_cells

    multirun = any(word in ("-m", "--multirun") for word in words)
    as_json = "--json" in words
    overrides = _overrides(words, "run", allowed=("-m", "--multirun", "--json"))
    with _pure_stdout(as_json) as out:
        return run_cells(project, overrides, multirun, out if as_json else None)


def show(project: Project, words: Sequence[str]) -> int:
    """The verb `show`; see SHOW_HELP. Raises LabError."""
    from lab.compose import plan
    from lab.fill import fill_command

    cell = plan(project, _overrides(words, "show")).cells[0]
    print(yaml.safe_dump(cell.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=140).rstrip())
    print(f"---\nid: {cell.id}\nhash: {cell.hash}\nrun: {fill_command(project, cell)}")
    if cell.path.unsupported:
        print(f"unsupported: {cell.path.unsupported.strip()}")
    return OK


def ls(project: Project, words: Sequence[str]) -> int:
    """The verb `ls`; see LS_HELP. Raises LabError."""
    from lab.listing import print_choices

    print_choices(project, _overrides(words, "ls"))
    return OK


def doctor(project: Project, words: Sequence[str]) -> int:
    """The verb `doctor`; see DOCTOR_HELP. Raises LabError."""
    from lab.doctor import examine

    _none(words, "doctor")
    return OK if examine(project) else 1


def plan_cell(project: Project, words: Sequence[str]) -> int:
    """The verb `plan`; see PLAN_HELP. Raises LabError."""
    from lab.plan_view import plan_command

    with _pure_stdout("--json" in words) as out:
        return plan_command(project, words, out)


def compare(project: Project, words: Sequence[str]) -> int:
    """The verb `compare`; see COMPARE_HELP. Raises LabError."""
    from lab.compare import compare_command

    with _pure_stdout("--json" in words) as out:
        return compare_command(project, words, out)


def invalidate(project: Project, words: Sequence[str]) -> int:
    """The verb `invalidate`; see INVALIDATE_HELP. Raises LabError."""
    from lab.history import invalidate_command

    return invalidate_command(project, words)


def export(project: Project, words: Sequence[str]) -> int:
    """The verb `export`; see EXPORT_HELP. Raises LabError."""
    from lab.exchange import export_command

    return export_command(project, words)


def import_records(project: Project, words: Sequence[str]) -> int:
    """The verb `import`; see IMPORT_HELP. Raises LabError."""
    from lab.exchange import import_command

    return import_command(project, words)


def matrix(project: Project, words: Sequence[str]) -> int:
    """The verb `matrix`; see MATRIX_HELP. Raises LabError."""
    from lab.reconcile import reconcile
    from lab.report.cli import matrix_command
    from lab.store import Store

    reconcile(Store(project.runs))
    with _pure_stdout("--json" in words) as out:
        return matrix_command(project, words, out)


def report(project: Project, words: Sequence[str]) -> int:
    """The verb `report`; see REPORT_HELP. Raises LabError."""
    from lab.reconcile import reconcile
    from lab.report.cli import report_command
    from lab.store import Store

    reconcile(Store(project.runs))
    return report_command(project, words)


Action = Callable[[Project, Sequence[str]], int]
VERBS: dict[str, tuple[Action, str]] = {
    "run": (run, RUN_HELP),
    "ls": (ls, LS_HELP),
    "show": (show, SHOW_HELP),
    "doctor": (doctor, DOCTOR_HELP),
    "plan": (plan_cell, PLAN_HELP),
    "matrix": (matrix, MATRIX_HELP),
    "report": (report, REPORT_HELP),
    "compare": (compare, COMPARE_HELP),
    "invalidate": (invalidate, INVALIDATE_HELP),
    "export": (export, EXPORT_HELP),
    "import": (import_records, IMPORT_HELP),
}


def _overrides(words: Sequence[str], verb: str, allowed: Sequence[str] = ()) -> list[str]:
    """The words that are no flags. Raises LabError for an unknown flag."""
    flags = [w for w in words if w.startswith("-") and w not in allowed]
    if flags:
        raise LabError(f"{flags[0]}: unknown flag of `{verb}` (python -m lab {verb} --help)")
    return [w for w in words if w not in allowed]


def _none(words: Sequence[str], verb: str) -> None:
    if words:
        raise LabError(f"{words[0]!r}: `{verb}` takes nothing more (python -m lab {verb} --help)")


@contextmanager
def _pure_stdout(only_json: bool) -> Iterator[TextIO]:
    """Standard output for one JSON document: inside, whatever else is printed, also by C code and children, goes to standard error."""
    if not only_json:
        yield sys.stdout
        return
    sys.stdout.flush()
    real = os.dup(1)
    os.dup2(2, 1)
    try:
        with open(real, "w", encoding="utf-8", closefd=False) as out:
            yield out
    finally:
        sys.stdout.flush()
        os.dup2(real, 1)
        os.close(real)
