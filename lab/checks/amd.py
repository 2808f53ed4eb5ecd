"""AMD GPUs as the amdgpu driver describes them in sysfs: memory, clocks, what holds the clocks down, processes.

Files instead of rocm-smi or amd-smi, whose output changes between versions and which list cards that HIP cannot use. What the firmware does for heat stands
in no text file, so a throttled card can look fine here; temperature and power are given for that reason.
Source: Documentation/gpu/amdgpu/thermal.rst and driver-misc.rst of the Linux kernel; kfd_process.c for the processes.
"""

from __future__ import annotations

import re
from pathlib import Path

from lab.checks.check import size
from lab.checks.gpu import Gpu, Seen
from lab.checks.source import Source

TOOL = "sysfs"
_VENDOR = "0x1002"


def look(source: Source) -> Seen | None:
    """The GPUs; None where no card of AMD is shown."""
    cards = _cards(source)
    if not cards:
        return None
    version = source.text("sys/module/amdgpu/version")
    kernel = source.text("proc/sys/kernel/osrelease")
    driver = version or (f"of kernel {kernel}" if kernel else None)
    return Seen(TOOL, driver, tuple(_gpu(source, card) for card in cards), _processes(source))


def free_bytes(source: Source) -> list[int | None]:
    """Free bytes of each card in the order of `look`, None where the driver does not tell."""
    sizes = [(source.number(card / "mem_info_vram_total"), source.number(card / "mem_info_vram_used")) for card in _cards(source)]
    return [None if total is None or used is None else max(0, total - used) for total, used in sizes]


def _cards(source: Source) -> list[Path]:
    return [card for card in source.matching("sys/class/drm/card*/device") if source.text(card / "vendor") == _VENDOR]


def _gpu(source: Source, card: Path) -> Gpu:
    clocks = {int(mhz): mark == "*" for mhz, mark in re.findall(r"^\d+:\s*(\d+)Mhz ?(\*?)", source.text(card / "pp_dpm_sclk") or "", re.MULTILINE)}
    sensors = next(iter(sorted(card.glob("hwmon/hwmon*"))), card / "hwmon")
    power, cap, default_cap = (_micro(source, sensors / f"power1_{what}") for what in ("average", "cap", "cap_default"))
    level = source.text(card / "power_dpm_force_performance_level")
    limits = [f"power_dpm_force_performance_level is {level}"] if level in ("low", "profile_min_sclk", "profile_min_mclk") else []
    if cap is not None and default_cap is not None and cap < default_cap:
        limits.append(f"power limit {cap:g} W, by default {default_cap:g} W")
    heat = source.number(sensors / "temp1_input")
    return Gpu(
        name=f"{card.parent.name} {source.text(card / 'product_name') or 'AMD ' + (source.text(card / 'device') or 'GPU')}",
        used_bytes=source.number(card / "mem_info_vram_used"),
        total_bytes=source.number(card / "mem_info_vram_total"),
        clock_mhz=next((float(mhz) for mhz, active in clocks.items() if active), None),
        max_clock_mhz=float(max(clocks)) if clocks else None,
        temperature_c=None if heat is None else heat / 1000,
        power_w=power if power is not None else _micro(source, sensors / "power1_input"),
        power_limit_w=cap,
        limits=tuple(limits),
    )


def _processes(source: Source) -> tuple[str, ...]:
    """Compute processes that hold memory of a card. Graphics alone is not listed there, but counts as memory in use."""
    found = []
    for folder in source.matching("sys/class/kfd/kfd/proc/[0-9]*"):
        used = sum(source.number(file) or 0 for file in folder.glob("vram_*"))
        name = source.text(f"proc/{folder.name}/comm") or "a process"
        if used:
            found.append(f"{name} (pid {folder.name}, {size(used)})")
    return tuple(found)


def _micro(source: Source, file: Path) -> float | None:
    """A value given in millionths."""
    number = source.number(file)
    return None if number is None else number / 1e6
