"""One attempt through the local engine, inside the child process: load the path, measure it, gather the evidence.

Order: load, then quality (perplexity, divergence), then parity, then speed; a path whose numbers are not finite is not timed. What one measurement
cannot give becomes that metric's gap with the reason; only a failed load ends the attempt. Whether its numbers may be believed is decided by
the parent from the evidence it returns.
"""

from __future__ import annotations

import platform
from typing import Any

import torch

from lab.artifacts import Artifact, open_model
from lab.artifacts.synthetic import SyntheticArtifact
from lab.attempt import Attempt, one_line, valued
from lab.cell import SYNTHETIC
from lab.devices import usable_cores
from lab.engines.local import LocalEngine, is_out_of_memory, usable_device
from lab.errors import GapError, LabError
from lab.measure.divergence import DivergenceTally, divergence_metrics
from lab.measure.llama_half import llama_half
from lab.measure.parity import step_parity
from lab.measure.perplexity import PerplexityTally
from lab.measure.reference import BATCH, OTHER_BATCH, is_its_own_reference, load_reference
from lab.measure.scoring import score_windows
from lab.measure.shares import SHARES, component_shares
from lab.measure.stage import STAGE, Found, stage_measures
from lab.measure.text import Corpus, load_corpus
from lab.measure.throughput import LANES, decode_rate, prefill_rate
from lab.measure.tiers import tier_metrics
from lab.measure.wide import measure, owed, passes
from lab.models import inventory
from lab.provenance import code_sha256
from lab.record import Status

QUALITY = ("ppl", "bits_per_byte", "kld_mean", "kld_p99", "top1_agreement")
ASKED = ("ppl_llama_half",)
"""Owed where the bench asks for it."""
SPEED = ("pp512_tok_s", "tg128_tok_s", "agg4_tg128_tok_s", "decode_bytes_per_token")
Reference = tuple[torch.Tensor, dict[str, float]]
"""Log-probabilities of the reference, and what its file says of them (`lab.measure.reference.load_reference`)."""
_COSINES = {"expert_cosine": "experts", "ple_cosine": "ple"}


class LocalAttempt(Attempt):
    """One run of one cell by the local engine."""

    def out_of_memory(self, error: Exception) -> bool:
        """Torch's allocation failures, on either device."""
        return is_out_of_memory(error)

    def measure(self) -> None:
        """Loads once, then everything in the order of the module's description."""
        cell = self.cell
        device, _, corpus, bounds, reference = self._prepare()
        self.phase("load", f"{cell.path.name}, {cell.layers} layers")
        engine = LocalEngine(cell, self.root)
        self.result.environment["threads"] = torch.get_num_threads()
        self._keep_load(engine)
        self._settle_threads(engine)
        try:
            if self.synthetic:
                self.gap(QUALITY, Status.UNSUPPORTED, "synthetic weights: random codes have no quality to measure")
                self.result.notes.append("synthetic weights: random codes at the model's sizes; only speed, memory and placement mean anything")
            else:
                self._score(engine, corpus, reference)
            self.phase("parity", "steps against the whole")
            self.result.evidence["parity"] = step_parity(engine, corpus)
        except ValueError as error:
            self._invalid(error)
        else:
            self._time(engine, corpus, bounds)
        self._keep_peak(engine.peak_memory_bytes(), device)
        if cell.layers in cell.bench.segment_layers:
            self.phase("segments", "share of each component, from a trace")
            found = Found()
            try:
                found.attempt(SHARES, lambda: component_shares(engine, corpus))
            except Exception as error:  # a profiler that fails, however it does, must not cost what was measured before it
                self.gap(SHARES, Status.INFRA, f"the profiler failed: {one_line(error)}")
            self.keep(**found.metrics)
            self.result.gaps |= found.gaps
        if cell.path.format == "vqf":
            self._stage(engine, corpus)
        self._collect_evidence(engine)
        if cell.model.table_rows is not None:
            self.result.notes.append(table_note(cell.model.table_rows))
        if cell.disable is not None:
            self.result.evidence["disabled"] = cell.disable
            self.result.notes.append(f"disable={cell.disable}: made to fail on purpose, to see what the record says of it")
        if engine.graphs.reason is not None and (device.type == "cuda" or cell.mode == "graph"):
            self.result.notes.append(f"decoded operation by operation, not as a graph: {engine.graphs.reason}")
        if (reason := engine.graphs.evidence()["prompt_reason"]) is not None and cell.mode != "eager":
            self.result.notes.append(f"prompts ran operation by operation, not as graphs: {reason}")
        self.result.notes += [
            f"{one['component']}: {one['codec']} has a GPU kernel, and {one['operations']} operations ran as torch: {one['reason']}"
            for one in self.result.evidence["fallbacks"]
        ]

    @property
    def synthetic(self) -> bool:
        """Whether the weights are random codes, which have no quality."""
        return self.cell.model.artifact == SYNTHETIC

    def _prepare(self, **versions: str) -> tuple[torch.device, Artifact | SyntheticArtifact, Corpus, dict[str, Any] | None, Reference | None]:
        """What comes before the load: (device, artifact, text, the machine's bounds, the reference). `versions`: of an engine's library."""
        torch.manual_seed(0)
        self.phase("check", self.cell.model.artifact)
        device = usable_device(self.cell.device.torch_device)
        self.result.environment = environment(device) | versions
        artifact = open_model(self.root, self.cell.model)
        self.result.artifact = artifact.inspect()
        corpus = load_corpus(artifact.tokenizer(), self.root / self.cell.model.corpus)
        bounds = self.machine(device, self.cell.device.threads or usable_cores())
        return device, artifact, corpus, bounds, None if self.synthetic else self._reference(corpus)

    def _invalid(self, error: ValueError) -> None:
        """Scores that are not finite: neither quality nor speed."""
        asked = (*(ASKED if self.cell.bench.llama_half_chunks else ()), *owed(self.cell.bench))
        self.gap((*QUALITY, *asked, *SPEED), Status.NUMERIC_INVALID, one_line(error))

    def _keep_peak(self, nbytes: int, device: torch.device) -> None:
        of = "device, from load on" if device.type == "cuda" else "process: Python, text, reference log-probabilities and scores included"
        self.keep(peak_memory_bytes=valued("peak_memory_bytes", nbytes, {"of": of}))

    def _settle_threads(self, engine: Any) -> None:
        if (threads := engine.settle_threads()) is not None:
            self.result.environment["threads_used"] = threads

    def _reference(self, corpus: Corpus) -> Reference | None:
        self.phase("reference", "log-probabilities at the same depth")
        try:
            return load_reference(self.cell, self.root, self.cache, self.result.artifact["sha256"], corpus)
        except GapError as error:
            self.gap(QUALITY[2:], error.status, one_line(error))
            return None

    def _keep_load(self, engine: LocalEngine) -> None:
        resident = engine.binder.resident()
        total = sum(entry["bytes"] for entry in resident)
        self.keep(
            load_s=valued(
                "load_s", engine.load_s, {"encoding": "from source precision at load", "cache_state": "files read once before, by the check of the digest"}
            ),
            resident_bytes=valued("resident_bytes", total, {"by_component": resident}),
        )
        encodings = engine.binder.encodings()
        for metric, component in _COSINES.items():
            if component in encodings:
                self.keep(**{metric: valued(metric, encodings[component]["mean"], encodings[component])})
            else:
                self.gap((metric,), Status.UNSUPPORTED, f"not applicable: {component} are in source precision, or absent at this depth")

    def _score(self, engine: LocalEngine, corpus: Corpus, reference: Reference | None) -> None:
        """Perplexity and divergence in one pass. Raises ValueError when a score is not finite."""
        bench, cell = self.cell.bench, self.cell
        windows, scored = corpus.windows(bench.ppl_context, bench.ppl_stride, bench.ppl_windows)
        self.phase("perplexity", f"{len(windows)} windows of {bench.ppl_context} tokens")
        # The reference path would repeat its own reference bit for bit; another batch shape makes its divergence the noise floor.
        batch = OTHER_BATCH if is_its_own_reference(cell) else BATCH
        shape = {"context": bench.ppl_context, "stride": bench.ppl_stride, "batch": batch, "bos": "none", "corpus": corpus.facts}
        perplexity = PerplexityTally(corpus.token_bytes)
        divergence = DivergenceTally(reference[0]) if reference else None
        for log_p, targets, window in score_windows(engine.scores, windows, scored, batch):
            perplexity.add(log_p, targets, window)
            if divergence is not None and not divergence.full:
                divergence.add(log_p, window)
        trained = cell.model.trained_depths
        if trained and cell.layers not in trained:
            self.result.notes.append(f"{cell.layers} layers: the model was trained to end after {', '.join(map(str, trained))}; quality is not meaningful")
        self.keep(**perplexity.metrics(shape))
        self._llama_half(engine, corpus)
        self.gap(("bits_per_byte",), Status.UNSUPPORTED, "the tokenizer is not byte-level: its tokens do not show their bytes")
        if divergence is not None and reference is not None:
            self.keep(**divergence_metrics(divergence.summary(), reference[1], shape))

    def _llama_half(self, engine: LocalEngine, corpus: Corpus) -> None:
        """Perplexity by llama.cpp's protocol where the bench asks for it. Raises ValueError when a score is not finite."""
        bench, told = self.cell.bench, self.result.artifact.get("tokenizer", {})
        if not bench.llama_half_chunks:
            return
        self.phase("perplexity", f"{bench.llama_half_chunks} chunks as llama-perplexity")
        bos = told.get("bos") if told.get("add_bos") else None
        try:
            found, scores = llama_half(engine.scores, corpus.ids, bos, bench.llama_half_context, bench.llama_half_chunks, {"corpus": corpus.facts})
        except LabError as error:
            self.gap(("ppl_llama_half",), Status.UNSUPPORTED, one_line(error))
            return
        self.result.evidence["token_nll"] = scores
        self.keep(ppl_llama_half=found)

    def _time(self, engine: LocalEngine, corpus: Corpus, bounds: dict[str, Any] | None) -> None:
        bench = self.cell.bench
        self.phase("prefill", f"{bench.warmup} + {bench.repeats} runs of 512 tokens")
        self.keep(pp512_tok_s=prefill_rate(engine, corpus, bench.warmup, bench.repeats, bounds))
        self.phase("decode", f"{bench.warmup} + {bench.repeats} runs of 128 tokens")
        rate, read = decode_rate(engine, corpus, 1, bench.warmup, bench.repeats, bounds)
        self.keep(tg128_tok_s=rate, decode_bytes_per_token=read)
        self.phase("decode", f"{LANES} sequences, {bench.warmup} + {bench.repeats} runs of 128 tokens")
        try:
            self.keep(agg4_tg128_tok_s=decode_rate(engine, corpus, LANES, bench.warmup, bench.repeats, bounds)[0])
        except GapError as error:  # slots for one sequence, and not for so many
            self.gap(("agg4_tg128_tok_s",), error.status, one_line(error))
        self._wide(engine, corpus, bounds)
        if engine.tiers is not None and engine.tiers.layers:
            self.phase("tiers", "routing of a text, rate of copies")
            self.keep(**tier_metrics(engine, self.cell, corpus, rate, bounds))

    def _wide(self, engine: LocalEngine, corpus: Corpus, bounds: dict[str, Any] | None) -> None:
        """The further prompts and contexts of the bench. What one of them cannot give leaves the others standing."""
        bench = self.cell.bench
        for one in passes(bench):
            what = [f"prompts of {one.tokens} tokens"] if one.prefill else []
            what += [f"128 steps after {one.tokens}"] if one.decode else []
            self.phase("wide", f"{bench.warmup} + {bench.repeats} runs: {one.lanes} sequence{'s' * (one.lanes > 1)}, {', '.join(what)}")
            try:
                self.keep(**measure(engine, corpus, one, bench.warmup, bench.repeats, bounds))
            except GapError as error:
                self.gap(one.names, error.status, one_line(error))
            except LabError as error:
                self.gap(one.names, Status.UNSUPPORTED, one_line(error))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                self.gap(one.names, Status.OOM, one_line(error))
                engine.free_cached()

    def _stage(self, engine: LocalEngine, corpus: Corpus) -> None:
        """The measures that a stage owes, after everything else: the profiler and the CPU's side would show in peak memory."""
        if self.synthetic:
            self.gap(STAGE, Status.UNSUPPORTED, "synthetic weights: random codes have nothing to agree on")
            return
        found = stage_measures(engine, self.cell, self.root, corpus, self.phase)
        self.keep(**found.metrics)
        self.result.gaps |= found.gaps

    def _collect_evidence(self, engine: LocalEngine) -> None:
        model = inventory(engine.config)
        if engine.strips is not None:
            self.result.evidence["strips"] = engine.strips.evidence()
        if engine.tiers is not None:
            self.result.evidence["tiers"] = engine.tiers.evidence()
        if engine.pinned.nbytes or engine.pinned.refused:
            self.result.evidence["pinned"] = engine.pinned.evidence()
            self.result.notes += [f"fallback: {reason}" for reason in engine.pinned.refused]
        self.result.evidence |= {
            "ops": engine.counters.as_list(),
            "resident": engine.binder.resident(),
            "source_codecs": {component: sorted(names) for component, names in engine.binder.source_codecs.items()},
            "weights": model.weights(),
            "rows_per_token": model.rows_per_token(engine.config.experts_per_token, engine.config.ngram_heads),
            "component_layers": model.component_layers(),
            "layers": len(engine.model.layers),
            "tokens_forwarded": engine.counters.rows("embed"),
            "vocab_size": engine.config.vocab_size,
            "encoding": engine.binder.encodings(),
            "kernels": {op: sorted(names) for op, names in sorted(engine.counters.kernels.items()) if names},
            "gpu_kernels": dict(engine.binder.kernels),
            "fallbacks": engine.binder.fallbacks_as_list(),
            "graph": engine.graphs.evidence(),
            "codec_options": {name: codec.options for name, codec in engine.binder.codecs.items()},
        }


def environment(device: torch.device) -> dict[str, Any]:
    """What only the child knows about its surroundings: torch build, code, GPU and driver side."""
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "code_sha256": code_sha256()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "gpu_arch": getattr(properties, "gcnArchName", None),
            "gpu_memory_bytes": properties.total_memory,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
        }
    return found


def table_note(rows: int) -> str:
    """What a record says of a synthetic model with a smaller table."""
    return f"n-gram table of {rows} rows (model.table_rows), not the model's own size: bytes and misses of the table are not the true model's"
