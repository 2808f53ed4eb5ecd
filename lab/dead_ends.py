"""Dead ends: ways that an experiment closed, looked up for a cell before any work is done for it.

A closed way costs days when it is walked again by somebody who did not know. Every registered experiment counts, not only the one that is being run. A
dead end says that its authors stopped there and why; it does not prove that the way is impossible, so it names what reopens it and can be forced.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lab.cell import Cell
from lab.devices import accelerators, is_expected
from lab.experiment import Experiment, experiment_names, load_experiment
from lab.overrides import GROUPS
from lab.project import Project
from lab.registered import DeadEnd, as_text, in_language


@dataclass(frozen=True)
class Closed:
    """A dead end and the experiment that registered it."""

    experiment: Experiment
    dead_end: DeadEnd

    def reason(self) -> str:
        """For the record, in one line: what was closed, on what evidence, and what reopens it."""
        d = self.dead_end
        return (
            f"dead end {d.id} of {self.experiment.source}, closed since {d.since}: {_en(d.what)}. Evidence: {_en(d.evidence)}"
            f" Source: {_en(d.source)}. Reopens: {_en(d.reopen)}"
        )

    def lines(self) -> list[str]:
        """For the screen."""
        d = self.dead_end
        return [
            f"DEAD END {d.id}, registered in {self.experiment.source}, since {d.since}: {_en(d.what)}",
            f"  evidence: {_en(d.evidence)} ({_en(d.source)})",
            f"  reopens:  {_en(d.reopen)}",
            "  force=true measures it all the same, and the record says so",
        ]


def closed_way(project: Project, cell: Cell) -> Closed | None:
    """The first registered dead end that the cell walks into. Raises LabError where an experiment file is wrong: it may hold one."""
    for closed in _registered(project.root / "experiments", tuple(registered_files(project).items())):
        if closed.dead_end.where and is_within(cell, closed.dead_end.where, project):
            return closed
    return None


def registered_files(project: Project) -> dict[str, str]:
    """{experiment: sha256 of its file} as they are now. Kept in every record: targets or criteria that changed after it can then be seen."""
    directory = project.root / "experiments"
    return {name: hashlib.sha256((directory / f"{name}.yaml").read_bytes()).hexdigest() for name in experiment_names(directory)}


@cache
def _registered(directory: Path, _contents: tuple[tuple[str, str], ...]) -> tuple[Closed, ...]:
    """Every dead end, read once for the same file contents: a sweep asks for each of its cells."""
    experiments = [load_experiment(name, directory) for name in experiment_names(directory)]
    return tuple(Closed(experiment, dead_end) for experiment in experiments for dead_end in experiment.dead_ends)


def is_within(cell: Cell, where: Mapping[str, str | int | float | bool], project: Project | None = None) -> bool:
    """Whether the cell has every value that `where` names, by override key: a choice by its name, any other key by its dotted place.

    With `project`, a device is also recognised where the cell calls it by another name: `device=cuda` on the very card that `where` means.
    """
    data = cell.model_dump(mode="json")
    return all(
        _value(data, key) == as_text(value) or (key == "device" and project is not None and _is_that_device(project, cell, as_text(value)))
        for key, value in where.items()
    )


def _is_that_device(project: Project, cell: Cell, name: str) -> bool:
    """Whether the cell's device is any accelerator of this machine, and one of them is the card that conf/device/`name`.yaml expects."""
    file = project.conf / GROUPS["device"] / f"{name}.yaml"
    if cell.device.torch_device == "cpu" or cell.device.expect is not None or not file.is_file():
        return False
    expect = yaml.safe_load(file.read_text(encoding="utf-8")).get("expect")
    return expect is not None and is_expected(expect, accelerators())


def _value(data: dict[str, Any], key: str) -> str | None:
    if key in GROUPS:
        return str(data[key]["name"])
    found: Any = data
    for part in key.split("."):
        if not isinstance(found, dict) or part not in found:
            return None
        found = found[part]
    return None if isinstance(found, dict | list) or found is None else as_text(found)


def _en(text: str | Mapping[str, str]) -> str:
    return in_language(text, "en").strip()
