"""Compiles the kernels of cold experts for sm_90 and gfx1201 without a GPU: `python -m tests.kernels.cold_aot` prints as JSON, by target and kernel, whether
it orders memory for the host (`fence`) and looks past the caches (`volatile`).

Why a program: kernels compile only where they were not defined for the interpreter. What it does not prove: that the code runs, or how late an answer is.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import triton
from triton.compiler import ASTSource

from lab.kernels.slots import PLACES
from lab.placement import cold_kernels
from tests.kernels.aot import TARGETS

_CODE = {"cuda": ("ptx", "global.sys.acq_rel", "ld.volatile.global"), "hip": ("amdgcn", "global_inv scope:SCOPE_SYS", "scope:SCOPE_SYS")}


def cases() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Name -> (kernel, arguments), at Flash-Next's shapes with 64 slots and one token."""
    narrow = ("ids", "slot_of", "expert_in", "slots", "ids_out", "copies", "victims", "x", "x_out")
    wide = ("last_use", "clock", "counts", "counting", "turn", "bell", "answer", "late")
    values = ("weights", "weights_out", "hot", "cold")
    types = {f"{name}_ptr": kind for names, kind in ((narrow, "*i32"), (wide, "*i64"), (values, "*fp32")) for name in names}
    types |= {"call": "i64", "most": "i32", "out_ptr": "*bf16"}
    shape = {"TOPK": 10, "EXPERTS": 512, "WORDS": 1280, "PLACES": PLACES, "REQUESTS": 10, "WIDTH": 16, "SLOTS": 64, "SLOTS_WIDTH": 64, "MOST": 2}
    shape |= {"SIZE": 2560, "HOT": True, "BLOCK": 1024}
    names = ("hand_over", "promote", "sum", "ring", "await")
    return {name: (getattr(cold_kernels, f"_{name}_kernel"), types | shape) for name in names}


def main() -> int:
    """{target: {kernel: {fence, volatile}}} for the targets given, or both."""
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        print("TRITON_INTERPRET=1 defines kernels for the interpreter; unset it to compile", file=sys.stderr)
        return 2
    found: dict[str, dict[str, Any]] = {}
    for target in sys.argv[1:] or TARGETS:
        for name, (kernel, arguments) in cases().items():
            types = {one: arguments[one] if isinstance(arguments[one], str) else "constexpr" for one in kernel.arg_names}
            constants = {(i,): arguments[one] for i, one in enumerate(kernel.arg_names) if types[one] == "constexpr"}
            aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types.values()) if kind.startswith("*")}
            made = triton.compile(ASTSource(kernel, types, constants, aligned), target=TARGETS[target], options={"num_warps": 1})
            stage, fence, volatile = _CODE[target]
            found.setdefault(target, {})[name] = {"fence": fence in made.asm[stage], "volatile": volatile in made.asm[stage]}
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
