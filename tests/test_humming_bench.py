"""The slot layout that experiments.humming_bench hands to humming: every slot once, in blocks of one expert."""

from __future__ import annotations

import pytest
import torch

from experiments.humming_layers import aligned


@pytest.mark.parametrize(("tokens", "k", "experts", "block"), [(1, 10, 512, 8), (7, 3, 16, 16), (300, 4, 32, 64)])
def test_every_slot_lies_once_in_a_block_of_its_expert(tokens: int, k: int, experts: int, block: int) -> None:
    ids = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens)).topk(k, 1).indices.int()
    slots, owner, count = aligned(ids, experts, block)
    flat = ids.flatten().tolist()
    assert slots.dtype == owner.dtype == count.dtype == torch.int32
    assert int(count) == len(slots) == len(owner) * block
    assert sorted(s for s in slots.tolist() if s < len(flat)) == list(range(len(flat)))
    for place, slot in enumerate(slots.tolist()):
        assert slot == len(flat) or flat[slot] == int(owner[place // block])
    wanted = sum(-(-flat.count(expert) // block) for expert in range(experts))
    assert len(owner) == wanted, "no more blocks than the slots need"
    assert owner.tolist() == sorted(owner.tolist())
