"""Host memory that the GPU reads by itself: huge pages, touched by all threads, then registered with the driver.

Why not torch's `pin_memory`: it rounds every allocation up to a power of two, which for a table of 51 GB is 64 GiB. Registered memory is asked for with the
same two calls on CUDA and ROCm (`torch.cuda.cudart()` is the HIP runtime there). What is refused raises an error that names it; nothing falls back in silence.
What it does not prove: that the driver keeps up its bandwidth over so much pinned memory; the bus rate is measured (`lab.measure.tiers`).
"""

from __future__ import annotations

import errno
import mmap
import time
import weakref
from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from lab.errors import GapError, flat
from lab.record import Status

_PORTABLE_MAPPED = 3
"""cudaHostRegisterPortable | cudaHostRegisterMapped; HIP has the same numbers."""
_PAGE = 4096


Register = Callable[[int, int], str | None]


def never(address: int, size: int) -> str | None:
    """Refuses everything."""
    return "disable=pinned"


class PinnedMemory:
    """Allocates for one engine, and remembers how much, how long it took and what was refused. On a CPU device it is ordinary memory."""

    def __init__(self, device: torch.device, register: Register | None = None) -> None:
        """`register` (address, bytes) -> why it was refused, or None: the driver's, unless another is given (disable=pinned, tests)."""
        self.device, self.nbytes, self.seconds = device, 0, 0.0
        self.refused: list[str] = []
        self._register = register or (_registered if device.type == "cuda" else None)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> Tensor:
        """Uninitialised. Raises GapError (UNSUPPORTED) naming `what` where the driver refuses to pin it, (OOM) where there is no such memory."""
        if self._register is None:
            return torch.empty(shape, dtype=dtype)
        size, started = max(1, prod(shape) * dtype.itemsize), time.perf_counter()
        held = _mapped(size, what)
        whole = torch.frombuffer(held, dtype=torch.uint8)
        whole[::_PAGE] = 0  # every thread touches its share of the pages; the driver would do it with one
        if reason := self._register(whole.data_ptr(), whole.numel()):
            self.refused.append(f"{what}: {size / 1e6:,.1f} MB of pinned host memory were refused ({reason})")
            raise GapError(Status.UNSUPPORTED, self.refused[-1])
        if self._register is _registered:
            weakref.finalize(held, _unregister, whole.data_ptr()).atexit = False  # at exit the driver may be gone before us, and frees all
        self.nbytes += size
        self.seconds += time.perf_counter() - started
        return whole[: prod(shape) * dtype.itemsize].view(dtype).view(shape)

    def or_plain(self, shape: tuple[int, ...], dtype: torch.dtype, what: str) -> Tensor:
        """The same, or ordinary memory where pinning was refused: `refused` then says so, and whoever uses it can only do so through the CPU."""
        try:
            return self.empty(shape, dtype, what)
        except GapError as error:
            if error.status is Status.OOM:
                raise
            return torch.empty(shape, dtype=dtype)

    def copy(self, value: Tensor, what: str) -> Tensor:
        """`value`, which may be on the device, in pinned memory. Raises GapError as `empty`."""
        return self.empty(tuple(value.shape), value.dtype, what).copy_(value)

    def evidence(self) -> dict[str, Any]:
        """{bytes, seconds, refused}."""
        return {"bytes": self.nbytes, "seconds": round(self.seconds, 3), "refused": list(self.refused)}


def _mapped(size: int, what: str) -> mmap.mmap:
    """Whole pages of anonymous memory, huge ones where the kernel gives them."""
    try:
        held = mmap.mmap(-1, max(_PAGE, -(-size // _PAGE) * _PAGE))
    except (OSError, OverflowError) as error:
        raise GapError(Status.OOM, f"{what}: {size / 1e6:,.1f} MB of host memory were refused ({error})") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            held.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:  # small pages do as well, only slower
            if error.errno not in (errno.EINVAL, errno.ENOMEM):
                raise
    return held


def _registered(address: int, size: int) -> str | None:
    """Asks the driver; its reason where it refuses."""
    code = int(torch.cuda.cudart().cudaHostRegister(address, size, _PORTABLE_MAPPED))
    if code == 0:
        return None
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:  # the refusal stays the runtime's last error until somebody asks, and would end the next launch
        return f"cudaHostRegister: error {code}, {flat(error, 80)}"
    return f"cudaHostRegister: error {code}"


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


def reachable(tensor: Tensor) -> bool:
    """Whether kernels on the GPU can read this tensor where it lies."""
    return tensor.is_cuda or (torch.cuda.is_available() and tensor.is_pinned())
