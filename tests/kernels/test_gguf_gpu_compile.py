"""Machine code of the GGUF kernels for sm_90 and gfx1201, compiled without a GPU; `python -m tests.kernels.test_gguf_gpu_compile` prints it as JSON.

What is looked at: instructions per weight (bounds are what Triton 3.6.0 and 3.9.0 give plus a tenth; whole kernels, 2560 columns), no spills on NVIDIA, no
weight that travels through shared memory, and at one token all loads before the first product, because waiting for memory is most of that time.
What it does not prove: that the code runs, or how fast.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import torch

MOST = {
    "cuda": {"Q4_0": 6.5, "Q4_K": 7.6, "Q6_K": 8.4, "IQ2_XS": 8.4, "Q2_0": 5.6, "MXFP4 slots": 8.0, "Q4_1 n=4": 21.2},
    "hip": {"Q4_0": 8.2, "Q4_K": 9.0, "Q6_K": 9.8, "IQ2_XS": 9.1, "Q2_0": 6.5, "MXFP4 slots": 8.6, "Q4_1 n=4": 46},
}
COLUMNS = 2560


def _types(name: str, slots: bool) -> dict[str, Any]:
    """Pointer types of a block type, as `instructions` takes them."""
    from lab.kernels.gguf_gpu_types import SPECS

    spec = SPECS[name]
    scale = "*bf16" if spec.scale == torch.bfloat16 else "*fp16"
    pointers = {"x_ptr": "*i64", "ids_ptr": "*i32" if slots else "*bf16", "words_ptr": "*i32", "scale_ptr": scale, "offset_ptr": scale, "out_ptr": "*bf16"}
    pointers["small_ptr"] = "*i8" if spec.supers else scale
    pointers["small_offset_ptr"] = "*i8" if spec.supers and spec.offset else scale
    pointers["table_ptr"] = scale if spec.step else "*fp32"
    numbers = dict.fromkeys(("t0", "t1", "t2", "t3", "tokens", "share", "experts", "rows", "blocks"), "i32")
    sizes = {"WORDS": COLUMNS * spec.bits // 32, "BITS": spec.bits, "GROUP": spec.group, "PER_SUPER": spec.per_super, "OFFSET": spec.offset}
    return {**pointers, **numbers, **sizes, "FIRST": spec.levels[0], "LEVEL_STEP": spec.step, "UNIT": spec.unit, "SLOTS": slots}


def _cases(target: str) -> dict[str, tuple[Any, dict[str, Any], int, float]]:
    """Name -> (kernel, arguments, warps, weights one thread decodes)."""
    from lab.kernels import gguf_gpu_product
    from lab.kernels.gguf_gpu_types import SPECS

    found: dict[str, tuple[Any, dict[str, Any], int, float]] = {}
    for case in MOST[target]:
        name, slots, tokens = case.split()[0], case.endswith("slots"), 4 if case.endswith("=4") else 1
        types = _types(name, slots)
        tile, steps, warps = gguf_gpu_product.launch_shape(tokens, types["WORDS"], types["BITS"])
        arguments = {**types, "M": tokens, "KIND": 2, "TILE": tile, "STEPS": steps, "PTX": target == "cuda"}
        found[case] = gguf_gpu_product._product_kernel, arguments, warps, tile * steps * 8 * (32 / SPECS[name].bits) / (32 * warps)
    for name in ("Q4_K", "IQ2_XS"):
        found[f"{name} decode"] = gguf_gpu_product._decode_kernel, {**_types(name, False), "TILE": 32}, 4, 32 * 8 * 8 / 128
    floats = {**_types("Q4_0", True), "x_ptr": "*bf16", "weight_ptr": "*bf16", "M": 1, "COLUMNS": COLUMNS, "ROWS": 4, "TILE": 256, "PTX": target == "cuda"}
    found["floats slots"] = gguf_gpu_product._floats_kernel, floats, 4, 4 * 256 / 128
    return found


def main() -> None:
    """Prints {target: {case: {"per_weight", "mnemonics"}}}, mnemonics in order."""
    from tests.kernels.aot import TARGETS, instructions

    result: dict[str, dict[str, Any]] = {}
    for target in TARGETS:
        for case, (kernel, arguments, warps, weights) in _cases(target).items():
            found = instructions(kernel, {key: arguments[key] for key in kernel.arg_names}, target, num_warps=warps)
            result.setdefault(target, {})[case] = {"per_weight": len(found) / weights, "mnemonics": found}
    json.dump(result, sys.stdout)


@pytest.fixture(scope="module")
def compiled() -> dict[str, dict[str, Any]]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = Path(__file__).parents[2]
    program = [sys.executable, "-m", "tests.kernels.test_gguf_gpu_compile"]
    done = subprocess.run(program, cwd=root, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(("target", "case"), [(target, case) for target, bounds in MOST.items() for case in bounds])
def test_instructions_per_weight(compiled: dict[str, dict[str, Any]], target: str, case: str) -> None:
    assert 1 < compiled[target][case]["per_weight"] <= MOST[target][case]


def test_every_kernel_compiles_for_both_targets(compiled: dict[str, dict[str, Any]]) -> None:
    assert set(compiled["cuda"]) == set(compiled["hip"]) > set(MOST["cuda"])
    assert all(len(found["mnemonics"]) > 50 for cases in compiled.values() for found in cases.values())


def test_nothing_spills_on_nvidia(compiled: dict[str, dict[str, Any]]) -> None:
    for case, found in compiled["cuda"].items():
        assert not {"LDL", "STL"} & set(found["mnemonics"]), case


def test_weights_stay_in_registers(compiled: dict[str, dict[str, Any]]) -> None:
    """Shared memory serves the sums at the end alone: at a weight each there would be hundreds of accesses."""
    for case in MOST["cuda"]:
        count = Counter(compiled["cuda"][case]["mnemonics"])
        assert count["STS"] + count["LDS"] <= (20 if "n=" not in case else 80), case


def test_even_levels_are_placed_and_uneven_ones_permuted(compiled: dict[str, dict[str, Any]]) -> None:
    for case in MOST["cuda"]:
        found = Counter(compiled["cuda"][case]["mnemonics"])
        assert (found["PRMT"] > found["LOP3"]) == (case.split()[0] in {"IQ2_XS", "MXFP4"}), case
        assert not found["I2FP"] and found["I2F"] < found["FFMA"] / 4, case  # no conversion per weight


def test_one_token_asks_for_all_words_first(compiled: dict[str, dict[str, Any]]) -> None:
    """Of the wide loads, which bring codes and activations, at most one may come late; the others stand in the first third."""
    for case in ("Q4_0", "Q4_K", "Q6_K"):
        mnemonics = compiled["cuda"][case]["mnemonics"]
        places = [i for i, mnemonic in enumerate(mnemonics) if mnemonic == "LDG"]
        late = [place for place in places if place > len(mnemonics) / 3]
        assert len(late) <= len(places) / 4, (case, places)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main()
