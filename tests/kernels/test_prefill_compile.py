"""The kernels of a prompt compile for sm_90 and gfx1201 without a GPU: products on matrix units, weights decoded in their registers, nothing spilled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parents[2]
MOST = {
    "grouped gate_up 2 bit M=16": 1600,
    "grouped gate_up 2 bit M=96": 1700,
    "grouped down 3 bit M=16": 1100,
    "grouped gate_up 4 bit M=16": 1280,
    "grouped gate_up 4 bit M=96": 1570,
    "grouped down 4 bit M=16": 760,
}
"""Instructions of a whole kernel, epilogue included, a tenth above what Triton 3.6.0 and 3.9.0 give. The loop of the first, 256 weights a thread, is 851 of
them: 3.3 a weight; through shared memory it was 15. At 4 bits it is 624: 2.4."""


TESTED = {
    "cuda": (*MOST, "mix", "chunks"),
    "hip": ("grouped down 2 bit M=16", "grouped down 4 bit M=16", "mix"),
}
"""Those with products, of which one of a kind: all forty take a minute (`python -m tests.kernels.prefill_aot`)."""


@pytest.mark.parametrize("target", ["cuda", "hip"])
def test_products_are_on_matrix_units_and_weights_stay_in_registers(target: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.prefill_aot", target, *TESTED[target]]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)[target]
    assert set(found) == set(TESTED[target])
    for name, words in found.items():
        assert any("MMA" in word.upper() for word in words), f"{name}: a matrix product became multiply-adds"
    if target == "cuda":
        assert not any({"LDL", "STL"} & set(words) for words in found.values())
        for name, most in MOST.items():
            assert sum(found[name].values()) <= most, name
            assert found[name].get("STS", 0) < 100, f"{name}: decoded weights went through shared memory"
            assert found[name].get("FFMA", 0) == 0 and (found[name].get("HGMMA" if "M=96" in name else "HMMA", 0) >= 32), f"{name}: not the units expected"
