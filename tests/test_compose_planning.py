"""Composition for planning: architectures without code, layer counts from a geometry, placement and mode in the configuration."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from lab.cell import Placement
from lab.compose import ARCHITECTURES, compose_cells, model_layers, sizes_file
from lab.errors import LabError
from lab.fill import fill_words
from lab.overrides import choices
from lab.project import Project
from tests.runner_helpers import ROOT, make_project


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path / "p")


def test_architectures_can_be_named_before_there_is_code_for_them(project: Project) -> None:
    assert set(ARCHITECTURES) == {"qwen4_exp", "qwen3", "qwen3_moe", "llama"}
    for arch in ARCHITECTURES:
        assert compose_cells([f"model.arch={arch}", "device=cpu"], project)[0].model.arch == arch
    with pytest.raises(LabError, match="^model.arch=gpt2: no such architecture; choose one of: qwen4_exp, qwen3, qwen3_moe, llama$"):
        compose_cells(["model.arch=gpt2", "device=cpu"], project)


@pytest.mark.parametrize(("model", "layers"), [("flash_next", 48), ("qwen3_8b", 36), ("qwen3_2b", 28), ("qwen3_30b_a3b", 48)])
def test_layers_are_checked_by_the_geometry_without_the_files(project: Project, model: str, layers: int) -> None:
    assert compose_cells([f"model={model}", "device=cpu"], project)[0].layers == layers
    with pytest.raises(LabError, match=f"layers={layers + 1}: {model} has {layers} layers; choose 1 to {layers}"):
        compose_cells([f"model={model}", f"layers={layers + 1}", "device=cpu"], project)


def test_the_artifact_counts_where_it_is_there(project: Project) -> None:
    folder = project.root / "weights"
    folder.mkdir()
    words = ["model=flash_next", "model.artifact=weights", "device=cpu"]
    assert compose_cells(words, project)[0].layers == 48
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 5}))
    assert compose_cells(words, project)[0].layers == 5
    assert sizes_file(project, "weights", "conf/geometry/flash_next.json") == folder / "config.json"
    assert model_layers(project, "nowhere") is None


def test_a_geometry_that_is_not_there_or_no_text_is_one_line(project: Project) -> None:
    with pytest.raises(LabError, match=r"^none\.json: no such file \(model\.geometry\)$"):
        compose_cells(["model=flash_next", "model.geometry=none.json", "device=cpu"], project)
    with pytest.raises(LabError, match=r"^model\.geometry: must be the path of a config\.json"):
        compose_cells(["model=flash_next", "model.geometry=5", "device=cpu"], project)


def test_placement_and_mode_are_keys_that_leave_a_plain_cell_as_it_was(project: Project) -> None:
    plain, given = (compose_cells(["path=tiered", "layers=3", "device=cpu", *words], project)[0] for words in ([], ["placement.slots=8", "mode=eager"]))
    assert plain.placement == Placement() and plain.mode == "auto"
    assert {"placement", "mode"} & plain.identity().keys() == set()
    assert (given.placement.slots, given.mode) == (8, "eager") and given.hash != plain.hash
    assert "placement.slots=8" in fill_words(project, given) and "mode=eager" in fill_words(project, given)
    with pytest.raises(LabError, match=r"placement\.slot: unknown key \(did you mean placement\.slots"):
        compose_cells(["placement.slot=8", "device=cpu"], project)
    with pytest.raises(LabError, match=r"placement\.slots=0: "):
        compose_cells(["placement.slots=0", "device=cpu"], project)


@pytest.mark.parametrize("device", choices(ROOT / "conf", "device"))
def test_every_figure_of_a_device_has_a_source(project: Project, device: str) -> None:
    spec = compose_cells(["layers=3", f"device={device}"], project)[0].device
    figures = (spec.memory_bytes, spec.read_bytes_s, spec.flops_s, spec.bus_bytes_s)
    assert bool(spec.source) is any(figure is not None for figure in figures)
    assert spec.expect is None or re.compile(spec.expect)


@pytest.mark.parametrize(("device", "name"), [("r9700", "AMD gfx 120001"), ("h200", "NVIDIA H200"), ("rtx5090", "NVIDIA GeForce RTX 5090")])
def test_a_device_file_expects_the_name_that_the_kernel_shows(device: str, name: str) -> None:
    expected = {d: yaml.safe_load((ROOT / f"conf/device/{d}.yaml").read_text())["expect"] for d in ("r9700", "h200", "rtx5090")}
    assert [d for d, pattern in expected.items() if re.search(pattern, name, re.IGNORECASE)] == [device]
