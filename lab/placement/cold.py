"""Experts of which some have slots on the GPU and the others are computed on the CPU from their packed bytes, beside the GPU's own work.

A step: the experts without a slot go down with the activations, a native job multiplies them while the GPU multiplies those that have one, and both sums are
added once (`cold_kernels`, `cold_link`). All experts lie in host memory in the order that the GPU's kernels read, which the CPU's kernels read as well, so
that slots fill by copying bytes. Policy: the least recently used slot gives way; in each step and layer at most PROMOTED of the experts that were missing get
one, for the next token. A prompt long enough that its layer crosses the bus sooner than the CPU computes it streams whole layers as `tiered` does.
What it does not prove: that this beats `tiered`: that depends on the bus, the CPU's memory and the hit rate, all of which are recorded.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lab.cell import Placement
from lab.counters import Counters
from lab.errors import GapError
from lab.kernels.experts_bf16 import Bf16Experts
from lab.kernels.native.cold import TOTALS, Job, Stack
from lab.kernels.slots import PLACES, SlotTables, copy_experts
from lab.ops import Packed
from lab.placement.cold_kernels import hand_over, promote, summed
from lab.placement.cold_pool import MOST_TOKENS, PROMOTED, ColdPool
from lab.placement.rooms import Kernel, Room, expert_parts, expert_units, taken_over
from lab.placement.tiers import Held
from lab.record import Status

__all__ = ["ColdExperts", "ColdPool"]


class ColdExperts:
    """One layer's experts (`lab.placement.tiers.TierExperts`)."""

    def __init__(
        self,
        gate_up: Packed,
        down: Packed,
        layer: int,
        device: torch.device,
        dtype: torch.dtype,
        counters: Counters,
        placement: Placement,
        shared: ColdPool,
    ) -> None:
        """Takes over both stacks, on the compute device: they are repacked there, copied to host memory and freed. Raises GapError for a codec without
        kernels. Host memory that cannot be pinned is used as it is: slots then keep the first experts."""
        self.layer, self.pool, self.codec, self.dtype = layer, shared, gate_up.codec.name, dtype
        self.count, self.hidden = gate_up.shape[0], gate_up.shape[2]
        self.flops = 2 * (gate_up.shape[1] * gate_up.shape[2] + down.shape[1] * down.shape[2])
        self._weights = self.count * self.flops // 2
        self.streamed_rows = 0
        self._counted, parts = taken_over("cpu_cold", gate_up, down, layer)
        whole = self._counted.slots
        self.units = expert_units(whole)
        self.pinned = True
        self.source = [self._kept(part) for part in parts]
        self.stacks = self._stacks(whole)
        self.host_bytes = sum(part.nbytes for part in self.source)
        self.expert_bytes = self.host_bytes // self.count
        self.cold_bytes = sum(stack.bytes_per_expert for stack in self.stacks)
        self.token_bytes = self.hidden * (dtype.itemsize + 4) + 8 * shared.top_k
        self.room = Room.like(whole, shared.slots) if shared.slots else None
        self.tables = SlotTables.empty(self.count, max(1, shared.slots), device, shared.counting)
        if self.room is not None and not self.pinned:
            self._keep_first(self.room)
        self._jobs: dict[int, Job] = {}
        gate_up.parts, down.parts = {}, {}
        shared.prepare(self, whole)
        del self._counted.slots  # the whole layer on the device was only for repacking

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden], ids [T, k], weights [T, k] -> [T, hidden]. Many tokens stream the whole layer where that is sooner."""
        if self.pool.stream_from is not None and len(x) >= self.pool.stream_from:
            self._counted.count(ids.numel())
            return self.pool.stream_layer(self, x, ids, weights)
        if len(x) <= MOST_TOKENS:
            return self.step(x, ids, weights)
        pieces = [self.step(*piece) for piece in zip(*(whole.split(MOST_TOKENS) for whole in (x, ids, weights)), strict=True)]
        return torch.cat(pieces)

    def step(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The same through the slots and the CPU, for at most MOST_TOKENS tokens; nothing waits for the device unless the link says so."""
        exchange, link, tokens = self.pool.exchange, self.pool.link, len(x)
        assert exchange is not None and link is not None
        slots = hand_over(x, ids, weights, self.tables, exchange.down(tokens))
        exchange.lower(tokens)
        job = self._job(tokens)
        link.start(job)
        hot = None if self.room is None else self._hot(self.room, x, slots, weights)
        if self.room is not None and self.pool.promotes and ids.numel() <= PLACES:
            copies, victims = promote(ids, slots, self.tables, PROMOTED)
            copy_experts(copies, victims, self.tables, self.source, self.room.parts, [*self.units, *self.room.units])
        link.join(job)
        return summed(hot, exchange.raised(tokens), x.dtype, x.device)

    def random_jobs_s(self, tokens: int, times: int) -> list[float]:
        """Seconds of jobs of `tokens` tokens that ask for random experts; they count nowhere."""
        exchange = self.pool.exchange
        assert exchange is not None
        x, ids, weights, y = exchange.host(tokens)
        x.normal_()
        weights.fill_(1 / ids.shape[1])
        totals = torch.zeros(len(TOTALS), dtype=torch.int64)
        job = Job(self.pool.office, self.stacks, x, ids, weights, y, totals)
        seconds = []
        for _ in range(times):
            ids.copy_(torch.rand(tokens, self.count).topk(ids.shape[1]).indices)
            before = int(totals[TOTALS.index("ns")])
            self.pool.office.run(job)
            seconds.append((int(totals[TOTALS.index("ns")]) - before) * 1e-9)
        return seconds

    def problem(self, counts: list[int], totals: list[int]) -> str | None:
        """What the device's counts, the CPU's and the slot tables say against each other, or None."""
        missed, copied = counts[2:]
        if missed != totals[TOTALS.index("pairs")]:
            return f"{missed} requests had no slot, the CPU computed {totals[TOTALS.index('pairs')]}"
        if totals[TOTALS.index("refused")]:
            return f"{totals[TOTALS.index('refused')]} requests were for experts that do not exist"
        if copied > missed:
            return f"{copied} experts were brought for {missed} requests without a slot"
        return self.tables.problem(copied_all=False)

    def held(self) -> list[Held]:
        """All experts on the host, and the slots."""
        found = [Held(self.codec, "cpu", self.host_bytes, self._weights)]
        if self.room is not None:
            units = sum(unit.nbytes for unit in self.units)
            found.append(Held(self.codec, self.pool.device.type, self.room.nbytes() + units, self._weights * self.pool.slots // self.count))
        return found

    def _hot(self, room: Room, x: Tensor, slots: Tensor, weights: Tensor) -> Tensor:
        """float32, so that it is rounded once, with the CPU's half."""
        return room.kernel.down(room.kernel.gate_up(x, slots), slots, weights, torch.float32)

    def _job(self, tokens: int) -> Job:
        """One per number of tokens: captured steps hold its address for good."""
        if tokens not in self._jobs:
            assert self.pool.exchange is not None
            totals = self.pool.totals[self.pool.layers.index(self.layer)]
            self._jobs[tokens] = Job(self.pool.office, self.stacks, *self.pool.exchange.host(tokens), totals)
        return self._jobs[tokens]

    def _kept(self, part: Tensor) -> Tensor:
        """On the host, pinned unless that is refused."""
        if self.pinned:
            try:
                return self.pool.pinned.copy(part, f"layer {self.layer}'s experts")
            except GapError as error:
                if error.status is not Status.UNSUPPORTED:
                    raise
                self.pinned = False
                self.pool.problems.append(f"layer {self.layer}: no expert gets a slot after loading: {error}")
        return part.cpu()

    def _stacks(self, whole: Kernel) -> tuple[Stack, Stack]:
        """The host's copies as jobs read them."""
        shaped = [own.view(part.dtype).view(part.shape) for own, part in zip(self.source, expert_parts(whole), strict=True)]
        if isinstance(whole, Bf16Experts):
            return Stack(shaped[0], 2), Stack(shaped[1], 1)
        first, second = whole.gate_up_planes, whole.down_planes
        units = [unit.cpu() for unit in self.units]
        return Stack(replace(first, words=shaped[0], scale=shaped[1], unit=units[0]), 2), Stack(
            replace(second, words=shaped[2], scale=shaped[3], unit=units[1]), 1
        )

    def _keep_first(self, room: Room) -> None:
        """Fills the slots once and for all."""
        count = self.pool.slots
        for own, its in zip((*room.parts, *room.units), (*self.source, *self.units), strict=True):
            own.copy_(its[:count])
        numbers = torch.arange(count, dtype=torch.int32)
        self.tables.slot_of[:count], self.tables.expert_in[:] = numbers.to(self.tables.slot_of.device), numbers.to(self.tables.expert_in.device)
