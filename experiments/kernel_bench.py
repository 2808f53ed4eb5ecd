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
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import linear

from lab.codecs import Codec, Parts, create
from lab.kernels.experts import LowBitExperts, Tiles, reference_experts
from lab.kernels.experts_bf16 import Bf16Experts
from lab.kernels.planes import repack
from lab.kernels.router import reference_route, route
from lab.kernels.table import Table, reference_table
from lab.kernels.trunk import Int8Linear, reference_linear

EXPERTS, HIDDEN, WIDTH, TOPK = 512, 2560, 640, 10
TRUNK = {"qkv 10240x2560": (10240, 2560), "out 2560x6144": (2560, 6144)}
CODECS: dict[str, dict[str, Any]] = {"w3_levels": {}, "q2_levels": {}, "q2_g32": {}}
READ_GB_S = 4400.0  # read-only sweep of an H200, measured; the denominator of every share
TOLERANCE = 4e-3  # |out - ref| / |ref|: bfloat16 output rounding is 1.7e-3, float16 sums within 32 weights under 1e-3
ROTATE_BYTES = 400e6  # several times the 60 MB cache
Case = tuple[str, list[Callable[[], object]], int]  # name, calls to rotate through, weight bytes one call reads


def random_parts(codec: Codec, shape: tuple[int, ...]) -> Parts:
    """Canonical parts of random codes with scales near the size of trained weights; what decode gives for them is the truth."""
    *lead, rows, cols = shape

    def scales(*size: int) -> Tensor:
        return torch.rand(*size, device="cuda") + 0.5

    if codec.name == "int8_g128":
        codes = torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda")
        return {"weight": codes, "scale": (scales(*lead, rows, -(-cols // 128)) / 2000).to(torch.bfloat16)}
    bits = 3 if codec.name == "w3_levels" else 2
    codes = torch.randint(0, 256, (*lead, rows, cols * bits // 8), dtype=torch.uint8, device="cuda")
    if codec.name == "w3_levels":
        return {"codes": codes, "scale": scales(*lead, rows, cols // 64).to(torch.float8_e4m3fn), "factor": torch.full((*lead, 1), 2.0**-8, device="cuda")}
    if codec.name == "q2_levels":
        return {"codes": codes, "scale": scales(*lead, rows, 1) / 200}
    return {"codes": codes, "scale": (scales(*lead, rows, cols // 32) / 50).to(torch.float16)}


@contextmanager
def poisoned() -> Iterator[None]:
    """Within, floating outputs start as NaN and integer ones as -77: what a kernel does not write shows."""
    real = torch.empty

    def empty(*size: Any, **options: Any) -> Tensor:
        out = real(*size, **options)
        return out.fill_(float("nan") if out.is_floating_point() else -77)

    with mock.patch.object(torch, "empty", empty):
        yield


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| in float64; NaN where anything is NaN."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def random_ids(tokens: int, experts: int, k: int) -> Tensor:
    """k different experts per token, int32."""
    return torch.rand(tokens, experts, device="cuda").topk(k, dim=-1).indices.to(torch.int32)


def check_trunk() -> Iterator[tuple[str, float]]:
    codec = create("int8_g128")
    for (rows, cols), dtype in ((TRUNK["qkv 10240x2560"], torch.bfloat16), (TRUNK["out 2560x6144"], torch.bfloat16), ((77, 2592), torch.float16)):
        parts = random_parts(codec, (rows, cols))
        kernel, weight = Int8Linear(repack(codec, parts, cols)), codec.decode(parts, cols)
        for tokens in (1, 2, 4, 8, 17, 130):
            x = torch.randn(tokens, cols, device="cuda").to(dtype)
            want = reference_linear(x, weight)
            if tokens <= 8:
                yield f"int8 gemv {rows}x{cols} M={tokens}", relative_error(kernel.inner(x), want)
            yield f"int8 tile {rows}x{cols} M={tokens}", relative_error(kernel.tiled(x), want)


def check_experts() -> Iterator[tuple[str, float]]:
    for hidden, width in ((HIDDEN, WIDTH), (192, 704)):
        for tokens in (1, 2, 4, 8):
            ids, weights = random_ids(tokens, 24, 10), torch.rand(tokens, 10, device="cuda")
            ids[0, 3] = -1
            x = torch.randn(tokens, hidden, device="cuda").to(torch.bfloat16)
            for name, options in [*CODECS.items(), ("q2_g32", {"scale_dtype": "e4m3"}), ("w3_levels", {"code_order": "10_10_10_2"})]:
                codec = create(name, options)
                shapes = ((24, 2 * width, hidden), (24, hidden, width))
                stacks = [random_parts(codec, shape) for shape in shapes]
                if options.get("scale_dtype") == "e4m3":
                    stacks = [{**p, "scale": (p["scale"].float() * 50).to(torch.float8_e4m3fn), "factor": torch.full((24, 1), 2.0**-6, device="cuda")} for p in stacks]
                kernel = LowBitExperts(repack(codec, stacks[0], hidden, halves=2), repack(codec, stacks[1], width))
                want = reference_experts(x, ids, weights, codec.decode(stacks[0], hidden), codec.decode(stacks[1], width))
                yield f"experts {name} {options} {hidden}/{width} M={tokens}", relative_error(kernel(x, ids, weights), want)
            dense = [(torch.randn(24, *s, device="cuda") / 50).to(torch.bfloat16) for s in ((2 * width, hidden), (hidden, width))]
            want = reference_experts(x, ids, weights, dense[0].float(), dense[1].float())
            yield f"experts bf16 {hidden}/{width} M={tokens}", relative_error(Bf16Experts(*dense)(x, ids, weights), want)


def check_small() -> Iterator[tuple[str, float]]:
    for experts, k in ((512, 10), (300, 7), (8, 8)):
        for normalise in (True, False):
            logits = torch.randn(8, experts, device="cuda")
            got, want = route(logits, k, normalise), reference_route(logits, k, normalise)
            yield f"router {experts} top-{k}", relative_error(got[1], want[1]) if torch.equal(got[0], want[0]) else float("nan")
    for name in ("e4m3", "q2_rows"):
        for cols in (160, 36):
            codec = create(name)
            parts = codec.encode(torch.randn(5003, cols, device="cuda"))
            ids = torch.randint(0, 5003, (8, 16), device="cuda")
            yield f"table {name} {cols}", relative_error(Table(codec, parts, cols)(ids), reference_table(codec, parts, cols, ids))


def check() -> list[tuple[str, float]]:
    """All comparisons; prints the worst of each kind and every failure."""
    with poisoned():
        found = [pair for part in (check_trunk, check_experts, check_small) for pair in part()]
    torch.cuda.synchronize()
    failed = [(name, error) for name, error in found if not error <= TOLERANCE]
    for name, error in failed:
        print(f"WRONG {name}: relative error {error:.2e}")
    kinds = {name.split(" M=")[0].split("torch")[0]: 0.0 for name, _ in found}
    print(f"checks: {len(found) - len(failed)} of {len(found)} within {TOLERANCE}, {len(kinds)} kinds, worst {max(error for _, error in found):.2e}")
    return failed


def graph_us(calls: list[Callable[[], object]], replays: int = 15) -> list[float]:
    """Microseconds per call, one sample per replay of a CUDA graph that holds all calls once."""
    stream = torch.cuda.Stream()
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


def trunk_cases(tune: bool) -> Iterator[Case]:
    codec = create("int8_g128")
    for name, (rows, cols) in TRUNK.items():
        copies = max(2, int(ROTATE_BYTES / (rows * cols)))
        planes = [repack(codec, random_parts(codec, (rows, cols)), cols) for _ in range(copies)]
        dense = [torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) for _ in range(copies // 2)]
        for tokens in (1, 2, 4, 8, 512, 4096):
            x = torch.randn(tokens, cols, device="cuda", dtype=torch.bfloat16)
            yield f"{name} M={tokens} cuBLAS bf16", [lambda w=w, x=x: linear(x, w) for w in dense], 2 * rows * cols
            nbytes = planes[0].nbytes()
            if tokens <= 8:
                shapes = GEMV_SHAPES if tune and tokens in (1, 4) else [None]
                for shape in shapes:
                    kernels = [Int8Linear(p, *([shape] if shape else [])) for p in planes]
                    yield f"{name} M={tokens} int8 gemv {shape or ''}", [lambda k=k, x=x: k.inner(x) for k in kernels], nbytes
            for config in (TILE_SHAPES_SMALL if tokens <= 8 else TILE_SHAPES) if tune and tokens != 2 else [None]:
                yield f"{name} M={tokens} int8 tile {config or ''}", [lambda k=Int8Linear(p), x=x, c=config: k.tiled(x, c) for p in planes], nbytes


GEMV_SHAPES = [(8, 5, 1), (8, 10, 1), (16, 1, 2), (16, 2, 2), (16, 5, 2), (32, 1, 4), (32, 3, 4), (64, 1, 8)]
TILE_SHAPES_SMALL = [(64, 16, 4, 3), (64, 16, 4, 5), (32, 16, 2, 4), (16, 16, 1, 6), (128, 16, 4, 3)]
TILE_SHAPES = [(128, 128, 8, 3), (128, 64, 4, 3), (64, 128, 4, 4), (64, 64, 4, 4)]
GATE_SHAPES = [(8, 1, 1), (8, 5, 1), (8, 10, 1), (16, 1, 2), (16, 2, 2), (16, 5, 2), (32, 1, 4), (32, 3, 4), (32, 3, 2)]
DOWN_SHAPES = [(8, 1, 1), (8, 5, 1), (16, 1, 2), (16, 4, 2), (16, 13, 2), (32, 1, 4), (32, 7, 4), (64, 1, 8), (64, 4, 8)]


def expert_cases(tune: bool) -> Iterator[Case]:
    for name, options in CODECS.items():
        codec = create(name, options)
        gate_up = repack(codec, random_parts(codec, (EXPERTS, 2 * WIDTH, HIDDEN)), HIDDEN, halves=2)
        down = repack(codec, random_parts(codec, (EXPERTS, HIDDEN, WIDTH)), WIDTH)
        for tokens in (1, 4, 8):
            rounds = max(8, EXPERTS // (tokens * TOPK))
            ids = [random_ids(tokens, EXPERTS, TOPK) for _ in range(rounds)]
            x, weights = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16), torch.rand(tokens, TOPK, device="cuda")
            h = torch.randn(tokens, TOPK, WIDTH, device="cuda", dtype=torch.float16)
            used = sum(int(i.unique().numel()) for i in ids) / rounds
            for shape in GATE_SHAPES if tune and name != "q2_levels" else [Tiles().gate_up]:
                kernel = LowBitExperts(gate_up, down, Tiles(gate_up=shape))
                yield f"gate+up {name} M={tokens} {shape}", [lambda i=i, k=kernel, x=x: k.gate_up(x, i) for i in ids], int(used * gate_up.bytes_per_matrix())
            for shape in DOWN_SHAPES if tune and name != "q2_levels" else [Tiles().down]:
                kernel = LowBitExperts(gate_up, down, Tiles(down=shape))
                calls: list[Callable[[], object]] = [lambda i=i, k=kernel, h=h, w=weights: k.down(h, i, w, torch.bfloat16) for i in ids]
                yield f"down {name} M={tokens} {shape}", calls, int(used * down.bytes_per_matrix())
            kernel = LowBitExperts(gate_up, down)
            both = gate_up.bytes_per_matrix() + down.bytes_per_matrix()
            yield f"both {name} M={tokens}", [lambda i=i, k=kernel, x=x, w=weights: k(x, i, w) for i in ids], int(used * both)


def small_cases() -> Iterator[Case]:
    for tokens in (1, 8):
        logits = torch.randn(tokens, EXPERTS, device="cuda")
        yield f"router M={tokens}", [lambda x=logits: route(x, TOPK)] * 16, logits.nbytes
        yield f"router M={tokens} torch", [lambda x=logits: reference_route(x, TOPK)] * 16, logits.nbytes
    for name in ("e4m3", "q2_rows"):
        codec = create(name)
        table = Table(codec, codec.encode(torch.randn(1 << 20, 160, device="cuda")), 160)
        for tokens in (1, 8, 512):
            ids = [torch.randint(0, 1 << 20, (tokens, 16), device="cuda") for _ in range(16)]
            yield f"table {name} M={tokens}", [lambda i=i, t=table: t(i) for i in ids], tokens * 16 * codec.row_bytes(160)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tune", action="store_true", help="search launch shapes instead of timing the defaults")
    parser.add_argument("--out", type=Path, help="write all samples there as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: no GPU; the kernels' tests on a CPU are in tests/kernels", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    if check():
        print("no speed is reported while a check fails")
        return 1
    rows = []
    for cases in (trunk_cases(options.tune), expert_cases(options.tune), small_cases()):
        for name, calls, nbytes in cases:
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
