"""The device of the cell: is it there, is it the one it is called, what else uses it, and what holds its clocks down.

Which GPUs there are is asked of the kernel (`lab.devices`), as in the resume key; nvidia-smi or sysfs add what the kernel does not say. torch is not
asked: a device that looks fine here can still be one that this build of torch has no code for, which the worker finds out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from lab.cell import DeviceSpec
from lab.checks import amd, nvidia
from lab.checks.check import Finding, bad, check, known, ok, size, unknown, warn
from lab.checks.gpu import Gpu, Seen
from lab.checks.source import Source
from lab.devices import auto_device, is_expected
from lab.provenance import machine

USED_BYTES = 512 << 20
"""A desktop or a driver's own buffers stay below; a model does not."""
_HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_DEVICE_FILES = ("dev/nvidiactl", "dev/kfd", "dev/dxg")
_PASS_IN = "install the GPU's driver; in a container pass it in (docker --gpus all, for AMD --device /dev/kfd --device /dev/dri); or take device=cpu"


def see_gpus(source: Source) -> tuple[Seen, ...]:
    """What the tools and sysfs say of the GPUs, by maker. Never raises: a tool that fails or talks nonsense is its `trouble`."""
    found = []
    for maker in (nvidia, amd):
        try:
            found.append(maker.look(source))
        except Exception as error:
            # As in `check`: what a driver's files and tools may hold is not ours to foresee.
            found.append(Seen(maker.TOOL, trouble=f"{maker.TOOL} could not be understood: {type(error).__name__}: {error}"))
    return tuple(seen for seen in found if seen is not None)


@check("device")
def device(source: Source, cell_device: DeviceSpec | None) -> Finding:
    """Whether the cell's device is there and is the one expected; without a cell, what there is."""
    names = source.accelerators()
    shown = f"{', '.join(names) or 'no GPU'} (the kernel's files)"
    if cell_device is None:
        return ok(f"{_host()}; {shown}", gpus=len(names))
    if cell_device.torch_device == "cpu":
        return ok(_host())
    if hidden := _hidden_by():
        return bad(f"{shown}, hidden by {hidden}={os.environ[hidden]}", f"unset {hidden}, or take device=cpu", gpus=len(names))
    if not names and any((source.root / file).exists() for file in _DEVICE_FILES):
        return unknown("a GPU's device file is there, but the kernel's files do not name the GPU; the worker asks torch")
    if not names:
        return bad(shown, _PASS_IN, gpus=0)
    if not is_expected(cell_device.expect, names):
        said = f"{shown}; device={cell_device.name} expects /{cell_device.expect}/"
        return bad(said, "take the device that is here (python -m lab ls devices)", gpus=len(names))
    return ok(shown, gpus=len(names))


@check("auto")
def auto(source: Source) -> Finding:
    """What device=auto means here. Asks torch in a short process if there seems to be a GPU, so it is not part of a run's checks."""
    chosen = auto_device()
    if hidden := _hidden_by():
        return ok(f"device=auto is {chosen}; {hidden}={os.environ[hidden]} hides every GPU")
    if chosen == "cpu" and (names := source.accelerators()):
        fix = "install a build of torch for this GPU: make run TORCH_INDEX=... (README, Install on a GPU machine)"
        return warn(f"device=auto is cpu, although the kernel shows {', '.join(names)}: this torch cannot use it", fix)
    return ok(f"device=auto is {chosen}")


@check("driver")
def driver(seen: Sequence[Seen]) -> Finding:
    """Versions of the GPU drivers."""
    said = "; ".join(f"{one.driver or 'version unknown'} ({one.tool})" + (f", but {one.trouble}" if one.trouble else "") for one in seen)
    if not seen:
        return unknown("neither nvidia-smi nor an AMD card in sysfs")
    if any("version mismatch" in one.trouble for one in seen):
        return warn(said, "reboot, or load the kernel module of the installed version: no GPU program starts until then")
    if any(one.trouble for one in seen):
        return unknown(said, "try it by hand; a container needs the driver's tools passed in (NVIDIA_DRIVER_CAPABILITIES=compute,utility)")
    return ok(said)


@check("gpu_memory")
def gpu_memory(seen: Sequence[Seen]) -> Finding:
    """Memory in use before the cell starts, so by others, and the processes known to use a GPU."""
    used = [(gpu.name, gpu.used_bytes, gpu.total_bytes) for gpu in _cards(seen) if gpu.used_bytes is not None and gpu.total_bytes is not None]
    if not used:
        return unknown(_untold(seen))
    said = "; ".join(f"{name}: {size(taken)} of {size(total)} in use" for name, taken, total in used) + _asked(seen)
    processes = [process for one in seen for process in one.processes]
    values = {"processes": len(processes), **_values(seen, "used_bytes", "total_bytes")}
    if processes:
        return warn(f"{said}; used by {', '.join(processes)}", "end them, or hide that GPU (CUDA_VISIBLE_DEVICES, for AMD HIP_VISIBLE_DEVICES)", **values)
    if any(taken > USED_BYTES for _, taken, _ in used):
        return warn(said, "end what holds it: a display, a stopping container, a left-over worker under another name", **values)
    return ok(said, **values)


@check("gpu_clocks")
def gpu_clocks(seen: Sequence[Seen]) -> Finding:
    """Clocks, heat and power now, and what holds the clocks down. A low clock of an idle GPU is not judged."""
    cards = _cards(seen)
    if all(gpu.clock_mhz is None and not gpu.limits for gpu in cards):
        return unknown(_untold(seen))
    values = _values(seen, "clock_mhz", "max_clock_mhz", "temperature_c", "power_w", "power_limit_w")
    said = "; ".join(map(_speed, cards)) + _asked(seen)
    if any(gpu.limits for gpu in cards):
        return warn(said, "let it cool, give it air and power, or lift the limit; otherwise compare only cells measured under the same one", **values)
    return ok(said, **values)


def _hidden_by() -> str | None:
    """The variable that hides every GPU from torch, if one does."""
    return next((name for name in _HIDING if os.environ.get(name, "unset").strip() in ("", "-1")), None)


def _cards(seen: Sequence[Seen]) -> list[Gpu]:
    return [gpu for one in seen for gpu in one.gpus]


def _values(seen: Sequence[Seen], *fields: str) -> dict[str, int | float]:
    """The fields that are known, as gpu0_..., gpu1_..."""
    return known(**{f"gpu{number}_{name}": getattr(gpu, name) for number, gpu in enumerate(_cards(seen)) for name in fields})


def _speed(gpu: Gpu) -> str:
    """Clock, heat, power and limits of one GPU in words, as far as they are told."""
    top = "" if gpu.max_clock_mhz is None else f" (at most {gpu.max_clock_mhz:.0f})"
    told = (
        "clock not told" if gpu.clock_mhz is None else f"{gpu.clock_mhz:.0f} MHz{top}",
        "" if gpu.temperature_c is None else f", {gpu.temperature_c:.0f} C",
        "" if gpu.power_w is None else f", {gpu.power_w:.0f} W",
        f", held down by: {', '.join(gpu.limits)}" if gpu.limits else "",
    )
    return f"{gpu.name}: {''.join(told)}"


def _asked(seen: Sequence[Seen]) -> str:
    return f" ({', '.join(one.tool for one in seen)})"


def _untold(seen: Sequence[Seen]) -> str:
    return "; ".join(one.trouble or f"{one.tool} does not tell" for one in seen) or "neither nvidia-smi nor an AMD card in sysfs"


def _host() -> str:
    facts = machine()
    return f"{facts['cpu']}, {facts['cores']} cores, {facts['memory_bytes'] / 2**30:.0f} GiB"
