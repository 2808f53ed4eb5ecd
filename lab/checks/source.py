"""Where the checks look: files of the kernel, a tool's answer, the room on a disk, limits of this process.

The one seam between the checks and the machine. Tests put recorded files and answers in its place, so that a 64 MB /dev/shm or an H200 can be
looked at anywhere. Nothing here judges what it reads.
"""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import NamedTuple

from lab.devices import accelerators

ASK_S = 3.0
"""How long a tool may take unless told otherwise. It answers in 0.03 s on a healthy machine; a hung driver never answers."""
PROBE_BYTES = 4096


class UnseenError(Exception):
    """A tool could not be asked or did not answer; the message says why in one line."""


class AbsentError(UnseenError):
    """The tool is not installed."""


class Room(NamedTuple):
    """Bytes of a file system, free for this user and in all."""

    free_bytes: int
    total_bytes: int


def ask_tool(argv: Sequence[str], within_s: float = ASK_S) -> str:
    """What the command prints. Raises UnseenError if it is not there, fails, or takes longer than `within_s`."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=within_s, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise AbsentError(f"{argv[0]} is not installed") from None
    except subprocess.TimeoutExpired:
        raise UnseenError(f"{argv[0]} did not answer within {within_s:g} s") from None
    except OSError as error:
        raise UnseenError(f"{argv[0]} could not be started: {error.strerror}") from None
    if done.returncode:
        said = " ".join((done.stdout + " " + done.stderr).split())[:200]
        raise UnseenError(f"{argv[0]} ended with exit code {done.returncode}: {said or 'it said nothing'}")
    return done.stdout


def room_in(folder: Path) -> Room:
    """The room in `folder`, after really writing a small file there: quotas, used-up inodes and read-only disks show in no number. Raises OSError."""
    with tempfile.TemporaryFile(dir=folder) as stream:
        stream.write(b"\0" * PROBE_BYTES)
        stream.flush()
    found = os.statvfs(folder)
    return Room(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


def lockable_bytes() -> int | None:
    """Bytes of memory this process may pin (RLIMIT_MEMLOCK, soft); None is unlimited."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


@dataclass(frozen=True)
class Source:
    """This machine, unless a test says otherwise. `root` is prefixed to every file of the kernel."""

    root: Path = Path("/")
    ask: Callable[[Sequence[str]], str] = ask_tool
    room: Callable[[Path], Room] = room_in
    lockable_bytes: Callable[[], int | None] = lockable_bytes
    cores: Callable[[], set[int]] = lambda: os.sched_getaffinity(0)
    pause: Callable[[float], None] = time.sleep
    accelerators: Callable[[], tuple[str, ...]] = accelerators

    def text(self, path: str | PurePath) -> str | None:
        """The stripped content of a file such as `proc/meminfo`; None where it is absent or may not be read."""
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return None

    def number(self, path: str | PurePath) -> int | None:
        """The whole number in a file; None where there is none (also `max`)."""
        text = self.text(path)
        try:
            return int(text) if text is not None else None
        except ValueError:
            return None

    def matching(self, pattern: str) -> list[Path]:
        """The files and folders that match, sorted."""
        return sorted(self.root.glob(pattern))
