"""`run experiment=NAME`: all of an experiment's cells, or those that match, and nothing that it does not register."""

from __future__ import annotations

import pytest

from lab.compose import compose_cells
from lab.errors import LabError
from lab.project import find_project
from lab.selection import names_experiment, plan_experiment

PROJECT = find_project()


def test_all_cells_of_the_experiment() -> None:
    found = plan_experiment(PROJECT, ["experiment=nano"])
    assert len(found.cells) == 28 and not found.force
    assert {c.path.name for c in found.cells} >= {"reference", "expert_q2", "kestrel_vqf"}


def test_cells_that_match_are_the_same_cells_as_composed_by_hand() -> None:
    found = plan_experiment(PROJECT, ["experiment=nano", "path=expert_q2,reference", "layers=3", "force=true"])
    assert found.force and {(c.path.name, c.layers) for c in found.cells} == {("expert_q2", 3), ("reference", 3)}
    by_hand = compose_cells(["model=nano", "device=cpu", "bench=standard", "path=expert_q2", "layers=3"], PROJECT)[0]
    assert by_hand.hash in {c.hash for c in found.cells}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["experiment=nope"], "unknown experiment 'nope'; choose from: .*nano"),
        (["experiment=nano", "path=w4"], "path=w4: experiment nano has no such cell; choose from: reference"),
        (["experiment=nano", "bench=quick"], "bench=quick: experiment nano has no such cell; choose from: standard"),
        (["experiment=nano", "engine=local"], "has no axis engine; choose among"),
        (["experiment=nano", "path=reference", "path=expert_q2"], "path is given twice"),
        (["experiment=nano", "experiment=nano"], "experiment is given twice"),
        (["experiment=nano", "path"], "'path' is not key=value"),
    ],
)
def test_what_the_experiment_does_not_register_is_refused(words: list[str], message: str) -> None:
    assert names_experiment(words)
    with pytest.raises(LabError, match=message):
        plan_experiment(PROJECT, words)
