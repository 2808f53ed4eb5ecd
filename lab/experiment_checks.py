"""What the types of an experiment file cannot say: names that must exist, cells that must be there exactly once, units that must agree.

Each finding is a place in the file and one sentence. No finding means that the file is consistent, not that its content is true.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from lab.marks import Loc
from lab.metrics import METRICS
from lab.registered import QUANTITIES, OrderCriterion, Overrides, ValueCriterion, matches, pick

if TYPE_CHECKING:
    from lab.experiment import Experiment

_NAME = re.compile(r"[A-Za-z0-9_]+(-[A-Za-z0-9_]+)*")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*([./][A-Za-z_][A-Za-z0-9_]*)*")
_CELL_KEYS = ("model", "path", "device", "bench", "layers", "engine", "mode", "disable")
_SHA256 = re.compile(r"[0-9a-f]{64}")
Finding = tuple[Loc, str]


def findings(experiment: Experiment, stem: str) -> Iterator[Finding]:
    """(place, message) for everything wrong; `stem` is the file's name."""
    if experiment.name != stem or not _NAME.fullmatch(stem):
        yield ("name",), f"must equal the file's name '{stem}', in letters, digits, _ and -"
    yield from _keys(experiment)
    for index, metric in enumerate(experiment.metrics):
        if metric not in METRICS:
            yield ("metrics", index), f"unknown metric '{metric}'; choose from: {', '.join(METRICS)}"
        if metric in experiment.metrics[:index]:
            yield ("metrics", index), f"'{metric}' is listed twice"
    points = experiment.points()
    for index, exempt in enumerate(experiment.not_owed):
        for position, metric in enumerate(exempt.metrics):
            if metric not in experiment.metrics:
                yield ("not_owed", index, "metrics", position), f"'{metric}' is not among this experiment's metrics"
        if not any(matches(point, exempt.where) for point in points):
            yield ("not_owed", index, "where"), "no expected cell matches"
    if experiment.baseline and not any(matches(point, experiment.baseline) for point in points):
        yield ("baseline",), "no expected cell matches"
    for model, digest in experiment.weights.items():
        if not _SHA256.fullmatch(digest):
            yield ("weights", model), "must be a sha256 in 64 lower-case hex digits"
    if not points:
        yield ("axes",), "the experiment expects no cell; give 'axes' or 'cells'"
    for repeated in (p for p, n in Counter(tuple(sorted(p.items())) for p in points).items() if n > 1):
        place = "cells" if experiment.cells else "axes"
        yield (place,), f"the cell {' '.join(f'{key}={value}' for key, value in repeated)} is expected twice"
    for section, count in Counter(section for chapter in experiment.chapters for section in chapter.sections).items():
        if count > 1:
            yield ("chapters",), f"section {section} is in {count} chapters; name each once"
    for index, target in enumerate(experiment.targets):
        yield from _metric(experiment, ("targets", index), target.metric, target.unit if target.of == "value" else None)
        if target.of == "roofline" and target.unit != "%":
            yield ("targets", index, "unit"), f"a share of the roofline is in %, not {target.unit}"
        if not any(matches(point, target.where) for point in points):
            yield ("targets", index, "where"), "no expected cell matches"
    for index, hypothesis in enumerate(experiment.hypotheses):
        criterion: Loc = ("hypotheses", index, "criterion")
        if isinstance(hypothesis.criterion, OrderCriterion):
            yield from _order(experiment, points, hypothesis.criterion, criterion)
        else:
            yield from _value(experiment, points, hypothesis.criterion, criterion)
    yield from _claims(experiment, points)
    yield from _closed_keys(experiment, points)
    for kind, entries in (("hypotheses", experiment.hypotheses), ("dead_ends", experiment.dead_ends), ("accounts", experiment.accounts)):
        yield from _repeated_ids(kind, [entry.id for entry in entries])


def _keys(experiment: Experiment) -> Iterator[Finding]:
    groups: list[tuple[Loc, Iterable[str]]] = [(("overrides",), experiment.overrides), (("axes",), experiment.axes)]
    groups += [(("cells", index), cell) for index, cell in enumerate(experiment.cells)]
    groups += [(("claims", index, "where"), claim.where) for index, claim in enumerate(experiment.claims)]
    groups += [(("dead_ends", index, "where"), dead_end.where) for index, dead_end in enumerate(experiment.dead_ends)]
    groups += [(("targets", index, "where"), target.where) for index, target in enumerate(experiment.targets)]
    for place, keys in groups:
        for key in keys:
            if not _KEY.fullmatch(key):
                yield (*place, key), f"'{key}' is not an override key"
    for key in sorted(experiment.axes.keys() & experiment.overrides.keys()):
        yield ("axes", key), f"'{key}' is also set in 'overrides'"


def _closed_keys(experiment: Experiment, points: list[dict[str, str]]) -> Iterator[Finding]:
    """A dead end that no command can ever walk into closes nothing: a key must be one that cells have, a path one that is expected here."""
    known = {*_CELL_KEYS, *(key for point in points for key in point)}
    for index, dead_end in enumerate(experiment.dead_ends):
        for key, value in dead_end.where.items():
            if key not in known and not key.startswith(("path.components.", "placement.", "model.", "bench.")):
                yield (
                    ("dead_ends", index, "where", key),
                    f"no cell has the key '{key}'; choose from: {', '.join(sorted(known))}, path.components.*",
                )
            elif key == "path" and value not in {point.get("path") for point in points}:
                yield ("dead_ends", index, "where", key), f"path {value} is not expected in this experiment"


def _metric(experiment: Experiment, place: Loc, metric: str, unit: str | None = None) -> Iterator[Finding]:
    if metric not in experiment.metrics:
        yield (*place, "metric"), f"'{metric}' is not among this experiment's metrics"
    elif unit is not None and unit != METRICS[metric].unit:
        yield (*place, "unit"), f"{metric} is measured in {METRICS[metric].unit}, not {unit}"


def _order(experiment: Experiment, points: list[dict[str, str]], rule: OrderCriterion, place: Loc) -> Iterator[Finding]:
    yield from _metric(experiment, place, rule.metric)
    for position, path in enumerate(rule.order):
        if path in rule.order[:position]:
            yield (*place, "order", position), f"path={path} layers={rule.layers} must be one expected cell, once in the order"
        yield from _one_cell(points, {"path": path, "layers": rule.layers}, (*place, "order", position))


def _value(experiment: Experiment, points: list[dict[str, str]], rule: ValueCriterion, place: Loc) -> Iterator[Finding]:
    # A ratio of two cells has no unit; a value has its metric's.
    yield from _metric(experiment, place, rule.metric, None if rule.base else rule.unit)
    if rule.base and rule.unit != "x":
        yield (*place, "unit"), f"a ratio of two cells is in x, not {rule.unit}"
    if rule.against_metric is not None:
        if rule.against is not None:
            yield (*place, "against_metric"), "is of the same cell; leave out 'against'"
        if rule.against_metric not in experiment.metrics:
            yield (*place, "against_metric"), f"'{rule.against_metric}' is not among this experiment's metrics"
        elif METRICS[rule.against_metric].unit != METRICS[rule.metric].unit:
            yield (*place, "against_metric"), f"is in {METRICS[rule.against_metric].unit}, {rule.metric} in {METRICS[rule.metric].unit}"
    for name, where in (("where", rule.where), ("against", rule.against)):
        if where is not None:
            yield from _one_cell(points, where, (*place, name))


def _one_cell(points: list[dict[str, str]], where: Overrides, place: Loc) -> Iterator[Finding]:
    if pick(points, where) is None:
        named = " ".join(f"{key}={value}" for key, value in where.items())
        yield place, f"{named} must be one expected cell, once in the order; {sum(matches(point, where) for point in points)} match"


def _claims(experiment: Experiment, points: list[dict[str, str]]) -> Iterator[Finding]:
    yield from _repeated_ids("claims", [claim.id for claim in experiment.claims])
    for index, claim in enumerate(experiment.claims):
        if claim.quantity not in QUANTITIES:
            yield ("claims", index, "quantity"), f"unknown quantity '{claim.quantity}'; choose from: {', '.join(QUANTITIES)}"
        elif claim.unit != QUANTITIES[claim.quantity].unit:
            yield ("claims", index, "unit"), f"{claim.quantity} is reported in {QUANTITIES[claim.quantity].unit}, not {claim.unit}"
        if claim.where and pick(points, claim.where) is None:
            yield ("claims", index, "where"), "names no single expected cell; leave it out where the figure is about none"


def _repeated_ids(kind: str, ids: list[str]) -> Iterator[Finding]:
    for index, name in enumerate(ids):
        if name in ids[:index]:
            yield (kind, index, "id"), f"'{name}' is used twice"
