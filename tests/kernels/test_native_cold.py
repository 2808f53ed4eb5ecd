"""A layer's experts as a native job, against plain torch on decoded weights: every codec, odd sizes, poisoned outputs, any number of threads and tokens."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from lab.codecs import create
from lab.errors import LabError
from lab.kernels import native
from lab.kernels.experts import reference_experts
from lab.kernels.planes import repack
from lab.kernels.verify import random_ids, random_parts, relative_error

if native.unavailable():
    pytest.skip(str(native.unavailable()), allow_module_level=True)

from lab.kernels.native.cold import TOTALS, Job, Office, Stack

CODECS: list[tuple[str, dict[str, Any]]] = [
    ("w3_levels", {}),
    ("q2_g32", {}),
    ("q2_g32", {"scale_dtype": "e4m3"}),
    ("q2_levels", {}),
    ("int8_g128", {}),
    ("bf16", {}),
]
TOLERANCE = 3e-4
"""Levels as float8_e5m2 times one factor, as the GPU's kernels have them, are within 2.2e-4; sums are float32."""


def layer(name: str, options: dict[str, Any], experts: int, width: int, hidden: int) -> tuple[tuple[Stack, Stack], Tensor, Tensor]:
    """Both stacks as jobs read them, and the same weights in float32."""
    codec = create(name, options)
    shapes = (experts, 2 * width, hidden), (experts, hidden, width)
    if name == "bf16":
        first, second = ((0.05 * torch.randn(shape)).bfloat16() for shape in shapes)
        return (Stack(first, 2), Stack(second, 1)), first.float(), second.float()
    one, other = (random_parts(codec, shape, "cpu") for shape in shapes)
    stacks = Stack(repack(codec, one, hidden, halves=2), 2), Stack(repack(codec, other, width), 1)
    return stacks, codec.decode(one, hidden), codec.decode(other, width)


def computed(office: Office, stacks: tuple[Stack, Stack], x: Tensor, ids: Tensor, weights: Tensor) -> tuple[Tensor, dict[str, int]]:
    """The job's result and what it counted."""
    y, totals = torch.full((len(x), x.shape[1]), float("nan")), torch.zeros(len(TOTALS), dtype=torch.int64)
    office.run(Job(office, stacks, x, ids, weights, y, totals))
    return y, dict(zip(TOTALS, totals.tolist(), strict=True))


@pytest.mark.parametrize(("name", "options"), CODECS, ids=["-".join([name, *options.values()]) for name, options in CODECS])
def test_it_equals_plain_torch(name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    odd = 96 if name in ("q2_g32", "q2_levels", "int8_g128") else 40 if name == "bf16" else 64
    for experts, width, hidden, tokens, k, threads in ((5, 64, 128, 1, 3, 1), (7, odd, 192, 5, 4, 3), (3, odd, 64, 19, 2, 2)):
        stacks, gate_up, down = layer(name, options, experts, width, hidden)
        office = Office(threads)
        for kind in (torch.bfloat16, torch.float32, torch.float16):
            x, ids, weights = torch.randn(tokens, hidden).to(kind), random_ids(tokens, experts, k, "cpu"), torch.rand(tokens, k)
            ids[torch.rand(ids.shape) < 0.3] = -1
            ids[0, 0] = experts - 1
            y, counted = computed(office, stacks, x, ids, weights)
            assert relative_error(y, reference_experts(x.float(), ids, weights, gate_up, down)) < TOLERANCE
            held = ids[ids >= 0]
            assert (counted["calls"], counted["tokens"], counted["refused"]) == (1, tokens, 0)
            assert (counted["pairs"], counted["experts"]) == (held.numel(), held.unique().numel())
            assert counted["ns"] > 0


def test_a_token_does_not_depend_on_threads_or_company() -> None:
    torch.manual_seed(2)
    stacks, _, _ = layer("w3_levels", {}, 6, 64, 128)
    x, ids, weights = torch.randn(11, 128).bfloat16(), random_ids(11, 6, 3, "cpu"), torch.rand(11, 3)
    whole, _ = computed(Office(1), stacks, x, ids, weights)
    crew = Office(4)
    for _ in range(30):
        assert torch.equal(computed(crew, stacks, x, ids, weights)[0], whole)
    for token in range(11):
        alone, _ = computed(crew, stacks, x[token : token + 1].clone(), ids[token : token + 1].clone(), weights[token : token + 1].clone())
        assert torch.equal(alone[0], whole[token])


def test_a_crew_that_fell_asleep_wakes_and_ends() -> None:
    stacks, gate_up, down = layer("q2_g32", {}, 4, 64, 64)
    x, ids, weights = torch.randn(2, 64), random_ids(2, 4, 2, "cpu"), torch.rand(2, 2)
    office = Office(3)
    for _ in range(3):
        time.sleep(0.02)  # longer than a worker stays awake
        y, _ = computed(office, stacks, x, ids, weights)
        assert relative_error(y, reference_experts(x, ids, weights, gate_up, down)) < TOLERANCE
    office.close()


def test_nothing_to_compute_is_zero_and_a_missing_expert_is_not_a_number() -> None:
    stacks, _, _ = layer("q2_g32", {}, 4, 64, 64)
    x, weights, office = torch.randn(3, 64), torch.rand(3, 2), Office(2)
    y, counted = computed(office, stacks, x, torch.full((3, 2), -1, dtype=torch.int32), weights)
    assert torch.equal(y, torch.zeros(3, 64)) and counted["pairs"] == 0
    y, counted = computed(office, stacks, x, torch.tensor([[0, 1], [2, 4], [3, -1]], dtype=torch.int32), weights)
    assert counted["refused"] == 1 and y[1].isnan().all() and y[[0, 2]].isfinite().all()


def test_what_does_not_fit_is_refused() -> None:
    stacks, _, _ = layer("q2_g32", {}, 4, 64, 96)
    office, totals = Office(1), torch.zeros(len(TOTALS), dtype=torch.int64)
    ids, weights = torch.zeros(1, 2, dtype=torch.int32), torch.rand(1, 2)
    with pytest.raises(LabError, match="do not fit the stacks"):
        Job(office, stacks, torch.randn(1, 64), ids, weights, torch.empty(1, 64), totals)
    with pytest.raises(LabError, match="do not fit the stacks"):
        Job(office, stacks, torch.randn(1, 96), ids.long(), weights, torch.empty(1, 96), totals)
    with pytest.raises(LabError, match="cannot be read on the CPU"):
        Stack(torch.randn(2, 4, 8), 1)


def test_the_crew_reads_memory() -> None:
    assert Office(2).read_bytes_s(torch.ones(1 << 20)) > 1e8
