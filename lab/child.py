"""One child process for one attempt: started in its own process group, listened to, and ended as a group.

The parent sleeps in one `select` on the child's events, its log, its end, the deadline and stop signals: it must not take a core from the
measurement, and nothing the child does (crash, silence, a full disk under its log) may leave the parent without an outcome. On Linux the
kernel kills the child when the parent dies; elsewhere the child stops at its next event, whose pipe then has no reader. Processes that the
child itself started may survive the parent's own SIGKILL. The outcome is what the child said, not whether it is true.
"""

from __future__ import annotations

import errno
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.checks.cgroup import oom_kills
from lab.checks.source import Source
from lab.events import EventReader, OnPhase, Outcome
from lab.signals import StopSignals

GRACE_S = 5.0
"""Between asking the group to end (SIGTERM) and ending it (SIGKILL)."""
TAIL_LINES = 20
KILLED_FOR_MEMORY = "the kernel ended the worker: main memory ran out"
"""The outcome's problem when the child ended by SIGKILL while the kernel counted such a kill in this process's control group."""
_CHUNK = 1 << 16

# Runs before the worker, in its process: asks the kernel to kill this process when the lab dies, then becomes the worker. A launcher, not
# a preexec_fn, since Python code between fork and exec can deadlock once a library has started threads.
_LAUNCHER = """
import os, sys
lab = int(sys.argv[1])
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, 9, 0, 0, 0)
if os.getppid() != lab:
    sys.exit("the lab died while starting the worker")
os.execv(sys.argv[2], sys.argv[2:])
"""


def run_child(
    argv: Sequence[str], job: dict[str, Any], *, cwd: Path, log: Path, timeout_s: float, stop: StopSignals, on_phase: OnPhase, machine: Source | None = None
) -> Outcome:
    """Run `argv` with the job on its standard input and `--events-fd N` appended, until it ends, `timeout_s` passes or a stop is asked for.

    Raises OSError if the process cannot be started at all. `machine` is another than this one only in tests.
    """
    machine = machine or Source()
    before = oom_kills(machine)
    outcome = _Child(argv, job, cwd=cwd, log=log, timeout_s=timeout_s, stop=stop, on_phase=on_phase).run()
    after = oom_kills(machine)
    if outcome.killed_by == "SIGKILL" and before is not None and after is not None and after > before:
        outcome.problem = KILLED_FOR_MEMORY
    return outcome


class _Child:
    """The state of one run; see `run_child`."""

    def __init__(self, argv: Sequence[str], job: dict[str, Any], *, cwd: Path, log: Path, timeout_s: float, stop: StopSignals, on_phase: OnPhase) -> None:
        self.stop = stop
        self.outcome = Outcome()
        self.started = time.monotonic()
        self.kill_at = self.started + timeout_s
        self.asked_to_end = False
        self.reader = EventReader(self.outcome, on_phase)
        self.tail: deque[bytes] = deque([b""], maxlen=TAIL_LINES + 1)
        self.log = self._open_log(log)
        events_read, events_write = os.pipe()
        command = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *argv, "--events-fd", str(events_write)]
        try:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(events_write,),
                start_new_session=True,
            )
        except BaseException:
            os.close(events_read)
            raise
        finally:
            os.close(events_write)
        assert self.process.stdout
        self.sources = {events_read: self._on_events, self.process.stdout.fileno(): self._on_log}
        self.events_fd = events_read
        for descriptor in self.sources:
            os.set_blocking(descriptor, False)
        self._give_job(job)

    def run(self) -> Outcome:
        """Sleep until something happens, until the child has ended and everything it wrote is read."""
        selector = selectors.DefaultSelector()
        end_fd = os.pidfd_open(self.process.pid) if hasattr(os, "pidfd_open") else None
        try:
            for descriptor in self.sources:
                selector.register(descriptor, selectors.EVENT_READ)
            for extra in (end_fd, self.stop.fd):
                if extra is not None:
                    selector.register(extra, selectors.EVENT_READ)
            while self.process.poll() is None:
                # Without pidfd (not Linux) the child's end is noticed by looking, four times a second.
                pause = max(0.0, self.kill_at - time.monotonic())
                for key, _ in selector.select(pause if end_fd is not None else min(pause, 0.25)):
                    if key.fd in self.sources and not self.sources[key.fd](key.fd):
                        selector.unregister(key.fd)
                if self.stop.received and self.stop.fd in selector.get_map():
                    selector.unregister(self.stop.fd)
                    self.outcome.ended, self.outcome.stop_signal = "interrupted", self.stop.received
                    self._end_group()
                elif time.monotonic() >= self.kill_at:
                    if self.outcome.ended == "exit":
                        self.outcome.ended = "timeout"
                    self._end_group()
        finally:
            # Also ends what the child left running in its group, and the child itself if an exception came this way.
            self._signal_group(signal.SIGKILL)
            self.process.wait()
            selector.close()
            if end_fd is not None:
                os.close(end_fd)
            for descriptor, read in self.sources.items():
                while read(descriptor):
                    pass
            self._close()
        return self._judge()

    def _end_group(self) -> None:
        """First SIGTERM with some grace, then SIGKILL."""
        self._signal_group(signal.SIGKILL if self.asked_to_end else signal.SIGTERM)
        self.asked_to_end = True
        self.kill_at = time.monotonic() + GRACE_S

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self.process.pid, number)
        except (ProcessLookupError, PermissionError):
            return  # the group is gone already (macOS says EPERM for a group of zombies)

    def _give_job(self, job: dict[str, Any]) -> None:
        """A job is a few kilobytes and fits the pipe, so that writing it cannot block."""
        assert self.process.stdin
        try:
            with self.process.stdin as stream:
                stream.write(json.dumps(job).encode())
        except BrokenPipeError:
            return  # the child died at once; its exit code and log will tell

    def _on_events(self, descriptor: int) -> bool:
        """Read what is there; False once the pipe is empty or closed."""
        chunk = _read(descriptor)
        self.reader.feed(chunk)
        return bool(chunk)

    def _on_log(self, descriptor: int) -> bool:
        chunk = _read(descriptor)
        head, *lines = chunk.split(b"\n")
        self.tail[-1] = (self.tail[-1] + head)[-2000:]
        self.tail.extend(line[-2000:] for line in lines)
        if chunk and self.log is not None:
            try:
                os.write(self.log, chunk)
            except OSError as error:
                self._log_failed(error)
        return bool(chunk)

    def _open_log(self, file: Path) -> int | None:
        try:
            return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            self._log_failed(error)
            return None

    def _log_failed(self, error: OSError) -> None:
        """The log is for people; the measurement goes on without it, and the record says so."""
        self.outcome.log_error = f"log.txt is incomplete: {os.strerror(error.errno or errno.EIO)}"

    def _close(self) -> None:
        os.close(self.events_fd)
        assert self.process.stdout
        self.process.stdout.close()
        if self.log is not None:
            os.close(self.log)

    def _judge(self) -> Outcome:
        outcome = self.outcome
        outcome.exit_code = self.process.returncode
        outcome.elapsed_s = time.monotonic() - self.started
        lines = [line.decode(errors="replace").rstrip("\r") for line in self.tail]
        outcome.log_tail = [line for line in lines if line.strip()][-TAIL_LINES:]
        return outcome


def _read(descriptor: int) -> bytes:
    """What the pipe holds now, at most one chunk; empty when it holds nothing or is closed."""
    try:
        return os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return b""
