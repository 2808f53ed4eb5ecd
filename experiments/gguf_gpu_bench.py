"""Checks every GGUF type's GPU kernels against its codec, then times some beside bf16 cuBLAS: `python -m experiments.gguf_gpu_bench`.

Why one script: a speed counts only beside a correct result, so a failed check ends the run before anything is timed. Checks run in several processes, because
compiling takes most of the time; what they compile the timing finds on disk. Weights are random blocks, in copies that go past the last-level cache; calls are
replayed in a CUDA graph. `--tune` also times other launch shapes, each checked against the default's result.
What it does not prove: end-to-end speed, or quality of the weights.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import linear

from experiments.gpu_parts import missing_gpu
from experiments.kernel_bench import graph_us
from lab.codecs.gguf import GGUF_CODECS, PART
from lab.kernels.gguf_gpu import GpuBlocks, decode, transcode
from lab.kernels.gguf_gpu_product import Shape, dequantise, expert_slots, product
from lab.kernels.gguf_gpu_verify import check_dequantise, check_product, check_slots, random_blocks
from lab.kernels.verify import Error, relative_error

TYPES = tuple(name.removeprefix("gguf:") for name in GGUF_CODECS)
TIMED = ("Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q8_0", "IQ2_XS", "IQ3_S", "IQ4_XS", "Q2_0")
DENSE = ((2560, 2560), (10240, 2560))
EXPERTS, SLOTS = 64, 10
STACKS = ((1280, 2560), (2560, 640))  # gate and up; down. Types of 256 weights a block cannot hold rows of 640
TOKENS = (1, 4, 8)
SHAPES: dict[int, tuple[Shape, ...]] = {
    1: ((32, 5, 1), (64, 3, 2), (64, 5, 2), (128, 2, 4), (128, 3, 4), (128, 5, 4), (256, 2, 8), (256, 3, 8)),
    4: ((32, 1, 1), (64, 1, 2), (64, 2, 2), (128, 1, 4), (128, 2, 4), (256, 1, 8)),
    8: ((32, 1, 1), (64, 1, 2), (64, 2, 2), (128, 1, 4), (256, 1, 8)),
}
FLOAT32 = 1e-5  # |out - exact| / |exact| for float32 results
ROUNDED = 5e-3  # the same where results or weights are rounded to bfloat16
ROTATE_BYTES = 400e6  # several times an H200's 60 MB cache
Case = tuple[
    str, Sequence[Callable[[], Tensor]], int, str | None
]  # name, calls to rotate through, bytes of weights one call reads, name of what it is set beside


def check(name: str) -> list[tuple[str, float, float]]:
    """(case, error, most) of one type on this GPU: bits of the transcoded weights, products, slots and decoding, odd sizes among them."""
    torch.manual_seed(0)
    codec = GGUF_CODECS[f"gguf:{name}"]()
    small = 640 if codec.kind.fits(640) else 512
    parts = {PART: random_blocks(name, (3, 37, small), "cuda")}
    same = torch.equal(decode(transcode(codec, parts, small)), codec.decode(parts, small))
    ids = torch.tensor([2, -1, 0, 2, 1, 0, 1, 2, -1, 0], device="cuda")

    def errors() -> Iterator[Error]:
        yield f"{name} transcoded bits", 0.0 if same else float("inf")
        for tokens, kind in ((1, torch.bfloat16), (1, torch.float32), (3, torch.bfloat16), (8, torch.bfloat16)):
            yield from check_product(name, 2560, 2560, tokens, kind, "cuda")
            yield from check_product(name, 77, 2560, tokens, kind, "cuda")
        yield from check_product(name, 37, small, 1, torch.float16, "cuda")
        yield from check_slots(name, 5, 1283, 2560, ids, torch.bfloat16, "cuda")
        yield from check_slots(name, 3, 37, small, ids, torch.bfloat16, "cuda")
        yield from check_dequantise(name, (3, 37, small), torch.float32, "cuda")

    found = [(case, error, FLOAT32) for case, error in errors()]
    return found + [(case, error, ROUNDED) for case, error in check_dequantise(name, (2560, 2560), torch.bfloat16, "cuda")]


def check_all(types: tuple[str, ...]) -> bool:
    """Checks in processes of their own; prints every failure and the worst float32 error. True where all are within their limits."""
    workers = max(1, min(len(types), (os.cpu_count() or 2) - 2, 14))
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        found = [case for cases in pool.map(check, types) for case in cases]
    failed = [(case, error) for case, error, most in found if not error <= most]
    for case, error in failed:
        print(f"WRONG {case}: relative error {error:.2e}")
    worst = max(error for _, error, most in found if most == FLOAT32)
    print(f"checks: {len(found) - len(failed)} of {len(found)} within {FLOAT32} (bfloat16: {ROUNDED}), worst float32 {worst:.2e}", flush=True)
    return not failed


def read_rate() -> float:
    """GB/s of a read-only sweep over 4 GiB: the denominator of every share."""
    big = torch.randn(1 << 30, device="cuda")
    return big.nbytes / median(graph_us([big.sum, big.sum])) / 1000


def blocks_of(name: str, shape: tuple[int, ...]) -> GpuBlocks:
    """Random blocks of a type, transcoded."""
    return transcode(GGUF_CODECS[f"gguf:{name}"](), {PART: random_blocks(name, shape, "cuda")}, shape[-1])


def copies(blocks: GpuBlocks) -> list[GpuBlocks]:
    """So many copies that a round of calls goes past the cache."""
    tensors = {field.name: getattr(blocks, field.name) for field in fields(blocks) if isinstance(getattr(blocks, field.name), Tensor)}
    more = int(ROTATE_BYTES / blocks.nbytes())
    return [blocks] + [replace(blocks, **{key: value.clone() for key, value in tensors.items()}) for _ in range(more)]


def float_out(count: int, rows: int) -> Tensor:
    """Where timed products go: float32, as in the checks, so that the kernels that are timed are the ones that were checked (and compiled)."""
    return torch.empty(count, rows, device="cuda")


def dense_cases(types: tuple[str, ...], tune: bool) -> Iterator[Case]:
    """One matrix: cuBLAS bf16 first, then every type; with `tune` every launch shape."""
    for rows, cols in DENSE:
        weights = [torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) for _ in range(int(ROTATE_BYTES / (2 * rows * cols)) + 1)]
        activations = {tokens: torch.randn(tokens, cols, device="cuda", dtype=torch.bfloat16) for tokens in TOKENS}
        for tokens, x in activations.items():
            yield f"{rows}x{cols} n={tokens} bf16", [partial(linear, x, weight) for weight in weights], weights[0].nbytes, None
        for name in types:
            held = copies(blocks_of(name, (rows, cols)))
            for tokens, x in activations.items():
                beside = f"{rows}x{cols} n={tokens} bf16"
                out = float_out(tokens, rows)
                yield f"{rows}x{cols} n={tokens} {name}", [partial(product, blocks, x, out) for blocks in held], held[0].nbytes(), beside
                want = product(held[0], x, float_out(tokens, rows))
                for shape in SHAPES[tokens] if tune else ():
                    agrees(f"{name} {shape}", product(held[0], x, out, shape), want)
                    calls = [partial(product, blocks, x, out, shape) for blocks in held]
                    yield f"{rows}x{cols} n={tokens} {name} {shape}", calls, held[0].nbytes(), beside
            whole = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda")
            yield f"{rows}x{cols} decode {name}", [partial(dequantise, blocks, torch.bfloat16, whole) for blocks in held], held[0].nbytes(), None


def expert_cases(types: tuple[str, ...], tune: bool) -> Iterator[Case]:
    """One token's experts: a batched bf16 product of as many matrices, then every type; each call chooses other experts."""
    for rows, cols in STACKS:
        dense = [torch.randn(SLOTS, rows, cols, device="cuda", dtype=torch.bfloat16) for _ in range(int(ROTATE_BYTES / (2 * SLOTS * rows * cols)) + 1)]
        x = torch.randn(1 if cols == 2560 else SLOTS, cols, device="cuda", dtype=torch.bfloat16)
        wide = x.expand(SLOTS, cols)[..., None].contiguous()
        beside = f"experts {rows}x{cols} bf16"
        yield beside, [partial(torch.bmm, weight, wide) for weight in dense], dense[0].nbytes, None
        for name in types:
            if not GGUF_CODECS[f"gguf:{name}"]().kind.fits(cols):
                continue
            held = copies(blocks_of(name, (EXPERTS, rows, cols)))
            ids = torch.randperm(EXPERTS, device="cuda")[: EXPERTS // SLOTS * SLOTS].view(-1, SLOTS)
            rounds = [(blocks, chosen) for blocks in held for chosen in ids]
            nbytes, out = held[0].nbytes() * SLOTS // EXPERTS, float_out(SLOTS, rows)
            yield f"experts {rows}x{cols} {name}", [partial(expert_slots, blocks, chosen, x, out) for blocks, chosen in rounds], nbytes, beside
            want = expert_slots(held[0], ids[0], x, float_out(SLOTS, rows))
            for shape in SHAPES[1] if tune else ():
                agrees(f"experts {name} {shape}", expert_slots(held[0], ids[0], x, out, shape), want)
                yield (
                    f"experts {rows}x{cols} {name} {shape}",
                    [partial(expert_slots, blocks, chosen, x, out, shape) for blocks, chosen in rounds],
                    nbytes,
                    beside,
                )


def agrees(case: str, got: Tensor, want: Tensor) -> None:
    """Ends the run where a launch shape gives another result than the default."""
    if not relative_error(got, want) <= ROUNDED:
        sys.exit(f"WRONG {case}: differs from the default launch shape")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tune", action="store_true", help="also time other launch shapes (minutes)")
    parser.add_argument("--types", nargs="+", choices=TYPES, help="check and time these instead of all and the usual ones")
    parser.add_argument("--out", type=Path, help="write all samples there as JSON")
    options = parser.parse_args()
    if missing_gpu("gguf_gpu_bench"):
        return 2
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    if not check_all(tuple(options.types or TYPES)):
        print("no speed is reported while a check fails")
        return 1
    torch.manual_seed(0)
    types, rate, medians, rows = tuple(options.types or TIMED), read_rate(), {}, []
    torch.cuda.empty_cache()
    print(f"read sweep {rate:.0f} GB/s")
    for part in (dense_cases, expert_cases):
        for case, calls, nbytes, beside in part(types, options.tune):
            samples = graph_us(list(calls))
            us = medians[case] = median(samples)
            against = f"{medians[beside] / us:6.2f} x bf16" if beside else ""
            print(
                f"{case:45s} {us:8.2f} us [{min(samples):.2f}, {max(samples):.2f}] {nbytes / us / 1000:6.0f} GB/s {nbytes / us / 1000 / rate:6.1%} {against}",
                flush=True,
            )
            rows.append({"name": case, "us": samples, "bytes": nbytes})
    if options.out:
        options.out.write_text(json.dumps({"read_gb_s": rate, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
