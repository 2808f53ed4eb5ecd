"""One attempt through llama.cpp, inside the child process: load the file, measure it, gather what llama.cpp says of itself.

Order: as in the local engine - check, machine, load, quality, parity, speed; a model whose numbers are not finite is not timed. The tokens are those of the
lab's own reading of the file; whether llama.cpp reads the text alike is recorded beside. What one measurement cannot give becomes that metric's gap. Whether
the numbers may be believed is decided by the parent, with `lab.engines.llama_cpp.evidence`.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lab.artifacts import open_artifact
from lab.artifacts.gguf import Gguf, open_gguf
from lab.attempt import Attempt, one_line, valued
from lab.engines.llama_cpp.library import build_facts, library
from lab.engines.llama_cpp.log import Log, placement
from lab.engines.llama_cpp.quality import TOKENS, batch_tokens, forward, step_parity, tokenization, tolerance
from lab.engines.llama_cpp.session import Context, LlamaModel, Settings
from lab.engines.llama_cpp.speed import decode_rate, prefill_rate, step_bytes
from lab.engines.local import peak_resident_bytes
from lab.engines.threads import TRIED_TOKENS, Threads
from lab.errors import GapError, LabError
from lab.measure.divergence import DivergenceTally, divergence_metrics
from lab.measure.llama_half import llama_half
from lab.measure.perplexity import PerplexityTally
from lab.measure.reference import load_reference
from lab.measure.scoring import score_windows
from lab.measure.text import Corpus, load_corpus
from lab.measure.throughput import DECODE, LANES, PREFILL, Bounds
from lab.provenance import code_sha256
from lab.record import Status

DIVERGENCE = ("kld_mean", "kld_p99", "top1_agreement")
QUALITY = ("ppl", "bits_per_byte", *DIVERGENCE)
SPEED = ("pp512_tok_s", "tg128_tok_s", "agg4_tg128_tok_s")
COSINES = ("expert_cosine", "ple_cosine")
WINDOWS_TOGETHER = 1
"""Windows in one batch of scoring."""


class LlamaCppAttempt(Attempt):
    """One run of one cell through llama.cpp. Counts the tokens that its measurements need, for the evidence."""

    def measure(self) -> None:
        """Measures in the order of the module's description."""
        cell, path = self.cell, self.root / self.cell.model.artifact
        self.phase("check", cell.model.artifact)
        lib = library()
        build = build_facts(lib)
        self.result.environment = {"python": platform.python_version(), "torch": torch.__version__, "code_sha256": code_sha256()}
        self.result.environment |= {"llama_cpp_python": build["package"], "llama_cpp": build["version"], "llama_cpp_commit": build["commit"]}
        settings = self._settings(bool(build["gpu_offload"]))
        self.result.environment["threads"] = settings.threads
        torch.set_num_threads(settings.threads)
        gguf = _opened(path)
        before = _stats(gguf)
        artifact = open_artifact(path, cell.model.arch)
        self.result.artifact = artifact.inspect()
        self._check_depth()
        corpus = load_corpus(artifact.tokenizer(), self.root / cell.model.corpus)
        bounds = self.machine(torch.device(cell.device.torch_device), settings.threads)
        reference = self._reference(corpus)
        self.phase("load", path.name)
        started = time.perf_counter()
        with LlamaModel(lib, Log(lib), gguf.files[0].path, settings) as model:  # llama.cpp asks for the first shard
            capacity = max(cell.bench.ppl_context, cell.bench.llama_half_context, PREFILL + DECODE)
            with Context(model, 1, capacity):
                self._keep_load(model, time.perf_counter() - started)
            self._settle_threads(model)
            with Context(model, 1, capacity) as single:
                self.needed, self.contexts = 0, [single]
                self._describe(model, build, gguf, before)
                self._compare_tokens(model, corpus)
                try:
                    self._score(single, corpus, reference)
                    self._parity(single, corpus, tolerance(gguf))
                except ValueError as error:
                    self.gap((*QUALITY, *SPEED), Status.NUMERIC_INVALID, one_line(error))
                else:
                    self._time(single, corpus, step_bytes(gguf, cell.layers), bounds)
                counted = [_counts(single)]
            if SPEED[2] not in self.result.gaps:
                counted += self._time_together(model, corpus, step_bytes(gguf, cell.layers), bounds)
            self._keep_peak(model)
        totals = {key: sum(each[key] for each in counted) for key in ("evaluated", "llama_cpp")}
        self.result.evidence["tokens"] = {"needed": self.needed, **totals}

    def _settings(self, gpu_build: bool) -> Settings:
        """Raises GapError for a device that this build cannot use."""
        device = torch.device(self.cell.device.torch_device)
        if device.type == "cuda" and not gpu_build:
            how = "build llama-cpp-python for it, as with CMAKE_ARGS=-DGGML_CUDA=on (ROCm: -DGGML_HIP=on)"
            raise GapError(Status.UNSUPPORTED, f"device {device}: this llama.cpp was built without a GPU backend; {how}")
        return Settings(threads=Threads.of(self.cell.device).most, gpu=(device.index or 0) if device.type == "cuda" else None)

    def _settle_threads(self, model: LlamaModel) -> None:
        """The numbers of threads that are soonest on this CPU, for prompts and for steps, unless one is given; contexts made from now on use them."""
        threads = Threads.of(self.cell.device)
        if threads.fixed:
            return
        ids, asked = np.arange(TRIED_TOKENS, dtype=np.int64) % model.n_vocab, model.settings
        with ExitStack() as stack:
            held: list[Context] = []

            def use(count: int) -> None:
                stack.close()
                model.settings = replace(asked, threads=count)
                held[:] = [stack.enter_context(Context(model, 1, 2 * TRIED_TOKENS))]

            def prompt() -> None:
                held[0].clear()
                held[0].prefill(ids)

            threads.settle(prompt, lambda: held[0].step(ids[:1]), use)
        model.settings = replace(asked, threads=threads.steps, threads_batch=threads.prompts)
        self.result.environment["threads_used"] = threads.facts()

    def _check_depth(self) -> None:
        """Raises GapError for a smaller depth than the file's."""
        depth = self.result.artifact["layers"]
        if self.cell.layers != depth:
            how = f"llama.cpp has no switch for a smaller depth; use layers={depth}, or convert a file of {self.cell.layers} layers"
            raise GapError(Status.UNSUPPORTED, f"layers={self.cell.layers}: {how}")

    def _reference(self, corpus: Corpus) -> tuple[torch.Tensor, dict[str, float]] | None:
        """Log-probabilities by the local engine: of the model before its conversion where the cell names it, else of this very file."""
        self.phase("reference", "log-probabilities of the source")
        try:
            return load_reference(self.cell, self.root, self.cache, self.result.artifact["sha256"], corpus)
        except GapError as error:
            self.gap(DIVERGENCE, error.status, one_line(error))
            return None

    def _keep_load(self, model: LlamaModel, load_s: float) -> None:
        cached = {"cache_state": "files read once before, by the check of the digest", "clock": "load of the model and its first context"}
        buffers = placement(model.said)["buffers_mib"]
        self.keep(
            load_s=valued("load_s", load_s, model.settings.details() | cached),
            resident_bytes=valued("resident_bytes", model.size_bytes, {"of": "all tensors of the model, by llama.cpp", "buffers_mib": buffers}),
        )
        self.gap(("decode_bytes_per_token",), Status.UNSUPPORTED, "llama.cpp does not count the bytes that it reads")
        self.gap(COSINES, Status.UNSUPPORTED, "not applicable: the weights are used as the file has them, nothing is encoded at load")

    def _describe(self, model: LlamaModel, build: dict[str, Any], gguf: Gguf, before: Sequence[tuple[int, ...]]) -> None:
        """The evidence about what was loaded and where."""
        place = placement(model.said + self.contexts[0].said)
        files, name = self.result.artifact["files"], gguf.files[0].path.name
        self.result.evidence |= {
            "llama_cpp": build,
            "model": {
                "architecture": model.value("general.architecture"),
                "n_layer": model.n_layer,
                "n_vocab": model.n_vocab,
                "vocab_size": self.result.artifact["vocab_size"],
                "bos": model.bos,
            },
            "file": {
                "name": name,
                "loaded": Path(place.pop("file") or "").name,
                "sha256": files.get(name),
                "bytes": sum(stat[0] for stat in before),
                "unchanged": _stats(gguf) == before,
            },
            "placement": place,
            "vocab_size": model.n_vocab,
        }

    def _compare_tokens(self, model: LlamaModel, corpus: Corpus) -> None:
        try:
            found = tokenization(model, (self.root / self.cell.model.corpus).read_text(encoding="utf-8"), corpus)
        except GapError as error:
            found = {"equal": False, "error": error.reason}
        self.result.evidence["tokenization"] = found
        if not found["equal"]:
            where = found.get("error") or f"{found['theirs']} tokens against {found['ours']}, the first difference at {found['first_difference']}"
            self.result.notes.append(f"llama.cpp's own tokenizer reads the text as other tokens ({where}); what was measured are the lab's tokens")

    def _score(self, context: Context, corpus: Corpus, reference: tuple[torch.Tensor, dict[str, float]] | None) -> None:
        """Perplexity, divergence where there is a reference, and llama-half where asked. Raises ValueError when a score is not finite."""
        bench, settings = self.cell.bench, context.model.settings
        windows, scored = corpus.windows(bench.ppl_context, bench.ppl_stride, bench.ppl_windows)
        self.phase("perplexity", f"{len(windows)} windows of {bench.ppl_context} tokens")
        self.needed += windows.numel()
        shape = {"context": bench.ppl_context, "stride": bench.ppl_stride, "batch": WINDOWS_TOGETHER, "bos": "none", "corpus": corpus.facts}
        details = shape | settings.details()
        perplexity = PerplexityTally(corpus.token_bytes)
        if reference is not None and reference[0].shape[-1] != context.model.n_vocab:
            self.gap(DIVERGENCE, Status.PATH_NOT_EXECUTED, f"logits of {context.model.n_vocab} tokens, the reference has {reference[0].shape[-1]}")
            reference = None
        divergence = DivergenceTally(reference[0]) if reference else None
        for log_p, targets, window in score_windows(forward(context), windows, scored, WINDOWS_TOGETHER):
            perplexity.add(log_p, targets, window)
            if divergence is not None and not divergence.full:
                divergence.add(log_p, window)
        self.keep(**perplexity.metrics(details))
        self.gap(("bits_per_byte",), Status.UNSUPPORTED, "the tokenizer is not byte-level: its tokens do not show their bytes")
        if divergence is not None and reference is not None:
            self.keep(**divergence_metrics(divergence.summary(), reference[1], details))
        if bench.llama_half_chunks:
            self._score_halves(context, corpus)

    def _score_halves(self, context: Context, corpus: Corpus) -> None:
        bench, before = self.cell.bench, context.evaluated
        self.phase("perplexity", f"up to {bench.llama_half_chunks} chunks of {bench.llama_half_context} tokens, second halves")
        details = {"batch": WINDOWS_TOGETHER, "corpus": corpus.facts} | context.model.settings.details()
        try:
            found, likelihoods = llama_half(
                forward(context), corpus.ids, context.model.bos, bench.llama_half_context, bench.llama_half_chunks, details
            )  # fmt: skip
        except LabError as error:
            self.gap(("ppl_llama_half",), Status.UNSUPPORTED, one_line(error))
            return
        except ValueError as error:
            self.needed += context.evaluated - before
            self.gap(("ppl_llama_half",), Status.NUMERIC_INVALID, one_line(error))
            raise
        self.needed += int(found.details["chunks"]) * bench.llama_half_context
        self.keep(ppl_llama_half=found)
        self.result.evidence["token_nll"] = likelihoods

    def _parity(self, context: Context, corpus: Corpus, tolerated: float) -> None:
        self.phase("parity", "steps against one batch")
        self.needed += batch_tokens(corpus) + TOKENS
        self.result.evidence["parity"] = step_parity(context, corpus, tolerated)

    def _time(self, context: Context, corpus: Corpus, weight_bytes: int | None, bounds: Bounds) -> None:
        bench = self.cell.bench
        runs = bench.warmup + bench.repeats
        self.phase("prefill", f"{bench.warmup} + {bench.repeats} runs of {PREFILL} tokens")
        self.needed += runs * PREFILL
        self.keep(pp512_tok_s=prefill_rate(context, corpus, bench.warmup, bench.repeats))
        self.phase("decode", f"{bench.warmup} + {bench.repeats} runs of {DECODE} tokens")
        self.needed += runs * (PREFILL + DECODE)
        self.keep(tg128_tok_s=decode_rate(context, corpus, bench.warmup, bench.repeats, weight_bytes, bounds, self.cell.device.torch_device == "cpu"))

    def _time_together(self, model: LlamaModel, corpus: Corpus, weight_bytes: int | None, bounds: Bounds) -> list[dict[str, int]]:
        """The rate of four sequences, in a context of their own; the tokens counted there."""
        bench = self.cell.bench
        self.phase("decode", f"{LANES} sequences, {bench.warmup} + {bench.repeats} runs of {DECODE} tokens")
        try:
            context = Context(model, LANES, PREFILL + DECODE)
        except GapError as error:
            self.gap((SPEED[2],), error.status, error.reason)
            return []
        with context:
            self.contexts.append(context)
            self.needed += (bench.warmup + bench.repeats) * LANES * (PREFILL + DECODE)
            self.keep(agg4_tg128_tok_s=decode_rate(context, corpus, bench.warmup, bench.repeats, weight_bytes, bounds, self.cell.device.torch_device == "cpu"))
            return [_counts(context)]

    def _keep_peak(self, model: LlamaModel) -> None:
        if model.settings.gpu is None:
            of = "process: Python, text, scores and the mapped file included"
            self.keep(peak_memory_bytes=valued("peak_memory_bytes", peak_resident_bytes(), {"of": of}))
            return
        gpus = {device["name"] for device in self.result.evidence["llama_cpp"]["devices"] if device["type"] != "CPU"}
        weights, *states = (_on(gpus, said) for said in (model.said, *(context.said for context in self.contexts)))
        of = "device: buffers of the weights and of the larger context, as llama.cpp's log names them"
        self.keep(peak_memory_bytes=valued("peak_memory_bytes", weights + max(states), {"of": of}))


def _on(devices: set[str], said: list[str]) -> float:
    """Bytes of the buffers on these devices."""
    return sum(mib for name, kinds in placement(said)["buffers_mib"].items() if name in devices for mib in kinds.values()) * 2**20


def _opened(path: Path) -> Gguf:
    if path.suffix != ".gguf":
        raise LabError(f"{path.name}: engine=llama_cpp runs GGUF files; give artifact=FILE.gguf")
    return open_gguf(path)


def _stats(gguf: Gguf) -> list[tuple[int, ...]]:
    """(size, time of change, inode) of each file."""
    found = [file.path.stat() for file in gguf.files]
    return [(each.st_size, each.st_mtime_ns, each.st_ino) for each in found]


def _counts(context: Context) -> dict[str, int]:
    return {"evaluated": context.evaluated, "llama_cpp": context.counted()}
