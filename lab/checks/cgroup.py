"""What a container allows: memory and processor time of this process's control group, and of the groups above it; and whom it cost their memory.

The kernel's own figures (/proc/meminfo, the number of cores) are the machine's, also inside a container; a process that goes by them is killed
or throttled without a word. Both versions of the interface are read. A limit set above the visible tree, as seen from inside a
container, cannot be found.
Source: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst of the Linux kernel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import NamedTuple

from lab.checks.source import Source

_FILE_CACHE = ("inactive_file", "active_file")
"""Entries of memory.stat. Both give way: a file that was read twice is active, which weights are once they were checked and loaded."""
_UNLIMITED = 1 << 60
"""Version 1 writes "no limit" as a number near 2**63."""


class MemoryLimit(NamedTuple):
    """The narrowest limit and what is left below it, in bytes."""

    limit_bytes: int
    left_bytes: int


def memory_limit(source: Source) -> MemoryLimit | None:
    """The group with the least memory left; None without a limit. The file cache does not count as used, since it gives way."""
    found = []
    for folder, version in _groups(source, "memory"):
        limit_file, used_file, prefix = ("memory.max", "memory.current", "") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        limit, used = source.number(folder / limit_file), source.number(folder / used_file)
        if limit is None or used is None or limit >= _UNLIMITED:
            continue
        stat = source.text(folder / "memory.stat")
        cached = sum(_entry(stat, prefix + key) or 0 for key in _FILE_CACHE)
        found.append(MemoryLimit(limit, max(0, limit - max(0, used - cached))))
    return min(found, key=lambda one: one.left_bytes, default=None)


def oom_kills(source: Source) -> int | None:
    """How many processes of this group (version 2: and of those below it) the kernel has ended because memory ran out; None where it does not count them."""
    for folder, version in _groups(source, "memory"):
        killed = _entry(source.text(folder / ("memory.events" if version == 2 else "memory.oom_control")), "oom_kill")
        if killed is not None:
            return killed
    return None


def core_quota(source: Source) -> float | None:
    """How many cores' worth of time this process may use, the narrowest quota; None without one."""
    quotas = []
    for folder, version in _groups(source, "cpu"):
        if version == 2:
            quota, _, period = (source.text(folder / "cpu.max") or "max").partition(" ")
        else:
            quota, period = (source.text(folder / f"cpu.cfs_{part}_us") or "" for part in ("quota", "period"))
        if quota.isdigit() and period.isdigit() and int(period):
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _groups(source: Source, controller: str) -> Iterator[tuple[PurePosixPath, int]]:
    """The folders that may hold this process's limits, from its own group up to the root, with the interface version."""
    for controllers, group in re.findall(r"^\d+:([^:]*):(.*)$", source.text("proc/self/cgroup") or "", re.MULTILINE):
        if controllers and controller not in controllers.split(","):
            continue
        base, version = (PurePosixPath("sys/fs/cgroup") / controller, 1) if controllers else (PurePosixPath("sys/fs/cgroup"), 2)
        own = PurePosixPath(group.lstrip("/"))
        for part in (own, *own.parents):
            yield base / part, version


def _entry(text: str | None, key: str) -> int | None:
    """The number after `key` in a file of `key value` lines; None where it is not listed."""
    for line in (text or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key and value.isdecimal():
            return int(value)
    return None
