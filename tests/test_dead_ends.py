"""A registered dead end stops a cell before any work, whichever command asks for it, and can be forced."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lab.compose import compose_cells
from lab.dead_ends import closed_way, is_within, registered_files
from lab.errors import LabError
from lab.project import Project
from lab.record import Record, Status
from tests.runner_helpers import ROOT, lab, make_project

STAGE = """\
name: stage
title: A stage with a closed way
description: For tests.
overrides: {model: nano, device: cpu, bench: quick}
axes: {path: [reference, cpu_cold, ple_q2], layers: [3, 6]}
metrics: [ppl]
dead_ends:
  - id: cold
    what: {en: Cold experts on the CPU, zh: 冷专家在 CPU}
    evidence: slower by 2.4 times at 3 layers
    since: "2026-11"
    reopen: a faster CPU kernel
    source: a post
    where: {model: nano, path: cpu_cold}
  - {id: told, what: no cell, evidence: e, since: "2026", reopen: r, source: s}
  - {id: deep, what: the table at depth, evidence: e, since: "2026", reopen: r, source: s, where: {path: ple_q2, layers: 6}}
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = make_project(tmp_path / "p")
    (made.root / "experiments" / "stage.yaml").write_text(STAGE, encoding="utf-8")
    return made


def record_of(project: Project) -> Record:
    (file,) = project.runs.glob("*/*/record.json")
    return Record.model_validate_json(file.read_text())


def test_the_way_is_found_for_every_command_that_leads_into_it(project: Project) -> None:
    def cell(*words: str) -> str | None:
        found = closed_way(project, compose_cells([*words, "device=cpu"], project)[0])
        return found.dead_end.id if found else None

    assert cell("path=cpu_cold", "layers=3") == cell("path=cpu_cold", "layers=12", "bench=thorough") == "cold"
    assert cell("path=ple_q2", "layers=6") == "deep"
    assert cell("path=ple_q2", "layers=3") is cell("path=reference", "layers=6") is None


def test_a_dotted_key_and_a_missing_one(project: Project) -> None:
    cell = compose_cells(["path=expert_q2", "device=cpu"], project)[0]
    assert is_within(cell, {"path.components.experts.codec": "q2_g32", "layers": 12})
    assert not is_within(cell, {"path.components.nothing.codec": "q2_g32"})
    assert not is_within(cell, {"placement.slots": 4})


@pytest.mark.parametrize("words", [("experiment=stage", "path=cpu_cold", "layers=3"), ("path=cpu_cold", "layers=3", "device=cpu")])
def test_a_dead_end_stops_before_any_work(project: Project, words: tuple[str, ...]) -> None:
    (project.root / "experiments" / "nano" / "config.json").unlink()  # a closed way needs no files
    code, out, err = lab(project, "run", *words)
    assert code == 3
    assert "Cold experts on the CPU" in err and "slower by 2.4 times" in err and "reopens:  a faster CPU kernel" in err and "force=true" in err
    record = record_of(project)
    assert record.status is Status.DEAD_END and not record.metrics
    assert "cold of experiments/stage.yaml" in record.reason and "a faster CPU kernel" in record.reason
    assert record.gaps["ppl"].fill.endswith(" force=true")
    assert {g.gate: g.outcome for g in record.gates}["dead_end"] == "stopped"
    assert not (project.runs / record.cell_id / "001" / "log.txt").exists()
    assert record.provenance["experiments"] == registered_files(project)
    assert "DEAD_END" in out


def test_force_goes_on_and_marks_the_record(project: Project) -> None:
    code, out, err = lab(project, "run", "path=ple_q2", "layers=6", "device=cpu", "bench=quick", "force=true", "--json")
    assert (code, err.count("DEAD END")) == (0, 0)
    record = Record.model_validate(json.loads(out))
    assert record.status is Status.OK
    assert {g.gate: g.outcome for g in record.gates}["dead_end"] == "forced"
    assert any("forced past the gate dead_end: dead end deep of experiments/stage.yaml" in note for note in record.notes)


def test_forcing_a_way_that_cannot_run_ends_at_the_next_gate(project: Project) -> None:
    code, _, _ = lab(project, "run", "path=cpu_cold", "layers=3", "device=cpu", "force=true")
    record = record_of(project)
    assert (code, record.status) == (3, Status.UNSUPPORTED)
    assert {g.gate: g.outcome for g in record.gates}["dead_end"] == "forced"


def test_a_broken_registry_is_an_error_and_not_an_open_road(project: Project) -> None:
    (project.root / "experiments" / "stage.yaml").write_text(STAGE.replace("since:", "sinse:"), encoding="utf-8")
    code, _, err = lab(project, "run", "path=reference", "layers=3", "device=cpu")
    assert code == 2 and "experiments/stage.yaml:" in err and "dead_ends.0.since: Field required" in err
    assert not project.runs.exists()


def test_every_dead_end_of_the_shipped_stage_closes_its_cells() -> None:
    project = Project(root=ROOT, runs=ROOT / "runs")
    cells = compose_cells(["model=flash_next", "device=r9700", "path=cpu_cold,ple_q2,paiton_native", "layers=3,48"], project)
    assert [bool(closed_way(project, cell)) for cell in cells] == [True, True, True, True, False, False]


def test_an_id_used_twice_is_refused(project: Project) -> None:
    shutil.copy(project.root / "experiments" / "stage.yaml", project.root / "experiments" / "other.yaml")
    (project.root / "experiments" / "other.yaml").write_text(STAGE.replace("name: stage", "name: other").replace("id: deep", "id: cold"), encoding="utf-8")
    with pytest.raises(LabError, match=r"other\.yaml:\d+: dead_ends\.2\.id: 'cold' is used twice"):
        closed_way(project, compose_cells(["device=cpu"], project)[0])


@pytest.mark.parametrize(
    ("words", "closed"),
    [
        ("path=cpu_cold device=r9700", True),
        ("path=cpu_cold device=cuda", True),  # the same card under its generic name
        ("path=tiered device=r9700 path.components.experts.placement=cpu_cold", True),
        ("path=expert_q2 device=r9700 path.components.ple.codec=q2_rows", True),
        ("path=cpu_cold device=h200", False),
        ("path=cpu_cold device=cpu", False),
        ("path=strata_server device=r9700", False),  # another engine
    ],
)
def test_another_name_for_the_same_thing_does_not_open_the_way(monkeypatch: pytest.MonkeyPatch, words: str, closed: bool) -> None:
    monkeypatch.setattr("lab.dead_ends.accelerators", lambda: ("AMD gfx 120001",))
    project = Project(root=ROOT, runs=ROOT / "runs")
    (cell,) = compose_cells(["model=flash_next", "layers=48", *words.split()], project)
    assert bool(closed_way(project, cell)) is closed


def test_any_card_is_not_that_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.dead_ends.accelerators", lambda: ("NVIDIA H200",))
    project = Project(root=ROOT, runs=ROOT / "runs")
    (cell,) = compose_cells(["model=flash_next", "layers=48", "path=cpu_cold", "device=cuda"], project)
    assert closed_way(project, cell) is None


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("where: {model: nano, path: cpu_cold}", "where: {model: nano, layer: 3}", r"dead_ends\.0\.where\.layer: no cell has the key 'layer'; choose from"),
        ("where: {model: nano, path: cpu_cold}", "where: {path: cpu_cald}", r"dead_ends\.0\.where\.path: path cpu_cald is not expected"),
    ],
)
def test_a_dead_end_that_can_never_close_anything_is_a_mistake(project: Project, old: str, new: str, message: str) -> None:
    (project.root / "experiments" / "stage.yaml").write_text(STAGE.replace(old, new), encoding="utf-8")
    with pytest.raises(LabError, match=message):
        closed_way(project, compose_cells(["device=cpu"], project)[0])
