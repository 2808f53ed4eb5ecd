"""An experiment: the matrix that was decided on before the first run, read from `experiments/*.yaml` and checked.

It fixes which cells are expected, which metrics each owes, and which criteria judge the result, so that a report can say what is missing
and not only what went well. A mistake in the file is one line naming the file and the line. The file's sha256 is kept in every record of its cells: a
criterion that changed after the first record can then be seen. A valid file does not prove that its cells can run; composing them does.
"""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from lab.errors import LabError
from lab.experiment_checks import findings
from lab.marks import MarkedYaml
from lab.registered import Account, Chapter, Claim, DeadEnd, Hypothesis, ModelFact, NotOwed, Overrides, Plain, Question, Target, Text, _Strict, as_text


class Experiment(_Strict):
    """A pre-registered matrix. Expected cells are the product of `axes`, then `cells`, each on top of the common `overrides`.

    `weights` pins the sha256 of a model's files: records of other weights under the same name are then no longer current. `baseline` picks the cells that
    speeds are set against, where it is not the reference path: of each model, depth, device and bench the one cell that matches.
    """

    name: str
    title: Text
    description: Text
    overrides: Overrides = Field(default_factory=dict)
    axes: dict[str, Annotated[tuple[Plain, ...], Field(min_length=1)]] = Field(default_factory=dict)
    cells: tuple[Overrides, ...] = ()
    metrics: tuple[str, ...] = Field(min_length=1)
    not_owed: tuple[NotOwed, ...] = ()
    weights: dict[str, str] = Field(default_factory=dict)
    baseline: Overrides = Field(default_factory=dict)
    targets: tuple[Target, ...] = ()
    questions: tuple[Question, ...] = ()
    hypotheses: tuple[Hypothesis, ...] = ()
    claims: tuple[Claim, ...] = ()
    dead_ends: tuple[DeadEnd, ...] = ()
    facts: tuple[ModelFact, ...] = ()
    accounts: tuple[Account, ...] = ()
    boundaries: tuple[Text, ...] = ()
    chapters: tuple[Chapter, ...] = ()
    source: str = Field(default="", exclude=True)
    sha256: str = Field(default="", exclude=True)

    def points(self) -> list[dict[str, str]]:
        """The overrides of each expected cell by key, as text, in report order."""
        crossed = [dict(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values())] if self.axes else []
        chosen = [{**self.overrides, **own} for own in (*crossed, *self.cells)]
        return [{key: as_text(value) for key, value in point.items()} for point in chosen]

    def expected_cells(self) -> list[list[str]]:
        """The override list of each expected cell, such as `["model=nano", "path=expert_q2", "layers=3"]`."""
        return [[f"{key}={value}" for key, value in point.items()] for point in self.points()]


def experiment_names(directory: Path) -> list[str]:
    """The registered experiments, sorted."""
    return sorted(p.stem for p in directory.glob("*.yaml"))


def load_experiment(name: str, directory: Path) -> Experiment:
    """The experiment `name` from `directory`. Raises LabError in one line, with file and line where the file is at fault."""
    known = experiment_names(directory)
    if name not in known:
        raise LabError(f"unknown experiment '{name}'; choose from: {', '.join(known) or f'none in {directory.name}/'}")
    text = MarkedYaml(directory / f"{name}.yaml")
    for reserved in sorted(text.data.keys() & {"source", "sha256"}):
        raise text.error((reserved,), "unknown key")
    try:
        experiment = Experiment.model_validate({**text.data, "source": text.source, "sha256": hashlib.sha256(text.raw).hexdigest()})
    except ValidationError as err:
        first = err.errors()[0]
        message = "unknown key" if first["type"] == "extra_forbidden" else first["msg"].removeprefix("Value error, ")
        raise text.error(first["loc"], message) from err
    for loc, message in findings(experiment, name):
        raise text.error(loc, message)
    return experiment
