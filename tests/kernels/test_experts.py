"""Routed experts at decode: every codec against the float32 reference, slots without an expert, order of sums, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from lab.codecs import create
from lab.errors import LabError
from lab.kernels.experts import LowBitExperts, Tile, reference_experts
from lab.kernels.experts_bf16 import Bf16Experts
from lab.kernels.planes import repack
from lab.kernels.verify import check_experts, random_parts, relative_error
from tests.kernels.support import DEVICE, TOLERANCE

CODECS: list[tuple[str, dict[str, Any]]] = [
    ("bf16", {}),
    ("w3_levels", {"code_order": "10_10_10_2"}),
    ("q2_levels", {}),
    ("q2_g32", {}),
    ("q2_g32", {"scale_dtype": "e4m3"}),
    ("gguf:Q4_0", {}),
]


@pytest.mark.parametrize(("name", "options"), CODECS, ids=[f"{n}-{'-'.join(map(str, o.values()))}" for n, o in CODECS])
@pytest.mark.parametrize(("hidden", "width", "tokens", "k"), [(128, 64, 2, 3), (64, 192, 1, 2)])
def test_experts_agree_with_the_reference(name: str, options: dict[str, Any], hidden: int, width: int, tokens: int, k: int) -> None:
    torch.manual_seed(hidden)
    for case, error in check_experts(create(name, options), 4, hidden, width, tokens, k, torch.float16, DEVICE):
        assert error <= TOLERANCE, case


def small_experts() -> tuple[LowBitExperts, torch.Tensor, torch.Tensor]:
    """q2_g32, 3 experts, 64 wide, 32 inside: kernel and decoded stacks."""
    codec = create("q2_g32")
    first, second = random_parts(codec, (3, 64, 64), DEVICE), random_parts(codec, (3, 64, 32), DEVICE)
    return LowBitExperts(repack(codec, first, 64, halves=2), repack(codec, second, 32)), codec.decode(first, 64), codec.decode(second, 32)


@pytest.mark.parametrize("tiles", [((8, 8, 2, 1), (32, 16, 1, 4)), ((32, 16, 1, 2), (8, 8, 1, 1))])
def test_launch_shapes_and_bfloat16_do_not_change_the_result(tiles: tuple[Tile, Tile]) -> None:
    torch.manual_seed(1)
    kernel, gate_up, down = small_experts()
    x, ids = torch.randn(1, 64, device=DEVICE).to(torch.bfloat16), torch.tensor([[1, 0]], device=DEVICE)
    weights = torch.tensor([[0.3, 0.7]], device=DEVICE)
    got = kernel.down(kernel.gate_up(x, ids, tiles[0]), ids, weights, torch.float32, tiles[1])
    assert relative_error(got, reference_experts(x, ids, weights, gate_up, down)) <= TOLERANCE


def test_a_slot_without_an_expert_adds_nothing_but_a_nan_weight_shows() -> None:
    kernel, _, _ = small_experts()
    x, weights = torch.randn(1, 64, device=DEVICE).to(torch.float16), torch.tensor([[0.4, 0.6]], device=DEVICE)
    alone = kernel(x, torch.tensor([[2]], device=DEVICE), weights[:, :1].contiguous())
    padded = kernel(x, torch.tensor([[2, -1]], device=DEVICE), weights)
    torch.testing.assert_close(padded, alone, rtol=2e-3, atol=1e-4)
    weights[0, 1] = float("nan")
    assert bool(kernel(x, torch.tensor([[2, -1]], device=DEVICE), weights).isnan().all())


def test_repeats_are_equal_bit_for_bit() -> None:
    kernel, _, _ = small_experts()
    x, ids, weights = torch.randn(1, 64, device=DEVICE).to(torch.float16), torch.tensor([[0, 2]], device=DEVICE), torch.rand(1, 2, device=DEVICE)
    assert torch.equal(kernel(x, ids, weights), kernel(x, ids, weights))


def test_wrong_inputs_are_one_line() -> None:
    kernel, _, _ = small_experts()
    x, ids, weights = torch.zeros(2, 64, dtype=torch.float16), torch.zeros(2, 2, dtype=torch.int32), torch.ones(2, 2)
    with pytest.raises(LabError, match="experts: x is torch.float32"):
        kernel.gate_up(x.float(), ids)
    with pytest.raises(LabError, match="experts: ids"):
        kernel.gate_up(x, ids[:1])
    with pytest.raises(LabError, match="experts: weights"):
        kernel.down(torch.zeros(2, 2, 32, dtype=torch.float16), ids, weights[:1], torch.float16)
    with pytest.raises(LabError, match="experts: gate_up .* do not fit"):
        LowBitExperts(kernel.gate_up_planes, kernel.gate_up_planes)
    with pytest.raises(LabError, match="experts bf16: gate_up .* do not fit"):
        Bf16Experts(torch.zeros(2, 8, 4, dtype=torch.bfloat16), torch.zeros(2, 4, 8, dtype=torch.bfloat16))
