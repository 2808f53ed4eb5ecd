"""The GPU's side of experts computed on the CPU: who is held here, what goes down to the host, who is brought next, and the sum of both halves.

Why kernels: in a captured step nothing may ask the host. The first writes a step's activations and the experts that are not held straight into pinned host
memory, where a native job reads them; the second lets the first few missing experts take the least recently used slots, so that a next token may find them
here; the third adds what the CPU found. Tables are those of `lab.kernels.slots`. `reference_*` are the same in plain Python.
What it does not prove: that reading and writing pinned memory this way is as quick on another bus.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.backend import jit, require, require_gpu
from lab.kernels.slots import PLACES, SlotTables

_BLOCK = 1024
_EMPTY = tl.constexpr(1 << 62)


@jit
def _hand_over_kernel(
    x_ptr: tl.tensor, ids_ptr: tl.tensor, weights_ptr: tl.tensor, slot_of_ptr: tl.tensor, last_use_ptr: tl.tensor, clock_ptr: tl.tensor,
    counts_ptr: tl.tensor, counting_ptr: tl.tensor, slots_ptr: tl.tensor, x_out_ptr: tl.tensor, ids_out_ptr: tl.tensor, weights_out_ptr: tl.tensor,
    TOPK: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr,
) -> None:  # fmt: skip
    """Program = token: slots [TOPK] of its experts (-1: not held), and to the host its row of x as 32-bit words, its experts that are not held, weights."""
    token = tl.program_id(0)
    place = tl.arange(0, WIDTH)
    inside = place < TOPK
    at = token * TOPK + place
    expert = tl.load(ids_ptr + at, mask=inside, other=-1).to(tl.int32)
    asked = (expert >= 0) & (expert < EXPERTS)
    slot = tl.load(slot_of_ptr + expert, mask=asked, other=-1)
    held = asked & (slot >= 0)
    tl.store(slots_ptr + at, slot, mask=inside)
    tl.store(ids_out_ptr + at, tl.where(held, -1, expert), mask=inside)
    tl.store(weights_out_ptr + at, tl.load(weights_ptr + at, mask=inside, other=0).to(tl.float32), mask=inside)
    recent = tl.load(clock_ptr) * PLACES + (PLACES - 1 - tl.minimum(at, PLACES - 1))
    tl.atomic_max(last_use_ptr + slot, recent, mask=held)
    counting = tl.load(counting_ptr)
    requests, hits = tl.sum(asked.to(tl.int64), axis=0), tl.sum(held.to(tl.int64), axis=0)
    tl.atomic_add(counts_ptr, counting * requests)
    tl.atomic_add(counts_ptr + 1, counting * hits)
    tl.atomic_add(counts_ptr + 2, counting * (requests - hits))
    for start in range(0, WORDS, BLOCK):
        word = start + tl.arange(0, BLOCK)
        tl.store(x_out_ptr + token * WORDS + word, tl.load(x_ptr + token * WORDS + word, mask=word < WORDS), mask=word < WORDS)


@jit
def _promote_kernel(
    ids_ptr: tl.tensor, slots_ptr: tl.tensor, slot_of_ptr: tl.tensor, expert_in_ptr: tl.tensor, last_use_ptr: tl.tensor, clock_ptr: tl.tensor,
    copies_ptr: tl.tensor, victims_ptr: tl.tensor, REQUESTS: tl.constexpr, WIDTH: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
    SLOTS_WIDTH: tl.constexpr, PLACES: tl.constexpr, MOST: tl.constexpr,
) -> None:  # fmt: skip
    """One program: the first MOST different experts that were not held -> copies [MOST] and the slots that they take, victims [MOST]; -1: none."""
    place = tl.arange(0, WIDTH)
    inside = place < REQUESTS
    expert = tl.load(ids_ptr + place, mask=inside, other=-1).to(tl.int32)
    slot = tl.load(slots_ptr + place, mask=inside, other=0)
    missing = ((expert >= 0) & (expert < EXPERTS) & (slot < 0)).to(tl.int32)
    clock = tl.load(clock_ptr)
    number = tl.arange(0, SLOTS_WIDTH)
    age = tl.load(last_use_ptr + number, mask=number < SLOTS, other=_EMPTY)
    for index in range(0, MOST):
        first = tl.min(tl.where(missing != 0, place, WIDTH), axis=0)
        chosen = tl.sum(tl.where(place == first, expert, 0), axis=0)
        oldest = tl.argmin(age, axis=0).to(tl.int32)
        # A slot that this step uses stays: the first kernel has stamped it with this clock.
        taken = (first < WIDTH) & (tl.min(age, axis=0) < clock * PLACES)
        leaving = tl.load(expert_in_ptr + oldest, mask=taken, other=-1)
        tl.store(slot_of_ptr + leaving, -1, mask=taken & (leaving >= 0))
        tl.store(slot_of_ptr + chosen, oldest, mask=taken)
        tl.store(expert_in_ptr + oldest, chosen, mask=taken)
        tl.store(last_use_ptr + oldest, clock * PLACES + (PLACES - 1 - first), mask=taken)
        tl.store(copies_ptr + index, tl.where(taken, chosen, -1))
        tl.store(victims_ptr + index, oldest)
        age = tl.where(number == oldest, _EMPTY, age)
        missing = tl.where(expert == chosen, 0, missing)
    tl.store(clock_ptr, clock + 1)


@jit
def _sum_kernel(hot_ptr: tl.tensor, cold_ptr: tl.tensor, out_ptr: tl.tensor, SIZE: tl.constexpr, HOT: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Program (block, token): the float32 halves added and rounded once."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(1) * SIZE + column
    total = tl.load(cold_ptr + at, mask=column < SIZE, other=0)
    if HOT:
        total += tl.load(hot_ptr + at, mask=column < SIZE, other=0)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=column < SIZE)


@jit
def _ring_kernel(turn_ptr: tl.tensor, bell_ptr: tl.tensor, call: tl.tensor) -> None:
    """One program: counts the turn on the device and writes `call` (the job's number in its upper half) with the turn to the bell, which the host watches.
    The atomic orders everything written before it, by earlier kernels too, ahead of the bell for the host."""
    turn = tl.atomic_add(turn_ptr, 1, sem="acq_rel", scope="sys") + 1
    tl.store(bell_ptr, call | (turn & 0x7FFFFFFF))


@jit
def _await_kernel(turn_ptr: tl.tensor, answer_ptr: tl.tensor, late_ptr: tl.tensor, call: tl.tensor, most: tl.tensor) -> None:
    """One program: looks at the host's answer until it is this turn's, at most `most` times; then it is late, and counted."""
    wanted = call | (tl.load(turn_ptr) & 0x7FFFFFFF)
    seen = tl.load(answer_ptr, volatile=True)
    looks = tl.full([], 0, dtype=tl.int32)
    while (seen != wanted) & (looks < most):
        seen = tl.load(answer_ptr, volatile=True)
        looks += 1
    if seen != wanted:
        tl.store(late_ptr, tl.load(late_ptr) + 1)


def ring(turn: Tensor, bell: Tensor, number: int) -> None:
    """Calls job `number` once what is in the stream before has ended. turn int64 [1] on the device, bell int64 [1] where the host looks."""
    _ring_kernel[(1,)](turn, bell, number << 32, num_warps=1)


def await_answer(turn: Tensor, answer: Tensor, late: Tensor, number: int, most: int) -> None:
    """What follows in the stream comes after the answer to `ring`; `late` int64 [1] counts the times that none came within `most` looks."""
    _await_kernel[(1,)](turn, answer, late, number << 32, most, num_warps=1)


def hand_over(x: Tensor, ids: Tensor, weights: Tensor, tables: SlotTables, out: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """x [T, hidden], ids integer [T, k], weights [T, k] -> slots int32 [T, k], -1 where the expert is not held. `out`, which may be pinned host memory: x as
    it is [T, hidden], int32 [T, k] (-1: held here), float32 [T, k]. Held slots are stamped as used. Raises LabError on shapes that do not fit."""
    tokens, k = ids.shape
    words = x.shape[1] * x.element_size() // 4
    fits = len(x) == tokens and weights.shape == ids.shape and all(one.is_contiguous() and len(one) == tokens for one in out)
    require(fits and x.shape[1] * x.element_size() % 4 == 0 and out[0].dtype == x.dtype, "cold hand-over", f"x {list(x.shape)}, ids {list(ids.shape)}")
    require_gpu("cold hand-over", x, ids, weights)
    slots = torch.empty(tokens, k, dtype=torch.int32, device=x.device)
    _hand_over_kernel[(tokens,)](
        x.contiguous().view(torch.int32), ids.contiguous(), weights.contiguous(), tables.slot_of, tables.last_use, tables.clock, tables.counts,
        tables.counting, slots, out[0].view(torch.int32), out[1], out[2], k, max(2, triton.next_power_of_2(k)), len(tables.slot_of), words,
        min(_BLOCK, triton.next_power_of_2(words)), PLACES, num_warps=4,
    )  # fmt: skip
    return slots


def promote(ids: Tensor, slots: Tensor, tables: SlotTables, most: int) -> tuple[Tensor, Tensor]:
    """ids and slots as `hand_over` had and gave them -> (experts to bring int32 [most], -1: none; the slots they take int32 [most]). Ends the step: the
    clock advances. Raises LabError for more pairs than `PLACES`."""
    require(ids.numel() <= PLACES, "cold promote", f"{ids.numel()} pairs in one step, at most {PLACES}")
    copies, victims = (torch.empty(most, dtype=torch.int32, device=ids.device) for _ in range(2))
    count = len(tables.expert_in)
    _promote_kernel[(1,)](
        ids.contiguous(), slots, tables.slot_of, tables.expert_in, tables.last_use, tables.clock, copies, victims, ids.numel(),
        max(16, triton.next_power_of_2(ids.numel())), len(tables.slot_of), count, max(2, triton.next_power_of_2(count)), PLACES, most, num_warps=1,
    )  # fmt: skip
    return copies, victims


def summed(hot: Tensor | None, cold: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Both halves float32 [T, hidden], `cold` perhaps in pinned host memory -> their sum in `dtype` on `device`."""
    tokens, size = cold.shape
    out = torch.empty(tokens, size, dtype=dtype, device=device)
    _sum_kernel[(triton.cdiv(size, _BLOCK), tokens)](out if hot is None else hot, cold, out, size, hot is not None, _BLOCK, num_warps=4)
    return out


def reference_step(ids: Sequence[Sequence[int]], tables: SlotTables, most: int) -> tuple[list[list[int]], list[int], list[int]]:
    """`hand_over` and `promote` in plain Python on tables that lie on the CPU: (slots, copies, victims)."""
    experts, counting, clock = len(tables.slot_of), int(tables.counting), int(tables.clock)
    slots = [[int(tables.slot_of[e]) if 0 <= e < experts else -1 for e in row] for row in ids]
    flat, places = [e for row in ids for e in row], [s for row in slots for s in row]
    for place, slot in enumerate(places):
        if slot >= 0:
            tables.last_use[slot] = max(int(tables.last_use[slot]), clock * PLACES + PLACES - 1 - place)
    asked, hits = sum(0 <= e < experts for e in flat), sum(s >= 0 for s in places)
    tables.counts += counting * torch.tensor([asked, hits, asked - hits, 0])
    missing = dict.fromkeys(e for e, s in zip(flat, places, strict=True) if s < 0 and 0 <= e < experts)
    copies, victims, age = [], [], tables.last_use.tolist()
    for expert in [*missing, *[-1] * most][:most]:
        victim = min(range(len(age)), key=lambda slot: age[slot])
        taken = expert >= 0 and age[victim] < clock * PLACES
        if taken:
            if (leaving := int(tables.expert_in[victim])) >= 0:
                tables.slot_of[leaving] = -1
            tables.slot_of[expert], tables.expert_in[victim] = victim, expert
            tables.last_use[victim] = clock * PLACES + PLACES - 1 - flat.index(expert)
        age[victim] = 1 << 62
        copies.append(expert if taken else -1)
        victims.append(victim)
    tables.clock += 1
    return slots, copies, victims
