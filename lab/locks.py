"""File locks between lab processes: one measurement at a time, one writer of MLflow, and a sign of life for a running attempt.

`flock` is used because the kernel gives it back when its holder dies, however it dies: no lock is ever stale and no process id is compared.
It works between processes of one machine; on a network file system it depends on the server.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_S = 0.25
"""Seconds between two tries for a lock that somebody holds. Long enough not to disturb the holder's measurement."""


class GaveUpError(Exception):
    """`wait` said to stop waiting for a lock. No OSError on purpose: a file system that timed out (ETIMEDOUT) is another matter."""


def try_lock(file: Path) -> int | None:
    """Lock `file` (created if absent) and return its descriptor, or None if another process holds it. Raises OSError."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_locked(file: Path) -> bool:
    """Whether a living process holds `file`; False where the file is absent. Raises OSError."""
    if not file.exists():
        return False
    descriptor = try_lock(file)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


@contextmanager
def hold(file: Path, owner: str, on_wait: Callable[[str], None], wait: Callable[[float], bool]) -> Iterator[None]:
    """Hold the lock `file` inside the block, and leave `owner` in it for others to read.

    While somebody else holds it, `on_wait` is told once who, and `wait(seconds)` is called between tries; it returns True to give up,
    which raises GaveUpError. Raises OSError if the file cannot be made.
    """
    told = False
    while (descriptor := try_lock(file)) is None:
        if not told:
            on_wait(file.read_text(errors="replace").strip() or "another lab process")
            told = True
        if wait(POLL_S):
            raise GaveUpError(f"gave up waiting for {file.name}")
    try:
        _write_owner(descriptor, owner)
        yield
    finally:
        os.close(descriptor)


def _write_owner(descriptor: int, owner: str) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, owner.encode(), 0)
    except OSError:
        # On a full disk the lock itself still holds; only its holder's name is missing for those who wait.
        return
