"""Free memory, from made-up kernel files and a made-up nvidia-smi: which answer counts where."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab.capacity import is_here, machine_memory, memory
from lab.cell import Cell
from lab.compose import compose_cells
from lab.project import Project
from tests.runner_helpers import make_project

GIB = 1 << 30


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path / "p")


@pytest.fixture(autouse=True)
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 GiB free, no control group, no GPU."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=64 * GIB))
    monkeypatch.setattr(memory, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_DRM", tmp_path / "drm")
    monkeypatch.setattr(memory, "accelerators", lambda: ())
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))


def write(file: Path, text: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"{text}\n")


def cell(project: Project, *words: str) -> Cell:
    return compose_cells(["layers=3", *words], project)[0]


def smi(tmp_path: Path, script: str) -> None:
    write(tmp_path / "bin" / "nvidia-smi", f"#!/bin/sh\n{script}")
    os.chmod(tmp_path / "bin" / "nvidia-smi", 0o755)


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 64 * GIB),
        ({"memory.max": "max", "memory.current": 5}, 64 * GIB),
        ({"memory.max": 10 * GIB, "memory.current": 4 * GIB}, 6 * GIB),
        ({"memory.max": 4 * GIB, "memory.current": 5 * GIB}, 0),
        ({"memory/memory.limit_in_bytes": 9 * GIB, "memory/memory.usage_in_bytes": GIB}, 8 * GIB),
    ],
)
def test_the_control_group_limits_main_memory(project: Project, tmp_path: Path, files: dict[str, object], free: int) -> None:
    for name, value in files.items():
        write(tmp_path / "cgroup" / name, value)
    assert machine_memory(project, cell(project, "device=cpu")) == (free, free)


def test_a_device_that_is_not_here_has_what_its_file_says(project: Project) -> None:
    assert machine_memory(project, cell(project, "device=r9700")) == (32 * GIB, 64 * GIB)
    assert machine_memory(project, cell(project, "device=cuda")) == (None, 64 * GIB)
    assert machine_memory(project, cell(project, "device=r9700", "device.memory_bytes=7")) == (7, 64 * GIB)
    assert not is_here(cell(project, "device=r9700")) and is_here(cell(project, "device=cpu"))


def test_the_driver_counts_only_for_the_card_that_the_cell_names(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi(tmp_path, "echo 20000; echo 30000")
    monkeypatch.setattr(memory, "accelerators", lambda: ("NVIDIA H200",))
    assert machine_memory(project, cell(project, "device=h200"))[0] == 20000 << 20
    assert machine_memory(project, cell(project, "device=h200", "device.torch_device='cuda:1'"))[0] == 30000 << 20
    assert machine_memory(project, cell(project, "device=h200", "device.torch_device='cuda:2'"))[0] == 139 * GIB
    assert machine_memory(project, cell(project, "device=h200", "device.memory_bytes=5"))[0] == 5
    assert machine_memory(project, cell(project, "device=r9700"))[0] == 32 * GIB


@pytest.mark.parametrize("script", ["exit 9", "echo '[N/A]'"])
def test_a_driver_that_does_not_say_leaves_the_file(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    smi(tmp_path, script)
    monkeypatch.setattr(memory, "accelerators", lambda: ("NVIDIA H200",))
    assert machine_memory(project, cell(project, "device=h200"))[0] == 139 * GIB


def test_the_amd_driver_counts_what_is_used(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "accelerators", lambda: ("AMD gfx 120001",))
    write(tmp_path / "drm/card1/device/mem_info_vram_total", 32 * GIB)
    write(tmp_path / "drm/card1/device/mem_info_vram_used", 2 * GIB)
    assert machine_memory(project, cell(project, "device=r9700"))[0] == 30 * GIB
