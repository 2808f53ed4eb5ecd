"""One layer's routed experts on the CPU as a job: a C function with one pointer, that a thread of the GPU's driver may call in the middle of a graph.

Why apart from the products of `calls`: the driver's thread can hold no Python, the work of one layer is a fraction of a millisecond, so its threads are an
own crew that stays awake between layers, and weights lie in the order that the GPU's kernels read (lab.kernels.planes), so that one copy in host memory
serves both. Activations stay float32. A job reports what it did in `totals`, with its own clock.
What it does not prove: that the CPU reads memory as fast as it can; `Office.read_bytes_s` is what its rate can be set against.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lab.errors import LabError
from lab.kernels.native import calls
from lab.kernels.planes import CHUNK, Planes

TOTALS = ("calls", "tokens", "pairs", "experts", "ns", "refused")
"""What a job adds up: calls, tokens seen, (token, expert) pairs computed, different experts read, nanoseconds, pairs whose expert does not exist."""
_SCALES = {torch.uint8: 0, torch.float16: 1, torch.bfloat16: 2, torch.float32: 3}
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class _Stack(ctypes.Structure):
    """Mirrors `Stack` of src/planes.h."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("unit", ctypes.c_void_p),
        ("levels", ctypes.c_float * 16),
        *((name, ctypes.c_int64) for name in ("count", "halves", "rows", "cols", "groups", "group_chunks")),
        ("bits", ctypes.c_int32),
        ("scale_kind", ctypes.c_int32),
    )


class _Job(ctypes.Structure):
    """Mirrors `Job` of src/cold.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("office", "gate_up", "down", "x", "ids", "weights", "y", "totals")),
        ("tokens", ctypes.c_int64),
        ("topk", ctypes.c_int64),
        ("x_kind", ctypes.c_int32),
    )


class Office:
    """The crew of threads that one engine's jobs share; one job runs at a time."""

    def __init__(self, threads: int) -> None:
        """`threads`: how many work at a time, that of the caller included. Raises LabError where there are no native kernels."""
        self.threads = max(1, threads)
        self._library = _declared()
        self.address: int = self._library.lab_office(self.threads)
        self._enrolled: list[Any] = []
        self.close = weakref.finalize(self, self._library.lab_office_close, self.address)
        self.close.atexit = False  # the driver may still be in a job; the process's end takes the threads
        # The attendant looks into memory that Python frees at its end. Made after `close`, so that it is called before it.
        self._leave = weakref.finalize(self, self._library.lab_office_leave, self.address)

    def run_address(self) -> int:
        """Of `void lab_cold_run(void* job)`."""
        return ctypes.cast(self._library.lab_cold_run, ctypes.c_void_p).value or 0

    def enroll(self, job: Job) -> int:
        """The number by which the bell calls the job; the office keeps it. Raises LabError for more than 16,384."""
        number: int = self._library.lab_office_enroll(self.address, job.address)
        if number < 0:
            raise LabError("cold experts: more jobs than an office has room for")
        self._enrolled.append(job.memory)
        return number

    def attend(self, bell: Tensor, answer: Tensor) -> None:
        """Starts a thread that runs a job whenever the int64 at `bell` changes (its number in the upper half), and then copies it to `answer`. Once only."""
        self._enrolled += [bell, answer]
        self._library.lab_office_attend(self.address, bell.data_ptr(), answer.data_ptr())

    def run(self, job: Job) -> None:
        """The job, now, on this thread and the crew's."""
        self._library.lab_cold_run(job.address)

    def read_bytes_s(self, memory: Tensor) -> float:
        """Bytes per second at which the crew reads a contiguous CPU tensor once."""
        return memory.nbytes / (self._library.lab_office_read(self.address, memory.data_ptr(), memory.nbytes) * 1e-9)


class Stack:
    """One of a layer's two stacks in host memory, as a job reads it: planes of 2, 3 or 8 bits, or bfloat16 [E, halves * rows, cols]."""

    def __init__(self, weight: Planes | Tensor, halves: int) -> None:
        """Raises LabError for tensors that are not on the CPU, not contiguous, or of other dtypes and shapes. They are read in place."""
        self.weight, self.halves = weight, halves
        if isinstance(weight, Planes):
            self.struct, tensors = _of_planes(weight), [weight.words, weight.scale, weight.unit]
            right = weight.halves == halves and weight.bits in (2, 3, 8) and weight.scale.dtype in _SCALES and weight.words.dtype == torch.int32
        else:
            count, rows, cols = weight.shape
            self.struct, tensors = _Stack(count=count, halves=halves, rows=rows // halves, cols=cols, bits=16, words=weight.data_ptr()), [weight]
            right = weight.dtype == torch.bfloat16 and rows % halves == 0
        if not right or not all(one.is_cpu and one.is_contiguous() for one in tensors):
            raise LabError(f"cold experts: a stack of {[(list(one.shape), str(one.dtype), str(one.device)) for one in tensors]} cannot be read on the CPU")

    @property
    def bytes_per_expert(self) -> int:
        """What computing with one expert reads."""
        tensors = [self.weight.words, self.weight.scale, self.weight.unit] if isinstance(self.weight, Planes) else [self.weight]
        return sum(one.nbytes for one in tensors) // int(self.struct.count)


class Job:
    """One call's numbers and addresses: fixed, so that a graph may run it again and again on other contents. It keeps alive what it points to."""

    def __init__(self, office: Office, stacks: Sequence[Stack], x: Tensor, ids: Tensor, weights: Tensor, y: Tensor, totals: Tensor) -> None:
        """x [T, hidden] float32, float16 or bfloat16, ids int32 [T, k] (below 0: computed elsewhere), weights float32 [T, k], y float32 [T, hidden] (written
        whole), totals int64 [len(TOTALS)], added to; all contiguous on the CPU. stacks: gate_up (halves=2) and down. Raises LabError where they do not fit."""
        gate_up, down = stacks
        first, second = gate_up.struct, down.struct
        tokens, hidden = x.shape
        fits = (first.halves, second.halves, first.count, first.rows, first.cols, second.rows) == (2, 1, second.count, second.cols, hidden, hidden)
        fits &= ids.shape == weights.shape and len(ids) == tokens and y.shape == x.shape and totals.shape == (len(TOTALS),)
        fits &= x.dtype in _KINDS and (ids.dtype, weights.dtype, y.dtype, totals.dtype) == (torch.int32, torch.float32, torch.float32, torch.int64)
        if not fits or not all(one.is_cpu and one.is_contiguous() for one in (x, ids, weights, y, totals)):
            raise LabError(f"cold experts: x {x.dtype} {list(x.shape)}, ids {ids.dtype} {list(ids.shape)}, y {y.dtype} {list(y.shape)} do not fit the stacks")
        self._office, self.memory = office, [gate_up, down, x, ids, weights, y, totals]
        addresses = {name: one.data_ptr() for name, one in (("x", x), ("ids", ids), ("weights", weights), ("y", y), ("totals", totals))}
        self._struct = _Job(
            office=office.address, gate_up=ctypes.addressof(first), down=ctypes.addressof(second), **addresses,
            tokens=tokens, topk=ids.shape[1], x_kind=_KINDS[x.dtype],
        )  # fmt: skip
        self.memory.append(self._struct)
        self.address = ctypes.addressof(self._struct)


def _of_planes(planes: Planes) -> _Stack:
    levels = [1.0 / 128] * 16
    if planes.bits != 8:
        table = torch.tensor([(planes.lut >> (8 * code)) & 255 for code in range(1 << planes.bits)], dtype=torch.uint8)
        levels = table.view(torch.float8_e5m2).float().repeat(16 >> planes.bits).tolist()
    return _Stack(
        planes.words.data_ptr(), planes.scale.data_ptr(), planes.unit.data_ptr(), (ctypes.c_float * 16)(*levels), len(planes.words), planes.halves,
        planes.rows, planes.cols, planes.scale.shape[3], planes.group // CHUNK, planes.bits, _SCALES.get(planes.scale.dtype, -1),
    )  # fmt: skip


def _declared() -> ctypes.CDLL:
    """The library with these functions' types. Raises LabError where it is unavailable."""
    library = calls.library()
    pointer, long = ctypes.c_void_p, ctypes.c_int64
    library.lab_office.argtypes, library.lab_office.restype = (ctypes.c_int,), pointer
    library.lab_office_close.argtypes, library.lab_office_close.restype = (pointer,), None
    library.lab_office_leave.argtypes, library.lab_office_leave.restype = (pointer,), None
    library.lab_office_enroll.argtypes, library.lab_office_enroll.restype = (pointer, pointer), long
    library.lab_office_attend.argtypes, library.lab_office_attend.restype = (pointer, pointer, pointer), None
    library.lab_cold_run.argtypes, library.lab_cold_run.restype = (pointer,), None
    library.lab_office_read.argtypes, library.lab_office_read.restype = (pointer, pointer, long), long
    return library
