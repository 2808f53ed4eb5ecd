"""A server that the lab starts for one cell, and ends with everything it started.

The server stays in the worker's process group, so that the lab's own end of that group reaches it even when the worker was killed. Children that left the
group or whose parent is gone are found too: on Linux this process adopts them (a child subreaper, prctl(2)), elsewhere only those whose parents still live. A
container is no child of anyone here: it ends when its foreground client passes SIGTERM on. That memory of a GPU is free afterwards is not claimed.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Self

import psutil

from lab.cell import ServerSpec
from lab.engines.server.address import Address
from lab.errors import GapError, LabError
from lab.project import say
from lab.record import Status

POLL_S = 0.2
GRACE_S = 20.0
"""Between asking the server to end and ending it."""
HURRIED_GRACE_S = 3.0
"""The same when the worker itself was asked to end, and has less than `lab.child.GRACE_S` for it."""
TAIL_LINES = 20
KILL_S = 1.5
_SET_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of linux/prctl.h


def start_command(spec: ServerSpec, artifact: Path, layers: int, port: int, threads: int) -> list[str]:
    """The words of the command with {artifact}, {layers}, {port}, {threads} and {python} (this interpreter) filled in; other braces (JSON) stay.

    Raises LabError for an unknown name.
    """
    known = {"{artifact}": str(artifact), "{layers}": str(layers), "{port}": str(port), "{threads}": str(threads), "{python}": sys.executable}
    words = []
    for word in spec.command:
        for name in re.findall(r"\{\w+\}", word):
            if name not in known:
                raise LabError(f"path.server.command: {name} in {word!r} is unknown; known: {', '.join(known)}")
            word = word.replace(name, known[name])  # noqa: PLW2901
        words.append(word)
    return words


class ServerProcess:
    """The started server. Leaving the `with` block ends it and its descendants, whatever happened inside."""

    def __init__(self, command: list[str], environment: dict[str, str], address: Address, cwd: Path) -> None:
        self.command, self.environment, self.address, self.cwd = command, environment, address, cwd
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.left_running = False

    def __enter__(self) -> Self:
        """Starts it. Raises GapError where the address is taken, LabError where the program cannot be started."""
        if _answers(self.address):
            reason = f"something listens on {self.address.host}:{self.address.port} already: end it, or drop path.server.command to measure it as it runs"
            raise GapError(Status.INFRA, reason)
        self._others = {child.pid for child in psutil.Process().children(recursive=True)}
        _adopt_orphans(True)
        self.started_s = time.monotonic()
        try:
            self.process = subprocess.Popen(
                self.command, cwd=self.cwd, env=os.environ | self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        except OSError as error:
            _adopt_orphans(False)
            raise LabError(f"path.server.command: {self.command[0]} cannot be started: {error.strerror}") from None
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        hurried = kind is not None and not issubclass(kind, Exception)
        try:
            self.end(HURRIED_GRACE_S if hurried else GRACE_S)
        except BaseException:
            # Asked to end ourselves while the server had its grace.
            self.end(HURRIED_GRACE_S)
            raise

    def wait_healthy(self, health: Callable[[], tuple[int | None, str]], timeout_s: float) -> float:
        """Seconds from the start to the first healthy answer. Raises GapError when the server ends before or takes longer than `timeout_s`."""
        while True:
            if self.process.poll() is not None:
                raise GapError(Status.LOAD_FAILED, f"the server ended before it was ready: {self.last_words()}")
            status, why = health()
            elapsed_s = time.monotonic() - self.started_s
            if status == 200:
                return elapsed_s
            if elapsed_s > timeout_s:
                said = f"HTTP {status}" if status else why
                reason = f"not ready after path.server.start_timeout_s={timeout_s:g} s (health: {said}); its last lines: {self._last_lines()}"
                raise GapError(Status.TIMEOUT, reason)
            time.sleep(POLL_S)

    def died(self, patience_s: float) -> bool:
        """Whether the server process ends within `patience_s`: a broken connection is noticed a little before an exit."""
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def last_words(self) -> str:
        """How the server ended and the end of its log."""
        # A child of the server may hold the log open for ever; what matters came before the exit.
        self._reader.join(1.0)
        code = self.process.poll()
        how = "still running" if code is None else f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return f"{how}; its last lines: {self._last_lines()}"

    def end(self, grace_s: float) -> None:
        """Ends the server and all its descendants: SIGTERM to each, then SIGKILL to those that are left after `grace_s`."""
        _signal(self._family(), signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while (family := self._family()) and time.monotonic() < deadline:
            psutil.wait_procs(family, timeout=POLL_S)
        deadline = time.monotonic() + KILL_S
        while (family := self._family()) and time.monotonic() < deadline:
            _signal(family, signal.SIGKILL)
            psutil.wait_procs(family, timeout=POLL_S)
        _adopt_orphans(False)
        self._reader.join(POLL_S)
        # A process that waits for a device may outlive even SIGKILL, and a container its client.
        self.left_running = bool(family) or _answers(self.address)

    def _family(self) -> list[psutil.Process]:
        """The living processes that exist through this server: every descendant of ours that was not there before it."""
        self.process.poll()
        found = []
        for child in psutil.Process().children(recursive=True):
            if child.pid in self._others:
                continue
            try:
                if child.status() == psutil.STATUS_ZOMBIE:
                    child.wait(0)  # reaps an adopted one; one with a living parent stays for that parent
                else:
                    found.append(child)
            except (psutil.NoSuchProcess, psutil.TimeoutExpired):
                continue
        return found

    def _last_lines(self) -> str:
        return " | ".join(list(self.tail)[-5:])[-400:] or "none"

    def _read_log(self) -> None:
        """Keeps the end of the server's log and passes all of it on into the attempt's."""
        assert self.process.stdout
        with self.process.stdout as stream:
            for raw in stream:
                line = raw.decode(errors="replace").rstrip()
                if line:
                    self.tail.append(line)
                    say(f"server: {line}")


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _answers(address: Address) -> bool:
    try:
        with socket.create_connection((address.host, address.port), timeout=1.0):
            return True
    except OSError:
        return False


def _adopt_orphans(adopt: bool) -> None:
    """Makes descendants whose parent ends children of this process, instead of the system's first one (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)
