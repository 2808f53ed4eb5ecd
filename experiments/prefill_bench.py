"""Checks and times what a prompt runs on this GPU: `python -m experiments.prefill_bench [checks] [experts] [delta] [parity] [profile] [model]`.

Order: every kernel against plain torch with NaN-filled outputs, then the parts at 512 and 4,096 tokens (device time by events, weights rotated past the
second-level cache), then whole prompts of synthetic weights of Flash-Next's true sizes. A failed check ends the run before anything is timed.
What it does not prove: quality of synthetic weights, or the numbers of a cell, which come from `lab run` with its gates.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments.flash_next_bench import by_kernel, kld, loaded, milliseconds
from experiments.gpu_parts import check_parts, missing_gpu
from experiments.prefill_checks import all_checks, delta, grouped
from experiments.step_checks import DEVICE, DTYPE, HIDDEN, draw
from lab.codecs import create
from lab.kernels import experts_prefill
from lab.kernels.experts import LowBitExperts
from lab.kernels.fragments import arrange_columns
from lab.kernels.moe_prefill import group_slots
from lab.kernels.planes import NIBBLES, repack
from lab.kernels.verify import Error, random_ids, random_parts
from lab.models.qwen4_exp.delta_rule import DeltaRule
from lab.models.qwen4_exp.norms import l2_normalise

MOST_KLD = 1e-3
"""nat: twenty times what the fused pass had against the plain one (experiments/kernel_log.md)."""
TOLERANCE = 1e-2  # bfloat16 results rounded once or twice: 2e-3 to 6e-3
WIDTH, EXPERTS, TOPK = 640, 512, 10


def microseconds(runs: Sequence[Callable[[], Any]], repeats: int = 15) -> float:
    """Median device time of one call, going round `runs` so that weights come from memory, by events around groups of four rounds."""
    for run in runs:
        run()
    found = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for run in runs:
            run()
        end.record()
        end.synchronize()
        found.append(1e3 * start.elapsed_time(end) / len(runs))
    return statistics.median(found)


def at_once(runs: Sequence[Callable[[], Any]]) -> None:
    """Runs all in threads: compiling is most of this script's time."""
    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(run) for run in runs]:
            done.result()


def layers_of_experts(name: str, count: int) -> list[LowBitExperts]:
    """Random stacks of `count` layers at true size."""
    codec, made = create(name), []
    for _ in range(count):
        first = repack(codec, random_parts(codec, (EXPERTS, 2 * WIDTH, HIDDEN), DEVICE), HIDDEN, halves=2)
        made.append(LowBitExperts(first, repack(codec, random_parts(codec, (EXPERTS, HIDDEN, WIDTH), DEVICE), WIDTH)))
    return made


def time_experts(name: str, quick: bool) -> None:
    """Both products by launch shape at 512 and 4,096 tokens, then the whole call."""
    stacks = layers_of_experts(name, 2)
    first = {16: ((64, 2, 3),), 96: ((64, 4, 3),)}
    second = {16: ((64, 1, 2, 3), (64, 5, 2, 3), (64, 10, 2, 3), (64, 5, 2, 4)), 96: ((128, 1, 4, 3), (64, 5, 4, 3), (128, 5, 4, 3), (64, 10, 4, 3))}
    for tokens in (512, 4096):
        x, ids, weights = draw(tokens, HIDDEN), random_ids(tokens, EXPERTS, TOPK, DEVICE), torch.rand(tokens, TOPK, device=DEVICE)
        groups = group_slots(ids, EXPERTS)
        arranged = arrange_columns(x, experts_prefill.run_of(groups.block))
        h = experts_prefill.gate_up(stacks[0].gate_up_planes, arranged, groups, TOPK)
        flops = 2 * tokens * TOPK * HIDDEN * WIDTH

        experts_prefill.down(stacks[0].down_planes, h, groups, weights)
        kind = 16 if groups.block <= 32 else 96
        runs = {
            ("gate+up", 2, shape): [partial(experts_prefill.gate_up, s.gate_up_planes, arranged, groups, TOPK, shape) for s in stacks]
            for shape in ([None] if quick else first[kind])
        } | {
            ("down", 1, shape): [partial(experts_prefill.down, s.down_planes, h, groups, weights, shape) for s in stacks]
            for shape in ([None] if quick else second[kind])
        }
        at_once([made[0] for made in runs.values()])
        for (title, products, shape), made in runs.items():
            us = microseconds(made)
            print(f"{name} {title} T={tokens} M={groups.block} {shape or ''}: {us:.0f} us, {products * flops / us / 1e6:.0f} TFLOP/s", flush=True)
        us = microseconds([partial(experts_prefill.grouped_experts, s, x, ids, weights) for s in stacks])
        small = microseconds([partial(group_slots, ids, EXPERTS)])
        print(f"{name} whole T={tokens}: {us:.0f} us; grouping {small:.0f} us (with its launches)", flush=True)


def delta_inputs(tokens: int, batch: int = 1) -> tuple[Tensor, ...]:
    """q, k [B, T, 16, 128] (normed), v [B, T, 48, 128], log decay and beta float32 [B, T, 48], memory float32 [B, 48, 128, 128]."""
    q, k = (l2_normalise(draw(batch, tokens, 16, 128)).to(DTYPE) for _ in range(2))
    decay = -torch.rand(batch, tokens, 48, device=DEVICE) / 4
    return q, k, draw(batch, tokens, 48, 128), decay, torch.rand(batch, tokens, 48, device=DEVICE), torch.randn(batch, 48, 128, 128, device=DEVICE) / 10


def time_delta() -> None:
    """The delta rule at both lengths, by kernel."""
    for tokens in (512, 4096):
        for whole in (True, False):
            rule = DeltaRule(torch.device(DEVICE), whole)
            by_kernel(f"{rule.name} T={tokens}", partial(rule, *delta_inputs(tokens)))


def report(found: list[Error]) -> bool:
    """Prints failures and the worst error."""
    failed = [(name, error) for name, error in found if not error <= TOLERANCE]
    for name, error in failed:
        print(f"WRONG {name}: relative error {error:.2e}")
    worst = max((error for _, error in found), key=lambda e: float("inf") if math.isnan(e) else e)
    print(f"checks: {len(found) - len(failed)} of {len(found)} within {TOLERANCE}, worst {worst:.2e}", flush=True)
    return not failed


def prompts(layers: int, path: str, asked: list[str]) -> bool:
    """Whole prompts: how far the fused pass is from the plain one, and only where that is near enough wall time, and device time by kernel."""
    engine = loaded(layers, path)
    model: Any = engine.model
    text = torch.randint(1, 200000, (1, 4096))
    for tokens in (512, 4096):
        state = engine.new_state(1, tokens)

        def prompt(state: Any = state, tokens: int = tokens) -> None:
            state.reset()
            engine.logits(text[:, :tokens], state, last_only=True)

        if (fused := model.prompt) is not None:
            ids = text[:, :tokens].to(DEVICE)
            model.prompt = None
            want = engine.logits(ids)[:, ::31].float().cpu()
            model.prompt = fused
            got = engine.logits(ids)[:, ::31].float().cpu()
            same = float((want.argmax(-1) == got.argmax(-1)).float().mean())
            print(f"{tokens} tokens, fused against plain: KLD {kld(want, got):.2e} nat, first choice equal {same:.3f}", flush=True)
            if not kld(want, got) <= MOST_KLD:
                print(f"WRONG: more than {MOST_KLD} nat; no speed is reported")
                return False
        if not {"model", "profile"} & {*asked}:
            continue
        found = milliseconds(prompt)
        print(f"{layers} layers PP{tokens}: {tokens / statistics.median(found) * 1e3:.0f} tok/s, ms {[round(t, 1) for t in found]}", flush=True)
        if "profile" in asked:
            by_kernel(f"{layers} layers, {tokens} tokens", prompt)
    print(engine.graphs.evidence(), f"peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB", flush=True)
    return True


def main() -> int:
    """Runs the parts asked for. Exit code 1 where a check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["checks", "experts", "model"], help="checks, experts, shapes, delta, parity, profile, model")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--path", default="expert_q2")
    asked = parser.parse_args()
    check_parts(parser, asked.parts, ("checks", "experts", "shapes", "delta", "parity", "profile", "model"))
    if missing_gpu("prefill_bench"):
        return 2
    torch.manual_seed(0)
    started = time.perf_counter()
    few = {*asked.parts} <= {"shapes", "delta", "parity"}  # which are checked by what they are about; all else is timed after all checks
    good = report(list(all_checks())) if not few else report(list(grouped())) if "shapes" in asked.parts else True
    print(f"{time.perf_counter() - started:.1f} s for the checks", flush=True)
    if good and {"experts", "shapes"} & {*asked.parts}:
        for name in ("q2_g32", "w3_levels", NIBBLES)[: 3 if "shapes" not in asked.parts else 1]:
            time_experts(name, "shapes" not in asked.parts)
    if "delta" in asked.parts:
        good &= report(list(delta(130, 6)))
        if good:
            time_delta()
    if good and {"model", "profile", "parity"} & {*asked.parts}:
        good = prompts(asked.layers, asked.path, asked.parts)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
