"""Messages of libraries as one line."""

from __future__ import annotations

import pytest

from lab.errors import flat

TORCH = """CUDA error: operation failed due to a previous error during capture
Search for `cudaErrorStreamCaptureInvalidated' in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""
"""As torch 2.11 said it on an H200."""


@pytest.mark.parametrize("words", ["CUDA", "HIP"])
def test_what_torch_advises_after_every_gpu_error_is_left_out(words: str) -> None:
    assert flat(RuntimeError(TORCH.replace("CUDA", words))) == f"{words} error: operation failed due to a previous error during capture"


def test_other_lines_stay_in_order_and_length_is_bound() -> None:
    assert flat("one\n  two\t three\n\nSearched for it\n") == "one two three Searched for it"
    assert flat("x" * 400) == "x" * 300 and flat("x" * 400, 7) == "x" * 7 and flat("") == ""
