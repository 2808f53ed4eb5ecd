"""Compiles the kernels of a chained decode step for sm_90 and gfx1201 without a GPU, as JSON: `python -m tests.kernels.chain_aot`.

Why a program: kernels compile only where they were not defined for the interpreter. What it does not prove: that the code runs, or how fast.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from lab.kernels import mixer_step, moe_step, ngram_step, project_step
from tests.kernels.aot import TARGETS, instructions

PLAIN = ("narrow", "project back", "gate_up of slots", "down back")
"""What is compiled for the other target, too: each way of multiplying once, because the plain branches take long."""


def cases(ptx: int) -> dict[str, tuple[Any, dict[str, Any], dict[str, int]]]:
    """The launches of a chained step, one token, with fewer columns than Flash-Next has: what is unrolled over them repeats itself."""
    int8 = {"words_ptr": "*i32", "scale_ptr": "*bf16", "unit_ptr": "*fp32", "GROUP_CHUNKS": 4, "M": 1, "PTX": ptx}
    streams = {"streams_ptr": "*bf16", "scaled_ptr": "*fp16", "given_ptr": "*fp32", "square_ptr": "*fp32", "norm_ptr": "*fp32", "rate_ptr": "*fp32"}
    shared = {**int8, **streams, "x_ptr": "*i64", "rows": "i32", "small": "i32", "COUNT": 4, "HIDDEN": 1024, "EPS": 1e-6, "BLOCK": 1024}
    small = {"natural_ptr": "*bf16", "small_ptr": "*bf16", "small_out_ptr": "*bf16", "logits_ptr": "*bf16", "SMALL_ROWS": 2, "SMALL_STEP": 512}
    found: dict[str, tuple[Any, dict[str, Any], dict[str, int]]] = {}
    narrow = {"quads_ptr": "*i64", "inject_ptr": "*bf16", "inner_ptr": "*fp16", "parts": "i32", "RANK": 320, "ROOM": 128, "ROWS": 4, "STEP": 128}
    found["narrow"] = mixer_step._narrow_kernel, {**shared, **narrow, "INJECT": True}, {"num_warps": 4}
    wide = {"inner_ptr": "*i64", "x_ptr": "*bf16", "quads_ptr": "*fp16", "CHUNKS": 10, "PLACES": 8, "STEP": 16}
    found["wide"] = mixer_step._wide_kernel, {**shared, **wide}, {"num_warps": 4}
    project = {**shared, **small, "out_ptr": "*bf16", "CHUNKS": 32, "ROWS": 16, "STEP": 16, "HELD": 1, "SMALL_PROGRAMS": 24}
    found["project"] = project_step._project_kernel, project, {"num_warps": 2}
    back = {**shared, "CHUNKS": 64, "ROWS": 8, "STEP": 64, "HELD": 1, "PARTS": 128}
    found["project back"] = project_step._back_kernel, back, {"num_warps": 4}
    router = {"inner_ptr": "*fp16", "CHUNKS": 32, "WIDTH": 640, "BLOCKS": 40, "ROWS": 8, "STEP": 32, "SMALL_PROGRAMS": 129}
    found["route"] = moe_step._router_kernel, {**shared, **small, **router}, {"num_warps": 2}
    choose = {
        "ids_ptr": "*i32",
        "weights_ptr": "*fp32",
        "share_ptr": "*fp32",
        "inner_ptr": "*i64",
        "out_ptr": "*fp32",
        "EXPERTS": 512,
        "TOPK": 10,
        "PLACES": 16,
    }
    choose |= {"PLACES": 16, "logits_ptr": "*bf16", "WIDTH": 512, "NORMALISE": True, "CHUNKS": 16, "ROWS": 8, "STEP": 16}
    found["choose and shared"] = moe_step._choose_kernel, {**shared, **choose}, {"num_warps": 1}
    slots = {**shared, "ids_ptr": "*i32", "weights_ptr": "*fp32", "scale_ptr": "*fp16", "lut_low": "i32", "lut_high": "i32", "TOPK": 3, "BITS": 2}
    slots |= {"GROUP_CHUNKS": 1, "PARTS": 320, "extra_ptr": "*fp32", "h_ptr": "*i64", "out_ptr": "*fp16", "WIDTH": 640}
    found["gate_up of slots"] = moe_step._gate_up_kernel, {**slots, "BLOCKS": 40, "CHUNKS": 16, "ROWS": 16, "STEP": 16, "HELD": 1}, {"num_warps": 2}
    found["down back"] = moe_step._down_kernel, {**slots, "BLOCKS": 160, "CHUNKS": 20, "ROWS": 8, "STEP": 64, "HELD": 1}, {"num_warps": 4}
    norms = {f"{name}_ptr": "*fp32" for name in ("key_norm", "query_norm", "conv_norm", "taps")}
    inject = {**shared, **norms, "mixed_ptr": "*bf16", "history_ptr": "*bf16", "KERNEL": 4, "DILATION": 3}
    found["inject"] = ngram_step._inject_kernel, inject, {"num_warps": 16}
    return found


def main() -> None:
    """Prints {target: {case: instructions}}."""
    result: dict[str, dict[str, int]] = {}
    for target in sys.argv[1:] or TARGETS:
        for name, (kernel, arguments, options) in cases(2 if target == "cuda" else 0).items():
            if target != "cuda" and name not in PLAIN:
                continue
            found = instructions(kernel, {key: arguments[key] for key in kernel.arg_names}, target, **options)
            result.setdefault(target, {})[name] = len(found)
            print(name, len(found), file=sys.stderr, flush=True)
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main()
