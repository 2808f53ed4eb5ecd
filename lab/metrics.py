"""The metrics a cell can hold: name, unit, protocol and direction, in one table.

Every other module (worker, admission, MLflow, matrix, report) looks a metric up here, so that a name always means the same unit and
the same protocol version. A protocol's version is raised when the way of measuring changes; old records then no longer count as current.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Metric:
    """One measurable quantity. `better` says which way is an improvement."""

    name: str
    unit: str
    protocol: str
    better: Literal["lower", "higher", "neither"]
    title: str
    optional: bool = False
    """Owed only by experiments that list it; a record without it has no gap for it."""


_ALL = (
    Metric("ppl", "ppl", "ppl/window@1", "lower", "Perplexity"),
    Metric("bits_per_byte", "bit/B", "ppl/window@1", "lower", "Bits per byte"),
    Metric("kld_mean", "nat", "kld@1", "lower", "Mean KLD to reference"),
    Metric("kld_p99", "nat", "kld@1", "lower", "99th percentile KLD"),
    Metric("top1_agreement", "fraction", "kld@1", "higher", "Top-1 agreement with reference"),
    Metric("pp512_tok_s", "tok/s", "pp@1", "higher", "Prefill, 512 tokens"),
    Metric("tg128_tok_s", "tok/s", "tg@1", "higher", "Decode, 128 tokens"),
    Metric("agg4_tg128_tok_s", "tok/s", "agg@1", "higher", "Decode of 4 sequences together, total"),
    Metric("load_s", "s", "load@1", "lower", "Load time"),
    Metric("resident_bytes", "B", "resident@1", "lower", "Weight bytes resident"),
    Metric("peak_memory_bytes", "B", "peak@1", "lower", "Peak memory of the process or device"),
    Metric("decode_bytes_per_token", "B", "counted@1", "lower", "Weight and state bytes read per decoded token"),
    Metric("expert_cosine", "cosine", "weight-cosine@1", "higher", "Expert weights' cosine to source"),
    Metric("ple_cosine", "cosine", "weight-cosine@1", "higher", "PLE table's cosine to source"),
    # A device against the CPU, and agreement between the two: owed by stages that move an engine from one to the other.
    Metric("prefill_multiple", "x", "multiple@1", "higher", "Prefill, device over CPU", optional=True),
    Metric("decode_multiple", "x", "multiple@1", "higher", "Decode, device over CPU", optional=True),
    Metric("end_to_end_multiple", "x", "multiple@1", "higher", "End to end, device over CPU", optional=True),
    Metric("greedy_match_tokens", "tokens", "greedy@1", "higher", "Greedy ids equal before the first flip", optional=True),
    Metric("greedy_compared_tokens", "tokens", "greedy@1", "neither", "Greedy ids compared", optional=True),
    Metric("verify_max_rel_err", "fraction", "verify@1", "lower", "Largest relative error of any product, device against CPU", optional=True),
    Metric("gemm_share", "fraction", "segments@1", "neither", "Share of time in matrix products", optional=True),
    Metric("ppl_llama_half", "ppl", "ppl/llama-half@1", "lower", "Perplexity as llama-perplexity counts it", optional=True),
    Metric("corpus_nll_mean", "nat", "nll@1", "lower", "Mean NLL over the fixed passages, token-weighted", optional=True),
    Metric("nll_rel_diff", "fraction", "nll@1", "lower", "Relative difference of that NLL, device against CPU", optional=True),
)

METRICS: dict[str, Metric] = {m.name: m for m in _ALL}
"""Every metric the lab knows, in the order reports show them."""

CORE = tuple(name for name, metric in METRICS.items() if not metric.optional)
"""What every record owes: a number or a gap each."""
