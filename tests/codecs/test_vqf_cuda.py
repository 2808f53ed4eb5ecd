"""VQF types on a GPU: the same bytes from the same weights, the same floats from the same bytes, rows taken where they lie.

Why apart: skipped without a GPU. What it does not prove: anything about speed.
"""

from __future__ import annotations

import pytest
import torch

from lab.codecs.vqf import PART, VQF_CODECS
from tests.codecs.support import student

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device")


@pytest.mark.parametrize("name", VQF_CODECS)
def test_a_gpu_encodes_and_decodes_the_same(name: str) -> None:
    codec = VQF_CODECS[name]()
    weight = student(3, 24, 512, seed=6)
    here, there = codec.encode(weight), codec.encode(weight.cuda())
    assert there[PART].is_cuda and torch.equal(there[PART].cpu(), here[PART])
    decoded = codec.decode(here, 512)
    assert torch.equal(codec.decode(there, 512).cpu(), decoded)
    ids = torch.tensor([23, 0, 9], device="cuda")
    assert torch.equal(codec.decode(codec.take_rows(codec.select(there, 1), ids), 512).cpu(), decoded[1, [23, 0, 9]])
