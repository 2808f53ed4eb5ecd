"""The cells of an experiment that one command asks for: all of them, or those that match.

`run experiment=nano` is a sweep over the experiment's expected cells; `path=expert_q2 layers=3,6` beside it choose among them. A key the experiment
fixes cannot be given another value here: that would be a cell the experiment never registered.
"""

from __future__ import annotations

from collections.abc import Sequence

from lab.compose import Plan, plan
from lab.errors import LabError
from lab.experiment import load_experiment
from lab.project import Project

_KEY = "experiment"


def names_experiment(words: Sequence[str]) -> bool:
    """Whether the overrides contain `experiment=NAME`."""
    return any(word.split("=", 1)[0] == _KEY for word in words)


def plan_experiment(project: Project, words: Sequence[str]) -> Plan:
    """The experiment's cells that match every other `key=value[,value]`. Raises LabError for an unknown experiment, key or value."""
    given: dict[str, str] = {}
    for key, value in map(_pair, words):
        if key in given:
            raise LabError(f"{key} is given twice")
        given[key] = value
    experiment = load_experiment(given.pop(_KEY), project.root / "experiments")
    force = plan(project, [f"force={given.pop('force')}"]).force if "force" in given else False
    points = experiment.points()
    for key, wanted in given.items():
        known = list(dict.fromkeys(point[key] for point in points if key in point))
        if not known:
            raise LabError(f"{key}={wanted}: experiment {experiment.name} has no axis {key}; choose among {', '.join(sorted(points[0]))}")
        values = wanted.split(",")
        if unknown := [v for v in values if v not in known]:
            raise LabError(f"{key}={unknown[0]}: experiment {experiment.name} has no such cell; choose from: {', '.join(known)}")
        points = [point for point in points if point.get(key) in values]
    if not points:
        raise LabError(f"no cell of experiment {experiment.name} matches {' '.join(words)}")
    cells = [plan(project, [f"{k}={v}" for k, v in point.items()]).cells[0] for point in points]
    return Plan(tuple({cell.hash: cell for cell in cells}.values()), force)


def _pair(word: str) -> tuple[str, str]:
    key, sep, value = word.partition("=")
    if not sep or not value:
        raise LabError(f"{word!r} is not key=value; with experiment=NAME give keys of its axes, e.g. path=reference layers=3")
    return key, value
