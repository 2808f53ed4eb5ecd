"""The kernels of a decode step compile for sm_90 and gfx1201 without a GPU, prompts on matrix units, and no thread of the delta rule gathers on its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("target", ["cuda", "hip"])
def test_every_kernel_compiles(target: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", "tests.kernels.step_aot", target], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)[target]
    assert all(units > 0 for name, (_, units) in found.items() if name.startswith(("grouped", "attend"))), "a matrix product became multiply-adds"
    if target == "cuda":
        assert found["delta"][0] < 1400, "loads of taps were repeated in every thread: 1744 instructions then, 1128 without"
