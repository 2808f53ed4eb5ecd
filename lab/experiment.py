"""An experiment: the matrix that was decided on before the first run, read from `experiments/*.yaml` and checked.

It fixes which cells are expected, which metrics each owes, and which criteria judge the result, so that a report can say what is missing
and not only what went well. A mistake in the file is one line naming the file and the line. The file's sha256 is kept: a criterion that
changed after the first record can then be seen. A valid file does not prove that its cells can run; composing them (`lab.compose`) does.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError

from lab.errors import LabError
from lab.marks import Loc, MarkedYaml
from lab.metrics import METRICS

_NAME = re.compile(r"[A-Za-z0-9_]+(-[A-Za-z0-9_]+)*")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*([./][A-Za-z_][A-Za-z0-9_]*)*")
_VALUE = re.compile(r"[A-Za-z0-9_.:/+-]+")


def _plain(value: Any) -> Any:
    """A value that can stand in one override: no list, no blank, and no comma (it would be a sweep, so more than one cell)."""
    if not isinstance(value, str | int | float) or not _VALUE.fullmatch(_text(value)):
        raise ValueError(f"{value!r} is not a plain override value (letters, digits and _.:/+- only)")
    return value


def _text(value: str | int | float | bool) -> str:
    """The value as it is written on a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


Plain = Annotated[str | int | float | bool, PlainValidator(_plain)]
Overrides = dict[str, Plain]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Target(_Strict):
    """A value to reach. `where` picks the cells it applies to by their overrides; empty means all. `source` says who set it."""

    metric: str
    comparison: Literal[">=", "<=", ">", "<"]
    value: float
    unit: str
    source: str = Field(min_length=1)
    where: Overrides = Field(default_factory=dict)


class OrderCriterion(_Strict):
    """Holds when `metric` rises strictly along the paths of `order`, all at the same number of layers."""

    order: tuple[str, ...] = Field(min_length=2)
    metric: str
    layers: int = Field(ge=1)


class Hypothesis(_Strict):
    """A claim with the criterion that decides it, both fixed before the first run. `id` also names its chart."""

    id: str = Field(pattern=r"^[A-Za-z0-9_-]+$")
    statement: str = Field(min_length=1)
    criterion: OrderCriterion


class Question(_Strict):
    """What the experiment wants to learn, where no single criterion decides it."""

    id: str = Field(min_length=1)
    statement: str = Field(min_length=1)


class Experiment(_Strict):
    """A pre-registered matrix. Expected cells are the product of `axes`, then `cells`, each on top of the common `overrides`."""

    name: str
    title: str = Field(min_length=1)
    description: str = Field(min_length=1)
    overrides: Overrides = Field(default_factory=dict)
    axes: dict[str, Annotated[tuple[Plain, ...], Field(min_length=1)]] = Field(default_factory=dict)
    cells: tuple[Overrides, ...] = ()
    metrics: tuple[str, ...] = Field(min_length=1)
    targets: tuple[Target, ...] = ()
    questions: tuple[Question, ...] = ()
    hypotheses: tuple[Hypothesis, ...] = ()
    boundaries: tuple[str, ...] = ()
    source: str = Field(default="", exclude=True)
    sha256: str = Field(default="", exclude=True)

    def points(self) -> list[dict[str, str]]:
        """The overrides of each expected cell by key, as text, in report order."""
        crossed = [dict(zip(self.axes, values, strict=True)) for values in itertools.product(*self.axes.values())] if self.axes else []
        chosen = [{**self.overrides, **own} for own in (*crossed, *self.cells)]
        return [{key: _text(value) for key, value in point.items()} for point in chosen]

    def expected_cells(self) -> list[list[str]]:
        """The override list of each expected cell, such as `["model=nano", "path=expert_q2", "layers=3"]`."""
        return [[f"{key}={value}" for key, value in point.items()] for point in self.points()]


def load_experiment(name: str, directory: Path) -> Experiment:
    """The experiment `name` from `directory`. Raises LabError in one line, with file and line where the file is at fault."""
    known = sorted(p.stem for p in directory.glob("*.yaml"))
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
    for loc, message in _findings(experiment, name):
        raise text.error(loc, message)
    return experiment


def matches(point: Mapping[str, str], where: Mapping[str, str | int | float | bool]) -> bool:
    """True when the cell's overrides agree with every key of `where`."""
    return all(point.get(key) == _text(value) for key, value in where.items())


def _findings(experiment: Experiment, stem: str) -> Iterator[tuple[Loc, str]]:
    """What the types cannot say, as (place, message): names that must exist, and cells that must be there exactly once."""
    if experiment.name != stem or not _NAME.fullmatch(stem):
        yield ("name",), f"must equal the file's name '{stem}', in letters, digits, _ and -"
    yield from _key_findings(experiment)
    for index, metric in enumerate(experiment.metrics):
        if metric not in METRICS:
            yield ("metrics", index), f"unknown metric '{metric}'; choose from: {', '.join(METRICS)}"
        if metric in experiment.metrics[:index]:
            yield ("metrics", index), f"'{metric}' is listed twice"
    points = experiment.points()
    if not points:
        yield ("axes",), "the experiment expects no cell; give 'axes' or 'cells'"
    for repeated in (p for p, n in Counter(tuple(sorted(p.items())) for p in points).items() if n > 1):
        place = "cells" if experiment.cells else "axes"
        yield (place,), f"the cell {' '.join(f'{key}={value}' for key, value in repeated)} is expected twice"
    yield from _target_findings(experiment, points)
    yield from _hypothesis_findings(experiment, points)


def _key_findings(experiment: Experiment) -> Iterator[tuple[Loc, str]]:
    groups: list[tuple[Loc, Iterable[str]]] = [(("overrides",), experiment.overrides), (("axes",), experiment.axes)]
    groups += [(("cells", index), cell) for index, cell in enumerate(experiment.cells)]
    for place, keys in groups:
        for key in keys:
            if not _KEY.fullmatch(key):
                yield (*place, key), f"'{key}' is not an override key"
    for key in sorted(experiment.axes.keys() & experiment.overrides.keys()):
        yield ("axes", key), f"'{key}' is also set in 'overrides'"


def _target_findings(experiment: Experiment, points: list[dict[str, str]]) -> Iterator[tuple[Loc, str]]:
    for index, target in enumerate(experiment.targets):
        if target.metric not in experiment.metrics:
            yield ("targets", index, "metric"), f"'{target.metric}' is not among this experiment's metrics"
        elif target.unit != METRICS[target.metric].unit:
            yield ("targets", index, "unit"), f"{target.metric} is measured in {METRICS[target.metric].unit}, not {target.unit}"
        if not any(matches(point, target.where) for point in points):
            yield ("targets", index, "where"), "no expected cell matches"


def _hypothesis_findings(experiment: Experiment, points: list[dict[str, str]]) -> Iterator[tuple[Loc, str]]:
    for index, hypothesis in enumerate(experiment.hypotheses):
        rule, base = hypothesis.criterion, ("hypotheses", index, "criterion")
        if rule.metric not in experiment.metrics:
            yield (*base, "metric"), f"'{rule.metric}' is not among this experiment's metrics"
        for position, path in enumerate(rule.order):
            found = sum(matches(point, {"path": path, "layers": rule.layers}) for point in points)
            if found != 1 or path in rule.order[:position]:
                yield (*base, "order", position), f"path={path} layers={rule.layers} must be one expected cell, once in the order"
