"""Under which circumstances an attempt ran: code, packages, machine, environment; and the resume key made from what moves the numbers.

The resume key decides whether an earlier result still answers the same question. It holds the cell, the code's and the artifact's contents,
protocol and package versions and the machine, but not the state of the machine (heat, load), which the worker records.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from lab.cell import Cell
from lab.devices import accelerators
from lab.metrics import METRICS
from lab.record import Record, Status

PACKAGES = ("torch", "triton", "numpy", "safetensors", "tokenizers", "transformers", "hydra-core", "mlflow", "pydantic")
_NUMERIC_PACKAGES = ("torch", "triton", "numpy", "tokenizers")
"""Another version of one of these can move a number; tokenizers decides which tokens are scored."""
_ENVIRONMENT = (
    "AMD_SERIALIZE_COPY",
    "AMD_SERIALIZE_KERNEL",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "GPU_MAX_HW_QUEUES",
    "HIP_LAUNCH_BLOCKING",
    "HIP_VISIBLE_DEVICES",
    "HSA_OVERRIDE_GFX_VERSION",
    "KMP_AFFINITY",
    "LD_PRELOAD",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING",
    "ROCR_VISIBLE_DEVICES",
    "TRITON_INTERPRET",
)
_REPAIRABLE = frozenset({Status.NOT_RUN, Status.OOM, Status.NUMERIC_INVALID, Status.IMPLAUSIBLE, Status.TIMEOUT, Status.CRASHED, Status.INFRA})
"""Gaps of single metrics that another attempt may fill. The other statuses say something lasting about the cell."""


def utc_now() -> str:
    """The time in UTC, ISO 8601, to the millisecond."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def seconds_since(time: str) -> float:
    """Seconds from `time` (as `utc_now` writes it) until now; never negative, whatever the clock did."""
    return max(0.0, (datetime.now(UTC) - datetime.fromisoformat(time)).total_seconds())


def provenance(root: Path, worker_argv: Sequence[str]) -> dict[str, Any]:
    """Everything the parent knows of the circumstances, as plain values. The worker adds its own view (`environment`)."""
    return {
        "git": git_state(root),
        "code_sha256": code_sha256(),
        "python": platform.python_version(),
        "packages": package_versions(PACKAGES),
        "machine": machine(),
        "env": environment(),
        "command": [sys.executable, *sys.argv],
        "worker_argv": list(worker_argv),
        "lab_pid": os.getpid(),
    }


def resume_key(cell: Cell, files: Mapping[str, str], worker_argv: Sequence[str]) -> str:
    """sha256 (hex) over everything that would move the cell's numbers; `files` are the digests of weights and text.

    Results with another key do not answer the same question.
    """
    on_cpu = cell.device.torch_device == "cpu"
    parts = {
        "cell": cell.hash,
        "code": code_sha256(),
        "files": dict(files),
        "protocols": sorted({m.protocol for m in METRICS.values()}),
        "python": platform.python_version(),
        "packages": package_versions(_NUMERIC_PACKAGES),
        "machine": [machine()["cpu"], machine()["cores"], [] if on_cpu else list(accelerators())],
        "env": {k: v for k, v in environment().items() if k in _ENVIRONMENT},
        "worker": list(worker_argv)[1:],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def repairable_gaps(record: Record) -> list[str]:
    """The metrics (with status) that another attempt under the same resume key may fill: the record is no full answer yet."""
    return [f"{name} {gap.status}" for name, gap in record.gaps.items() if gap.status in _REPAIRABLE]


def code_sha256() -> str:
    """sha256 (hex) over the names and contents of the package's source files, read anew: they may change while a command waits."""
    package = Path(__file__).resolve().parent
    digest = hashlib.sha256()
    for file in sorted(f for f in package.rglob("*") if f.suffix in (".py", ".cpp", ".h")):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(package).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


@cache
def machine() -> dict[str, Any]:
    """CPU model, usable cores, memory in bytes, system, and the GPUs the kernel shows."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "accelerators": list(accelerators()),
    }


def environment() -> dict[str, str]:
    """The environment variables that can move a number or a path."""
    return {k: v for k, v in sorted(os.environ.items()) if k in _ENVIRONMENT or k.startswith("LAB_")}


def package_versions(names: Sequence[str]) -> dict[str, str | None]:
    """Installed versions; None for a package that is not installed."""
    return {name: _version(name) for name in names}


def git_state(root: Path) -> dict[str, Any] | None:
    """Commit and whether the working tree differs from it; None outside a git checkout or without git."""
    try:
        commit = _git(root, "rev-parse", "HEAD")
        return {"commit": commit, "dirty": bool(_git(root, "status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=20)
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip().lower() in ("model name", "cpu model"):
                return value.strip()
    return platform.processor() or platform.machine()
