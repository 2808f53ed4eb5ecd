"""Prefill and decode rates of llama.cpp by the lab's protocols `pp@1`, `tg@1` and `agg@1` (see `lab.measure.throughput`).

What is timed is the call into llama.cpp, its synchronisation and the copy or view of the logits; the choice of the next token is made inside each step and
the text's own token is fed. Realised lengths are read from llama.cpp's memory. The bound of decoding counts the tensors that one step has to read by the
file's own table, since llama.cpp counts no bytes: a lower bound of bytes (no cache, no state), and so an upper bound of the rate.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import numpy as np

from lab.artifacts.gguf import Gguf
from lab.engines.llama_cpp.session import Context, Ids
from lab.measure.text import Corpus
from lab.measure.throughput import DECODE, PREFILL, WARM, Bounds, decode_bound
from lab.metrics import METRICS
from lab.record import Measurement


def prefill_rate(context: Context, corpus: Corpus, warmup: int, repeats: int) -> Measurement:
    """pp512_tok_s: PREFILL tokens in one batch into a cleared context, logits of the last only. No roofline: nobody counts llama.cpp's operations."""
    samples, realised = [], 0
    for run in range(warmup + repeats):
        ids = _ids(corpus, 1, PREFILL, run)[0]
        context.clear()
        started = time.perf_counter()
        context.prefill(ids)
        elapsed = time.perf_counter() - started
        realised = context.length(0)
        if run >= warmup:
            samples.append(PREFILL / elapsed)
    details = {"requested_tokens": PREFILL, "realised_tokens": realised, "warmup": warmup, "cache_state": WARM}
    return _measured("pp512_tok_s", samples, None, details | context.model.settings.details())


def decode_rate(context: Context, corpus: Corpus, warmup: int, repeats: int, step_bytes: int | None, bounds: Bounds, on_cpu: bool) -> Measurement:
    """tg128_tok_s or agg4_tg128_tok_s: DECODE steps of all the context's lanes over one clock, from PREFILL tokens each."""
    lanes, samples, steps_ms, realised = context.lanes, [], [], 0
    for run in range(warmup + repeats):
        ids = _ids(corpus, lanes, PREFILL + DECODE, run * lanes)
        context.clear()
        for lane in range(lanes):
            context.prefill(ids[lane, :PREFILL], lane)
        before = sum(map(context.length, range(lanes)))
        times = _timed_steps(context, ids)
        realised = sum(map(context.length, range(lanes))) - before
        if run >= warmup:
            samples.append(lanes * DECODE / (times[-1] - times[0]))
            steps_ms += [1e3 * (b - a) for a, b in pairwise(times)]
    details = {
        "requested_tokens": lanes * DECODE,
        "realised_tokens": realised,
        "lanes": lanes,
        "context_tokens": PREFILL,
        "warmup": warmup,
        "cache_state": WARM,
        "step_ms_p50": float(np.percentile(steps_ms, 50)),
        "step_ms_p95": float(np.percentile(steps_ms, 95)),
        "fed": "the text's own next token; the greedy choice is computed inside the step",
        "weight_bytes_by_the_file": step_bytes,
    }
    bound = decode_bound(step_bytes, lanes, bounds, on_cpu) if step_bytes else None
    return _measured("tg128_tok_s" if lanes == 1 else "agg4_tg128_tok_s", samples, bound, details | context.model.settings.details())


def step_bytes(gguf: Gguf, layers: int) -> int | None:
    """Bytes of the tensors that every decode step reads, by the file's table: layers and head, of an expert stack the share that one token uses.

    Tables that are looked up by row (token embedding with a head of its own, n-gram table) count nothing. None where the share of the experts is unknown.
    """
    arch = gguf.metadata.get("general.architecture")
    experts, used = (gguf.metadata.get(f"{arch}.{key}") for key in ("expert_count", "expert_used_count"))
    total = 0.0
    for name, tensor in gguf.tensors.items():
        block = name.split(".")[1] if name.startswith("blk.") else None
        if block is not None and block.isdigit() and int(block) >= layers:
            continue  # a block that predicts several tokens ahead
        if "_exps." in name:
            if not isinstance(experts, int) or not isinstance(used, int) or experts < 1:
                return None
            total += tensor.nbytes * used / experts
        elif not name.startswith("per_layer_token_embd") and (name != "token_embd.weight" or "output.weight" not in gguf.tensors):
            total += tensor.nbytes
    return int(total)


def _timed_steps(context: Context, ids: Ids) -> list[float]:
    """Clock readings before the first and after each of the DECODE steps, in seconds."""
    times = [time.perf_counter()]
    for position in range(PREFILL, PREFILL + DECODE):
        context.step(ids[:, position]).argmax(-1)
        times.append(time.perf_counter())
    return times


def _ids(corpus: Corpus, count: int, tokens: int, offset: int) -> Ids:
    return corpus.prompts(count, tokens, offset=offset).numpy()


def _measured(name: str, samples: list[float], bound: float | None, details: dict[str, Any]) -> Measurement:
    known = METRICS[name]
    result = Measurement.from_samples(samples, known.unit, known.protocol, details={**details, "repeats": len(samples), "roofline_tok_s": bound})
    return result if bound is None else result.model_copy(update={"roofline_pct": 100 * result.value / bound})
