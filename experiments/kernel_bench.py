"""Checks every kernel against its plain-torch reference on this GPU, then times it: `python -m experiments.kernel_bench`.

Why one script: a speed counts only beside a correct result, so a failed check ends the run before anything is timed. Weights are random codes at the true
shapes of Flash-Next, rotated past the last-level cache; calls are replayed in a CUDA graph; medians are over replays. `--tune` also searches launch shapes.
What it does not prove: end-to-end speed (launches between kernels, other work on the GPU) or quality of the weights.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import linear

from experiments.gpu_parts import missing_gpu
from lab.codecs import create
from lab.kernels.experts import LowBitExperts, Tile
from lab.kernels.experts_bf16 import Bf16Experts
from lab.kernels.planes import repack
from lab.kernels.router import reference_route, route
from lab.kernels.table import Table
from lab.kernels.trunk import Int8Linear
from lab.kernels.verify import Error, check_experts, check_linear, check_router, check_table, random_ids, random_parts, relative_error

DEVICE = "cuda"
EXPERTS, HIDDEN, WIDTH, TOPK = 512, 2560, 640, 10
TRUNK = {"qkv 10240x2560": (10240, 2560), "out 2560x6144": (2560, 6144)}
CODECS = ("w3_levels", "q2_g32", "q2_levels", "gguf:Q4_0")
CHECKED: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "w3_levels": [("w3_levels", {}), ("w3_levels", {"code_order": "10_10_10_2"})],
    "q2_g32": [("q2_g32", {}), ("q2_g32", {"scale_dtype": "e4m3"})],
    "q2_levels": [("q2_levels", {})],
    "gguf:Q4_0": [("gguf:Q4_0", {})],
    "small": [("bf16", {})],
}
READ_GB_S = 4400.0  # read-only sweep of an H200, measured; the denominator of every share
TOLERANCE = 4e-3  # |out - ref| / |ref|: bfloat16 output rounding is 1.7e-3, float16 sums within 32 weights under 1e-3
ROTATE_BYTES = 400e6  # several times the 60 MB cache
Calls = list[Callable[[], Tensor]]
Case = tuple[str, Calls, int, Tensor | None]  # name, calls to rotate through, weight bytes one call reads, what the first call must give


def checks(part: str) -> Iterator[Error]:
    """The comparisons of one part, at the true shapes and at some that divide by nothing."""
    if part == "trunk":
        for tokens in (1, 2, 4, 8, 17, 130):
            for rows, cols in TRUNK.values():
                yield from check_linear(rows, cols, tokens, torch.bfloat16, DEVICE)
            yield from check_linear(77, 2592, tokens, torch.float16, DEVICE)
        return
    if part == "small":
        for experts, k in ((512, 10), (300, 7), (8, 8)):
            yield from check_router(experts, k, 8, DEVICE)
        for name, cols in (("e4m3", 160), ("q2_rows", 160), ("e4m3", 36), ("q2_rows", 36)):
            yield from check_table(create(name), 5003, cols, DEVICE)
    for codec in (create(name, options) for name, options in CHECKED.get(part, [])):
        for hidden, width, dtype in ((HIDDEN, WIDTH, torch.bfloat16), (192, 704, torch.float16)):
            for tokens in (1, 2, 4, 8):
                yield from check_experts(codec, 24, hidden, width, tokens, TOPK, dtype, DEVICE)


def check(parts: list[str]) -> bool:
    """Runs the comparisons; prints every failure and the worst error. True where all are within tolerance."""
    found = [error for part in parts for error in checks(part)]
    failed = [(name, error) for name, error in found if not error <= TOLERANCE]
    for name, error in failed:
        print(f"WRONG {name}: relative error {error:.2e}")
    print(f"checks: {len(found) - len(failed)} of {len(found)} within {TOLERANCE}, worst {max(error for _, error in found):.2e}")
    return not failed


def graph_us(calls: Calls, replays: int = 15) -> list[float]:
    """Microseconds per call, one sample per replay of a CUDA graph that holds all calls once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the inputs were made there
    with torch.cuda.stream(stream):
        calls[0]()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
        graph.replay()
        samples = []
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1000 / len(calls))
    return samples


def serial(name: str) -> Any:
    """Launches of lab.kernels.<name> without overlap, to see what the overlap gives."""
    return mock.patch(f"lab.kernels.{name}.launch_options", dict)


def trunk_cases(tune: bool) -> Iterator[Case]:
    """int8 and cuBLAS bf16 on the same matrices' shapes; with `tune` every launch shape, checked against the default's result."""
    codec = create("int8_g128")
    for name, (rows, cols) in TRUNK.items():
        copies = max(2, int(ROTATE_BYTES / (rows * cols)))
        planes = [repack(codec, random_parts(codec, (rows, cols), DEVICE), cols) for _ in range(copies)]
        dense = [torch.randn(rows, cols, device=DEVICE, dtype=torch.bfloat16) for _ in range(copies // 2)]
        kernels, nbytes = [Int8Linear(p) for p in planes], planes[0].nbytes()
        for tokens in (1, 2, 4, 8, 64, 512, 4096):
            x = torch.randn(tokens, cols, device=DEVICE, dtype=torch.bfloat16)
            yield f"{name} M={tokens} cuBLAS bf16", [partial(linear, x, w) for w in dense], 2 * rows * cols, None
            yield f"{name} M={tokens} int8", [partial(k, x) for k in kernels], nbytes, None
            want = kernels[0](x)
            for shape in GEMV_SHAPES.get(tokens, []) if tune else []:
                yield f"{name} M={tokens} inner {shape}", [partial(k.inner, x, shape) for k in kernels], nbytes, want
            for tile in TILE_SHAPES.get(tokens, []) if tune else []:
                yield f"{name} M={tokens} tiled {tile}", [partial(k.tiled, x, tile) for k in kernels], nbytes, want
            if tokens == 64:
                yield f"{name} M={tokens} decoded", [partial(k.decoded, x) for k in kernels], nbytes, want
            if tokens <= 2:
                with serial("trunk"):
                    yield f"{name} M={tokens} int8, no overlap", [partial(k, x) for k in kernels], nbytes, want


GEMV_SHAPES = {
    1: [(16, 32, 3, 0, 4), (16, 32, 3, 1, 4), (8, 64, 2, 0, 4)],
    2: [(16, 32, 3, 0, 4), (16, 32, 3, 1, 4), (8, 64, 2, 1, 4)],
    4: [(16, 16, 1, 0, 2), (16, 32, 3, 0, 4), (8, 64, 2, 0, 4), (8, 64, 2, 1, 4)],
    8: [(16, 16, 1, 0, 2), (8, 64, 2, 1, 4)],
}
TILE_SHAPES = {8: [(32, 16, 2, 4), (16, 16, 1, 4)], 64: [(32, 64, 2, 4)]}
GATE_SHAPES = [(16, 16, 1, 2), (16, 32, 3, 4)]
DOWN_SHAPES = [(8, 64, 4, 4), (16, 64, 4, 8), (16, 32, 7, 4), (16, 16, 4, 2), (16, 16, 13, 2), (8, 32, 7, 4), (8, 32, 7, 2), (8, 16, 13, 2), (32, 8, 25, 4)]


def expert_cases(name: str, tune: bool) -> Iterator[Case]:
    """Both kernels of one codec, alone and together; every call routes to other experts, so that no weight is cached."""
    codec = create(name)
    gate_up = repack(codec, random_parts(codec, (EXPERTS, 2 * WIDTH, HIDDEN), DEVICE), HIDDEN, halves=2)
    down = repack(codec, random_parts(codec, (EXPERTS, HIDDEN, WIDTH), DEVICE), WIDTH)
    kernel = LowBitExperts(gate_up, down)
    for tokens in (1, 4, 8):
        rounds = max(8, EXPERTS // (tokens * TOPK))
        ids = [random_ids(tokens, EXPERTS, TOPK, DEVICE) for _ in range(rounds)]
        x, weights = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16), torch.rand(tokens, TOPK, device=DEVICE)
        h = torch.randn(tokens, TOPK, WIDTH, device=DEVICE, dtype=torch.float16)
        used = sum(int(i.unique().numel()) for i in ids) / rounds
        up_bytes, down_bytes = int(used * gate_up.bytes_per_matrix()), int(used * down.bytes_per_matrix())

        def gates(tile: Tile | None = None, x: Tensor = x, ids: list[Tensor] = ids) -> Calls:
            return [partial(kernel.gate_up, x, i, tile) for i in ids]

        def downs(tile: Tile | None = None, h: Tensor = h, ids: list[Tensor] = ids, weights: Tensor = weights) -> Calls:
            return [partial(kernel.down, h, i, weights, torch.bfloat16, tile) for i in ids]

        yield f"gate+up {name} M={tokens}", gates(), up_bytes, None
        yield f"gate+up {name} M={tokens} float16 in", gates(x=x.to(torch.float16)), up_bytes, None
        yield f"down {name} M={tokens}", downs(), down_bytes, None
        both: Calls = [partial(kernel, x, i, weights) for i in ids]
        yield f"both {name} M={tokens}", both, up_bytes + down_bytes, None
        with serial("experts"):
            yield f"gate+up {name} M={tokens}, no overlap", gates(), up_bytes, None
            yield f"down {name} M={tokens}, no overlap", downs(), down_bytes, None
            yield f"both {name} M={tokens}, no overlap", both, up_bytes + down_bytes, None
        if tune:
            wants = gates()[0](), downs()[0]()
            for shape in GATE_SHAPES:
                yield f"gate+up {name} M={tokens} {shape}", gates(shape), up_bytes, wants[0]
            for shape in DOWN_SHAPES:
                yield f"down {name} M={tokens} {shape}", downs(shape), down_bytes, wants[1]


def small_cases() -> Iterator[Case]:
    """bf16 experts, router and table; the two small ones are bounded by launches, not bytes."""
    gate_up, down = (torch.randn(EXPERTS, *s, device=DEVICE, dtype=torch.bfloat16) for s in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)))
    dense, each = Bf16Experts(gate_up, down), 2 * HIDDEN * WIDTH
    for tokens in (1, 8):
        x, weights = torch.randn(tokens, HIDDEN, device=DEVICE, dtype=torch.bfloat16), torch.rand(tokens, TOPK, device=DEVICE)
        ids = [random_ids(tokens, EXPERTS, TOPK, DEVICE) for _ in range(8)]
        used = sum(int(i.unique().numel()) for i in ids) / len(ids)
        yield f"both bf16 M={tokens}", [partial(dense, x, i, weights) for i in ids], int(used * 3 * each), None
        logits = torch.randn(tokens, EXPERTS, device=DEVICE)
        yield f"router M={tokens}", [lambda x=logits: route(x, TOPK)[1]] * 16, logits.nbytes, None  # type: ignore[misc]
        yield f"router M={tokens} torch", [lambda x=logits: reference_route(x, TOPK)[1]] * 16, logits.nbytes, None  # type: ignore[misc]
    for name in ("e4m3", "q2_rows"):
        codec = create(name)
        table = Table(codec, codec.encode(torch.randn(1 << 20, 160, device=DEVICE)), 160)
        for tokens in (1, 8, 512):
            rows = [torch.randint(0, 1 << 20, (tokens, 16), device=DEVICE) for _ in range(16)]
            yield f"table {name} M={tokens}", [partial(table, i) for i in rows], tokens * 16 * codec.row_bytes(160), None


def cases(part: str, tune: bool) -> Iterator[Case]:
    """What is timed of one part."""
    if part == "trunk":
        return trunk_cases(tune)
    return small_cases() if part == "small" else expert_cases(part, tune)


def main() -> int:
    names = ["trunk", *CODECS, "small"]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tune", action="store_true", help="also time other launch shapes, each checked against the default's result")
    parser.add_argument("--only", choices=names, help="one part")
    parser.add_argument("--out", type=Path, help="write all samples there as JSON")
    options = parser.parse_args()
    if missing_gpu("kernel_bench"):
        return 2
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    chosen = [options.only] if options.only else names
    if not check(chosen):
        print("no speed is reported while a check fails")
        return 1
    rows = []
    for part in chosen:
        for name, calls, nbytes, want in cases(part, options.tune):
            if want is not None and not relative_error(calls[0](), want) <= TOLERANCE:
                print(f"WRONG {name}: differs from the default launch shape")
                return 1
            samples = graph_us(calls)
            us = median(samples)
            rate = nbytes / us / 1000
            print(f"{name:50s} {us:9.2f} us [{min(samples):.2f}, {max(samples):.2f}] {rate:7.0f} GB/s {rate / READ_GB_S:6.1%}", flush=True)
            rows.append({"name": name, "us": samples, "bytes": nbytes})
    if options.out:
        options.out.write_text(json.dumps(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
