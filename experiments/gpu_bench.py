"""Every kernel on this GPU in one command: `python -m experiments.gpu_bench [--out FOLDER] [--layers N]`.

Each part checks its kernels against their plain-torch references with poisoned outputs and only then times them; a part that ends red ends the whole run,
so that nothing is timed after a wrong result. Parts that need a package which is not installed are named as not run.
What it does not prove: the numbers of a cell, which come from `lab run` with its gates.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from experiments.gpu_parts import missing_gpu

Part = tuple[str, tuple[str, ...], str | None]
"""(module in experiments, its arguments, a package that it needs)."""


def parts(layers: int, out: Path | None) -> list[Part]:
    """The parts in order: single kernels, the decode step, prompts, tiers, file blocks, another project's kernels beside ours."""

    def kept(name: str) -> tuple[str, ...]:
        return () if out is None else ("--out", str(out / f"{name}.json"))

    return [
        ("kernel_bench", kept("kernels"), None),
        ("flash_next_bench", ("checks", "mixer", "nano", "speed", "--layers", str(layers)), None),
        ("prefill_bench", ("checks", "experts", "delta", "parity", "model", "--layers", str(layers)), None),
        ("tier_bench", kept("tiers"), None),
        ("gguf_gpu_bench", kept("gguf"), "gguf"),
        ("humming_bench", kept("humming"), "humming"),
    ]


def run_module(name: str, words: Sequence[str]) -> int:
    """The exit code of one part, whose output goes straight to the terminal."""
    return subprocess.run([sys.executable, "-m", f"experiments.{name}", *words], check=False).returncode


def run_all(todo: Sequence[Part], run: Callable[[str, Sequence[str]], int] = run_module) -> int:
    """Runs the parts until one ends red. Returns its exit code, or 0."""
    for number, (name, words, needs) in enumerate(todo, 1):
        if needs is not None and find_spec(needs) is None:
            print(f"[{number}/{len(todo)}] {name}: not run, {needs} is not installed", flush=True)
            continue
        started = time.monotonic()
        print(f"[{number}/{len(todo)}] {name} {' '.join(words)}", flush=True)
        if code := run(name, words):
            print(f"{name} ended with exit code {code} after {time.monotonic() - started:.0f} s: what follows is neither checked nor timed", flush=True)
            return code
    return 0


def main() -> int:
    """Exit code 0 where every part was green, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder for every sample as JSON")
    parser.add_argument("--layers", type=int, default=48, help="layers of the whole-model parts")
    asked = parser.parse_args()
    if missing_gpu("gpu_bench"):
        return 2
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
    return run_all(parts(asked.layers, asked.out))


if __name__ == "__main__":
    sys.exit(main())
