"""Compiles the kernels of a decode step for sm_90 and gfx1201 without a GPU, as JSON: `python -m tests.kernels.step_aot`.

Why a program: kernels compile only where they were not defined for the interpreter. What it does not prove: that the code runs, or how fast.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import triton.language as tl

from lab.kernels import attention_step, cache_step, delta_step, hyper_step, indexer_step, prefetch_step, residual_step, rows_step
from tests.kernels.aot import TARGETS, instructions


def cases(target: str) -> dict[str, tuple[Any, dict[str, Any], dict[str, int]]]:
    """Name -> (kernel, arguments, options), at Flash-Next's shapes."""
    ptx = target == "cuda"
    int8 = {"words_ptr": "*i32", "scale_ptr": "*bf16", "unit_ptr": "*fp32", "PTX": ptx}
    sizes = {"COUNT": 4, "HIDDEN": 2560, "PTX": ptx}
    found: dict[str, tuple[Any, dict[str, Any], dict[str, int]]] = {}
    streams = {name: "*bf16" for name in ("streams_ptr", "y_ptr", "extra_ptr", "inject_ptr", "normed_ptr", "x_ptr", "mixed_ptr", "ring_ptr", "gates_ptr")}
    norm = {
        **streams,
        "given_ptr": "*fp32",
        "norm_ptr": "*fp32",
        "share_ptr": "*fp32",
        "EPS": 1e-6,
        "BLOCK": 4096,
        "PENDING": True,
        "EXTRA": True,
        "INJECT": True,
    }
    found["norm"] = hyper_step._norm_kernel, {**norm, **sizes}, {"num_warps": 16}
    for tokens in (1, 4):
        down = {**int8, "x_ptr": "*i64", "out_ptr": "*fp32", "rows": "i32", "blocks": "i32", "M": tokens, "CHUNKS": 320, "GROUP_CHUNKS": 4, "SPLITS": 5}
        found[f"mix down M={tokens}"] = hyper_step._down_kernel, {**down, "STEP": 64, "ROWS": 8, "BF16": True}, {"num_warps": 4}
        up = {**int8, **sizes, "part_ptr": "*fp32", "normed_ptr": "*bf16", "out_ptr": "*bf16", "RANK": 320, "SPLITS": 5, "CHUNKS": 10}
        found[f"mix up M={tokens}"] = hyper_step._up_kernel, {**up, "GROUPS": 3, "GROUP_CHUNKS": 4, "WIDTH": 128}, {"num_warps": 8}
    delta = {**streams, "position_ptr": "*i32", **{f"{n}_ptr": "*fp32" for n in ("memory", "taps", "a_log", "bias", "norm")}, "out_ptr": "*bf16", "EPS": 1e-6}
    shape = {"HIDDEN": 2560, "BLOCK": 4096, "HEADS": 48, "SHARE": 3, "DK": 128, "DV": 128, "KERNEL": 4, "SIGMOID": True, "PTX": ptx}
    found["delta"] = delta_step._delta_kernel, {**delta, **shape, "CHAINED": False}, {"num_warps": delta_step.WARPS}
    found["delta chained"] = delta_step._delta_kernel, {**delta, **shape, "out_ptr": "*fp16", "CHAINED": True}, {"num_warps": delta_step.WARPS}
    heads = {"HEADS": 24, "KV": 2, "D": 256, "PTX": ptx}
    cache = {f"{n}_ptr": "*bf16" for n in ("mixed", "index", "cos", "sin", "query", "keys", "values", "index_keys", "out")} | {"position_ptr": "*i32"}
    norms = {"q_norm_ptr": "*fp32", "k_norm_ptr": "*fp32", "capacity": "i32", "DI": 128, "INDEX": 512, "ROTARY": 64, "EPS": 1e-6}
    found["prepare"] = attention_step._prepare_kernel, {**cache, **heads, **norms}, {"num_warps": 1}
    parts = {**cache, **heads, "part_ptr": "*fp32", "stat_ptr": "*fp32", "PIECES": 16, "QUADS": True, "capacity": "i32", "blocks": "i32", "piece": "i32"}
    for select in (False, True):
        attend = {"chosen_ptr": "*u8", "GROUP": 16, "TILE": 32, "SELECT": select, "BLOCK": 4, "KIND": tl.bfloat16}
        found[f"attend select={select}"] = attention_step._attend_kernel, {**parts, **attend}, {"num_warps": 4}
    choice = {"scores_ptr": "*fp32", "chosen_ptr": "*u8", "position_ptr": "*i32", "blocks": "i32", "BLOCK": 4, "PTX": ptx}
    keys = {"index_ptr": "*bf16", "raw_ptr": "*bf16", "q_weight_ptr": "*fp32", "k_weight_ptr": "*fp32", "cos_ptr": "*bf16", "sin_ptr": "*bf16"}
    score = {**choice, **keys, "out_ptr": "*fp32", "raw_batch": "i32", "HEADS": 4, "D": 128, "ROTARY": 64, "M": indexer_step._TILE, "EPS": 1e-6}
    found["index score"] = indexer_step._score_kernel, score, {"num_warps": 4}
    found["index choose"] = indexer_step._choose_kernel, {**choice, "BUDGET": 512, "WIDTH": 2048}, {"num_warps": 4}
    found["combine"] = attention_step._combine_kernel, parts, {"num_warps": 4}
    plain = {**parts, **norms, "norm_ptr": "*fp32", "HEADS": 32, "KV": 8, "D": 128, "NORM": True}
    found["plain prepare"] = cache_step._prepare_kernel, plain, {"num_warps": 1}
    found["attend plain"] = cache_step._attend_kernel, {**plain, "GROUP": 16, "TILE": 32, "KIND": tl.bfloat16}, {"num_warps": 4}
    found["plain combine"] = cache_step._combine_kernel, plain, {"num_warps": 4}
    added = {
        "x_ptr": "*bf16",
        "y_ptr": "*bf16",
        "weight_ptr": "*fp32",
        "normed_ptr": "*bf16",
        "HIDDEN": 4096,
        "BLOCK": 4096,
        "EPS": 1e-6,
        "ADD": True,
        "PTX": ptx,
    }
    found["add norm"] = residual_step._norm_kernel, added, {"num_warps": 16}
    gate = {"both_ptr": "*bf16", "out_ptr": "*bf16", "width": "i32", "BLOCK": 1024, "PTX": ptx}
    found["gate"] = residual_step._gate_kernel, gate, {"num_warps": 4}
    rows = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "out_ptr": "*bf16", "rows": "i32", "M": 1, "COLUMNS": 2560, "BLOCK": 4096, "ROWS": 2, "PTX": ptx}
    found["rows"] = rows_step._rows_kernel, rows, {"num_warps": 4}
    choose = {"logits_ptr": "*bf16", "ids_ptr": "*i32", "weights_ptr": "*fp32", "share_ptr": "*fp32", "EXPERTS": 512, "STRIDE": 513, "TOPK": 10, "PLACES": 16}
    found["choose"] = rows_step._choose_kernel, {**choose, "WIDTH": 512, "NORMALISE": True, "PTX": ptx}, {"num_warps": 1}
    if ptx:
        regions = {name: kind for letter in "abcd" for name, kind in ((f"{letter}_ptr", "*i32"), (letter, "i32"))}
        found["prefetch"] = prefetch_step._prefetch_kernel, {**regions, "PROGRAMS": 64, "LANES": 256}, {"num_warps": 8}
    return found


def main() -> None:
    """Prints {target: {case: [instructions, those of the matrix units]}}."""
    result: dict[str, dict[str, list[int]]] = {}
    for target in sys.argv[1:] or TARGETS:
        for name, (kernel, arguments, options) in cases(target).items():
            found = instructions(kernel, {key: arguments[key] for key in kernel.arg_names}, target, **options)
            result.setdefault(target, {})[name] = [len(found), sum(any(unit in word.upper() for unit in ("MMA", "HGMMA")) for word in found)]
            print(name, result[target][name], file=sys.stderr)
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main()
