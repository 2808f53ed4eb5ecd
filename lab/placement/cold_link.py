"""How the GPU calls the CPU's job in the middle of a step, captured or not, without Python.

Two ways. A bell: a kernel writes the job's number into pinned memory, a thread of the CPU that looks there runs it and answers, and a kernel that looks for
the answer holds back what follows. A host node: the driver calls the job on a thread of its own (cuLaunchHostFunc and hipLaunchHostFunc take the same three
arguments). The bell costs two trips over the bus, a host node the waking of a thread. Each is tried before it is used, outside a graph and inside; where both
fail, or memory could not be pinned, the step waits for the device and calls the job itself, and `reason` says why.
What it does not prove: that the CPU is not busy with something else when the bell rings; the time of a step shows it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lab.errors import GapError, LabError, flat
from lab.kernels.native.cold import Job, Office
from lab.placement.cold_kernels import await_answer, ring
from lab.placement.pinned import PinnedMemory

_LIBRARIES = {"cuLaunchHostFunc": ("libcuda.so.1",), "hipLaunchHostFunc": ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6")}
_LINE = 16
"""int64 from the bell to the answer: on cache lines of their own, as one side writes each."""
MOST_LOOKS = 10_000_000
"""A look over the bus takes about a microsecond: ten seconds, after which a step goes on without its answer and evidence says so."""

Launch = Callable[[int, int, int], int]
"""(stream, function, argument) -> 0, or the driver's error."""


class Link:
    """Starts jobs and joins them. `mode`: "bell", "host node", "waiting" (Python waits for the device and calls; `reason` says why), or "inline" (no second
    device: the job is called at once)."""

    def __init__(
        self, office: Office, device: torch.device, memory: PinnedMemory, trial: Job, done: Callable[[], int], launch: Launch | None = None, bell: bool = True
    ) -> None:
        """Tries both ways with `trial`, a job that may run any number of times; `done` says how often it has. `launch`: the driver's, unless a test gives
        one; `bell`: whether there may be one."""
        self.office, self.device, self.memory = office, device, memory
        self.mode, self.reason = "inline", ""
        self.tried: dict[str, str] = {}
        """Ways that failed, and why."""
        self.late = torch.zeros(1, dtype=torch.int64, device=device)
        self._turn = torch.zeros(1, dtype=torch.int64, device=device)
        self._function = office.run_address()
        self._numbers: dict[int, int] = {}
        self._stream: Any = None
        self._launch = launch
        if device.type != "cuda":
            return
        self._stream = torch.cuda.Stream(device)
        for mode, prepare in (("bell", self.hang_bell if bell else lambda: "switched off"), ("host node", self._find_driver)):
            self.mode = mode
            failure = prepare() or self._fails(trial, done)
            if failure is None:
                return
            self.tried[mode] = failure
        self.mode, self.reason = "waiting", "; ".join(f"{mode}: {why}" for mode, why in self.tried.items())

    def fall_back(self, reason: str) -> None:
        """From here on steps wait for the device."""
        if self.mode != "inline":
            self.mode, self.reason = "waiting", reason

    def start(self, job: Job) -> None:
        """The job runs once what is in the current stream has ended, beside what follows there until `join`."""
        if self.mode == "bell":
            ring(self._turn, self._bell, self._number(job))
        elif self.mode == "host node":
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            assert self._launch is not None
            if code := self._launch(self._stream.cuda_stream, self._function, job.address):
                raise RuntimeError(f"the driver refused a host function in the stream: error {code}")
        else:
            if self.mode == "waiting":
                torch.cuda.current_stream(self.device).synchronize()
            self.office.run(job)

    def join(self, job: Job) -> None:
        """What follows in the current stream waits for the job."""
        if self.mode == "bell":
            await_answer(self._turn, self._answer, self.late, self._number(job), MOST_LOOKS)
        elif self.mode == "host node":
            torch.cuda.current_stream(self.device).wait_stream(self._stream)

    def hang_bell(self) -> str | None:
        """Memory for the bell and a thread that attends to it; why not, or None."""
        try:
            lines = self.memory.empty((2 * _LINE,), torch.int64, "the bell of cold experts")
        except GapError as error:
            return flat(error)
        lines.zero_()
        self._bell: Tensor = lines[:1]
        self._answer: Tensor = lines[_LINE : _LINE + 1]
        self.office.attend(self._bell, self._answer)
        self.mode = "bell"
        return None

    def _number(self, job: Job) -> int:
        if job.address not in self._numbers:
            self._numbers[job.address] = self.office.enroll(job)
        return self._numbers[job.address]

    def _fails(self, trial: Job, done: Callable[[], int]) -> str | None:
        """Why jobs cannot be called from a stream and from a graph this way, or None: both are done once."""
        before = done()
        try:
            self.start(trial)
            self.join(trial)
            torch.cuda.synchronize(self.device)
            if done() != before + 1:
                return f"called from a stream, a job ran {done() - before} times instead of once"
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.start(trial)
                self.join(trial)
            graph.replay()
            torch.cuda.synchronize(self.device)
        except (RuntimeError, LabError) as error:
            return flat(error)
        return None if done() == before + 2 else f"called from a graph, a job ran {done() - before - 1} times instead of once"

    def _find_driver(self) -> str | None:
        found = self._launch or _driver()
        if isinstance(found, str):
            return found
        self._launch = found
        return None


def _driver() -> Launch | str:
    """The driver's function, or why there is none. The library is loaded already; naming it again gives the same one."""
    name = "hipLaunchHostFunc" if torch.version.hip else "cuLaunchHostFunc"
    failures = []
    for library in _LIBRARIES[name]:
        try:
            found = getattr(ctypes.CDLL(library), name)
        except (OSError, AttributeError) as error:
            failures.append(flat(error))
            continue
        found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p), ctypes.c_int
        return lambda stream, function, argument: int(found(stream, function, argument))
    return f"{name} was not found: {failures[0]}"
