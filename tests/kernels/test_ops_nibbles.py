"""Experts in a file's blocks of 4 bits through the engine's GPU operations: planes where every stack is Q4_0, with the plain operations' values and counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from lab import ops_gpu
from lab.codecs import create
from lab.counters import Counters
from lab.kernels.experts import LowBitExperts
from lab.kernels.planes import NIBBLES
from lab.kernels.verify import random_ids, random_parts, relative_error
from lab.ops import Packed, PackedExperts
from lab.ops_gpu import KernelExperts
from lab.ops_gpu_blocks import BlockExperts
from tests.kernels.support import DEVICE

EXPERTS, HIDDEN, WIDTH, TOPK = 4, 64, 32, 2
ONE, APART = ((2 * WIDTH, HIDDEN),), ((WIDTH, HIDDEN), (WIDTH, HIDDEN))
DOWN = ((HIDDEN, WIDTH),)


def made(gate_up: tuple[tuple[int, int], ...], names: list[str], counters: Counters) -> PackedExperts:
    """Stacks of random blocks, the same at every call; a name per stack, down's last."""
    torch.manual_seed(7)
    stacks = []
    for i, (shape, name) in enumerate(zip((*gate_up, *DOWN), names, strict=True)):
        whole, codec = (EXPERTS, *shape), create(name)
        parts = random_parts(create(NIBBLES), whole, DEVICE) if name.endswith(":Q4_0") else codec.encode(torch.randn(whole, device=DEVICE) / 50)
        stacks.append(Packed(codec, parts, whole, 0, "experts", counters, first=i in (0, len(gate_up))))
    return PackedExperts(stacks[:-1], stacks[-1])


def problem(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    ids, weights = random_ids(tokens, EXPERTS, TOPK, DEVICE).long(), torch.rand(tokens, TOPK, device=DEVICE)
    return torch.randn(tokens, HIDDEN, device=DEVICE).half(), ids, weights.half()


@pytest.mark.parametrize(("gate_up", "name"), [(APART, "gguf:Q4_0"), (ONE, "vqf:Q4_0")], ids=["apart", "together"])
def test_few_and_many_tokens_give_the_plain_result_and_its_counts(gate_up: tuple[tuple[int, int], ...], name: str) -> None:
    plain_counts, counts = Counters(), Counters()
    names = [name] * (len(gate_up) + 1)
    plain, packed = made(gate_up, names, plain_counts), made(gate_up, names, counts)
    assert ops_gpu.has_kernel(packed)
    found, reason = ops_gpu.experts(packed, torch.float16)
    assert reason is None and isinstance(found, KernelExperts) and isinstance(found.slots, LowBitExperts) and found.slots.gate_up_planes.bits == 4
    for tokens in (1, 9):  # slot by slot, and grouped
        x, ids, weights = problem(tokens)
        assert relative_error(found(x, ids, weights), plain(x.float(), ids, weights.float())) < 4e-3
    assert {key: (tally.rows, tally.flops) for key, tally in counts.tallies.items()} == {k: (t.rows, t.flops) for k, t in plain_counts.tallies.items()}


def test_what_is_resident_is_the_planes_and_each_slot_reads_its_experts_bytes() -> None:
    counts = Counters()
    packed = made(APART, [NIBBLES] * 3, counts)
    stacks = [*packed.gate_up, packed.down]
    filed = [stack.nbytes() for stack in stacks]
    found, _ = ops_gpu.experts(packed, torch.bfloat16)
    held = found.slots.gate_up_planes.nbytes() + found.slots.down_planes.nbytes()
    assert all(stack.parts == {} for stack in stacks), "the file's blocks are given up"
    assert sum(stack.nbytes() for stack in stacks) == held == sum(filed) + 2 * 4 * EXPERTS, "4.5 bits a weight, and a unit for each of an expert's two planes"
    found.count(1)
    (tally,) = counts.tallies.values()
    assert tally.weight_bytes == sum(stack.nbytes() // EXPERTS for stack in stacks)


@pytest.mark.parametrize(("names", "dtype"), [([NIBBLES, "gguf:Q4_1", NIBBLES], torch.float16), ([NIBBLES] * 3, torch.float32)], ids=["mixed", "float32"])
def test_anything_else_stays_with_the_blocks(names: list[str], dtype: torch.dtype) -> None:
    found, reason = ops_gpu.experts(made(APART, names, Counters()), dtype)
    assert reason is None and isinstance(found, BlockExperts)


def test_stacks_that_do_not_belong_together_keep_their_blocks() -> None:
    packed = made(((WIDTH, HIDDEN), (2 * WIDTH, HIDDEN)), [NIBBLES] * 3, Counters())
    found, reason = ops_gpu.experts(packed, torch.float16)
    assert found is packed and reason is not None and "do not fit" in reason
    assert all(stack.parts for stack in (*packed.gate_up, packed.down)), "the reference still needs them"
