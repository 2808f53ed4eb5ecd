"""What is looked at on the machine before a measurement: by `doctor` for a person, by `run` for the record.

One list for both, so that a record shows the state of the machine that `doctor` would have shown. All of it is read, nothing is changed beyond a small
temporary file, and it is over before the child starts. Checks describe a moment; a machine that passes can still be too small, or busy a second later.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lab.cell import DeviceSpec
from lab.checks import device as gpu
from lab.checks import host, software, storage, stores
from lab.checks.check import Check
from lab.checks.source import Source
from lab.project import Project

__all__ = ["Check", "machine_checks", "sampled"]


def machine_checks(project: Project, device: DeviceSpec | None, source: Source | None = None) -> list[Check]:
    """Everything to know before a cell on `device` is measured; None looks at all there is. Never raises.

    Takes about 0.2 s, and 0.1 s more with nvidia-smi. A hung nvidia-smi costs 3 s, a store that does not answer 1 s, or as long as its name takes to
    resolve. GPUs are left out for a cell on the CPU.
    """
    source = source or Source()
    seen = () if device and device.torch_device == "cpu" else gpu.see_gpus(source)
    wants_gpu = bool(seen) if device is None else device.torch_device != "cpu"
    return [
        software.packages(),
        gpu.device(source, device),
        *((gpu.driver(seen), gpu.gpu_memory(seen), gpu.gpu_clocks(seen)) if wants_gpu else ()),
        host.memory(source),
        host.swap(source),
        host.load(source),
        host.cores(source, device),
        host.cpu_clocks(source),
        host.memlock(source, wants_gpu),
        storage.runs(source, project),
        storage.cache(source, project),
        storage.tmp(source),
        storage.shm(source),
        software.variables(),
        stores.tracking(project),
    ]


def sampled(checks: Iterable[Check]) -> dict[str, dict[str, Any]]:
    """The compact form for a record: name -> state, found, values. The fix is left out; it is for the person at the machine."""
    return {one.name: {"state": one.state, "found": one.found, "values": dict(one.values)} for one in checks}
