"""The Gated DeltaNet step against plain torch over several tokens: output, memory and the ring of past inputs; head sizes of two models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from lab.kernels.delta_step import DeltaWeights, delta_step, reference_delta, refused
from lab.kernels.verify import poisoned, relative_error
from tests.kernels.support import DEVICE


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("batch", "key_heads", "heads", "dk", "dv", "gate"), [(2, 2, 6, 16, 32, "sigmoid"), (1, 1, 4, 32, 32, "silu")])
def test_steps(batch: int, key_heads: int, heads: int, dk: int, dv: int, gate: str, dtype: torch.dtype) -> None:
    hidden, kernel, wide = 48, 4, 2 * key_heads * dk + heads * dv
    weights = DeltaWeights(draw(2 * heads, hidden, dtype=dtype) / 7, draw(kernel, wide), draw(heads) / 4, draw(heads) / 4, draw(dv) / 4 + 1, 1e-6, gate)
    ring, memory = torch.zeros(batch, kernel, wide, dtype=dtype, device=DEVICE), torch.zeros(batch, heads, dk, dv, device=DEVICE)
    for position in range(6):
        x, mixed = draw(batch, hidden, dtype=dtype), draw(batch, wide + heads * dv, dtype=dtype)
        want, new = reference_delta(x, mixed, position, ring, memory, weights)
        with poisoned():
            got = delta_step(x, mixed, torch.tensor([position], dtype=torch.int32, device=DEVICE), ring, memory, weights)
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2  # gate logits, decay and convolution are rounded as in the plain code
        assert relative_error(got, want) < tolerance
        assert relative_error(memory, new) < tolerance
        assert torch.equal(ring[:, position % kernel], mixed[:, :wide])


def test_sizes_it_refuses() -> None:
    assert refused(2, 6, 128, 128, 4) is None
    assert "96" in str(refused(2, 6, 96, 128, 4))
