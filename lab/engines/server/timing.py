"""From answers to rates: what PP, TG and N-way mean through a server, and which answers are refused.

TTFT: request sent to first text received, so connecting, queueing and sampling are inside. PP: prompt tokens (the server's count, less what it admits to have
cached) over TTFT of a fresh prompt. TG: tokens after the first over the time between first and last update. N-way: the same quotient for four requests sent
together - all tokens after each one's first, over one wall clock from the earliest first update to the latest last one, never a sum of lanes. Token counts
are the server's; a server that miscounts is not found out here.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from lab.engines.server.stream import Answer
from lab.engines.server_evidence import MAX_SHARED_TOKENS
from lab.errors import GapError
from lab.measure.throughput import DECODE, LANES, PREFILL
from lab.metrics import METRICS
from lab.record import Measurement, Status

LENGTH_TOLERANCE = 0.1
"""Share by which a prompt may miss 512 tokens. The rate uses the true length; a prompt much shorter or longer is another measurement."""
WARM_SHARE = 0.5
"""A repeated prompt that starts in less than this share of a fresh one's time was not computed again."""
MAX_TOKENS_PER_UPDATE = 16
"""Speculation yields a few tokens at once; more means that something collects the stream, and its clock is no clock of tokens."""
MIN_TOGETHER = 0.5
"""Share of a wave's wall time in which all its requests must be decoding; below, it times the reading of prompts."""
SINGLE_TOKENS = 1.05
"""Up to this many tokens per update, the time between two updates is an inter-token latency."""

PP_DEFINITION = "prompt tokens by usage, less cached ones, over the time from request sent to first text received; fresh prompts"
TG_DEFINITION = "(completion tokens by usage - 1) over the time from first to last update"
AGG_DEFINITION = "all completion tokens after each request's first, over one wall clock from the earliest first to the latest last update of the wave"

Wave = Sequence[Answer]
"""Answers to requests that were sent together."""


@dataclass(frozen=True)
class CacheProbe:
    """What a repeated prompt showed: median TTFT of fresh ones and the slowest of the repeats, in seconds; cached tokens the server admitted to."""

    fresh_ttft_s: float
    repeat_ttft_s: float
    reported_tokens: int | None

    @property
    def warm(self) -> bool:
        """Whether the repeats were answered without computing the prompt."""
        return self.told or self.repeat_ttft_s < WARM_SHARE * self.fresh_ttft_s

    @property
    def told(self) -> bool:
        """Whether the server said of the repeats that they came from its cache."""
        return (self.reported_tokens or 0) > MAX_SHARED_TOKENS


def probe_cache(fresh: Wave, repeats: Wave) -> CacheProbe:
    """Compares fresh prompts with repeats of one of them."""
    reported = [a.cached_tokens for a in repeats if a.cached_tokens is not None]
    return CacheProbe(statistics.median(a.ttft_s for a in fresh), max(a.ttft_s for a in repeats), max(reported, default=None))


def prefill_rate(answers: Wave, probe: CacheProbe, details: dict[str, Any]) -> Measurement:
    """pp512_tok_s from fresh, single requests. Raises GapError where prompts were cached, cannot be told from cached ones, or miss the length."""
    reused = max(a.cached_tokens or 0 for a in answers)
    if reused > MAX_SHARED_TOKENS:
        raise GapError(Status.IMPLAUSIBLE, f"a fresh prompt was answered from the prompt cache: the server reports {reused} of its tokens as cached")
    if probe.warm and not probe.told:
        raise GapError(
            Status.IMPLAUSIBLE,
            f"the server keeps prompts and does not say when it uses them (a repeated prompt starts after {1e3 * probe.repeat_ttft_s:.3g} ms, fresh ones after "
            f"{1e3 * probe.fresh_ttft_s:.3g} ms), so that no prompt can be shown to be computed: turn its prefix cache off, or make it report cached_tokens",
        )
    lengths = [a.prompt_tokens for a in answers]
    if any(abs(n - PREFILL) > LENGTH_TOLERANCE * PREFILL for n in lengths):
        how = "where nobody counts tokens beforehand, prompts are cut by characters: put the tokenizer into model.artifact"
        raise GapError(Status.IMPLAUSIBLE, f"prompts of {min(lengths)} to {max(lengths)} tokens are no measurement of {PREFILL}; {how}")
    samples = [(a.prompt_tokens - (a.cached_tokens or 0)) / a.ttft_s for a in answers]
    ttft = [1e3 * a.ttft_s for a in answers]
    return _measured("pp512_tok_s", samples, details | {
        "definition": PP_DEFINITION,
        "asked_prompt_tokens": PREFILL,
        "realised_prompt_tokens": lengths,
        "ttft_ms_p50": _percentile(ttft, 50),
        "ttft_ms_p95": _percentile(ttft, 95),
        "cache_probe": asdict(probe) | {"warm": probe.warm},
    })  # fmt: skip


def decode_rate(waves: Sequence[Wave], details: dict[str, Any]) -> Measurement:
    """tg128_tok_s from waves of one request, agg4_tg128_tok_s from waves of four. Raises GapError where answers are short, bundled or not together."""
    lanes = len(waves[0])
    for wave in waves:
        _check_wave(wave)
    samples = [(sum(a.completion_tokens for a in wave) - lanes) / _wall_s(wave) for wave in waves]
    answers = [a for wave in waves for a in wave]
    gaps_ms = [1e3 * (b - a) for answer in answers for a, b in zip(answer.updates_s, answer.updates_s[1:], strict=False)]
    updates, tokens = sum(len(a.updates_s) for a in answers), sum(a.completion_tokens for a in answers)
    # Between updates of several tokens lies no latency of a token.
    name = "itl_ms" if tokens / updates < SINGLE_TOKENS else "update_gap_ms"
    found = details | {
        "definition": TG_DEFINITION if lanes == 1 else AGG_DEFINITION,
        "requested_tokens": lanes * DECODE,
        "realised_tokens": sum(a.completion_tokens for a in waves[-1]),
        "lanes": lanes,
        "context_tokens": [a.prompt_tokens for a in answers],
        "tokens_per_update": tokens / updates,
        **{f"{name}_p{q}": _percentile(gaps_ms, q) for q in (50, 95, 99)},
    }
    drafted = [(a.drafted, a.accepted) for a in answers if a.drafted is not None and a.accepted is not None]
    if drafted:
        found |= {"drafted_tokens": sum(d for d, _ in drafted), "accepted_tokens": sum(a for _, a in drafted)}
    if lanes == 1:
        return _measured("tg128_tok_s", samples, found)
    whole = [sum(a.completion_tokens for a in wave) / (max(a.last_s for a in wave) - min(a.sent_s for a in wave)) for wave in waves]
    return _measured("agg4_tg128_tok_s", samples, found | {
        "with_prefill_tok_s": statistics.median(whole),
        "together_share": min(_share_together(wave) for wave in waves),
    })  # fmt: skip


def _check_wave(wave: Wave) -> None:
    """Raises GapError where the answers of one wave are no decoding of the length asked for."""
    for answer in wave:
        if answer.completion_tokens != DECODE:
            raise GapError(Status.IMPLAUSIBLE, f"{answer.completion_tokens} tokens came back where {DECODE} were asked for")
        if len(answer.updates_s) * MAX_TOKENS_PER_UPDATE < answer.completion_tokens or answer.last_s <= answer.first_s:
            raise GapError(
                Status.IMPLAUSIBLE, f"{answer.completion_tokens} tokens came in {len(answer.updates_s)} updates: something between collects the stream"
            )
    if (share := _share_together(wave)) < MIN_TOGETHER:
        how = "they were read or decoded one after another (a batch limit, or a slow prefill)"
        raise GapError(Status.UNSUPPORTED, f"{LANES} requests sent together decoded together for {max(0.0, share):.0%} of their common time: {how}")


def _share_together(wave: Wave) -> float:
    """Share of the wave's wall time in which every request was decoding; negative where one ended before another began, 1 for a single request."""
    return (min(a.last_s for a in wave) - max(a.first_s for a in wave)) / _wall_s(wave)


def _wall_s(wave: Wave) -> float:
    return max(a.last_s for a in wave) - min(a.first_s for a in wave)


def _percentile(values: list[float], q: float) -> float:
    return float(np.percentile(values, q))


def _measured(name: str, samples: list[float], details: dict[str, Any]) -> Measurement:
    known = METRICS[name]
    return Measurement.from_samples(samples, known.unit, known.protocol, details={**details, "repeats": len(samples)})
