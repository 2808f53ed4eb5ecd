"""GGUF types on a GPU: the same bytes decode to the same floats there, in every type, and rows are taken from what lies there.

Why apart: skipped without a GPU. What it does not prove: anything about speed.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lab.codecs.gguf import GGUF_CODECS, PART
from tests.codecs.gguf_blocks import as_bits, packed_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA or ROCm device")


@pytest.mark.parametrize("name", GGUF_CODECS)
def test_a_gpu_decodes_to_the_same_floats(name: str) -> None:
    codec = GGUF_CODECS[name]()
    if name.removeprefix("gguf:").startswith("IQ"):
        pytest.importorskip("gguf")
    packed = torch.from_numpy(packed_rows(codec.kind.name, 1 if codec.kind.block > 1 else 256))
    cols = packed.shape[1] // codec.kind.nbytes * codec.kind.block
    here, there = codec.decode({PART: packed}, cols), codec.decode({PART: packed.cuda()}, cols)
    assert there.is_cuda and np.array_equal(as_bits(there.cpu()), as_bits(here))
    ids = torch.tensor([3, 0], device="cuda")
    assert np.array_equal(as_bits(codec.decode(codec.take_rows({PART: packed.cuda()}, ids), cols).cpu()), as_bits(here[[3, 0]]))
