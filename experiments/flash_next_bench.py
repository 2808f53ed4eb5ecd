"""Checks a decode step on this GPU and measures a model of Flash-Next's true sizes: `python -m experiments.flash_next_bench [checks] [nano] [speed] [profile]`.

Order: kernels against plain torch at true shapes, nano on the GPU against nano on the CPU (whole, step by step, as a graph, four sequences), then speeds of
synthetic weights. A failed check ends the run before anything is timed.
What it does not prove: quality of synthetic weights, or the numbers of a cell, which come from `lab run` with its gates.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from experiments.gpu_parts import check_parts, missing_gpu
from experiments.step_checks import all_checks, check_mixer
from lab.cell import Cell
from lab.compose import compose_cells
from lab.engines.local import LocalEngine
from lab.kernels import (
    attention_step,
    backend,
    delta_step,
    experts,
    hyper_step,
    mixer_step,
    moe_step,
    ngram_step,
    project_step,
    rows_step,
    trunk,
)  # fmt: skip
from lab.measure.divergence import kl_divergence
from lab.models.qwen4_exp import step

ROOT = Path(__file__).parents[1]
TOLERANCE = 1e-2  # bfloat16 results rounded once or twice: 2e-3 to 6e-3


def checks() -> bool:
    """All kernel checks; prints failures and the worst error."""
    found = list(all_checks())
    failed = [(name, error) for name, error in found if not error <= TOLERANCE]
    for name, error in failed:
        print(f"WRONG {name}: relative error {error:.2e}")
    worst = max((error for _, error in found), key=lambda e: float("inf") if math.isnan(e) else e)
    print(f"checks: {len(found) - len(failed)} of {len(found)} within {TOLERANCE}, worst {worst:.2e}")
    return not failed


def cell(*overrides: str) -> Cell:
    """The cell that a command line would give."""
    return compose_cells(overrides)[0]


def kld(want: Tensor, got: Tensor) -> float:
    """Mean KL divergence in nat of logits [..., V]."""
    return float(kl_divergence(*(logits.cpu().flatten(0, -2) for logits in (want, got))).mean())


def stepped(engine: LocalEngine, ids: Tensor, prompt: int) -> Tensor:
    """Logits after a prompt, token by token, [B, T - prompt, V] on the CPU."""
    state = engine.new_state(len(ids), ids.shape[1] + 8)
    engine.logits(ids[:, :prompt], state, last_only=True)
    return torch.cat([engine.logits(ids[:, at : at + 1], state).cpu() for at in range(prompt, ids.shape[1])], 1)


def nano() -> bool:
    """nano on this GPU against itself on the CPU, and its graph against its eager steps. Past nano's budget of 128 tokens equal block scores are broken
    differently on both, so float32 is held to rounding below it only."""
    good = True
    cases = (("expert_q2", "bfloat16", 180, 2e-2), ("reference", "float32", 120, 1e-7), ("reference", "bfloat16", 180, 2e-2))
    for path, dtype, tokens, limit in cases:
        settings = [f"path={path}", "model=nano", "layers=12", "bench=quick"]
        ids = torch.randint(1, 2500, (4, tokens), generator=torch.Generator().manual_seed(7))
        on_cpu = LocalEngine(cell(*settings, "device=cpu"), ROOT)
        graph, eager = (LocalEngine(cell(*settings, "device=cuda", f"device.compute_dtype={dtype}", f"mode={mode}"), ROOT) for mode in ("graph", "eager"))
        whole, prompt = on_cpu.logits(ids), tokens - 24
        by_graph, by_eager = stepped(graph, ids, prompt), stepped(eager, ids, prompt)
        apart = torch.cat([stepped(graph, ids[i : i + 1], prompt) for i in range(4)])
        found = {
            "whole GPU": kld(whole, graph.logits(ids)), "graph": kld(whole[:, prompt:], by_graph), "eager": kld(whole[:, prompt:], by_eager),
            "graph || eager": kld(by_eager, by_graph), "four || one": kld(apart, by_graph),
        }  # fmt: skip
        same = torch.equal(stepped(graph, ids, prompt), by_graph)
        ok = all(-1e-9 < value < limit for value in found.values()) and same and graph.graphs.reason is None
        good &= ok
        told = ", ".join(f"{name} {value:.1e}" for name, value in found.items())
        print(f"nano {path} {dtype} {tokens}: {'ok' if ok else 'WRONG'} kld {told}; repeats equal {same}; {graph.graphs.evidence()}", flush=True)
    return good


def milliseconds(run: Any, repeats: int = 5) -> list[float]:
    """Wall time of `run` in ms, after one run to warm up, sorted."""
    run()
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        torch.cuda.synchronize()
        found.append(1e3 * (time.perf_counter() - started))
    return sorted(found)


def loaded(layers: int, path: str) -> LocalEngine:
    """Synthetic weights of Flash-Next's first layers."""
    torch.cuda.reset_peak_memory_stats()
    engine = LocalEngine(cell("model=flash_next", "artifact=synthetic", f"path={path}", f"layers={layers}", "device=h200", "bench=quick"), ROOT)
    print(f"loaded {layers} layers in {engine.load_s:.1f} s, {torch.cuda.memory_allocated() / 1e9:.1f} GB", flush=True)
    return engine


def speed(engine: LocalEngine) -> None:
    """PP512, PP4096 and TG at 1 to 8 sequences."""
    text = torch.randint(1, 200000, (8, 4096))
    for tokens in (512, 4096):
        state = engine.new_state(1, tokens)

        def prompt(state: Any = state, tokens: int = tokens) -> None:
            state.reset()
            engine.logits(text[:1, :tokens], state, last_only=True)

        found = milliseconds(prompt)
        print(f"PP{tokens}: {tokens / found[len(found) // 2] * 1e3:.0f} tok/s, ms {[round(t, 1) for t in found]}", flush=True)
    for batch in (1, 2, 4, 8):
        decode(engine, text[:batch, :513], "as it is")
    print(engine.graphs.evidence(), f"peak {torch.cuda.max_memory_allocated() / 1e9:.1f} GB", flush=True)


def profile(engine: LocalEngine) -> None:
    """Device time of one step by kernel, every launch alone, so that a kernel's time is its own; then what each way of overlapping gives, and the step that
    is no chain."""
    text = torch.randint(1, 200000, (4, 513))
    modules = (attention_step, delta_step, hyper_step, rows_step, experts, trunk, mixer_step, moe_step, project_step, ngram_step)
    alone = [mock.patch.object(module, "launch_options", dict) for module in modules]
    late = mock.patch.object(backend, "EARLY", False)
    variants: dict[str, list[Any]] = {"nothing overlaps": [late, *alone], "next one starts after the wait": [late], "as it is": []}
    for title, patches in variants.items():
        _profile(engine, text, title, patches, not engine.graphs.launches)
    with torch.no_grad():
        engine.graphs._step = step.DecodeStep(engine.model, engine.device, engine.dtype)  # type: ignore[arg-type]
    _profile(engine, text, "no chain", [], False)


def _profile(engine: LocalEngine, text: Tensor, title: str, patches: list[Any], kernels: bool) -> None:
    engine.graphs.forget()
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        for batch in (1, 4):
            state = decode(engine, text[:batch], title)
            if kernels:
                by_kernel(f"the same, {batch} sequences", lambda state=state, batch=batch: engine.logits(text[:batch, -1:], state))


def decode(engine: LocalEngine, text: Tensor, title: str) -> Any:
    """Prints the step time after the text's first tokens; the state after it."""
    batch = len(text)
    state = engine.new_state(batch, 640)
    engine.logits(text[:, :-1], state, last_only=True)
    for _ in range(8):
        engine.logits(text[:, -1:], state)
    torch.cuda.synchronize()
    found = sorted(_step_ms(engine, text[:, -1:], state) for _ in range(100))
    print(f"TG B={batch} {title}: {batch / found[50] * 1e3:.1f} tok/s, step ms p5 {found[5]:.3f} p50 {found[50]:.3f} p95 {found[95]:.3f}", flush=True)
    return state


def _step_ms(engine: LocalEngine, ids: Tensor, state: Any) -> float:
    started = time.perf_counter()
    engine.logits(ids, state, last_only=True).argmax(-1)
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started)


def by_kernel(title: str, run: Any) -> None:
    """Device time of one call by kernel name, largest first."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as kept:
        run()
        torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in kept.events() or ():
        if str(event.device_type).endswith("CUDA"):
            spent[event.name[:70]] += event.device_time
            calls[event.name[:70]] += 1
    print(f"{title}: {sum(spent.values()) / 1e3:.2f} ms on the device in {sum(calls.values())} launches")
    for name, us in spent.most_common(22):
        print(f"  {us / 1e3:8.3f} ms {calls[name]:5d} x {us / calls[name]:8.1f} us  {name}")
    sys.stdout.flush()


def main() -> int:
    """Runs the parts asked for. Exit code 1 where a check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["checks", "nano", "speed"], help="checks, mixer, nano, speed, profile")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--path", default="expert_q2")
    asked = parser.parse_args()
    check_parts(parser, asked.parts, ("checks", "mixer", "nano", "speed", "profile"))
    if missing_gpu("flash_next_bench"):
        return 2
    torch.manual_seed(0)
    good = True
    if {"checks", "speed", "profile"} & {*asked.parts}:  # nothing is timed that was not checked
        good &= checks()
    if "mixer" in asked.parts:
        found = [error for batch in (1, 3, 8) for error in check_mixer(batch)]
        print("mixer:", found)
        good &= all(error <= TOLERANCE for _, error in found)
    if "nano" in asked.parts:
        good &= nano()
    if good and {"speed", "profile"} & {*asked.parts}:
        engine = loaded(asked.layers, asked.path)
        if "profile" in asked.parts:
            profile(engine)
            engine.graphs.forget()
        if "speed" in asked.parts:
            speed(engine)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
