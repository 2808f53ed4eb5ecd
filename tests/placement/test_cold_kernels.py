"""The kernels around cold experts: slot tables over many steps as in plain Python, what is handed to the host, the sum of both halves."""

from __future__ import annotations

import copy

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from lab.kernels.slots import SlotTables
from lab.kernels.verify import poisoned, random_ids
from lab.placement.cold_kernels import hand_over, promote, reference_step, summed
from tests.kernels.support import DEVICE

HERE = torch.device(DEVICE)
EXPERTS, K, SLOTS, PROMOTED = 9, 2, 4, 2


def test_tables_as_in_plain_python() -> None:
    tables = SlotTables.empty(EXPERTS, SLOTS, HERE, torch.ones(1, dtype=torch.int64, device=HERE))
    plain = copy.deepcopy(tables)
    for name in ("slot_of", "expert_in", "last_use", "clock", "counts", "counting"):
        setattr(plain, name, getattr(plain, name).cpu())
    for step in range(12):
        torch.manual_seed(step)
        tokens = 1 + step % 4
        x, ids, weights = torch.randn(tokens, 64, device=HERE).half(), random_ids(tokens, EXPERTS, K, DEVICE), torch.rand(tokens, K, device=HERE)
        if step % 3 == 0:
            ids[0, 0] = -1
        out = tuple(torch.full(shape, 7, dtype=kind, device=HERE) for shape, kind in ((x.shape, x.dtype), (ids.shape, torch.int32), (ids.shape, torch.float32)))
        with poisoned():
            slots = hand_over(x, ids, weights, tables, (out[0], out[1], out[2]))
            copies, victims = promote(ids, slots, tables, PROMOTED)
        want = reference_step(ids.tolist(), plain, PROMOTED)
        assert (slots.tolist(), copies.tolist()) == want[:2]
        assert [v for v, c in zip(victims.tolist(), want[1], strict=True) if c >= 0] == [v for v, c in zip(want[2], want[1], strict=True) if c >= 0]
        assert torch.equal(out[0], x) and torch.equal(out[2], weights)
        assert torch.equal(out[1], torch.where(slots >= 0, -1, ids))
        assert all(torch.equal(getattr(tables, name).cpu(), getattr(plain, name)) for name in ("slot_of", "expert_in", "last_use", "clock", "counts"))
    assert tables.problem(copied_all=False) is None


def test_the_two_halves_are_added_once() -> None:
    hot, cold = (torch.randn(3, 70, device=HERE) for _ in range(2))
    with poisoned():
        assert torch.equal(summed(hot, cold, torch.float16, HERE), (hot + cold).half())
        assert torch.equal(summed(None, cold, torch.float16, HERE), cold.half())
