"""humming-kernels beside the lab's expert and trunk kernels on one GPU, in one run: `python -m experiments.humming_bench --out FILE`.

Why one run: figures of another day and machine move by more than the differences asked about. All calls of one comparison are captured as CUDA graphs and
replayed in turns (A, B, A, B, ...), over weights that go past the last-level cache. Every result is first compared with float32 products of decoded weights;
a part with a wrong result prints no speed. Extra: humming-kernels 0.1.20 with jinja2, tabulate and cuda-bindings (an NVIDIA GPU alone).
What it does not prove: end-to-end speed. humming's products leave out the sorting of slots, SiLU and the weighted sum, and the lab's kernels hold them; at many
tokens both are also timed as a whole layer (humming's with torch's operations between its products, sorting still left out).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from experiments.gpu_parts import missing_gpu
from experiments.humming_layers import SAMPLE, Humming
from lab.codecs import create
from lab.kernels.experts import LowBitExperts, reference_experts
from lab.kernels.experts_prefill import FEW_TOKENS, grouped_experts
from lab.kernels.planes import NIBBLES, repack
from lab.kernels.trunk import Int8Linear
from lab.kernels.verify import poisoned, random_ids, random_parts, relative_error

EXPERTS, HIDDEN, WIDTH, TOPK = 512, 2560, 640, 10
TRUNK = (10240, 2560)
TOKENS = (1, 4, 8, 512, 4096)
OPPONENT = {"q2_g32": "int2", "q2_levels": "int2", "w3_levels": "int3", "Q4_0": "int4"}
"""The lab's codec -> humming's type of as many bits (groups of 32; its scales are bf16, so that its bytes differ a little)."""
CODECS = {"Q4_0": NIBBLES}
"""Full names of codecs that rows call by a shorter one."""
TOLERANCE = 1e-2  # |out - ref| / |ref|: bf16 outputs and, on matrix units, weights rounded to bf16
ROTATE_BYTES = 400e6
ROUNDS, REPLAYS = 7, 3
VERSION = "0.1.20"
Calls = Sequence[Callable[[], Any]]
Line = tuple[str, Calls, int]  # name, calls to rotate through, bytes of weights that one call reads


class Ours:
    """Both stacks of the lab's experts in one codec, in planes."""

    def __init__(self, name: str) -> None:
        shapes = (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
        self.codec = create(CODECS.get(name, name))
        self.parts = [random_parts(self.codec, shape, "cuda") for shape in shapes]
        planes = repack(self.codec, self.parts[0], HIDDEN, halves=2), repack(self.codec, self.parts[1], WIDTH)
        self.kernel, self.each = LowBitExperts(*planes), (planes[0].bytes_per_matrix(), planes[1].bytes_per_matrix())

    def gate_up(self, x: Tensor, ids: Tensor) -> Tensor:
        """The first product of few tokens, with SiLU."""
        return self.kernel.gate_up(x, ids)

    def down(self, h: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The second product of few tokens, with the weighted sum."""
        return self.kernel.down(h, ids, weights, torch.bfloat16)

    def whole(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """As the engine computes a layer's experts."""
        return self.kernel(x, ids, weights) if len(x) <= FEW_TOKENS else grouped_experts(self.kernel, x, ids, weights)

    def error(self, tokens: int) -> float:
        """Of `whole` at some of `tokens` tokens, against decoded weights in float32."""
        ids, x, weights = problem(tokens)
        with poisoned():
            got = self.whole(x, ids, weights)
        rows = torch.linspace(0, tokens - 1, min(tokens, SAMPLE)).long().tolist()
        used = ids[rows].unique().tolist()
        decoded = [
            torch.stack([self.codec.decode({k: v[e] for k, v in part.items()}, cols) for e in used])
            for part, cols in zip(self.parts, (HIDDEN, WIDTH), strict=True)
        ]
        place = torch.tensor([[used.index(e) for e in row] for row in ids[rows].tolist()], device="cuda")
        return relative_error(got[rows], reference_experts(x[rows], place, weights[rows], *decoded))


def problem(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """(ids, x, weights) of so many tokens, drawn."""
    return random_ids(tokens, EXPERTS, TOPK, "cuda"), torch.randn(tokens, HIDDEN, device="cuda").to(torch.bfloat16), torch.rand(tokens, TOPK, device="cuda")


def check_ours(name: str) -> list[tuple[str, float]]:
    """(case, error) of one codec or the trunk. Runs in a process of its own: compiling takes most of the time, and the timing finds the kernels on disk."""
    torch.manual_seed(1)
    if name != "trunk":
        ours = Ours(name)
        return [(f"{name} M={tokens}", ours.error(tokens)) for tokens in TOKENS]
    codec, cols = create("int8_g128"), TRUNK[1]
    parts = random_parts(codec, TRUNK, "cuda")
    kernel, weight = Int8Linear(repack(codec, parts, cols)), codec.decode(parts, cols)
    xs = [torch.randn(tokens, cols, device="cuda").to(torch.bfloat16) for tokens in TOKENS]
    with poisoned():
        return [(f"trunk M={len(x)}", relative_error(kernel(x), x.float() @ weight.float().T)) for x in xs]


def check_humming(stack: Humming, cols: int) -> float:
    """Worst error of one stack's or matrix's products over TOKENS."""
    truth, worst = stack.truth(), 0.0
    for tokens in TOKENS:
        x = torch.randn(tokens, cols, device="cuda").to(torch.bfloat16)
        if stack.experts is None:
            worst = max(worst, relative_error(stack.dense(x)(), x.float() @ truth.T))
            continue
        ids = random_ids(tokens, EXPERTS, TOPK, "cuda")
        ids[0, :SAMPLE] = torch.arange(SAMPLE, device="cuda", dtype=ids.dtype)
        got, slot = stack.indexed(ids)(x), (ids.flatten() < SAMPLE).nonzero().flatten()
        want = torch.stack([truth[int(ids.flatten()[s])] @ x[int(s) // TOPK].float() for s in slot])
        worst = max(worst, relative_error(got[slot], want))
    return worst


def expert_lines(ours: Ours, name: str, stacks: tuple[Humming, Humming], tokens: int) -> Iterator[tuple[str, list[Line]]]:
    """(what, lines set beside each other); every call of few tokens routes to other experts."""
    rounds = [problem(tokens) for _ in range(max(3, EXPERTS // (tokens * TOPK)) if tokens <= FEW_TOKENS else 3)]
    used = sum(int(ids.unique().numel()) for ids, _, _ in rounds) / len(rounds)
    mine, theirs = [int(used * each) for each in ours.each], [int(used * stack.nbytes) for stack in stacks]
    rival = f"humming {OPPONENT[name]}"
    hidden = [torch.randn(tokens, TOPK, WIDTH, device="cuda") for _ in rounds]
    half = [h.to(torch.float16) for h in hidden]
    flat = [h.flatten(0, 1).to(torch.bfloat16) for h in hidden]
    up = [partial(stacks[0].indexed(ids), x) for ids, x, _ in rounds]
    down = [stacks[1].indexed(ids.flatten()[:, None]) for ids, _, _ in rounds]
    whole: Line = (f"{name}, whole layer", [partial(ours.whole, x, ids, weights) for ids, x, weights in rounds], sum(mine))
    products: Line = (f"{rival}, both products", [partial(both, a, partial(b, h)) for a, b, h in zip(up, down, flat, strict=True)], sum(theirs))
    if tokens <= FEW_TOKENS:
        yield "gate+up", [(name, [partial(ours.gate_up, x, ids) for ids, x, _ in rounds], mine[0]), (rival, up, theirs[0])]
        downs = [partial(ours.down, h, ids, weights) for (ids, _, weights), h in zip(rounds, half, strict=True)]
        yield "down", [(name, downs, mine[1]), (rival, [partial(b, h) for b, h in zip(down, flat, strict=True)], theirs[1])]
        yield "both", [whole, products]
    else:
        chain = [partial(layer, a, b, weights) for a, b, (_, _, weights) in zip(up, down, rounds, strict=True)]
        yield "both", [whole, products, (f"{rival}, with SiLU and sum", chain, sum(theirs))]


def both(up: Callable[[], Any], down: Callable[[], Any]) -> None:
    """Two products, each of an input of its own."""
    up()
    down()


def layer(up: Callable[[], Tensor], down: Callable[[Tensor], Tensor], weights: Tensor) -> Tensor:
    """A layer's experts from two products, with torch's operations between."""
    gate, wide = up().chunk(2, -1)
    return (down(silu(gate) * wide).view(*weights.shape, -1) * weights[..., None].to(torch.bfloat16)).sum(1)


def trunk_lines(copies: Sequence[Humming], tokens: int) -> Iterator[tuple[str, list[Line]]]:
    """int8, cuBLAS bf16 and humming's int8 on matrices of one shape."""
    codec, (rows, cols) = create("int8_g128"), TRUNK
    kernels = [Int8Linear(repack(codec, random_parts(codec, TRUNK, "cuda"), cols)) for _ in copies]
    dense = [torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) for _ in copies]
    x = torch.randn(tokens, cols, device="cuda", dtype=torch.bfloat16)
    yield (
        "trunk 10240x2560",
        [
            ("int8_g128", [partial(kernel, x) for kernel in kernels], kernels[0].planes.nbytes()),
            ("cuBLAS bf16", [partial(linear, x, weight) for weight in dense], 2 * rows * cols),
            ("humming int8", [copy.dense(x) for copy in copies], copies[0].nbytes),
        ],
    )


def captured(calls: Calls) -> Any:
    """A graph of all calls once; each has run before, so that nothing is compiled or loaded while capturing."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in calls:
                call()
    return graph


def in_turns(lines: Sequence[Line]) -> list[list[float]]:
    """Microseconds per call of each line: REPLAYS replays of its graph, then the next line's, ROUNDS times around. The first of each turn only warms up."""
    graphs = [captured(calls) for _, calls, _ in lines]
    samples: list[list[float]] = [[] for _ in lines]
    for _ in range(ROUNDS):
        for graph, found, (_, calls, _) in zip(graphs, samples, lines, strict=True):
            for replay in range(REPLAYS + 1):
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                if replay:
                    found.append(start.elapsed_time(end) * 1000 / len(calls))
    return samples


def timed(what: str, tokens: int, lines: Sequence[Line]) -> list[dict[str, Any]]:
    """Prints and returns one comparison; the ratio is a line's time over that of the first, the lab's."""
    rows, first = [], 0.0
    for (name, _, nbytes), samples in zip(lines, in_turns(lines), strict=True):
        us = median(samples)
        first = first or us
        rate, ratio, spread = nbytes / us / 1000, us / first, f"[{min(samples):.2f}, {max(samples):.2f}]"
        print(f"{what:18s} M={tokens:<5d} {name:32s} {us:9.2f} us {spread:20s} {rate:6.0f} GB/s  {ratio:5.2f} x the lab's", flush=True)
        rows.append({"what": what, "tokens": tokens, "name": name, "us": us, "gb_s": rate, "ratio": ratio, "bytes": nbytes, "samples_us": samples})
    return rows


def red(errors: Sequence[tuple[str, float]]) -> bool:
    """Whether one of these is too large; prints the worst, and every wrong one."""
    wrong = [(case, error) for case, error in errors if not error <= TOLERANCE]
    for case, error in wrong:
        print(f"WRONG {case}: relative error {error:.2e}", flush=True)
    print(f"checks: {len(errors) - len(wrong)} of {len(errors)} within {TOLERANCE}, worst {max(error for _, error in errors):.2e} ({errors[0][0].split()[0]})")
    return bool(wrong)


def compare(parts: Sequence[str], tokens: Sequence[int]) -> tuple[list[dict[str, Any]], bool]:
    """(rows, whether every check was right). Kernels are compiled side by side: the lab's by processes, humming's by threads."""
    workers = ProcessPoolExecutor(len(parts), mp_context=multiprocessing.get_context("spawn"))
    checks = {part: workers.submit(check_ours, part) for part in parts}
    kinds = sorted({OPPONENT[part] for part in parts if part != "trunk"})
    stacks = {kind: (Humming(kind, 32, 2 * WIDTH, HIDDEN, EXPERTS), Humming(kind, 32, HIDDEN, WIDTH, EXPERTS)) for kind in kinds}
    copies = [Humming("int8", 128, *TRUNK) for _ in range(int(ROTATE_BYTES / (TRUNK[0] * TRUNK[1])) + 1)] if "trunk" in parts else []
    wanted = [(stack, m * TOPK) for pair in stacks.values() for stack in pair for m in TOKENS] + [(copy, m) for copy in copies[:1] for m in TOKENS]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 2)) as pool:
        list(pool.map(lambda one: one[0].compile(one[1]), wanted))
    print("humming's kernels are compiled", flush=True)
    rows, right = [], True
    for part in parts:
        pair = stacks.get(OPPONENT.get(part, ""))
        theirs = (
            [("humming int8", check_humming(copies[0], TRUNK[1]))]
            if pair is None
            else [(f"humming {OPPONENT[part]} {n}", check_humming(s, c)) for n, s, c in zip(("gate+up", "down"), pair, (HIDDEN, WIDTH), strict=True)]
        )
        if red(checks[part].result()) | red(theirs):
            print(f"{part}: no speed is reported while a check fails")
            right = False
            continue
        torch.manual_seed(0)
        ours = None if pair is None else Ours(part)
        for m in tokens:
            for what, lines in trunk_lines(copies, m) if ours is None or pair is None else expert_lines(ours, part, pair, m):
                rows += timed(what, m, lines)
            torch.cuda.empty_cache()
    workers.shutdown()
    return rows, right


def main() -> int:
    names = ["trunk", *OPPONENT]
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", choices=names, nargs="+", help="these parts")
    parser.add_argument("--tokens", type=int, choices=TOKENS, nargs="+", help="these numbers of tokens")
    parser.add_argument("--out", type=Path, help="write every sample there as JSON")
    options = parser.parse_args()
    if missing_gpu("humming_bench"):
        return 2
    try:
        found = import_module("importlib.metadata").version("humming-kernels")
        import_module("humming.layer")
    except ImportError as error:
        print(f"error: {error}; pip install humming-kernels=={VERSION} jinja2 tabulate cuda-bindings", file=sys.stderr)
        return 2
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "humming-kernels", found, flush=True)
    torch.manual_seed(0)
    rows, right = compare(options.only or names, options.tokens or TOKENS)
    if options.out:
        options.out.write_text(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "humming": found, "rows": rows}))
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
