"""Machine code of the decode kernels for both targets, compiled without a GPU: instructions per weight, matrix units where a dot is, no spills.

The bounds are what Triton 3.6.0 and 3.9.0 give here plus a tenth (whole kernels, loops not unrolled); they fail when a change or a compiler makes a kernel
longer. What it does not prove: speed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

MOST = {
    "cuda": {
        "gate_up 2 bit": 3.5,
        "gate_up 3 bit": 4.0,
        "gate_up 4 bit": 3.6,
        "down 2 bit": 3.9,
        "down 3 bit": 4.3,
        "down 4 bit": 3.9,
        "gemv M=1": 3.9,
        "gemv M=4": 8.9,
        "tile M=16": 12.3,
        "decode": 9.1,
    },
    "hip": {
        "gate_up 2 bit": 8.2,
        "gate_up 3 bit": 13.1,
        "gate_up 4 bit": 8.8,
        "down 2 bit": 9.0,
        "down 3 bit": 13.6,
        "down 4 bit": 9.3,
        "gemv M=1": 8.9,
        "gemv M=4": 19.6,
        "tile M=16": 39,
        "decode": 21.2,
    },
}


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-m", "tests.kernels.aot"], cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("target", "case"), [(target, case) for target, bounds in MOST.items() for case in bounds])
def test_instructions_per_weight(compiled: dict[str, dict[str, Any]], target: str, case: str) -> None:
    assert 1 < compiled[target][case]["per_weight"] <= MOST[target][case]


def test_every_kernel_compiles_for_both_targets(compiled: dict[str, dict[str, Any]]) -> None:
    assert set(compiled["cuda"]) == set(compiled["hip"]) > set(MOST["cuda"])
    assert all(found["total"] > 50 for cases in compiled.values() for found in cases.values())


def test_a_dot_uses_the_matrix_units(compiled: dict[str, dict[str, Any]]) -> None:
    assert any("MMA" in name for name in compiled["cuda"]["tile M=16"]["mnemonics"])
    assert any("wmma" in name for name in compiled["hip"]["tile M=16"]["mnemonics"])


def test_levels_are_looked_up_and_multiplied_in_pairs(compiled: dict[str, dict[str, Any]]) -> None:
    for case in ("gate_up 2 bit", "gate_up 3 bit", "down 2 bit", "down 3 bit", "gemv M=1"):
        mnemonics = compiled["cuda"][case]["mnemonics"]
        assert mnemonics["PRMT"] > 0 and mnemonics["HFMA2"] > mnemonics.get("FFMA", 0), case


def test_codes_of_four_bits_are_masked_and_multiplied_in_pairs(compiled: dict[str, dict[str, Any]]) -> None:
    """16 masks and 32 multiply-adds of a pair for 32 codes, and no conversion of single ones."""
    for case, chunks in (("gate_up 4 bit", 8), ("down 4 bit", 4)):
        mnemonics = compiled["cuda"][case]["mnemonics"]
        assert mnemonics["LOP3"] >= 16 * chunks and mnemonics["HFMA2"] > 30 * chunks, case
        assert mnemonics.get("FFMA", 0) < 2 * chunks and "I2F" not in mnemonics and "I2FP" not in mnemonics, case


def test_nothing_spills_on_nvidia(compiled: dict[str, dict[str, Any]]) -> None:
    for case, found in compiled["cuda"].items():
        assert not {"LDL", "STL"} & set(found["mnemonics"]), case


def test_without_a_gpu_the_message_names_the_way_out() -> None:
    program = """
import torch
from lab.errors import LabError
from lab.kernels.router import route
try:
    route(torch.zeros(1, 4), 2)
except LabError as error:
    print(error)
"""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip().endswith("is on cpu; move it to the GPU, or set TRITON_INTERPRET=1 for a slow check"), done.stderr
