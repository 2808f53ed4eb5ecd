"""One attempt through transformers, inside the child process: its own model loaded, then measured by the very code that measures the lab's engine.

Order and protocols are those of `lab.engines.local_attempt`, whose scoring is used as it is. What transformers refuses (its cache wants an attention layer,
which a qwen4_exp model of three layers has none of) becomes the gap of the metrics that need it, with transformers' own error; the others stand. Whether the
numbers may be believed is decided by the parent, with `lab.engines.hf.evidence`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lab.attempt import one_line, valued
from lab.engines.hf.engine import HfEngine
from lab.engines.hf.library import library
from lab.engines.local_attempt import ASKED, QUALITY, LocalAttempt, Reference, table_note
from lab.errors import GapError
from lab.measure.parity import step_parity
from lab.measure.stage import Found
from lab.measure.text import Corpus
from lab.measure.throughput import LANES, decode_rate, prefill_rate
from lab.models import inventory
from lab.record import Measurement, Status

_COSINES = ("expert_cosine", "ple_cosine")


class HfAttempt(LocalAttempt):
    """One run of one cell through transformers."""

    def measure(self) -> None:
        """Measures in the order of the module's description."""
        cell, version = self.cell, str(library().__version__)
        device, artifact, corpus, bounds, reference = self._prepare(transformers=version)
        self.phase("load", f"transformers {version}, {cell.layers} layers")
        engine = HfEngine(cell, self.root)
        self.result.environment["threads"] = torch.get_num_threads()
        self._keep_loaded(engine)
        self._settle_threads(engine)
        try:
            self._quality(engine, corpus, reference)
        except ValueError as error:
            self._invalid(error)
        else:
            self._time_each(engine, corpus, bounds)
        self._keep_peak(engine.peak_memory_bytes(), device)
        if cell.model.table_rows is not None:
            self.result.notes.append(table_note(cell.model.table_rows))
        self._describe(engine, artifact.config().truncated(cell.layers))

    def _keep_loaded(self, engine: HfEngine) -> None:
        parts = engine.parts.held()
        cached = {"encoding": "none", "cache_state": "files read once before, by the check of the digest"}
        self.keep(
            load_s=valued("load_s", engine.load_s, cached | engine.loading),
            resident_bytes=valued("resident_bytes", sum(part["bytes"] for part in parts), {"by_component": parts}),
        )
        self.gap(_COSINES, Status.UNSUPPORTED, "not applicable: the weights are those of the file, nothing is encoded at load")

    def _quality(self, engine: Any, corpus: Corpus, reference: Reference | None) -> None:
        """Scores and parity. Raises ValueError when a score is not finite."""
        if self.synthetic:
            self.gap(QUALITY, Status.UNSUPPORTED, "synthetic weights: random ones have no quality to measure")
            self.result.notes.append("synthetic weights: random ones at the model's sizes; only speed, memory and placement mean anything")
            self.result.artifact["layout"] = f"{self.result.artifact['layout']}; here: {engine.loading['weights']}"
        else:
            try:
                self._score(engine, corpus, reference)
            except GapError as error:
                self.gap((*QUALITY, *(ASKED if self.cell.bench.llama_half_chunks else ())), error.status, one_line(error))
        self.phase("parity", "steps against the whole")
        try:
            self.result.evidence["parity"] = step_parity(engine, corpus)
        except GapError as error:
            self.result.notes.append(f"steps were not compared with the whole: {one_line(error)}")

    def _time_each(self, engine: Any, corpus: Corpus, bounds: dict[str, Any] | None) -> None:
        """Prefill, one sequence, four: what transformers refuses in one leaves the others standing."""
        bench = self.cell.bench
        runs = f"{bench.warmup} + {bench.repeats} runs of"

        def decode(lanes: int) -> Callable[[], dict[str, Measurement]]:
            def rate() -> dict[str, Measurement]:
                found, read = decode_rate(engine, corpus, lanes, bench.warmup, bench.repeats, bounds)
                return {"tg128_tok_s": found, "decode_bytes_per_token": read} if lanes == 1 else {"agg4_tg128_tok_s": found}

            return rate

        def prefill() -> dict[str, Measurement]:
            return {"pp512_tok_s": prefill_rate(engine, corpus, bench.warmup, bench.repeats, bounds)}

        measures: tuple[tuple[str, str, tuple[str, ...], Callable[[], dict[str, Measurement]]], ...] = (
            ("prefill", f"{runs} 512 tokens", ("pp512_tok_s",), prefill),
            ("decode", f"{runs} 128 tokens", ("tg128_tok_s", "decode_bytes_per_token"), decode(1)),
            ("decode", f"{LANES} sequences, {runs} 128 tokens", ("agg4_tg128_tok_s",), decode(LANES)),
        )
        for phase, detail, names, measure in measures:
            self.phase(phase, detail)
            found = Found()
            found.attempt(names, measure)
            self.keep(**found.metrics)
            self.result.gaps |= found.gaps
            if any(status is Status.OOM for status, _ in found.gaps.values()):
                engine.free_cached()
        self._wide(engine, corpus, bounds)

    def _describe(self, engine: HfEngine, config: Any) -> None:
        """The evidence, and in words what a reader of the number must know."""
        sizes, model = inventory(config), engine.model
        self.result.evidence |= {
            "transformers": engine.library
            | {
                "class": f"{type(model).__module__}.{type(model).__name__}",
                "attention": model.config._attn_implementation,
                "experts": engine.experts,
                "loading": engine.loading,
            },
            "parts": engine.parts.held(),
            "ops": engine.counters.as_list(),
            "depth": len(engine.parts.layers),
            "fed": engine.fed,
            "weights": sizes.weights(),
            "component_layers": sizes.component_layers(),
            "per_token": {"experts": config.experts_per_token, "ple": config.ngram_heads},
            "tokens_forwarded": engine.counters.rows("embed"),
            "vocab_size": config.vocab_size,
        }
        kernels = [name for name, version in engine.library["kernels"].items() if version is not None]
        said = f"transformers {engine.library['version']}, {model.config._attn_implementation} attention, kernel packages: {', '.join(kernels) or 'none'}"
        if engine.experts["prompts"]:
            said += f"; experts by {engine.experts['prompts']} for prompts and {engine.experts['steps']} for steps, as its generate() chooses"
        self.result.notes.append(said)
