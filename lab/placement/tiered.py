"""Experts in pinned host memory with some of them in slots on the GPU: missing ones are copied inside the step, prompts stream whole layers.

A step asks the slot tables (`lab.kernels.slots`), copies what is missing over the bus in one launch and multiplies from the slots, all on the device, so that
it is captured like any other. A prompt would throw everything out of the slots that decoding has gathered, so it leaves them alone: every layer's
experts pass through a buffer on the device that holds one, copied on a second stream: the next layer's first stack while this one's second is multiplied,
its second with the attention in between. The kernels that multiply are those of the resident path on the same bytes, so results are the same to the bit.
What it does not prove: that this keeps the bus busy where a prompt is so long that multiplying takes longer than copying.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lab.counters import Counters
from lab.kernels.experts_prefill import FEW_TOKENS
from lab.kernels.slots import SlotTables, assign, copy_experts
from lab.ops import Packed
from lab.placement.pinned import PinnedMemory
from lab.placement.rooms import BUFFERS, Buffer, Kernel, Room, Streamed, expert_units, taken_over
from lab.placement.tiers import Held, Moved


class TieredPool:
    """What the layers of one engine share (`lab.placement.tiers.Shared`): pinned memory, the buffers, the switch of the counts."""

    graph_reason: str | None = None
    prompt_reason: str | None = "a prompt streams whole layers of experts from host memory through buffers that a graph would have to own"

    def __init__(self, device: torch.device, counters: Counters, layers: tuple[int, ...], slots: int, top_k: int, pinned: PinnedMemory) -> None:
        self.device, self.counters, self.layers, self.slots, self.top_k = device, counters, layers, slots, top_k
        self.pinned = pinned
        self.counting = torch.ones(1, dtype=torch.int64, device=device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.ops: dict[int, Streamed] = {}
        self.buffers: list[Buffer] = []
        self.through: Room | None = None
        self.streamed_bytes = 0
        self._aside = 0
        counters.on_recording.append(self._recording)

    def _recording(self, begins: bool) -> None:
        """What only warms up a graph, or is only traced, is no work of the cell: neither in the slots nor streamed. Recordings may lie in one another."""
        self._aside += 1 if begins else -1
        if self._aside == (1 if begins else 0):
            self._set_aside(begins)

    def _set_aside(self, begins: bool) -> None:
        """The outermost recording begins or ends."""
        self.counting.fill_(0 if begins else 1)

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """What runs inside is no work of the cell."""
        self._recording(True)
        try:
            yield
        finally:
            self._recording(False)

    def add(self, op: Streamed, whole: Kernel) -> None:
        """Takes a layer in; the first one says how large buffers are."""
        self.ops[op.layer] = op
        if not self.buffers:
            self.buffers = [Buffer(Room.like(whole, op.count), self.stream) for _ in range(min(BUFFERS, len(self.layers)))]
            if not self.slots:
                self.through = self.buffers[-1].room.first(min(op.count, FEW_TOKENS * self.top_k))

    def stream_layer(self, op: Streamed, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Many tokens through one layer's experts; the next layer's are asked for as soon as there is room."""
        if not self._aside:
            op.streamed_rows += ids.numel()
        place = self.layers.index(op.layer)
        y = self._fill(op).multiply(x, ids, weights)
        if place + 1 < len(self.layers):
            self._fill(self.ops[self.layers[place + 1]])
        return y

    def settle(self) -> None:
        """After a prompt that did not reach its end: what it had asked for is not waited for by anything, and is forgotten."""
        if any(buffer.layer is not None for buffer in self.buffers):
            torch.cuda.synchronize(self.device) if self.device.type == "cuda" else None
            for buffer in self.buffers:
                buffer.layer = None

    def _fill(self, op: Streamed) -> Buffer:
        buffer = self.buffers[self.layers.index(op.layer) % len(self.buffers)]
        if buffer.fill(op) and not self._aside:
            self.streamed_bytes += op.host_bytes
        return buffer

    def _counts(self) -> list[list[int]]:
        """[asked for, found, missed, copied] by layer."""
        found: list[list[int]] = torch.stack([self.ops[layer].tables.counts for layer in self.layers]).tolist()
        return found

    def moved(self) -> Moved:
        """Totals so far. Waits for the device."""
        counts, each = self._counts(), [self.ops[layer].expert_bytes for layer in self.layers]
        asked, found, missed = (sum(row[column] for row in counts) for column in range(3))
        return Moved(asked, found, missed, sum(row[3] * size for row, size in zip(counts, each, strict=True)), self.streamed_bytes)

    def held(self) -> list[Held]:
        """The buffers. Where there are no slots, a step's experts pass through them, too."""
        rooms = [buffer.room for buffer in self.buffers]
        names = sorted({op.codec for op in self.ops.values()})
        return [Held(", ".join(names), self.device.type, sum(room.nbytes() for room in rooms), 0, "staging")] if rooms else []

    def evidence(self) -> dict[str, Any]:
        """Counts of every layer, what the tables say of themselves, and how the host memory was pinned."""
        counts, ops = self._counts(), [self.ops[layer] for layer in self.layers]
        names = ("requests", "hits", "misses", "copied")
        broken = [f"layer {op.layer}: {problem}" for op in ops if (problem := op.tables.problem())]
        return {
            **{name: [row[column] for row in counts] for column, name in enumerate(names)},
            "streamed_rows": [op.streamed_rows for op in ops],
            "expert_bytes": ops[0].expert_bytes,
            "streamed_bytes": self.streamed_bytes,
            "buffers": len(self.buffers),
            "inconsistent": broken,
            "problems": [],
        }


class TieredExperts:
    """One layer's experts (`lab.placement.tiers.TierExperts`)."""

    def __init__(self, gate_up: Packed, down: Packed, layer: int, pool: TieredPool) -> None:
        """Takes over both stacks, on the compute device: they are repacked there, copied to pinned host memory and freed. Raises GapError for a codec that has
        no kernel, or where host memory is refused."""
        self.layer, self.pool, self.codec, self.count = layer, pool, gate_up.codec.name, gate_up.shape[0]
        self.streamed_rows = 0
        self._counted, parts = taken_over("tiered", gate_up, down, layer)
        whole = self._counted.slots
        self.units = expert_units(whole)
        self._weights = self.count * (gate_up.shape[1] * gate_up.shape[2] + down.shape[1] * down.shape[2])
        self.source = [pool.pinned.copy(part, f"layer {layer}'s experts") for part in parts]
        self.host_bytes = sum(part.nbytes for part in self.source)
        self.expert_bytes = self.host_bytes // self.count
        pool.add(self, whole)
        self.keep = pool.slots > 0
        self.room = Room.like(whole, pool.slots) if self.keep else pool.through
        assert self.room is not None
        self.tables = SlotTables.empty(self.count, len(self.room.units[0]), pool.device, pool.counting)
        gate_up.parts, down.parts = {}, {}
        del self._counted.slots  # the whole layer on the device was only for repacking

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden], ids [T, k], weights [T, k] -> [T, hidden]. A few tokens are a step; many stream the whole layer."""
        room = self.room
        assert room is not None
        if len(x) <= FEW_TOKENS and min(ids.numel(), self.count) <= len(room.units[0]):
            return self.step(x, ids, weights)
        self._counted.count(ids.numel())
        return self.pool.stream_layer(self, x, ids, weights)

    def step(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The same through the slots. Raises LabError where a step asks for more experts than there are slots."""
        return self.slot_kernel(x, self.take(ids), weights)

    @property
    def slot_kernel(self) -> Kernel:
        """The kernels on the slots."""
        assert self.room is not None
        return self.room.kernel

    def take(self, ids: Tensor) -> Tensor:
        """`bring`, counted as one call of the layer's operation: for a step that multiplies from the slots itself."""
        self._counted.count(ids.numel())
        return self.bring(ids)

    def bring(self, ids: Tensor) -> Tensor:
        """ids integer [T, k] -> their slots int32 [T, k], what was missing copied into them."""
        room = self.room
        assert room is not None
        slots, copies = assign(ids, self.tables, self.keep)
        copy_experts(copies, slots, self.tables, self.source, room.parts, [*self.units, *room.units])
        return slots

    def held(self) -> list[Held]:
        """All experts on the host, and the slots."""
        found = [Held(self.codec, "cpu", self.host_bytes, self._weights)]
        if self.keep and self.room is not None:
            units = sum(unit.nbytes for unit in self.units)
            found.append(Held(self.codec, self.pool.device.type, self.room.nbytes() + units, self._weights * self.pool.slots // self.count))
        return found
