"""Space on the device for experts that lie in host memory: rooms with kernels on them, and the buffer that whole layers pass through.

A room's tensors have the form that the resident path's kernels read, so that what is copied in is multiplied as it is. The buffer's two stacks come and go
on their own: the next layer's first is copied on a second stream while this one's second is multiplied.
What it does not prove: that a copy brought the right bytes; comparing results with the resident path does (tests).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from lab.capacity.tiers import STAGED_LAYERS
from lab.errors import GapError, LabError
from lab.kernels.experts import LowBitExperts
from lab.kernels.experts_bf16 import Bf16Experts
from lab.kernels.experts_prefill import grouped_experts
from lab.kernels.slots import SlotTables
from lab.ops import Packed
from lab.ops_gpu import LOW_BIT, KernelExperts
from lab.record import Status

BUFFERS = STAGED_LAYERS
Kernel = LowBitExperts | Bf16Experts


def taken_over(kind: str, gate_up: Packed, down: Packed, layer: int) -> tuple[KernelExperts, list[Tensor]]:
    """The operation that both stacks become on their device (their parts are freed), and its parts as words [E, n] for host memory. Raises GapError
    (UNSUPPORTED), which names the placement `kind`, for a codec without kernels or experts of no whole words."""
    names = {gate_up.codec.name, down.codec.name}
    if len(names) > 1 or not names <= {*LOW_BIT, "bf16"}:
        known = ", ".join((*LOW_BIT, "bf16"))
        raise GapError(Status.UNSUPPORTED, f"layer {layer}: experts in {', '.join(sorted(names))} cannot be {kind}; the codecs that can: {known}")
    try:
        made = KernelExperts(gate_up, down)
        return made, [words_of(part) for part in expert_parts(made.slots)]
    except LabError as error:
        raise GapError(Status.UNSUPPORTED, f"layer {layer}: experts cannot be {kind}: {error}") from None


def expert_parts(kernel: Kernel) -> list[Tensor]:
    """The tensors [E, ...] that an expert's bytes are in."""
    if isinstance(kernel, Bf16Experts):
        return [kernel.gate_up_weight, kernel.down_weight]
    first, second = kernel.gate_up_planes, kernel.down_planes
    return [first.words, first.scale, second.words, second.scale]


def expert_units(kernel: Kernel) -> list[Tensor]:
    """float32 [E] of each stack, beside the parts; of bfloat16 stacks ones, which nobody reads."""
    if isinstance(kernel, Bf16Experts):
        return [torch.ones(len(kernel.down_weight), device=kernel.down_weight.device) for _ in range(2)]
    return [kernel.gate_up_planes.unit, kernel.down_planes.unit]


def words_of(part: Tensor) -> Tensor:
    """[E, ...] as int64 [E, n]. Raises LabError where an expert's bytes are not whole words."""
    flat = part.flatten(1)
    if flat.shape[1] * flat.element_size() % 16:
        raise LabError(f"{flat.shape[1] * flat.element_size()} bytes of an expert are not whole words of 16")
    return flat.view(torch.int64)


@dataclass
class Room:
    """Space on the device for `count` experts, and the kernels on it. `parts` int64 [count, n] each, `units` float32 [count] each."""

    kernel: Kernel
    parts: list[Tensor]
    units: list[Tensor]

    @classmethod
    def like(cls, kernel: Kernel, count: int) -> Room:
        """For experts of `kernel`'s form; uninitialised."""
        parts = [torch.empty(count, words_of(part).shape[1], dtype=torch.int64, device=part.device) for part in expert_parts(kernel)]
        units = [torch.empty(count, dtype=torch.float32, device=unit.device) for unit in expert_units(kernel)]
        shaped = [new.view(old.dtype).view(count, *old.shape[1:]) for new, old in zip(parts, expert_parts(kernel), strict=True)]
        return cls._of(kernel, shaped, parts, units)

    @classmethod
    def _of(cls, kernel: Kernel, shaped: list[Tensor], parts: list[Tensor], units: list[Tensor]) -> Room:
        if isinstance(kernel, Bf16Experts):
            return cls(Bf16Experts(*shaped), parts, units)
        first = replace(kernel.gate_up_planes, words=shaped[0], scale=shaped[1], unit=units[0])
        return cls(LowBitExperts(first, replace(kernel.down_planes, words=shaped[2], scale=shaped[3], unit=units[1])), parts, units)

    def first(self, count: int) -> Room:
        """The same memory, of which the first `count` experts are used."""
        shaped = [part[:count] for part in expert_parts(self.kernel)]
        return Room._of(self.kernel, shaped, [part[:count] for part in self.parts], [unit[:count] for unit in self.units])

    def nbytes(self) -> int:
        """Bytes."""
        return sum(part.nbytes for part in (*self.parts, *self.units))


class Streamed(Protocol):
    """A layer's experts in host memory, which can be streamed. `source` and `units`: as the parts and units of a `Room`, of all its experts."""

    layer: int
    codec: str
    source: list[Tensor]
    units: list[Tensor]
    count: int
    host_bytes: int
    expert_bytes: int
    streamed_rows: int
    tables: SlotTables


class Buffer:
    """A room that whole layers pass through, its two stacks on their own. `layer`: whose experts are in it or on their way; None once they were used."""

    def __init__(self, room: Room, stream: Any) -> None:
        self.room, self.stream = room, stream
        self.layer: int | None = None
        events: list[list[Any]] = [[None if stream is None else torch.cuda.Event() for _ in range(2)] for _ in range(2)]
        self.ready, self.used = events

    def fill(self, op: Streamed) -> bool:
        """Begins to bring a layer's experts, unless they are on their way. True where it began."""
        if self.layer == op.layer:
            return False
        self.layer = op.layer
        half = len(self.room.parts) // 2
        for stack in range(2):
            own = [*self.room.parts[stack * half : (stack + 1) * half], self.room.units[stack]]
            its = [*op.source[stack * half : (stack + 1) * half], op.units[stack]]
            if self.stream is None:
                for one, other in zip(own, its, strict=True):
                    one.copy_(other)
                continue
            self.stream.wait_event(self.used[stack])
            with torch.cuda.stream(self.stream):
                for one, other in zip(own, its, strict=True):
                    one.copy_(other, non_blocking=True)
                self.ready[stack].record(self.stream)
        return True

    def multiply(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """What `fill` brought, times the tokens."""
        self._wait(0, x.device)
        y = grouped_experts(self.room.kernel, x, ids, weights, lambda: self._next_stack(x.device))
        self._release(1, x.device)
        self.layer = None
        return y

    def _next_stack(self, device: torch.device) -> None:
        self._release(0, device)
        self._wait(1, device)

    def _wait(self, stack: int, device: torch.device) -> None:
        if self.stream is not None:
            torch.cuda.current_stream(device).wait_event(self.ready[stack])

    def _release(self, stack: int, device: torch.device) -> None:
        if self.stream is not None:
            self.used[stack].record(torch.cuda.current_stream(device))
