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

from lab.convert import CONVERT_HELP
from lab.errors import LabError
from lab.project import Project, find_project, forget_stdout, say
from lab.usage import (
    COMPARE_HELP,
    DOCTOR_HELP,
    EXPORT_HELP,
    IMPORT_HELP,
    INVALIDATE_HELP,
    LS_HELP,
    MATRIX_HELP,
    PLAN_HELP,
    REPORT_HELP,
    RUN_HELP,
    SHOW_HELP,
    USAGE,
)

OK, WRONG, GAP, INTERRUPTED = 0, 2, 3, 130


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
        elif verb == "convert":
            say("interrupted: nothing was written; what was there before is unchanged")
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


def convert(project: Project, words: Sequence[str]) -> int:
    """The verb `convert`; see CONVERT_HELP. Raises LabError."""
    from lab.convert import convert_command

    return convert_command(words)


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
    "convert": (convert, CONVERT_HELP),
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
