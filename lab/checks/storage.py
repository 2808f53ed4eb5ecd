"""Room for what a run writes: records, cache, temporary files and shared memory, each by itself since each fails in its own way.

A full /tmp breaks compilers and unpackers with errors that look like faults of the path; a container's usual 64 MB of /dev/shm stops multi-process engines
without a word. A small file is really written. Room now does not promise room later.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from lab.checks.check import Finding, bad, check, ok, size, warn
from lab.checks.source import Source
from lab.project import Project
from lab.store import MIN_FREE_BYTES

LOW_BYTES = 1 << 30
SHM_BYTES = 1 << 30
"""Engines of several processes pass tensors through shared memory; Docker gives 64 MB unless told otherwise."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


@check("disk_runs")
def runs(source: Source, project: Project) -> Finding:
    """Room for records and logs. Without it nothing is measured."""
    return _disk(source, _existing(project.runs), project.short(project.runs), "free space there, or set LAB_RUNS to a folder that can be written")


@check("disk_cache")
def cache(source: Source, project: Project) -> Finding:
    """Room for what can be made again. A run does without it, only slower."""
    found = _disk(source, _existing(project.cache), project.short(project.cache), "free space on the project's disk, or make the folder writable")
    return warn(found.found, found.fix, **found.values) if found.state == "bad" else found


@check("disk_tmp")
def tmp(source: Source) -> Finding:
    """Room where programs are told to put temporary files. Not `tempfile.gettempdir()`, which quietly takes another folder when this one is full."""
    folder = next((named for name in ("TMPDIR", "TEMP", "TMP") if (named := os.environ.get(name))), "/tmp")
    return _disk(source, Path(folder), folder, "free space there, or set TMPDIR to a folder that exists and can be written")


@check("shm")
def shm(source: Source) -> Finding:
    """Size and room of /dev/shm."""
    fix = "docker --shm-size=16g (or --ipc=host); elsewhere: mount -o remount,size=16g /dev/shm"
    try:
        free, total = source.room(Path("/dev/shm"))
    except OSError as error:
        return warn(f"/dev/shm: {error.strerror}", fix)
    said, values = f"/dev/shm: {size(free)} of {size(total)} free", {"free_bytes": free, "total_bytes": total}
    return warn(said, fix, **values) if free < SHM_BYTES else ok(said, **values)


def _disk(source: Source, folder: Path, name: str, fix: str) -> Finding:
    try:
        free, total = source.room(folder)
    except OSError as error:
        return bad(f"{name}: {'disk full' if error.errno in _FULL else error.strerror}", fix)
    said, values = f"{name}: {size(free)} of {size(total)} free", {"free_bytes": free, "total_bytes": total}
    if free < MIN_FREE_BYTES:
        return bad(f"{name}: disk full, {size(free)} of {size(total)} free", fix, **values)
    return warn(said, fix, **values) if free < LOW_BYTES else ok(said, **values)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists and in which it would be made."""
    return next(path for path in (folder, *folder.parents) if path.exists())
