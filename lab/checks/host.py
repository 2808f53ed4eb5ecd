"""The host: memory, swap, what other processes do to the processor, how many cores, how fast they may run, and how much memory can be pinned.

These decide whether timings mean anything: a busy neighbour, a power-saving clock or a container's quota slow a path down without an error. All is
read from the kernel's files at one moment before the measurement; what happens during it is not seen here.
"""

from __future__ import annotations

import re

from lab.cell import DeviceSpec
from lab.checks.cgroup import core_quota, memory_limit
from lab.checks.check import Finding, check, known, ok, size, unknown, warn
from lab.checks.source import Source

LOW_MEMORY_BYTES = 2 << 30
"""Below this, loading the libraries and nano already comes close."""
SWAP_BYTES = 256 << 20
"""Swapped out pages of idle programs are common and harmless up to about here."""
SAMPLE_S = 0.15
BUSY_SHARE = 0.10
"""Of all cores. One core of sixteen still leaves room; more competes for caches and memory bandwidth."""
_OWN_GOVERNOR = ("intel_pstate", "amd-pstate-epp")
"""Drivers whose `powersave` governor still reaches the highest clock (Documentation/admin-guide/pm of the Linux kernel)."""
_SAMPLED_CORES = 8
"""Reading the current clock of an idle core can wake it; a few are enough."""


@check("memory")
def memory(source: Source) -> Finding:
    """Memory free for a new process: the kernel's estimate, or what a container's limit leaves, whichever is less."""
    table = _meminfo(source)
    if "MemAvailable" not in table:
        return unknown("/proc/meminfo does not tell")
    free, total, limit = table["MemAvailable"], table["MemTotal"], memory_limit(source)
    said = f"{size(free)} of {size(total)} available (/proc/meminfo)"
    if limit is not None:
        said += f"; the container's limit of {size(limit.limit_bytes)} leaves {size(limit.left_bytes)} (cgroup)"
        free = min(free, limit.left_bytes)
    values = known(available_bytes=free, total_bytes=total, limit_bytes=limit and limit.limit_bytes)
    if free < LOW_MEMORY_BYTES:
        return warn(said, "end other programs, or raise the container's limit (docker --memory)", **values)
    return ok(said, **values)


@check("swap")
def swap(source: Source) -> Finding:
    """Memory swapped out now. A machine that swaps times its disk."""
    table = _meminfo(source)
    if "SwapTotal" not in table:
        return unknown("/proc/meminfo does not tell")
    used, total = table["SwapTotal"] - table["SwapFree"], table["SwapTotal"]
    said = f"{size(used)} of {size(total)} in use (/proc/meminfo)" if total else "none (/proc/meminfo)"
    if used > SWAP_BYTES:
        return warn(said, "end what fills the memory, then: swapoff -a && swapon -a", used_bytes=used, total_bytes=total)
    return ok(said, used_bytes=used, total_bytes=total)


@check("load")
def load(source: Source) -> Finding:
    """How many cores others keep busy, over SAMPLE_S; time taken by other guests of the same host counts too.

    The load average is told but not judged: after one cell of a sweep it still holds that cell's own work for a minute.
    """
    before = _processor_times(source)
    source.pause(SAMPLE_S)
    after = _processor_times(source)
    average = (source.text("proc/loadavg") or "unknown").split()[0]
    present = _online_cores(source)
    if before is None or after is None or after[1] <= before[1] or not present:
        return unknown(f"/proc/stat does not tell; load average of the last minute: {average}")
    share = (after[0] - before[0]) / (after[1] - before[1])
    said = f"others keep {share * present:.1f} of {present} cores busy (/proc/stat, {SAMPLE_S:g} s; load average {average})"
    values = {"busy_cores": round(share * present, 3), "cores": present}
    if share > BUSY_SHARE:
        return warn(said, "wait for them or end them; timings taken now are of a shared machine", **values)
    return ok(said, **values)


@check("cores")
def cores(source: Source, device: DeviceSpec | None) -> Finding:
    """Threads the cell would use against the cores and the processor time it may use."""
    usable, present, quota = len(source.cores()), _online_cores(source), core_quota(source)
    threads = (device.threads if device else 0) or usable
    said = f"{usable} of {present} cores usable (affinity)" if present else f"{usable} cores usable (affinity)"
    said += f", {threads} threads" + (f", quota of {quota:g} cores (cgroup)" if quota is not None else "")
    values = known(usable=usable, present=present or None, threads=threads, quota_cores=quota)
    if threads > usable:
        return warn(said, f"device.threads={usable}: more threads than cores wait for each other", **values)
    if quota is not None and quota < threads:
        fix = f"device.threads={max(1, int(quota))}, or raise the container's quota (docker --cpus): threads beyond it are stopped in turns"
        return warn(said, fix, **values)
    return ok(said, **values)


@check("cpu_clocks")
def cpu_clocks(source: Source) -> Finding:
    """Governor and clock limits of the usable cores. The current clock of an idle core says little and is not judged."""
    folders = [f"sys/devices/system/cpu/cpu{core}/cpufreq" for core in sorted(source.cores())]
    governors = sorted({text for folder in folders if (text := source.text(f"{folder}/scaling_governor"))})
    if not governors:
        return unknown("no cpufreq files: the clocks are the host's affair, as in most virtual machines")
    driver = source.text(f"{folders[0]}/scaling_driver") or "unknown driver"
    allowed = [number for folder in folders if (number := source.number(f"{folder}/scaling_max_freq"))]
    possible = [number for folder in folders if (number := source.number(f"{folder}/cpuinfo_max_freq"))]
    current = [number for folder in folders[:_SAMPLED_CORES] if (number := source.number(f"{folder}/scaling_cur_freq"))]
    values = {name: max(khz) / 1000 for name, khz in (("now_mhz", current), ("allowed_mhz", allowed), ("possible_mhz", possible)) if khz}
    said = f"governor {', '.join(governors)} ({driver})" + "".join(f", {name.removesuffix('_mhz')} {mhz:.0f} MHz" for name, mhz in values.items())
    if "powersave" in governors and driver not in _OWN_GOVERNOR:
        return warn(said, "cpupower frequency-set -g performance: this governor stays at the lowest clock", **values)
    if allowed and possible and min(allowed) < min(possible):
        return warn(said, f"cpupower frequency-set -u {min(possible) // 1000}MHz: the clock is capped below what the processor can do", **values)
    return ok(said, **values)


@check("memlock")
def memlock(source: Source, wants_gpu: bool) -> Finding:
    """Memory that may be pinned. Experts kept in pinned host memory need more than the usual 8 MiB; without it, engines fall back quietly."""
    limit, total = source.lockable_bytes(), _meminfo(source).get("MemTotal")
    if limit is None:
        return ok("unlimited (RLIMIT_MEMLOCK)")
    said = f"{size(limit)} may be pinned (RLIMIT_MEMLOCK)"
    if wants_gpu and (total is None or limit < total):
        return warn(said, "ulimit -l unlimited (docker --ulimit memlock=-1): paths with pinned host memory fail or slow down", limit_bytes=limit)
    return ok(said if wants_gpu else f"{said}; nothing is pinned on the CPU", limit_bytes=limit)


def _meminfo(source: Source) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    table = {}
    for line in (source.text("proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        if value.endswith(" kB"):
            table[name] = int(value.removesuffix(" kB")) * 1024
    return table


def _online_cores(source: Source) -> int:
    """Cores of the machine, whatever this process may use of them; 0 where /proc/stat does not tell."""
    return len(re.findall(r"^cpu\d+ ", source.text("proc/stat") or "", re.MULTILINE))


def _processor_times(source: Source) -> tuple[int, int] | None:
    """Clock ticks of all cores since boot: (busy or taken by other guests, all). See proc_stat in proc(5); guest time is part of user time."""
    lines = (source.text("proc/stat") or "").splitlines()
    fields = lines[0].split() if lines else []
    if len(fields) < 9 or fields[0] != "cpu":
        return None
    user, nice, system, idle, iowait, irq, softirq, steal = map(int, fields[1:9])
    busy = user + nice + system + irq + softirq + steal
    return busy, busy + idle + iowait
