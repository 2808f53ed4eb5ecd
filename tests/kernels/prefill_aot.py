"""Compiles the kernels of prompts for sm_90 and gfx1201 without a GPU: `python -m tests.kernels.prefill_aot [target [case ...]]`; prints JSON.

Why a program: kernels compile only where they were not defined for the interpreter. What it does not prove: that the code runs, or how fast.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import Any

import triton.language as tl

from lab.kernels import (
    attention_prefill,
    delta_intra,
    delta_prefill,
    experts_tiles,
    indexer_prefill,
    mixer_prefill,
    moe_prefill,
    ngram_prefill,
    trunk_prefill,
)
from lab.kernels.fragments import gain, operand_ptx
from lab.kernels.planes import level_table
from tests.kernels.aot import TARGETS, instructions

Case = tuple[Any, dict[str, Any], dict[str, int]]


def grouped(target: str) -> dict[str, Case]:
    """Grouped experts at Flash-Next's widths, narrow and wide tiles."""
    ptx = target == "cuda"
    pointers: dict[str, Any] = {f"{name}_ptr": "*i32" for name in ("order", "tiles", "words", "scale", "shift")} | {"unit_ptr": "*fp32", "weights_ptr": "*fp32"}
    pointers |= {f"{name}_ptr": "*bf16" for name in ("x", "h", "out")}
    found: dict[str, Case] = {}
    for bits, stored, group, levels in ((2, 16, 1, (-1.5, -0.5, 0.5, 1.5)), (3, 8, 2, (-8, -5, -3, -1, 1, 3, 5, 8)), (4, 16, 1, ())):
        lut = level_table(tuple(float(level) for level in levels))[0] if levels else 0
        code = [tl.constexpr(operand_ptx(lut, bits, half, True) if ptx else "") for half in (0, 1)]
        shared = {**pointers, "BITS": bits, "STORED": stored, "LUT": lut, "ASM0": code[0], "ASM1": code[1], "GROUP_CHUNKS": group, "TOPK": 10}
        shared["GAIN"] = gain(bits, True, ptx)
        for places, rows, warps in ((16, 64, 2), (96, 64, 4))[: 1 if bits == 3 else 2]:
            tile = {
                **shared,
                "N": rows,
                "PASSES": 4,
                "M": min(places, 64),
                "EXTRA": places - min(places, 64),
                "RUN": 4 if places == 16 else 2,
                "KIND": tl.bfloat16,
                "PTX": ptx,
            }
            options = {"num_warps": warps, "num_stages": 3 if ptx else 2}
            gate_up = {**tile, "WIDTH": 640, "BLOCKS": 40, "CHUNKS": 80}
            found[f"grouped gate_up {bits} bit M={places}"] = experts_tiles.gate_up_kernel, gate_up, options
            down = {**tile, "WIDTH": 2560, "BLOCKS": 160, "CHUNKS": 20}
            found[f"grouped down {bits} bit M={places}"] = experts_tiles.down_kernel, down, options
    return found


def chunks(target: str) -> dict[str, Case]:
    """The chunks of the delta rule."""
    kinds: dict[str, Any] = (
        {f"{name}_ptr": "*bf16" for name in ("k", "v", "w", "u")} | {f"{name}_ptr": "*fp32" for name in ("decay", "beta", "total")} | {"tokens": "i32"}
    )
    sizes: dict[str, Any] = {"HEADS": 48, "SHARE": 3, "D": 128, "KIND": tl.bfloat16, "TF32": tl.constexpr("tf32" if target == "cuda" else "ieee")}
    return {"chunks": (delta_intra._intra_kernel, {**kinds, **sizes}, {"num_warps": 4})}


def small(target: str) -> dict[str, Case]:
    """What sorts slots and sums them."""
    slots: dict[str, Any] = {f"{name}_ptr": "*i32" for name in ("ids", "counts", "rank", "ends", "tile_ends", "order", "tiles")} | {"slots": "i32"}
    sizes = {"experts": "i32", "tiles": "i32", "BLOCK": 16, "WIDTH": 512, "STEP": 1024, "SLOTS": 256}
    choice: dict[str, Any] = {
        "logits_ptr": "*bf16",
        "ids_ptr": "*i32",
        "weights_ptr": "*fp32",
        "share_ptr": "*fp32",
        "stride": "i32",
        "EXPERTS": 512,
        "TOPK": 10,
        "PLACES": 16,
    }
    summed: dict[str, Any] = {
        "y_ptr": "*bf16",
        "shared_ptr": "*bf16",
        "share_ptr": "*fp32",
        "out_ptr": "*bf16",
        "TOPK": 10,
        "WIDTH": 2560,
        "TILE": 1024,
        "SHARED": True,
    }
    return {
        "count": (moe_prefill._count_kernel, {**slots, **sizes}, {"num_warps": 4}),
        "ends": (moe_prefill._ends_kernel, {**slots, **sizes}, {"num_warps": 4}),
        "place": (moe_prefill._place_kernel, {**slots, **sizes}, {"num_warps": 4}),
        "route": (moe_prefill._route_kernel, {**choice, "WIDTH": 512, "NORMALISE": True}, {"num_warps": 1}),
        "sum": (moe_prefill._sum_kernel, summed, {"num_warps": 4}),
    }


def around(target: str) -> dict[str, Case]:
    """Mixers, Gated DeltaNet, attention and the indexer at Flash-Next's sizes."""
    ptx = target == "cuda"
    half = (
        "streams",
        "y",
        "given",
        "normed",
        "x",
        "out",
        "u",
        "weight",
        "past",
        "ring",
        "qk",
        "v",
        "ab",
        "read",
        "z",
        "q",
        "k",
        "gate",
        "cos",
        "sin",
        "raw",
        "keys",
    )
    kinds = {f"{name}_ptr": "*bf16" for name in half}
    kinds |= {f"{name}_ptr": "*fp32" for name in ("norm", "taps", "a_log", "bias", "decay", "beta", "scores", "unit")} | {
        "words_ptr": "*i32",
        "scale_ptr": "*bf16",
    }
    numbers = ("stride", "tokens", "start", "numbers", "rows", "blocks", "out_stride", "out_batch", "words", "raw_batch")
    # Strides are given as numbers, because those that are multiples of 16 are compiled apart, too.
    strides: dict[str, Any] = {"bits_ptr": "*i32", "kv_batch": 1 << 20, "gate_stride": 12288, "x_stride": 12288}
    kinds |= strides | dict.fromkeys(numbers, "i32")
    mixer: dict[str, Any] = {
        **kinds,
        "EPS": 1e-6,
        "COUNT": 4,
        "HIDDEN": 2560,
        "BLOCK": 4096,
        "FIRST": False,
        "PENDING": True,
        "RANK": 320,
        "KIND": tl.bfloat16,
        "PTX": ptx,
    }
    delta: dict[str, Any] = {
        **kinds,
        "KEYS": 2048,
        "WIDE": 10240,
        "D": 128,
        "KERNEL": 4,
        "M": 16,
        "KEEP": True,
        "HEADS": 48,
        "TILE": 1024,
        "EPS": 1e-6,
        "SIGMOID": True,
    }
    turned: dict[str, Any] = {**kinds, "weight_ptr": "*fp32", "HEAD_STRIDE": 512, "D": 256, "ROTARY": 64, "M": 16, "EPS": 1e-6}
    attend: dict[str, Any] = {**kinds, "SCALE": 0.09, "HEADS": 24, "KV": 2, "D": 256, "GATE_STRIDE": 512, "M": 128, "N": 64, "BLOCK": 4, "KIND": tl.bfloat16}
    index: dict[str, Any] = {
        **kinds,
        "weight_ptr": "*fp32",
        "BLOCK": 4,
        "D": 128,
        "ROTARY": 64,
        "EPS": 1e-6,
        "HEADS": 4,
        "N": 64,
        "KIND": tl.bfloat16,
        "BUDGET": 512,
        "WIDTH": 1024,
    }
    ngram: dict[str, Any] = {
        **kinds,
        **{f"{name}_norm_ptr": "*fp32" for name in ("key", "query", "conv")},
        "key_ptr": "*bf16",
        "value_ptr": "*bf16",
        "gated_ptr": "*bf16",
    }
    ngram |= {"EPS": 1e-6, "COUNT": 4, "HIDDEN": 2560, "BLOCK": 4096, "WIDE": 10240, "KERNEL": 4, "DILATION": 3, "TILE": 1024}
    m, n, warps, stages = mixer_prefill.MIX_SHAPE
    found: dict[str, Case] = {
        "norm": (mixer_prefill._norm_kernel, mixer, {"num_warps": 8}),
        "silu": (mixer_prefill._silu_kernel, {**mixer, "DIVISOR": 4, "TILE": 1024}, {"num_warps": 4}),
        "mix": (mixer_prefill._mix_kernel, {**mixer, "M": m, "N": n}, {"num_warps": warps, "num_stages": stages if ptx else 2}),
        "convolve": (delta_prefill._convolve_kernel, delta, {"num_warps": 4}),
        "gates": (delta_prefill._gates_kernel, delta, {"num_warps": 4}),
        "gated norm": (delta_prefill._gated_norm_kernel, delta, {"num_warps": 4}),
        "rotate": (attention_prefill._norm_rotate_kernel, turned, {"num_warps": 4}),
        "pool": (indexer_prefill._pool_kernel, {**index, "M": 16}, {"num_warps": 4}),
        "scores": (indexer_prefill._scores_kernel, {**index, "out_ptr": "*fp32", "M": 32}, {"num_warps": 4, "num_stages": 1}),
        "choose": (indexer_prefill._choose_kernel, index, {"num_warps": 2}),
        "n-gram gate": (ngram_prefill._gate_kernel, ngram, {"num_warps": 8}),
        "n-gram inject": (ngram_prefill._inject_kernel, ngram, {"num_warps": 4}),
        "decode": (trunk_prefill._decode_kernel, {**kinds, "CHUNKS": 320, "GROUP_CHUNKS": 4, "N": 32}, {"num_warps": 4}),
    }
    found["attend"] = attention_prefill._attend_kernel, {**attend, "SELECT": True}, {"num_warps": 8, "num_stages": 2 if ptx else 1}
    return found


def cases(target: str) -> dict[str, Case]:
    """Name -> (kernel, arguments, options)."""
    return {**grouped(target), **around(target), **chunks(target), **small(target)}


def main() -> None:
    """Prints {target: {case: {mnemonic: count}}}."""
    result: dict[str, dict[str, Any]] = {}
    for target in sys.argv[1:2] or TARGETS:
        for name, (kernel, arguments, options) in cases(target).items():
            if sys.argv[2:] and name not in sys.argv[2:]:
                continue
            found = instructions(kernel, {key: arguments[key] for key in kernel.arg_names}, target, **options)
            result.setdefault(target, {})[name] = Counter(found)
            units = sum(any(unit in word.upper() for unit in ("MMA", "HGMMA")) for word in found)
            print(target, name, len(found), "matrix", units, "to local memory", sum(word in ("LDL", "STL") for word in found), file=sys.stderr)
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    main()
