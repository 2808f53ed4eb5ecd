"""Grouped experts against the plain reference: every codec, uneven groups, experts without tokens, sizes that divide by nothing."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from lab.codecs import create
from lab.kernels.experts import LowBitExperts, reference_experts
from lab.kernels.experts_bf16 import Bf16Experts
from lab.kernels.experts_prefill import grouped_experts
from lab.kernels.moe_prefill import group_slots
from lab.kernels.planes import repack
from lab.kernels.verify import poisoned, random_ids, random_parts, relative_error
from tests.kernels.support import DEVICE


def test_groups_hold_every_slot_once_in_its_experts_tiles() -> None:
    ids = random_ids(37, 11, 3, DEVICE)
    ids[:20, 0] = 4  # one expert with more places than a tile
    groups = group_slots(ids, 11)
    assert sorted(groups.order.tolist()) == list(range(37 * 3))
    ends, tiles = [0, *groups.ends.tolist()], groups.tiles.tolist()
    held = [tile[:3] for tile in tiles if tile[0] >= 0]
    expected = []
    for expert in range(11):
        start, end = ends[expert], ends[expert + 1]
        assert all(int(ids.flatten()[slot]) == expert for slot in groups.order[start:end].tolist())
        expected += [[expert, first, end] for first in range(start, end, groups.block)]
    assert held == expected == [tile[:3] for tile in tiles[: len(held)]]


@pytest.mark.parametrize(("name", "tokens"), [("q2_g32", 29), ("w3_levels", 13), ("q2_levels", 9), ("gguf:Q4_0", 29), ("gguf:Q4_0", 13)])
def test_low_bit_experts_of_many_tokens(name: str, tokens: int) -> None:
    codec, experts, hidden, width, k = create(name), 4, 64 if name == "w3_levels" else 96, 64, 2
    first, second = random_parts(codec, (experts, 2 * width, hidden), DEVICE), random_parts(codec, (experts, hidden, width), DEVICE)
    ids, weights = random_ids(tokens, experts, k, DEVICE), torch.rand(tokens, k, device=DEVICE)
    ids[ids == 2] = 3  # an expert without a token; the other may come twice, which the sum must bear
    x = torch.randn(tokens, hidden, device=DEVICE).to(torch.float16)
    want = reference_experts(x, ids, weights, codec.decode(first, hidden), codec.decode(second, width))
    kernel = LowBitExperts(repack(codec, first, hidden, halves=2), repack(codec, second, width))
    with poisoned():
        got = grouped_experts(kernel, x, ids, weights)
    assert relative_error(got, want) < 4e-3


def test_bf16_experts_of_many_tokens() -> None:
    first, second = (torch.randn(shape, device=DEVICE).to(torch.bfloat16) / 8 for shape in ((6, 2 * 48, 64), (6, 64, 48)))
    ids, weights = random_ids(19, 6, 2, DEVICE), torch.rand(19, 2, device=DEVICE)
    x = torch.randn(19, 64, device=DEVICE).to(torch.bfloat16)
    want = reference_experts(x, ids, weights, first.float(), second.float())
    assert relative_error(grouped_experts(Bf16Experts(first, second), x, ids, weights), want) < 2e-2
