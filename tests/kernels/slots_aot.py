"""Compiles the kernels of expert slots for sm_90 and gfx1201 without a GPU: `python -m tests.kernels.slots_aot` prints the 16-byte loads of each as JSON.

Why a program: kernels compile only where they were not defined for the interpreter. What it does not prove: that the code runs, or how fast a bus is.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import triton
from triton.compiler import ASTSource

from lab.kernels import slots
from tests.kernels.aot import TARGETS

_WIDE = {"cuda": ("ptx", "ld.global.v2.b64"), "hip": ("amdgcn", "global_load_b128")}


def cases(target: str) -> dict[str, tuple[Any, dict[str, Any], dict[str, int]]]:
    """Name -> (kernel, arguments, options), at Flash-Next's shapes with 64 slots."""
    names = ("slot_of", "expert_in", "ids", "slots", "copies")
    tables = {f"{name}_ptr": "*i32" for name in names} | {f"{name}_ptr": "*i64" for name in ("last_use", "clock", "counts", "counting")}
    sizes = {"EXPERTS": 512, "PLACES": slots.PLACES, "PTX": target == "cuda"}
    found: dict[str, tuple[Any, dict[str, Any], dict[str, int]]] = {}
    shape = {"REQUESTS": 10, "WIDTH": 16, "SLOTS": 64, "SLOTS_WIDTH": 64}
    found["assign"] = slots._assign_kernel, {**tables, **sizes, **shape, "KEEP": True}, {"num_warps": 1}
    parts = {f"{way}_{i}": "*i64" for way in ("from", "to") for i in range(4)} | {f"unit_{name}": "*fp32" for name in ("0", "1", "to_0", "to_1")}
    words = {"SIZE_0": 153600, "SIZE_1": 6400, "SIZE_2": 76800, "SIZE_3": 3200, "PIECES": slots.PIECES, "BLOCK": slots._BLOCK, "PTX": target == "cuda"}
    found["copy"] = slots._copy_kernel, {**tables, **parts, **words}, {"num_warps": 4}
    return found


def main() -> int:
    """{target: {case: {wide_loads}}} for the targets given, or both."""
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        print("TRITON_INTERPRET=1 defines kernels for the interpreter; unset it to compile", file=sys.stderr)
        return 2
    found: dict[str, dict[str, Any]] = {}
    for target in sys.argv[1:] or TARGETS:
        for name, (kernel, arguments, options) in cases(target).items():
            types = {one: arguments[one] if isinstance(arguments[one], str) else "constexpr" for one in kernel.arg_names}
            constants = {(i,): arguments[one] for i, one in enumerate(kernel.arg_names) if types[one] == "constexpr"}
            aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind.startswith("*")}
            made = triton.compile(ASTSource(kernel, types, constants, aligned), target=TARGETS[target], options=options)
            stage, wide = _WIDE[target]
            found.setdefault(target, {})[name] = {"wide_loads": made.asm[stage].count(wide)}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
