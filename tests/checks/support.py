"""Machines to look at: recorded files and answers in place of this machine's.

The H200's answers and /proc files were taken from a machine with one (driver 580.159.04), except the power limit's default; the AMD tree follows the
kernel's documentation, and has not been compared with a real card.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lab.cell import DeviceSpec
from lab.checks.source import AbsentError, Room, Source, UnseenError

GIB = 1 << 30
CPU = DeviceSpec(name="cpu", torch_device="cpu", compute_dtype="float32")
CUDA = DeviceSpec(name="cuda", torch_device="cuda", compute_dtype="bfloat16")

H200_IDLE = "0, NVIDIA H200, 580.159.04, 143771, 0, 345, 1980, 33, 79.21, 700.00, 700.00, 0x0000000000000001\n"
H200_BUSY = "0, NVIDIA H200, 580.159.04, 143771, 5069, 1560, 1980, 49, 257.52, 700.00, 700.00, 0x0000000000000004\n"
H200_PROCESSES = "475, 5060, python3\n"
NVIDIA_MODULE = """\
NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (nixbld@)  
GCC version:  gcc version 15.3.0 (GCC) 
"""

MEMINFO = "MemTotal:       16777216 kB\nMemFree:         1000000 kB\nMemAvailable:   12582912 kB\nSwapTotal:       {swap} kB\nSwapFree:        {free} kB\n"
QUIET = ("cpu  1000 0 100 5000 50 0 5 2 0 0\ncpu0 1 0 0 0\ncpu1 1 0 0 0\n", "cpu  1000 0 101 5028 51 0 5 2 0 0\ncpu0 1 0 0 0\ncpu1 1 0 0 0\n")
HOST = {
    "proc/meminfo": MEMINFO.format(swap=0, free=0),
    "proc/stat": QUIET[0],
    "proc/loadavg": "0.22 0.05 0.02 1/207 517",
}

AMD_CARD = "sys/class/drm/card1/device"
AMD = {
    f"{AMD_CARD}/vendor": "0x1002\n",
    f"{AMD_CARD}/device": "0x7551\n",
    f"{AMD_CARD}/mem_info_vram_total": f"{32 * GIB}\n",
    f"{AMD_CARD}/mem_info_vram_used": f"{29 * GIB}\n",
    f"{AMD_CARD}/pp_dpm_sclk": "0: 500Mhz\n1: 1024Mhz *\n2: 2350Mhz\n",
    f"{AMD_CARD}/power_dpm_force_performance_level": "auto\n",
    f"{AMD_CARD}/hwmon/hwmon3/temp1_input": "41000\n",
    f"{AMD_CARD}/hwmon/hwmon3/power1_average": "18000000\n",
    f"{AMD_CARD}/hwmon/hwmon3/power1_cap": "300000000\n",
    f"{AMD_CARD}/hwmon/hwmon3/power1_cap_default": "300000000\n",
    "sys/class/drm/card0/device/vendor": "0x1a03\n",
    "sys/class/kfd/kfd/proc/4711/vram_51234": f"{28 * GIB}\n",
    "sys/class/kfd/kfd/proc/4712/vram_51234": "0\n",
    "proc/4711/comm": "VLLM::Worker\n",
    "proc/sys/kernel/osrelease": "6.14.0-33-generic\n",
}

Rooms = Mapping[str, Room | OSError]
PLENTY: Rooms = {"": Room(100 * GIB, 200 * GIB)}
FULL = OSError(errno.ENOSPC, "No space left on device")


def write(root: Path, files: Mapping[str, str]) -> None:
    """Lay the files below `root`."""
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def answers(cards: str, processes: str = "") -> Callable[[Sequence[str]], str]:
    """An nvidia-smi that prints these."""
    return lambda argv: cards if argv[1].startswith("--query-gpu=") else processes


def silent(message: str) -> Callable[[Sequence[str]], str]:
    """A tool that fails."""

    def ask(_argv: Sequence[str]) -> str:
        raise UnseenError(message)

    return ask


def absent(argv: Sequence[str]) -> str:
    """A tool that is not installed."""
    raise AbsentError(f"{argv[0]} is not installed")


def rooms(table: Rooms) -> Callable[[Path], Room]:
    """Folders with this room; the entry "" serves every other folder."""

    def room(folder: Path) -> Room:
        found = table.get(str(folder), table.get("", FULL))
        if isinstance(found, OSError):
            raise found
        return found

    return room


def machine(root: Path, files: Mapping[str, str] = HOST, after: str = QUIET[1], **seams: object) -> Source:
    """A machine of two cores without a GPU, unless told otherwise. `after` is /proc/stat when the sample is over."""
    write(root, files)
    chosen: dict[str, object] = {
        "ask": absent,
        "room": rooms(PLENTY),
        "lockable_bytes": lambda: None,
        "cores": lambda: {0, 1},
        "pause": lambda _seconds: (root / "proc/stat").write_text(after) if (root / "proc/stat").exists() else None,
        "accelerators": lambda: (),
        **seams,
    }
    return Source(root=root, **chosen)  # type: ignore[arg-type]
