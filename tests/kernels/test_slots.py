"""Slots of experts: tables after every step against plain Python, on random streams with repeats, gaps and duplicates; the copies; what contradicts itself."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from lab.errors import LabError
from lab.kernels.slots import SlotTables, assign, copy_experts, reference_assign
from lab.kernels.verify import poisoned
from tests.kernels.support import DEVICE

CPU = torch.device("cpu")


def tables_of(experts: int, slots: int, device: torch.device | str = DEVICE) -> SlotTables:
    return SlotTables.empty(experts, slots, torch.device(device), torch.ones(1, dtype=torch.int64, device=device))


def same(tables: SlotTables, want: SlotTables) -> None:
    for name in ("slot_of", "expert_in", "last_use", "clock"):
        assert torch.equal(getattr(tables, name).cpu(), getattr(want, name)), name
    assert tables.counts.tolist()[:3] == want.counts.tolist()[:3]


@pytest.mark.parametrize(("experts", "slots", "tokens", "k"), [(37, 11, 1, 5), (23, 19, 4, 4), (8, 8, 2, 4), (64, 6, 1, 6)])
def test_the_tables_are_those_of_plain_python(experts: int, slots: int, tokens: int, k: int) -> None:
    random = torch.Generator().manual_seed(experts)
    tables, want = tables_of(experts, slots), tables_of(experts, slots, "cpu")
    for step in range(25):
        ids = torch.stack([torch.randperm(experts, generator=random)[:k] for _ in range(tokens)])
        ids = torch.where(torch.rand(ids.shape, generator=random) < 0.5, ids % max(2, slots), ids)  # some often again, some twice in a step
        if step % 5 == 0:
            ids[0, k // 2] = -1
        while len(set(ids.flatten().tolist()) - {-1}) > slots:
            ids[-1] = ids[0]
        with poisoned():
            found, copies = assign(ids.to(DEVICE), tables)
        flat = [int(i) for i in ids.flatten()]
        assert (found.flatten().tolist(), copies.flatten().tolist()) == reference_assign(flat, want), f"step {step}"
        same(tables, want)
        assert all(int(tables.expert_in[slot]) == expert for expert, slot in zip(flat, found.flatten().tolist(), strict=True) if expert >= 0)
    assert tables.counts[0] > tables.counts[1] > 0


def test_without_keeping_every_different_expert_is_brought_each_time() -> None:
    tables, want = tables_of(20, 8), tables_of(20, 8, "cpu")
    for ids in ([[3, 7, 19, 0], [7, 3, -1, 5]], [[3, 7, 19, 0], [1, 2, 4, 5]]):
        found, copies = assign(torch.tensor(ids, device=DEVICE), tables, keep=False)
        flat = [one for row in ids for one in row]
        assert (found.flatten().tolist(), copies.flatten().tolist()) == reference_assign(flat, want, keep=False)
    same(tables, want)
    assert tables.counts.tolist()[:3] == [15, 2, 13]


def test_copies_bring_each_expert_with_its_units_and_leave_the_other_slots() -> None:
    random = torch.Generator().manual_seed(1)
    sizes, experts, slots = (3100, 6, 34, 2), 9, 5
    source = [torch.randint(-(1 << 62), 1 << 62, (experts, size), generator=random) for size in sizes]
    if DEVICE == "cuda":
        source = [part.pin_memory() for part in source]
    target = [torch.full((slots, size), -77, dtype=torch.int64, device=DEVICE) for size in sizes]
    units = [torch.rand(experts, device=DEVICE) for _ in range(2)] + [torch.full((slots,), -7.0, device=DEVICE) for _ in range(2)]
    tables = tables_of(experts, slots)
    ids = torch.tensor([[8, 0, 3]], device=DEVICE)
    found, copies = assign(ids, tables)
    copy_experts(copies, found, tables, source, target, units)
    for expert, slot in zip((8, 0, 3), found.flatten().tolist(), strict=True):
        assert all(torch.equal(to[slot].cpu(), part[expert]) for part, to in zip(source, target, strict=True))
        assert (units[2][slot], units[3][slot]) == (units[0][expert], units[1][expert])
    others = [slot for slot in range(slots) if slot not in found.flatten().tolist()]
    assert all(bool((to[others] == -77).all()) for to in target) and bool((units[2][others] == -7).all())
    assert tables.counts.tolist() == [3, 0, 3, 3] and tables.problem() is None


def test_what_only_warms_up_is_not_counted_but_kept() -> None:
    tables = tables_of(9, 5)
    tables.counting.zero_()
    assign(torch.tensor([[1, 2]], device=DEVICE), tables)
    tables.counting.fill_(1)
    assign(torch.tensor([[1, 3]], device=DEVICE), tables)
    assert tables.counts.tolist()[:3] == [2, 1, 1]


def test_tables_that_contradict_themselves_say_how() -> None:
    def broken(name: str, place: int, value: int) -> str | None:
        tables = tables_of(9, 5)
        found, copies = assign(torch.tensor([[1, 2]], device=DEVICE), tables)
        tables.counts[3] = 2  # as if both had been copied
        assert tables.problem() is None and len(found) == len(copies)
        getattr(tables, name)[place] = value
        return tables.problem()

    assert broken("expert_in", 0, 2) == "an expert is in two slots"
    assert broken("slot_of", 4, 3) == "slots by expert and experts by slot disagree"
    assert broken("counts", 1, 1) == "1 pairs found and 2 missed are not the 2 asked for"
    assert broken("counts", 3, 1) == "2 experts were missing, 1 were copied"


def test_too_few_slots_for_a_step_are_refused() -> None:
    with pytest.raises(LabError, match="5 slots for a step of 6 pairs"):
        assign(torch.zeros(1, 6, dtype=torch.int32, device=DEVICE), tables_of(9, 5))
