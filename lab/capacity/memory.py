"""Free memory of this machine for a cell, without torch: what the kernel and the drivers say now.

The device's own answer counts only where the accelerator is the one the cell names (`device.expect`); for a card that is not here its file's
`memory_bytes` stands. A smaller `memory_bytes` always counts: it is how one plans for less. Limits of containers and the drivers' tools are read by
`lab.checks`, as for `doctor`. What other programs take later is not foreseen.
"""

from __future__ import annotations

import os
from functools import partial

import psutil

from lab.cell import Cell
from lab.checks import amd, nvidia
from lab.checks.cgroup import memory_limit
from lab.checks.source import Source, ask_tool
from lab.devices import is_expected
from lab.project import Project

ASK_S = 20.0
"""How long nvidia-smi may take here, where its answer decides; the first call after a start loads the driver."""
_MACHINE = Source(ask=partial(ask_tool, within_s=ASK_S))


def machine_memory(project: Project, cell: Cell, source: Source = _MACHINE) -> tuple[int | None, int]:
    """(free bytes of the cell's device or None where nothing says, free bytes of this machine's memory)."""
    host = host_free_bytes(source)
    if cell.device.torch_device == "cpu":
        return _least(host, cell.device.memory_bytes), host
    free = gpu_free_bytes(cell.device.torch_device, source) if is_here(cell, source) else None
    return _least(free, cell.device.memory_bytes), host


def is_here(cell: Cell, source: Source = _MACHINE) -> bool:
    """Whether the cell's device is in this machine, as far as the kernel's names tell."""
    if cell.device.torch_device == "cpu":
        return True
    names = source.accelerators()
    return bool(names) and is_expected(cell.device.expect, names)


def host_free_bytes(source: Source) -> int:
    """Free bytes of main memory: the system's, or what the narrowest control group leaves where that is less."""
    free, limit = psutil.virtual_memory().available, memory_limit(source)
    return free if limit is None else min(free, limit.left_bytes)


def gpu_free_bytes(torch_device: str, source: Source) -> int | None:
    """Free bytes of the GPU that torch would call `torch_device`, or None where neither driver says."""
    index = int(torch_device.partition(":")[2] or 0)
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("HIP_VISIBLE_DEVICES"))) is not None:
        # torch counts among the visible cards only, the drivers' tools among all.
        shown = [part.strip() for part in visible.split(",")]
        if index >= len(shown) or not shown[index].isdigit():
            return None
        index = int(shown[index])
    found = nvidia.free_bytes(source) or amd.free_bytes(source)
    return found[index] if index < len(found) else None


def _least(*sizes: int | None) -> int | None:
    known = [size for size in sizes if size is not None]
    return min(known) if known else None
