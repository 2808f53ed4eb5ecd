"""Times the native CPU kernels type by type: `python -m experiments.native_bench [--types Q4_1,Q8_0] [--threads 2]`.

Why two answers: a matrix that fits the caches shows what decoding costs; one that does not, and a walk through many of them, what memory gives. Times are the
least and the median of repeated calls; on a machine that is not quiet only the least, and one thread, say something about the kernels. The machine's read
bandwidth is measured beside them, since packed bytes cannot come faster.
What it does not prove: the speed of a model, which also pays for calls, attention and everything between.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import cycle
from statistics import median
from time import perf_counter

import torch
from torch import Tensor

from lab.codecs.gguf import GGUF_CODECS
from lab.codecs.gguf_types import TYPES, GgufType
from lab.errors import LabError
from lab.kernels import native

SHAPES = ((576, 576), (1536, 576), (576, 1536), (49152, 576), (2560, 640), (2560, 2048))
BUDGET_S = 0.2  # per measurement
WALK_BYTES = 256e6  # several times a last-level cache


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Least and median seconds of a call, after two that are not counted."""
    call()
    call()
    samples: list[float] = []
    end = perf_counter() + BUDGET_S
    while len(samples) < 5 or perf_counter() < end:
        start = perf_counter()
        call()
        samples.append(perf_counter() - start)
    return min(samples), median(samples)


def read_bandwidth() -> float:
    """Bytes per second of the fastest sum over memory that no cache holds."""
    block = torch.ones(int(WALK_BYTES) // 4)
    return 4 * block.numel() / timed(block.sum)[0]


def blocks(kind: GgufType, rows: int, cols: int) -> Tensor:
    """Packed rows of small positive bytes: every field is a valid number, and no sum overflows."""
    return torch.randint(1, 56, (rows, kind.row_bytes(cols)), dtype=torch.uint8)


def measure(kind: GgufType, rows: int, cols: int) -> str:
    """One line of the table."""
    packed = blocks(kind, rows, cols)
    weight, name = native.prepare(f"gguf:{kind.name}", packed, cols), f"{kind.name} {rows}x{cols}"
    one, eight, out = torch.randn(1, cols), torch.randn(8, cols), torch.empty(rows, cols)
    copies = max(1, min(64, int(WALK_BYTES) // packed.numel()))
    walk = cycle([native.prepare(f"gguf:{kind.name}", packed.clone(), cols) for _ in range(copies)])
    single, cold, several, decoded = (
        timed(lambda: weight(one)),
        timed(lambda: next(walk)(one)),
        timed(lambda: weight(eight)),
        timed(lambda: weight.decode(out=out)),
    )
    weights = rows * cols
    return (
        f"{name:18} {single[0] * 1e6:8.1f} {single[1] * 1e6:8.1f} {packed.numel() / single[0] / 1e9:7.1f} {weights / single[0] / 1e9:7.1f} "
        f"{cold[1] * 1e6:9.1f} {packed.numel() / cold[1] / 1e9:7.1f} {several[0] * 1e6:9.1f} {decoded[0] * 1e6:9.1f} {weights / decoded[0] / 1e9:8.1f}"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default=",".join(codec.kind.name for codec in GGUF_CODECS.values()), help="GGUF types, comma-separated")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    if reason := native.unavailable():
        raise LabError(reason)
    print(f"threads {chosen.threads}, read bandwidth {read_bandwidth() / 1e9:.1f} GB/s")
    print(f"{'type, rows x cols':18} {'n=1 us':>8} {'median':>8} {'GB/s':>7} {'Gw/s':>7} {'walk us':>9} {'GB/s':>7} {'n=8 us':>9} {'decode us':>9} {'Gw/s':>8}")
    for name in chosen.types.split(","):
        if name not in TYPES:
            raise LabError(f"--types {name}: no GGUF type; known: {', '.join(codec.kind.name for codec in GGUF_CODECS.values())}")
        for rows, cols in SHAPES:
            if TYPES[name].fits(cols):
                print(measure(TYPES[name], rows, cols), flush=True)


if __name__ == "__main__":
    main()
