"""Free memory of this machine for a cell, without torch: what the kernel and the drivers say now.

The device's own answer counts only where the accelerator is the one the cell names (`device.expect`); for a card that is not here its file's
`memory_bytes` stands. A smaller `memory_bytes` always counts: it is how one plans for less. What other programs take later is not foreseen.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil

from lab.cell import Cell
from lab.devices import accelerators, is_expected
from lab.project import Project

ASK_S = 20.0
"""How long nvidia-smi may take; the first call after a start loads the driver."""
_CGROUP = Path("/sys/fs/cgroup")
_DRM = Path("/sys/class/drm")


def machine_memory(project: Project, cell: Cell) -> tuple[int | None, int]:
    """(free bytes of the cell's device or None where nothing says, free bytes of this machine's memory)."""
    host = host_free_bytes()
    if cell.device.torch_device == "cpu":
        return _least(host, cell.device.memory_bytes), host
    free = gpu_free_bytes(cell.device.torch_device) if is_here(cell) else None
    return _least(free, cell.device.memory_bytes), host


def is_here(cell: Cell) -> bool:
    """Whether the cell's device is in this machine, as far as the kernel's names tell."""
    if cell.device.torch_device == "cpu":
        return True
    names = accelerators()
    return bool(names) and is_expected(cell.device.expect, names)


def host_free_bytes() -> int:
    """Free bytes of main memory: the system's, or what the control group still allows where that is less."""
    free = psutil.virtual_memory().available
    for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
        most, now = _number(_CGROUP / limit), _number(_CGROUP / used)
        if most is not None and now is not None:
            free = min(free, max(0, most - now))
    return free


def gpu_free_bytes(torch_device: str) -> int | None:
    """Free bytes of the GPU that torch would call `torch_device`, or None where neither driver says."""
    index = int(torch_device.partition(":")[2] or 0)
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("HIP_VISIBLE_DEVICES"))) is not None:
        # torch counts among the visible cards only, the drivers' tools among all.
        shown = [part.strip() for part in visible.split(",")]
        if index >= len(shown) or not shown[index].isdigit():
            return None
        index = int(shown[index])
    for found in (_nvidia_free(), _amd_free()):
        if index < len(found):
            return found[index]
    return None


def _nvidia_free() -> list[int]:
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ASK_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.split("\n") if done.returncode == 0 else []
    return [int(line) << 20 for line in lines if line.strip().isdigit()]


def _amd_free() -> list[int]:
    found = []
    for total in sorted(_DRM.glob("card*/device/mem_info_vram_total")):
        size, used = _number(total), _number(total.with_name("mem_info_vram_used"))
        if size is not None and used is not None:
            found.append(max(0, size - used))
    return found


def _number(file: Path) -> int | None:
    """The whole number in a kernel file, or None where there is no file or no limit (`max`)."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _least(*sizes: int | None) -> int | None:
    known = [size for size in sizes if size is not None]
    return min(known) if known else None
