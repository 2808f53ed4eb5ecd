"""The kernels of expert slots compile for sm_90 and gfx1201 without a GPU, and what crosses the bus is asked for 16 bytes at a time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")


def test_slots_compile_and_copy_in_wide_loads() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-m", "tests.kernels.slots_aot"], cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["cuda"].keys() == found["hip"].keys() == {"assign", "copy"}
    assert all(cases["copy"]["wide_loads"] >= 16 for cases in found.values())
