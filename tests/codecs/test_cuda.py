"""The codecs on a GPU: the same bytes decode to the same floats, and the same weights encode to the same bytes.

Why apart: skipped without a GPU. What it does not prove: anything about the Triton kernels, which have their own tests.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lab.codecs import create, verify_encoding
from tests.codecs.support import IDS, VARIANTS, student

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device")


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=IDS)
def test_device_follows_the_input(name: str, options: dict[str, Any]) -> None:
    codec, weight = create(name, options), student(3, 70, 192)
    parts = codec.encode(weight)
    moved = {key: part.cuda() for key, part in parts.items()}
    assert torch.equal(codec.decode(moved, 192).cpu(), codec.decode(parts, 192))
    there = codec.encode(weight.cuda())
    assert all(part.is_cuda and part.dtype == parts[key].dtype and part.shape == parts[key].shape for key, part in there.items())
    assert all(torch.equal(part.cpu().view(torch.uint8), parts[key].view(torch.uint8)) for key, part in there.items())
    assert verify_encoding(codec, there, weight.cuda()).ok
    ids = torch.tensor([69, 0], device="cuda")
    assert torch.equal(codec.decode(codec.take_rows(codec.select(moved, 1), ids), 192), codec.decode(moved, 192)[1][ids])
