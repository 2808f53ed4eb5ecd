"""What the parent process may know of the machine's accelerators without importing torch.

Importing torch costs over a second and memory beside a measurement, so the parent reads files: which build of torch is installed and which
devices the kernel shows. Only where both hint at a GPU is torch asked, in a short process. The worker, not this, records what really ran.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from lab.project import say

ASK_S = 120.0
"""How long torch may take to find its GPU. A first start from a slow disk takes a minute."""


@cache
def auto_device() -> str:
    """`cuda` if torch can use a GPU here, else `cpu`. Takes seconds only on a machine that looks as if it had one."""
    if not (_torch_has_gpu_build() and shows_gpu()):
        return "cpu"
    ask = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)"
    try:
        answer = subprocess.run([sys.executable, "-c", ask], capture_output=True, check=False, timeout=ASK_S)
    except subprocess.TimeoutExpired:
        # A hung driver; a cell for the CPU can be measured all the same, and device=cuda still tries.
        say(f"warning: torch did not say within {ASK_S:g} s whether it can use the GPU; device=auto is cpu")
        return "cpu"
    return "cuda" if answer.returncode == 0 else "cpu"


@cache
def accelerators() -> tuple[str, ...]:
    """Names of the GPUs the kernel shows, e.g. `NVIDIA H200`; empty without any. Part of the resume key of cells that run on one."""
    names = []
    for info in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        found = re.search(r"^Model:\s*(.+)$", info.read_text(), re.MULTILINE)
        names.append(found.group(1).strip() if found else "NVIDIA GPU")
    for node in sorted(Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties")):
        version = re.search(r"^gfx_target_version (\d+)$", node.read_text(), re.MULTILINE)
        if version and version.group(1) != "0":
            names.append(f"AMD gfx {version.group(1)}")
    return tuple(names)


def is_expected(pattern: str | None, names: Iterable[str]) -> bool:
    """Whether one of the accelerators is the one that a device file names by `expect` (a regular expression, any case); without one, anything is."""
    return pattern is None or any(re.search(pattern, name, re.IGNORECASE) for name in names)


def _torch_has_gpu_build() -> bool:
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return False
    file = Path(spec.submodule_search_locations[0]) / "version.py"
    text = file.read_text() if file.is_file() else ""
    return re.search(r"^(cuda|hip)\b.*=\s*['\"]", text, re.MULTILINE) is not None


def shows_gpu() -> bool:
    """Whether the kernel shows a device that torch calls `cuda`, and the environment does not hide it. No promise that torch can use it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return False
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg"))


def usable_cores() -> int:
    """Cores this process may run on; fewer than the machine's inside a container or under taskset."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
