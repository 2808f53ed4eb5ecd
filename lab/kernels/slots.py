"""A layer's experts in numbered slots on the GPU: which slot holds which expert, who gives way, and the copies from host memory, all on the device.

Why: a step captured as a graph cannot ask the host. One program looks the step's experts up, chooses the least recently used slots for the missing ones (never
one that this step needs), and writes a list; many programs then copy those experts over the bus with 16-byte loads. Among the experts of one step
the earlier place is the more recent one, so that recency is one order for any number of slots: what S slots hold is the first S of it, and hit rates follow
from stack distances (Mattson et al. 1970; lab.measure.hit_curve).
What it does not prove: that the bytes copied are the right experts' beyond what the tests compare; or speed over a bus it has not run on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.backend import interpreted, jit, launch_options, require, use_ptx, wait_for_inputs

PLACES = 1024
"""Most (token, expert) pairs of a step, and the unit of a step in `last_use`."""
PIECES = 32
"""Programs that copy one expert. With 8 KB asked for by each, one expert alone has 256 KB on their way, more than a PCIe 5 bus needs to be busy."""
_BLOCK = 1024
_NEVER = -1
_EMPTY = tl.constexpr(1 << 62)


@dataclass
class SlotTables:
    """State of one layer's slots, on the device. `slot_of` int32 [E], -1: not held. `expert_in` int32 [S], -1: empty. `last_use` int64 [S]: step * PLACES +
    the more the earlier its place, -1: never. `clock` int64 [1]: steps so far. `counts` int64 [4]: pairs asked for, pairs found, pairs missed, experts copied;
    only where `counting` int64 [1] is 1."""

    slot_of: Tensor
    expert_in: Tensor
    last_use: Tensor
    clock: Tensor
    counts: Tensor
    counting: Tensor

    @classmethod
    def empty(cls, experts: int, slots: int, device: torch.device, counting: Tensor) -> SlotTables:
        """Nothing held. `counting` is shared by all layers."""
        return cls(
            torch.full((experts,), -1, dtype=torch.int32, device=device),
            torch.full((slots,), -1, dtype=torch.int32, device=device),
            torch.full((slots,), _NEVER, dtype=torch.int64, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.zeros(4, dtype=torch.int64, device=device),
            counting,
        )

    def problem(self, copied_all: bool = True) -> str | None:
        """What in the tables contradicts itself, or None; `copied_all`: every expert that was missing must have been brought. Reads them to the host."""
        slot_of, expert_in = self.slot_of.tolist(), self.expert_in.tolist()
        held = {expert: slot for slot, expert in enumerate(expert_in) if expert >= 0}
        if len(held) < sum(expert >= 0 for expert in expert_in):
            return "an expert is in two slots"
        if {expert: slot for expert, slot in enumerate(slot_of) if slot >= 0} != held:
            return "slots by expert and experts by slot disagree"
        asked, found, missed, copied = self.counts.tolist()
        if found + missed != asked:
            return f"{found} pairs found and {missed} missed are not the {asked} asked for"
        return None if missed == copied or not copied_all else f"{missed} experts were missing, {copied} were copied"


@jit
def _assign_kernel(
    ids_ptr: tl.tensor, slot_of_ptr: tl.tensor, expert_in_ptr: tl.tensor, last_use_ptr: tl.tensor, clock_ptr: tl.tensor, counts_ptr: tl.tensor,
    counting_ptr: tl.tensor, slots_ptr: tl.tensor, copies_ptr: tl.tensor, REQUESTS: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr, SLOTS_WIDTH: tl.constexpr, PLACES: tl.constexpr, KEEP: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """One program: ids [REQUESTS] -> slots [REQUESTS] and copies [REQUESTS] (the expert to bring into that slot, -1: none). Without KEEP nothing is kept from
    step to step: every different expert is copied, the first into slot 0."""
    wait_for_inputs(PTX)
    place = tl.arange(0, WIDTH)
    inside = place < REQUESTS
    expert = tl.load(ids_ptr + place, mask=inside, other=-1).to(tl.int32)
    asked = (expert >= 0) & (expert < EXPERTS)
    same = (expert[:, None] == expert[None, :]) & asked[None, :]
    first_place = tl.min(tl.where(same, place[None, :], WIDTH), axis=1)
    first = asked & (first_place == place)
    if KEEP:
        clock = tl.load(clock_ptr) + 1
        stamp = clock * PLACES + (PLACES - 1 - place)
        slot = tl.load(slot_of_ptr + expert, mask=asked, other=-1)
        missing = first & (slot < 0)
        tl.debug_barrier()
        tl.store(last_use_ptr + slot, stamp, mask=first & (slot >= 0))
        tl.debug_barrier()
        number = tl.arange(0, SLOTS_WIDTH)
        age = tl.load(last_use_ptr + number, mask=number < SLOTS, other=_EMPTY)
        order = tl.cumsum(missing.to(tl.int32), axis=0) - 1
        victim = tl.full([WIDTH], 0, dtype=tl.int32)
        for index in range(0, tl.sum(missing.to(tl.int32), axis=0)):
            oldest = tl.argmin(age, axis=0).to(tl.int32)
            victim = tl.where(missing & (order == index), oldest, victim)
            age = tl.where(number == oldest, _EMPTY, age)
        leaving = tl.load(expert_in_ptr + victim, mask=missing, other=-1)
        tl.debug_barrier()
        tl.store(slot_of_ptr + leaving, -1, mask=missing & (leaving >= 0))
        tl.store(slot_of_ptr + expert, victim, mask=missing)
        tl.store(expert_in_ptr + victim, expert, mask=missing)
        tl.store(last_use_ptr + victim, stamp, mask=missing)
        tl.store(clock_ptr, clock)
        tl.debug_barrier()
        slot = tl.load(slot_of_ptr + expert, mask=asked, other=-1)
    else:
        missing = first
        before = first[None, :] & (place[None, :] < first_place[:, None])
        slot = tl.where(asked, tl.sum(before.to(tl.int32), axis=1), -1)
    tl.store(slots_ptr + place, slot.to(tl.int32), mask=inside)
    tl.store(copies_ptr + place, tl.where(missing, expert, -1), mask=inside)
    counting = tl.load(counting_ptr)
    requests, misses = tl.sum(asked.to(tl.int64), axis=0), tl.sum(missing.to(tl.int64), axis=0)
    hits = tl.sum((asked & (missing == 0)).to(tl.int64), axis=0)
    tl.store(counts_ptr, tl.load(counts_ptr) + counting * requests)
    tl.store(counts_ptr + 1, tl.load(counts_ptr + 1) + counting * hits)
    tl.store(counts_ptr + 2, tl.load(counts_ptr + 2) + counting * misses)


@jit
def _copy_part(source: tl.tensor, target: tl.tensor, piece: tl.tensor, SIZE: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """This piece of SIZE 64-bit words."""
    span: tl.constexpr = (SIZE + PIECES * BLOCK - 1) // (PIECES * BLOCK) * BLOCK
    for start in range(0, span, BLOCK):
        at = piece * span + start + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < SIZE), mask=at < SIZE)


@jit
def _copy_kernel(
    copies_ptr: tl.tensor, slots_ptr: tl.tensor, counts_ptr: tl.tensor, counting_ptr: tl.tensor,
    from_0: tl.tensor, from_1: tl.tensor, from_2: tl.tensor, from_3: tl.tensor, to_0: tl.tensor, to_1: tl.tensor, to_2: tl.tensor, to_3: tl.tensor,
    unit_0: tl.tensor, unit_1: tl.tensor, unit_to_0: tl.tensor, unit_to_1: tl.tensor, SIZE_0: tl.constexpr, SIZE_1: tl.constexpr, SIZE_2: tl.constexpr,
    SIZE_3: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (piece, place): its piece of the expert in copies[place] into slot slots[place], four parts of SIZE 64-bit words an expert; nothing where the
    expert is -1. The units (one float32 an expert and stack) lie on the device and go with it."""
    wait_for_inputs(PTX)
    piece, place = tl.program_id(0), tl.program_id(1)
    expert = tl.load(copies_ptr + place).to(tl.int64)
    if expert >= 0:
        slot = tl.load(slots_ptr + place).to(tl.int64)
        _copy_part(from_0 + expert * SIZE_0, to_0 + slot * SIZE_0, piece, SIZE_0, PIECES, BLOCK)
        _copy_part(from_1 + expert * SIZE_1, to_1 + slot * SIZE_1, piece, SIZE_1, PIECES, BLOCK)
        _copy_part(from_2 + expert * SIZE_2, to_2 + slot * SIZE_2, piece, SIZE_2, PIECES, BLOCK)
        _copy_part(from_3 + expert * SIZE_3, to_3 + slot * SIZE_3, piece, SIZE_3, PIECES, BLOCK)
        if piece == 0:
            tl.store(unit_to_0 + slot, tl.load(unit_0 + expert))
            tl.store(unit_to_1 + slot, tl.load(unit_1 + expert))
            tl.atomic_add(counts_ptr + 3, tl.load(counting_ptr))


def assign(ids: Tensor, tables: SlotTables, keep: bool = True) -> tuple[Tensor, Tensor]:
    """ids integer [...] (outside 0..E-1: no expert) -> (slots int32 [...], copies int32 [...]: the expert that must be brought into that slot, -1: none).

    Updates the tables. Without `keep` the tables are left alone and slots are numbered by first request. Raises LabError where the slots cannot hold a step."""
    experts, slots, requests = len(tables.slot_of), len(tables.expert_in), ids.numel()
    require(requests <= PLACES, "slots", f"{requests} pairs in one step, at most {PLACES}")
    require(slots >= min(requests, experts), "slots", f"{slots} slots for a step of {requests} pairs")
    found, copies = (torch.empty(ids.shape, dtype=torch.int32, device=ids.device) for _ in range(2))
    width = max(16, triton.next_power_of_2(requests))
    _assign_kernel[(1,)](
        ids.contiguous(), tables.slot_of, tables.expert_in, tables.last_use, tables.clock, tables.counts, tables.counting, found, copies, requests, width,
        experts, slots, triton.next_power_of_2(slots), PLACES, keep, use_ptx(), num_warps=1 if width <= 16 else 4, **launch_options(),
    )  # fmt: skip
    return found, copies


def copy_experts(copies: Tensor, slots: Tensor, tables: SlotTables, source: Sequence[Tensor], target: Sequence[Tensor], units: Sequence[Tensor]) -> None:
    """Brings the experts of `copies` into `slots`. `source`: two or four tensors int64 [E, n], pinned on the host; `target`: the same [S, n] on the device;
    `units`: float32 [E] of both stacks, then [S] of both. Raises LabError on shapes that do not fit."""
    require(len(source) == len(target) in (2, 4) and len(units) == 4, "slots", f"{len(source)} parts and {len(units)} units, expected 2 or 4, and 4")
    for one, other in zip(source, target, strict=True):
        same = one.ndim == 2 and one.shape[1] == other.shape[1] and one.dtype == other.dtype == torch.int64
        require(same and one.is_contiguous() and other.is_contiguous(), "slots", f"parts {list(one.shape)} and {list(other.shape)} do not fit")
    pieces, block = (2, 1024) if interpreted() else (PIECES, _BLOCK)
    sizes = [part.shape[1] for part in source] + [0] * (4 - len(source))
    sources, targets = ([*parts, *parts][:4] for parts in (source, target))  # what has size 0 is never read
    _copy_kernel[(pieces, copies.numel())](
        copies, slots, tables.counts, tables.counting, *sources, *targets, *units, *sizes, pieces, block, use_ptx(), num_warps=4, **launch_options()
    )


def reference_assign(ids: Sequence[int], tables: SlotTables, keep: bool = True) -> tuple[list[int], list[int]]:
    """`assign` in plain Python, on tables that lie on the CPU."""
    experts, counting = len(tables.slot_of), int(tables.counting)
    slots, copies, seen = [-1] * len(ids), [-1] * len(ids), dict[int, int]()
    asked = [place for place, expert in enumerate(ids) if 0 <= expert < experts]
    for place in asked:
        seen.setdefault(ids[place], place)
    missing = [place for expert, place in seen.items() if not keep or int(tables.slot_of[expert]) < 0]
    if keep:
        tables.clock += 1
        now = int(tables.clock) * PLACES + PLACES - 1
        for expert, place in seen.items():
            if (slot := int(tables.slot_of[expert])) >= 0:
                tables.last_use[slot] = now - place
        for place in missing:
            victim = int(tables.last_use.argmin())  # what this step uses is newer than everything else
            if (leaving := int(tables.expert_in[victim])) >= 0:
                tables.slot_of[leaving] = -1
            tables.slot_of[ids[place]], tables.expert_in[victim], tables.last_use[victim] = victim, ids[place], now - place
    for place in asked:
        slots[place] = int(tables.slot_of[ids[place]]) if keep else list(seen).index(ids[place])
    for place in missing:
        copies[place] = ids[place]
    tables.counts += counting * torch.tensor([len(asked), len(asked) - len(missing), len(missing), 0])
    return slots, copies
