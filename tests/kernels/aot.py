"""Compiles every decode kernel for sm_90 and gfx1201 without a GPU and prints what came out, as JSON: `python -m tests.kernels.aot`.

Why: the instructions per weight bound the speed at a few bits, and a `tl.dot` that silently becomes multiply-adds is right and slow; both show in the
machine code. Why a program: kernels compile only where they were not defined for the interpreter, so the tests start this in its own process.
What it does not prove: that the code runs, or how fast.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from lab.kernels import experts, experts_bf16, hyper_bf16, router, table, trunk

TARGETS = {"cuda": GPUTarget("cuda", 90, 32), "hip": GPUTarget("hip", "gfx1201", 32)}
_NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
_SASS = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]+)", re.M)
_GCN = re.compile(r"^\s+((?:v|s|ds|global|buffer|scratch|flat)_[a-z0-9_]+)", re.M)


def instructions(kernel: Any, arguments: dict[str, Any], target: str, **options: int) -> list[str]:
    """Mnemonics in order. `arguments`: per parameter a Triton type ("*fp16", "i32") or, for constexprs, the value. Pointers are 16-byte aligned."""
    types = {name: arguments[name] if isinstance(arguments[name], str) else "constexpr" for name in kernel.arg_names}
    constants = {(i,): arguments[name] for i, name in enumerate(kernel.arg_names) if types[name] == "constexpr"}
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind.startswith("*")}
    compiled = triton.compile(ASTSource(kernel, types, constants, aligned), target=TARGETS[target], options=options)
    if target == "hip":
        return _GCN.findall(compiled.asm["amdgcn"])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        return _SASS.findall(subprocess.run([_NVDISASM, "-c", cubin.name], capture_output=True, text=True, check=True).stdout)


def cases(target: str) -> dict[str, tuple[Any, dict[str, Any], dict[str, int], float]]:
    """Name -> (kernel, arguments, options, weights one thread decodes), at Flash-Next's shapes."""
    ptx = target == "cuda"
    pointers = {"x_ptr": "*i64", "h_ptr": "*i64", "ids_ptr": "*i32", "weights_ptr": "*fp32", "words_ptr": "*i32", "unit_ptr": "*fp32"}
    found: dict[str, tuple[Any, dict[str, Any], dict[str, int], float]] = {}
    for bits, scale, group in ((2, "*fp16", 1), (3, "*u8", 2), (4, "*fp16", 1)):
        shared = {**pointers, "scale_ptr": scale, "lut_low": "i32", "lut_high": "i32", "TOPK": 10, "GROUP_CHUNKS": group, "BITS": bits, "PTX": ptx, "UNROLL": 1}
        gate = {**shared, "out_ptr": "*fp16", "WIDTH": 640, "BLOCKS": 40, "CHUNKS": 80, "ROWS": 16, "STEP": 16, "BF16": True}
        down = {**shared, "out_ptr": "*bf16", "WIDTH": 2560, "BLOCKS": 160, "CHUNKS": 20, "ROWS": 16, "STEP": 16}
        found[f"gate_up {bits} bit"] = experts._gate_up_kernel, gate, {"num_warps": 2}, 2 * 16 * 16 * 32 / 64
        found[f"down {bits} bit"] = experts._down_kernel, down, {"num_warps": 2}, 16 * 16 * 32 / 64
    trunk_types = {**pointers, "scale_ptr": "*bf16", "out_ptr": "*bf16", "rows": "i32", "blocks": "i32", "tokens": "i32", "CHUNKS": 80, "GROUPS": 20}
    for tokens in (1, 4):
        gemv = {**trunk_types, "M": tokens, "GROUP_CHUNKS": 4, "ROWS": 16, "STEP": 16, "UNROLL": 1, "AHEAD": 0, "PTX": ptx, "BF16": True}
        found[f"gemv M={tokens}"] = trunk._gemv_kernel, gemv, {"num_warps": 2}, 16 * 16 * 32 / 64
    tile = {**trunk_types, "x_ptr": "*bf16", "BLOCK_N": 32, "BLOCK_M": 16, "KIND": tl.bfloat16}
    found["tile M=16"] = trunk._tile_kernel, tile, {"num_warps": 2, "num_stages": 4 if ptx else 2}, 32 * 128 / 64
    found["decode"] = trunk._decode_kernel, {**trunk_types, "BLOCK_N": 32}, {"num_warps": 4}, 32 * 128 / 128
    dense = {**pointers, "x_ptr": "*bf16", "h_ptr": "*fp32", "weight_ptr": "*bf16", "TOPK": 10, "ROWS": 8}
    gate_up = {**dense, "out_ptr": "*fp32", "WIDTH": 640, "COLUMNS": 2560, "STEP": 256}
    found["gate_up bf16"] = experts_bf16._gate_up_kernel, gate_up, {"num_warps": 4}, 2 * 8 * 256 / 128
    found["down bf16"] = (
        experts_bf16._down_kernel,
        {**dense, "out_ptr": "*bf16", "WIDTH": 2560, "COLUMNS": 640, "STEP": 128},
        {"num_warps": 2},
        10 * 5 * 8 * 128 / 64,
    )
    mixer = {"normed_ptr": "*bf16", "weight_ptr": "*bf16", "part_ptr": "*fp32", "out_ptr": "*bf16", "COUNT": 4, "HIDDEN": 2560, "RANK": 320, "PTX": ptx}
    found["narrow bf16"] = hyper_bf16._narrow_kernel, {**mixer, "ROWS": 8, "STEP": 512}, {"num_warps": 8}, 8 * 2560 / 256
    found["wide bf16"] = hyper_bf16._wide_kernel, {**mixer, "WIDTH": 512, "PLACES": 16}, {"num_warps": 4}, 4 * 16 * 512 / 128
    route = {"logits_ptr": "*fp32", "ids_ptr": "*i32", "weights_ptr": "*fp32", "experts": "i32", "TOPK": 10, "PLACES": 16, "WIDTH": 512, "NORMALISE": True}
    found["router"] = router._route_kernel, route, {"num_warps": 1}, 512 / 32
    rows = {"ids_ptr": "*i64", "out_ptr": "*bf16", "rows": "i32", "COLS": 160, "WIDTH": 256}
    found["table e4m3"] = table._e4m3_kernel, {**rows, "table_ptr": "*u8", "scale_ptr": "*bf16"}, {"num_warps": 1}, 160 / 32
    found["table q2_rows"] = table._q2_kernel, {**rows, "codes_ptr": "*u8", "scale_ptr": "*fp32", "levels_ptr": "*fp32"}, {"num_warps": 1}, 160 / 32
    return found


def main() -> None:
    """Prints {target: {case: {"total", "per_weight", "mnemonics"}}}; the count is of the whole kernel, with its loop once."""
    result: dict[str, dict[str, Any]] = {}
    for target in TARGETS:
        for name, (kernel, arguments, options, weights) in cases(target).items():
            found = instructions(kernel, {key: arguments[key] for key in kernel.arg_names}, target, **options)
            result.setdefault(target, {})[name] = {"total": len(found), "per_weight": len(found) / weights, "mnemonics": Counter(found)}
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main()
