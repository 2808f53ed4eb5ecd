"""One attempt through a server, inside the child process: reach or start it, settle how to ask, measure, gather what it says of itself.

Order: start, first request, perplexity where offered, single requests (PP and TG of the same answers), the cache probe, then four together. What one
measurement cannot give becomes that metric's gap; a server that is gone ends the attempt. What a client cannot see - bytes, kernels, weights - is a gap by
nature. Whether the numbers may be believed is decided by the parent, with `lab.engines.server_evidence`.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar

from lab.artifacts import open_artifact
from lab.attempt import Attempt, one_line
from lab.devices import usable_cores
from lab.engines.server.facts import Drafts, listed_models, said_of_itself
from lab.engines.server.process import ServerProcess, start_command
from lab.engines.server.prompts import PromptMaker, held_out_text
from lab.engines.server.stream import Answer
from lab.engines.server.timing import decode_rate, prefill_rate, probe_cache
from lab.errors import GapError, LabError
from lab.measure.text import load_corpus
from lab.measure.throughput import DECODE, LANES, PREFILL
from lab.metrics import METRICS
from lab.provenance import code_sha256
from lab.record import Measurement, Status
from lab.signals import leaving_by

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from lab.engines.server.client import Client

QUALITY = ("ppl", "bits_per_byte")
DIVERGENCE = ("kld_mean", "kld_p99", "top1_agreement")
SPEED = ("pp512_tok_s", "tg128_tok_s", "agg4_tg128_tok_s")
UNSEEN = ("resident_bytes", "peak_memory_bytes", "decode_bytes_per_token", "expert_cosine", "ple_cosine")
PROBES = 2
DEATH_S = 2.0
"""How long after a broken request the server may take to be gone."""
CACHE_STATE = "shapes warmed up; every prompt begins with new random letters; caches of experts or weights as the server keeps them"
_MOST_FAILURES = 20

T = TypeVar("T")


class ServerGoneError(GapError):
    """The server died while it was measured: nothing of the attempt stands."""


class ServerAttempt(Attempt):
    """One run of one cell through its path's server."""

    client: Client
    server: ServerProcess | None = None

    def measure(self) -> None:
        """Measures in the order of the module's description, and ends the server if it started one."""
        from lab.engines.server.client import Client  # here, since it needs an extra: without httpx this is one line of the record

        cell, spec = self.cell, self.cell.path.server
        if spec is None:
            raise LabError(f"path.server: path {cell.path.name} names no server; engine=server runs the paths that do (python -m lab ls paths)")
        self.result.environment = {"python": platform.python_version(), "httpx": version("httpx"), "code_sha256": code_sha256()}
        self.prompts = PromptMaker(held_out_text(self.root / cell.model.corpus), PREFILL)
        self.fresh: list[Answer] = []
        with leaving_by(lambda number: SystemExit(128 + number)), Client(spec) as self.client, ExitStack() as running:
            if spec.command:
                command = start_command(spec, self.root / cell.model.artifact, cell.layers, self.client.address.port, cell.device.threads or usable_cores())
                self.phase("start", " ".join(command))
                self.server = running.enter_context(ServerProcess(command, spec.environment, self.client.address, self.root))
            self.result.evidence["server"] = self._identity()
            self._reach()
            try:
                self._measure()
            finally:
                self.result.evidence["server"]["models_answered"] = sorted({a.model for a in self.client.answers if a.model})
                self.result.evidence["requests"] = self._requests()
        if self.server is not None and self.server.left_running:
            self.result.notes.append(f"after the server was ended, something of it still runs or listens at {spec.url}: end it by hand before the next run")

    def _reach(self) -> None:
        """Waits until requests can be sent, and settles the model's name. Raises GapError or LabError where that fails."""
        client, spec = self.client, self.client.spec
        if self.server is not None:
            load_s = self.server.wait_healthy(client.health, spec.start_timeout_s)
            details = {"clock": "process start to first healthy answer, looked at every 0.2 s", "cache_state": "unknown: files may or may not be in memory"}
            self.keep(load_s=Measurement(value=load_s, unit="s", protocol=METRICS["load_s"].protocol, details=details))
        else:
            health, why = client.health()
            if health is None:
                raise GapError(Status.INFRA, f"nothing answers at {client.address.root} ({why}): start the server, or give path.server.command")
            if health != 200:
                here = client.address.root + spec.health
                raise GapError(Status.LOAD_FAILED, f"{here} says HTTP {health}: the server is not ready, or its path.server.health is another")
            self.gap(("load_s",), Status.UNSUPPORTED, "the server was running already")
        listed = listed_models(client)
        if not client.model:
            if not listed:
                raise LabError(f"path.server.model: {client.address.api}/models lists no model; name the one to ask for")
            client.model = listed[0]
        self.result.evidence["server"] |= {"model": client.model, "models_listed": listed, "says": said_of_itself(client)}

    def _counter(self) -> tuple[Callable[[str], int] | None, str]:
        """Who counts the tokens of a text, and its name for the details. Raises LabError for broken tokenizer files."""
        if self.client.count_tokens(self.prompts.body[:PREFILL]) is not None:
            # Should the server stop telling, the prompt stays as it is, and its true length is judged like any other.
            return lambda text: self.client.count_tokens(text) or PREFILL, "the server's tokenizer"
        tokenizer = self._tokenizer()
        if tokenizer is not None:
            return lambda text: len(tokenizer.encode(text, add_special_tokens=False)), "the tokenizer of model.artifact"
        return None, "characters, by the ratio of the first request"

    def _tokenizer(self) -> Tokenizer | None:
        """That of model.artifact, or None where it is not here. Raises LabError for broken files."""
        path = self.root / self.cell.model.artifact
        if not path.exists() or (path.is_dir() and not (path / "tokenizer.json").is_file()):
            return None
        return open_artifact(path, self.cell.model.arch).tokenizer()

    def _measure(self) -> None:
        bench = self.cell.bench
        self.gap(UNSEEN, Status.UNSUPPORTED, "an endpoint does not show its memory or its weights")
        self.gap(DIVERGENCE, Status.UNSUPPORTED, "an endpoint returns the log-probabilities of a few tokens, not the distribution that a divergence needs")
        self.phase("first request", self.client.model)
        self.prompts.count, self.cut_by = self._counter()
        prompt = self.prompts.fresh()
        first = self._while_alive(lambda: self.client.settle(prompt, DECODE))
        self.fresh.append(first)
        if self.prompts.count is None:
            self.prompts.learn(prompt, first.prompt_tokens)
        self.result.evidence["server"] |= {"route": self.client.dialect.route, "options": self.client.dialect.options, "declined": self.client.declined}
        self.phase("perplexity", "if the endpoint scores prompts")
        self._metric(QUALITY, self._keep_quality)
        self.phase("single", f"{bench.warmup} + {bench.repeats} requests of {PREFILL} + {DECODE} tokens")
        drafts = Drafts.read(self.client)
        waves = self._metric(SPEED, lambda: self._waves(1))
        if waves is None:
            return
        details = self._details() | Drafts.read(self.client).since(drafts)
        self._metric(("pp512_tok_s",), lambda: self._keep_prefill([wave[0] for wave in waves]))
        self._metric(("tg128_tok_s",), lambda: self.keep(tg128_tok_s=decode_rate(waves, details)))
        self.phase("together", f"{bench.warmup} + {bench.repeats} waves of {LANES} requests")
        self._metric(("agg4_tg128_tok_s",), self._keep_together)

    def _keep_quality(self) -> None:
        """Perplexity by the local engine's protocol. Raises GapError where the endpoint or the files do not allow it."""
        from lab.engines.server.quality import perplexity  # needs the client's extra, as above

        model = self.cell.model
        try:
            tokenizer = open_artifact(self.root / model.artifact, model.arch).tokenizer()
            corpus = load_corpus(tokenizer, self.root / model.corpus)
        except LabError as error:
            raise GapError(Status.UNSUPPORTED, f"no perplexity without the model's tokenizer: {one_line(error)}") from None
        self.result.evidence["vocab_size"] = tokenizer.get_vocab_size()
        try:
            self.keep(**perplexity(self.client, corpus, tokenizer, self.cell.bench))
        except ValueError as error:
            raise GapError(Status.NUMERIC_INVALID, one_line(error)) from None
        self.gap(QUALITY, Status.UNSUPPORTED, "the tokenizer is not byte-level: its tokens do not show their bytes")

    def _keep_prefill(self, single: Sequence[Answer]) -> None:
        """PP of the single requests, after one more prompt was sent and then repeated."""
        prompt = self.prompts.fresh()
        self.fresh.append(self.client.complete(prompt, DECODE))
        probe = probe_cache(single, [self.client.complete(prompt, DECODE) for _ in range(PROBES)])
        self.keep(pp512_tok_s=prefill_rate(single, probe, self._details()))

    def _keep_together(self) -> None:
        single = self.result.metrics.get("tg128_tok_s")
        beside = {"single_stream_tok_s": single.value} if single else {}
        self.keep(agg4_tg128_tok_s=decode_rate(self._waves(LANES), self._details() | beside))

    def _waves(self, lanes: int) -> list[list[Answer]]:
        """The answers of each measured wave of `lanes` fresh requests, after the warm-up."""
        bench = self.cell.bench
        waves = []
        for _ in range(bench.warmup + bench.repeats):
            waves.append(self.client.together([self.prompts.fresh() for _ in range(lanes)], DECODE))
            self.fresh += waves[-1]
        return waves[bench.warmup :]

    def _metric(self, names: tuple[str, ...], measure: Callable[[], T]) -> T | None:
        """The result, or None and gaps for `names`. Raises ServerGoneError."""
        try:
            return self._while_alive(measure)
        except ServerGoneError:
            raise
        except GapError as error:
            self.gap(names, error.status, error.reason)
            return None

    def _while_alive(self, measure: Callable[[], T]) -> T:
        """`measure`, with a failure after which the server is gone told from one that it survived."""
        try:
            return measure()
        except GapError as error:
            if error.status is not Status.CRASHED:
                raise
            if self.server is not None and self.server.died(DEATH_S):
                raise ServerGoneError(Status.CRASHED, f"the server died ({self.server.last_words()}): {error.reason}") from None
            health, why = self.client.health()
            if health != 200:
                raise ServerGoneError(Status.CRASHED, f"the server is gone (health: {why or f'HTTP {health}'}): {error.reason}") from None
            raise

    def _details(self) -> dict[str, Any]:
        dialect = self.client.dialect
        return {
            "engine": "server",
            "warmup": self.cell.bench.warmup,
            "cache_state": CACHE_STATE,
            "route": dialect.route,
            "options": list(dialect.options),
            "lossy": list(self.client.spec.lossy),
            "prompts_cut_by": self.cut_by,
        }

    def _identity(self) -> dict[str, Any]:
        """What is known before the first answer: address, start, switches."""
        spec = self.client.spec
        passed = any("{layers}" in word for word in spec.command)
        if not passed:
            self.result.notes.append(f"layers={self.cell.layers} is what the cell says; the server was not told a depth")
        if spec.lossy:
            self.result.notes.append(f"lossy switches of this stack: {', '.join(spec.lossy)}")
        return {
            "url": spec.url,
            "model": spec.model,
            "models_answered": [],
            "started_here": self.server is not None,
            "command": self.server.command if self.server else None,
            "environment": dict(spec.environment),
            "layers_passed": passed,
            "lossy": list(spec.lossy),
        }

    def _requests(self) -> dict[str, Any]:
        client = self.client
        return {
            "ok": len(client.answers) + client.plain_ok,
            "failed": len(client.failures),
            "failures": client.failures[:_MOST_FAILURES],
            "prompt_tokens": sum(a.prompt_tokens for a in client.answers),
            "completion_tokens": sum(a.completion_tokens for a in client.answers),
            "cached_tokens_max": max((a.cached_tokens or 0 for a in self.fresh), default=0),
            "cached_tokens_reported": any(a.cached_tokens is not None for a in client.answers),
        }
