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
)

METRICS: dict[str, Metric] = {m.name: m for m in _ALL}
"""Every metric the lab knows, in the order reports show them."""
