"""What this machine can do at most: read bandwidth, matrix arithmetic and the bus, measured once and kept with their date.

The bounds behind every roofline percentage. The read sweep sums an array far larger than any cache; the arithmetic is one large square product in the
dtype the engine computes in. Best of several runs, because a bound should be what the machine can do, not what it did on average.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from lab.errors import GapError
from lab.record import Status

_VERSION = 2
_LOOK_S = 0.3
_IDLE_CORES = 0.3
"""Cores that others may use while bounds of a CPU are measured that are to be kept."""
_BESIDE_A_GPU = 0.5
"""Share of the cores for those of a GPU, whose reading and arithmetic do not need them: cells on its neighbours may run."""


def machine_bounds(device: torch.device, dtype: torch.dtype, threads: int, cache: Path) -> dict[str, Any]:
    """{read_bytes_s, flops_s, bus_bytes_s, device, threads, dtype, measured_at}; from `cache` when this device, thread count and torch were measured before.
    bus_bytes_s is that of copies from pinned host memory to the device, None on a CPU.

    Measured in a process of its own: its large arrays would otherwise be the peak memory of the path. Raises GapError when that process fails."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
    identity = {
        "host": hashlib.sha256(platform.node().encode()).hexdigest()[:8],
        "device": name,
        "threads": threads,
        "dtype": str(dtype),
        "torch": torch.__version__,
        "version": _VERSION,
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    path = cache / f"machine-{key}.json"
    if path.is_file():
        try:
            kept: dict[str, Any] = json.loads(path.read_text())
            if {"read_bytes_s", "flops_s"} <= kept.keys():
                return kept
        except (OSError, ValueError, AttributeError) as error:
            print(f"{path.name}: not readable ({error}); measuring again", file=sys.stderr)
    cores = psutil.cpu_count() or 1
    busy = psutil.cpu_percent(interval=_LOOK_S) / 100 * cores
    command = [sys.executable, "-m", "lab.measure.machine", str(device), str(dtype).removeprefix("torch."), str(threads)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise GapError(Status.INFRA, f"measuring this machine's bandwidth failed with exit code {done.returncode}; the attempt's log says why")
    bounds: dict[str, Any] = {**identity, **json.loads(done.stdout), "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    allowed = _IDLE_CORES if device.type == "cpu" else max(_IDLE_CORES, _BESIDE_A_GPU * cores)
    if busy > allowed:  # bounds of a shared machine are too low, and would make every later rate look impossible
        print(f"machine bounds are not kept: others used {busy:.1f} cores when they were measured", file=sys.stderr)
        return bounds | {"others_busy_cores": round(busy, 1)}
    try:
        cache.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.part")
        partial.write_text(json.dumps(bounds, indent=1))
        partial.replace(path)
    except OSError as error:  # a full or read-only disk costs the next run ten seconds, not this one its numbers
        print(f"machine bounds were not kept in {cache}: {error}", file=sys.stderr)
    return bounds


def _best_seconds(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats + 1):  # the first run also warms up
        _wait(device)
        started = time.perf_counter()
        run()
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return best


def _read_bandwidth(device: torch.device) -> float:
    """Bytes per second of summing 4 GiB (GPU) or 0.5 GiB (CPU) of float32 ones."""
    data = torch.ones((1 << 30) if device.type == "cuda" else (1 << 27), device=device)
    return data.nbytes / _best_seconds(data.sum, device, 5)


def _bus_rate(device: torch.device) -> float | None:
    """Bytes per second of copying 512 MB from pinned host memory to the device, the best of several: an idle link starts at a low speed."""
    if device.type == "cpu":
        return None
    source = torch.empty(1 << 29, dtype=torch.uint8).pin_memory()
    target = torch.empty_like(source, device=device)
    return source.nbytes / _best_seconds(lambda: target.copy_(source, non_blocking=True), device, 20)


def _matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second (2 n^3) of one n x n product of random data."""
    n = 8192 if device.type == "cuda" else 2048
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / _best_seconds(lambda: a @ b, device, 5)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return "cpu"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "cpu")


def main() -> int:
    """`python -m lab.measure.machine DEVICE DTYPE THREADS`: prints {read_bytes_s, flops_s, bus_bytes_s} as JSON."""
    device, dtype, threads = torch.device(sys.argv[1]), getattr(torch, sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(threads)
    print(json.dumps({"read_bytes_s": _read_bandwidth(device), "flops_s": _matmul_rate(device, dtype), "bus_bytes_s": _bus_rate(device)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
