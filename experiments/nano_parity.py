"""nano on this GPU against nano on this CPU: `python -m experiments.nano_parity [--path expert_q2] [--layers 12]`.

Whether both hold the same codes and scales, perplexity over the same windows, divergence, greedy ids of four prompts with the first flip and how near a tie
it was. In float32 both sides must agree to rounding, over as many tokens as nano's indexer sees whole (past them equal block scores are broken differently
on both). In bfloat16 the divergence is read against a noise floor: the larger of the GPU against itself with another number of windows at a time, and of
what bfloat16 costs the CPU against its float32. Exit code 1 where perplexity, divergence or a flip's gap is beyond its limit. What it does not prove:
quality, or that another model behaves like this one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from experiments.gpu_parts import missing_gpu
from lab.artifacts import open_model
from lab.compose import compose_cells
from lab.devices import usable_cores
from lab.engines.local import LocalEngine
from lab.measure.divergence import kl_divergence
from lab.measure.greedy import PROMPT_TOKENS, PROMPTS, Continuation, continuation, first_flip
from lab.measure.passages import spaced
from lab.measure.perplexity import perplexity_of
from lab.measure.reference import BATCH, OTHER_BATCH
from lab.measure.scoring import chosen, score_windows
from lab.measure.text import Corpus, load_corpus

ROOT = Path(__file__).parents[1]
PPL_SHARE, FLOORS = 1e-3, 2.0
TOKENS = {"float32": 128, "bfloat16": 512}
"""Tokens of a window, and at most of a prompt with what follows it: nano's indexer sees 128 whole."""
ROUNDING = 1e-9
"""nat; two float32 computations in different orders give 1e-13 to 1e-11 on nano, one wrong expert 1e-3."""
FLIP_GAP = {"float32": 1e-3, "bfloat16": 0.25}
"""Logits; one between 8 and 16 is rounded by up to 2^-5 in bfloat16, after layers that round, too."""
FLOOR_WINDOWS = 8
"""Windows from which the CPU's own noise floor is taken: in bfloat16 some CPUs are slow."""
THREADS = 8
"""nano's products are small: more threads than this wait for one another."""


@dataclass(frozen=True)
class Side:
    """What one engine says of the text: log-probabilities [n, V], their targets' likelihoods in nat [n] with window numbers [n], continuations."""

    log_p: Tensor
    nll: Tensor
    window: Tensor
    greedy: list[Continuation]


def scored(engine: LocalEngine, corpus: Corpus, tokens: int, windows: int, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probabilities, likelihoods, window numbers) of the first `windows` windows of `tokens` tokens, `batch` at a time, on the CPU."""
    found = [
        (log_p.cpu(), chosen(log_p, targets).cpu(), window.cpu())
        for log_p, targets, window in score_windows(engine.scores, *corpus.windows(tokens, tokens // 2, windows), batch)
    ]
    log_p, nll, window = (torch.cat(parts) for parts in zip(*found, strict=True))
    return log_p, nll, window


def side(engine: LocalEngine, corpus: Corpus, tokens: int, windows: int, new: int) -> Side:
    """Everything that is compared; at most `new` ids after each prompt."""
    prompts = spaced(corpus, PROMPTS, PROMPT_TOKENS)[0]
    greedy = [continuation(engine, prompt, min(new, tokens - PROMPT_TOKENS)) for prompt in prompts]
    return Side(*scored(engine, corpus, tokens, windows, BATCH), greedy)


def divergence(one: Tensor, other: Tensor) -> float:
    """Mean KL divergence in nat of log-probabilities [n, V]."""
    return float(kl_divergence(one, other).mean())


def same_codes(cpu: LocalEngine, gpu: LocalEngine) -> tuple[bool, str]:
    """Whether each component's codes and scales, encoded on either side from the same file, are the same bytes."""
    one, other = ({name: found["checksum"] for name, found in engine.binder.encodings().items()} for engine in (cpu, gpu))
    told = [name if one.get(name) == other.get(name) else f"{name} DIFFER" for name in {**one, **other}]
    return one == other, f"codes and scales: {', '.join(told) or 'none encoded'}"


def compare(cpu: Side, gpu: Side, limit: float, gap: float) -> list[tuple[bool, str]]:
    """Each finding with whether it is within its limit. `limit`: of the divergence, nat; `gap`: of the CPU's two best logits where ids part."""
    ppl = [perplexity_of(one.nll, one.window, "window")[0] for one in (cpu, gpu)]
    share, kld = abs(ppl[1] / ppl[0] - 1), divergence(cpu.log_p, gpu.log_p)
    compared = len(cpu.greedy[0].ids)
    flips = [first_flip(a, b) for a, b in zip(cpu.greedy, gpu.greedy, strict=True)]
    same = [compared if flip is None else flip["position"] for flip in flips]
    gaps = [flip["cpu_gap"] for flip in flips if flip is not None]
    ties = f"; logits' gaps at the flips {', '.join(f'{one:.3g}' for one in gaps)}, at most {gap:g}" if gaps else ""
    return [
        (share <= PPL_SHARE, f"PPL {ppl[0]:.5f} and {ppl[1]:.5f}: {100 * share:.4f} % apart, at most {100 * PPL_SHARE:g} %"),
        (kld <= limit, f"KLD {kld:.3g} nat, at most {limit:.3g}"),
        (all(one <= gap for one in gaps), f"greedy ids: {', '.join(map(str, same))} of {compared} equal{ties}"),
    ]


def run(path: str, layers: int, windows: int, device: str = "cuda", new: int = 128, say: Callable[[str], None] = print) -> bool:
    """Each type on `device` against the CPU; says a line for each finding."""
    words = ["model=nano", f"path={path}", f"layers={layers}", "bench=quick", f"device.threads={min(THREADS, usable_cores())}"]

    def engine(where: str, dtype: str) -> LocalEngine:
        return LocalEngine(compose_cells([f"device={where}", *words, f"device.compute_dtype={dtype}"])[0], ROOT)

    cell = compose_cells(["device=cpu", *words])[0]
    corpus = load_corpus(open_model(ROOT, cell.model).tokenizer(), ROOT / cell.model.corpus)
    on_cpu, good = engine("cpu", "float32"), True
    for dtype, tokens in TOKENS.items():
        there = engine(device, dtype)
        cpu, gpu = (side(one, corpus, tokens, windows, new) for one in (on_cpu, there))
        limit, told = ROUNDING, ""
        if dtype != "float32":
            again = divergence(gpu.log_p, scored(there, corpus, tokens, windows, OTHER_BATCH)[0])
            rough = scored(engine("cpu", dtype), corpus, tokens, min(windows, FLOOR_WINDOWS), BATCH)[0]
            rounded = divergence(cpu.log_p[: len(rough)], rough)
            limit, told = FLOORS * max(again, rounded), f" (noise floors {again:.3g} and {rounded:.3g})"
        for fine, line in [same_codes(on_cpu, there), *compare(cpu, gpu, limit, FLIP_GAP[dtype])]:
            good &= fine
            say(f"{'ok   ' if fine else 'WRONG'} nano {path} {layers} layers, {dtype}: {line}{told if line.startswith('KLD') else ''}")
    return good


def main() -> int:
    """Exit code 0 where all agree, 1 where something does not, 2 without a GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--path", default="expert_q2")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--windows", type=int, default=40, help="windows that are scored")
    asked = parser.parse_args()
    if missing_gpu("nano_parity"):
        return 2
    return 0 if run(asked.path, asked.layers, asked.windows) else 1


if __name__ == "__main__":
    sys.exit(main())
