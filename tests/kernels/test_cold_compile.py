"""The kernels of cold experts compile for sm_90 and gfx1201 without a GPU; the bell orders memory for the host, and an answer is looked for past the caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")


def test_cold_kernels_compile_and_meet_the_host_in_order() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-m", "tests.kernels.cold_aot"], cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["cuda"].keys() == found["hip"].keys() == {"hand_over", "promote", "sum", "ring", "await"}
    assert all(cases["ring"]["fence"] and cases["await"]["volatile"] for cases in found.values())
