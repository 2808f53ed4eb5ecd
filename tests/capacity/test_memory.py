"""Free memory, from made-up kernel files and a made-up nvidia-smi: which answer counts where, and that page cache is not called used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab.capacity import is_here, machine_memory
from lab.cell import Cell
from lab.checks.source import Source, UnseenError
from lab.compose import compose_cells
from lab.project import Project
from tests.checks.support import AMD_CARD, absent, machine
from tests.runner_helpers import make_project

GIB = 1 << 30


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return make_project(tmp_path / "p")


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 GiB free, and no GPU hidden."""
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=64 * GIB))
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def here(root: Path, files: Mapping[str, object], name: str = "", smi: Callable[[Sequence[str]], str] = absent) -> Source:
    """A machine with these files, and the accelerator `name` if there is one."""
    return machine(root, {path: str(text) for path, text in files.items()}, ask=smi, accelerators=lambda: (name,) if name else ())


def cell(project: Project, *words: str) -> Cell:
    return compose_cells(["layers=3", *words], project)[0]


V2 = {"proc/self/cgroup": "0::/lab/job"}
GROUP = "sys/fs/cgroup/lab/job"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, 64 * GIB),
        (V2 | {f"{GROUP}/memory.max": "max", f"{GROUP}/memory.current": 5}, 64 * GIB),
        (V2 | {f"{GROUP}/memory.max": 10 * GIB, f"{GROUP}/memory.current": 4 * GIB}, 6 * GIB),
        (V2 | {f"{GROUP}/memory.max": 4 * GIB, f"{GROUP}/memory.current": 5 * GIB}, 0),
        (V2 | {"sys/fs/cgroup/lab/memory.max": 3 * GIB, "sys/fs/cgroup/lab/memory.current": GIB}, 2 * GIB),
        (
            V2
            | {f"{GROUP}/memory.max": 10 * GIB, f"{GROUP}/memory.current": 10 * GIB, f"{GROUP}/memory.stat": f"inactive_file {3 * GIB}\nactive_file {4 * GIB}"},
            7 * GIB,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/docker/abc",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": 9 * GIB,
                "sys/fs/cgroup/memory/memory.usage_in_bytes": 9 * GIB,
                "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GIB}\ntotal_active_file {2 * GIB}",
            },
            3 * GIB,
        ),
    ],
    ids=["none", "no limit", "limit", "beyond it", "limit of the group above", "file cache", "file cache, version 1"],
)
def test_the_control_group_limits_main_memory_and_its_file_cache_is_free(project: Project, tmp_path: Path, files: dict[str, object], free: int) -> None:
    assert machine_memory(project, cell(project, "device=cpu"), here(tmp_path / "m", files)) == (free, free)


def test_a_device_that_is_not_here_has_what_its_file_says(project: Project, tmp_path: Path) -> None:
    bare = here(tmp_path / "m", {})
    assert machine_memory(project, cell(project, "device=r9700"), bare) == (32 * GIB, 64 * GIB)
    assert machine_memory(project, cell(project, "device=cuda"), bare) == (None, 64 * GIB)
    assert machine_memory(project, cell(project, "device=r9700", "device.memory_bytes=7"), bare) == (7, 64 * GIB)
    assert not is_here(cell(project, "device=r9700"), bare) and is_here(cell(project, "device=cpu"), bare)


def test_the_driver_counts_only_for_the_card_that_the_cell_names(project: Project, tmp_path: Path) -> None:
    two = here(tmp_path / "m", {}, "NVIDIA H200", lambda argv: "20000\n30000\n")
    assert machine_memory(project, cell(project, "device=h200"), two)[0] == 20000 << 20
    assert machine_memory(project, cell(project, "device=h200", "device.torch_device='cuda:1'"), two)[0] == 30000 << 20
    assert machine_memory(project, cell(project, "device=h200", "device.torch_device='cuda:2'"), two)[0] == 139 * GIB
    assert machine_memory(project, cell(project, "device=h200", "device.memory_bytes=5"), two)[0] == 5
    assert machine_memory(project, cell(project, "device=r9700"), two)[0] == 32 * GIB


@pytest.mark.parametrize(("visible", "free"), [("1", 30000 << 20), ("GPU-1234", 139 * GIB), ("", 139 * GIB)])
def test_the_first_visible_card_is_torchs_first(project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, free: int) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    two = here(tmp_path / "m", {}, "NVIDIA H200", lambda argv: "20000\n30000\n")
    assert machine_memory(project, cell(project, "device=h200"), two)[0] == free


def failing(argv: Sequence[str]) -> str:
    raise UnseenError("nvidia-smi ended with exit code 9")


@pytest.mark.parametrize("smi", [failing, lambda argv: "[N/A]\n"])
def test_a_driver_that_does_not_say_leaves_the_file(project: Project, tmp_path: Path, smi: Callable[[Sequence[str]], str]) -> None:
    assert machine_memory(project, cell(project, "device=h200"), here(tmp_path / "m", {}, "NVIDIA H200", smi))[0] == 139 * GIB


def test_a_card_that_does_not_say_does_not_lend_its_place_to_the_next(project: Project, tmp_path: Path) -> None:
    two = here(tmp_path / "m", {}, "NVIDIA H200", lambda argv: "[N/A]\n30000\n")
    assert machine_memory(project, cell(project, "device=h200", "device.torch_device='cuda:1'"), two)[0] == 30000 << 20


def test_the_amd_driver_counts_what_is_used(project: Project, tmp_path: Path) -> None:
    files = {f"{AMD_CARD}/vendor": "0x1002", f"{AMD_CARD}/mem_info_vram_total": 32 * GIB, f"{AMD_CARD}/mem_info_vram_used": 2 * GIB}
    assert machine_memory(project, cell(project, "device=r9700"), here(tmp_path / "m", files, "AMD gfx 120001"))[0] == 30 * GIB
