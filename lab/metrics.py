"""The metrics a cell can hold: name, unit, protocol and direction, in one table.

Every other module (worker, admission, MLflow, matrix, report) looks a metric up here, so that a name always means the same unit and
the same protocol version. A protocol's version is raised when the way of measuring changes; old records then no longer count as current.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lab.cell import DECODE_DEPTHS, PREFILL_SIZES


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


def prefill_metric(lanes: int, tokens: int) -> str:
    """The metric of a prompt of so many tokens: pp2048_tok_s, agg4_pp2048_tok_s."""
    return f"{'' if lanes == 1 else f'agg{lanes}_'}pp{tokens}_tok_s"


def decode_metric(lanes: int, depth: int) -> str:
    """The metric of 128 tokens decoded after so many: tg128_d4096_tok_s, agg4_tg128_d4096_tok_s; after 512 without the depth."""
    return f"{'' if lanes == 1 else f'agg{lanes}_'}tg128{'' if depth == 512 else f'_d{depth}'}_tok_s"


def _wide() -> tuple[Metric, ...]:
    """Prompts and contexts of other sizes than the usual ones, of one sequence and of four: owed where a bench asks for them (lab.measure.wide)."""
    found = []
    for lanes, who, each in ((1, "", ""), (4, " of 4 sequences together", " each")):
        prompts = [size for size in PREFILL_SIZES if (lanes, size) != (1, 512)]
        found += [Metric(prefill_metric(lanes, n), "tok/s", "pp/wide@1", "higher", f"Prefill{who}, {n} tokens{each}", optional=True) for n in prompts]
        contexts = [depth for depth in DECODE_DEPTHS if depth != 512]
        found += [Metric(decode_metric(lanes, d), "tok/s", "tg/wide@1", "higher", f"Decode{who}, 128 tokens{each} after {d}", optional=True) for d in contexts]
    return tuple(found)


WIDE = tuple(metric.name for metric in _wide())
"""The metrics of lab.measure.wide."""

_ALL: tuple[Metric, ...] = (
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
    Metric("prefill_multiple", "x", "multiple@2", "higher", "Prefill, device over CPU", optional=True),
    Metric("decode_multiple", "x", "multiple@2", "higher", "Decode, device over CPU", optional=True),
    Metric("end_to_end_multiple", "x", "multiple@2", "higher", "End to end, device over CPU", optional=True),
    Metric("greedy_match_tokens", "tokens", "greedy@1", "higher", "Greedy ids equal before the first flip", optional=True),
    Metric("greedy_compared_tokens", "tokens", "greedy@1", "neither", "Greedy ids compared", optional=True),
    Metric("verify_max_rel_err", "fraction", "verify@1", "lower", "Largest relative error of any product, device against CPU", optional=True),
    Metric("gemm_share", "fraction", "segments@1", "neither", "Share of time in matrix products", optional=True),
    Metric("decode_experts_share", "fraction", "components@1", "neither", "Share of decode time in the routed experts", optional=True),
    Metric("prefill_experts_share", "fraction", "components@1", "neither", "Share of prefill time in the routed experts", optional=True),
    Metric("ppl_llama_half", "ppl", "ppl/llama-half@1", "lower", "Perplexity as llama-perplexity counts it", optional=True),
    Metric("corpus_nll_mean", "nat", "nll@1", "lower", "Mean NLL over the fixed passages, token-weighted", optional=True),
    # Experts kept in part (lab.measure.tiers).
    Metric("expert_hit_rate", "fraction", "tier@1", "higher", "Expert requests found on the device, one sequence", optional=True),
    Metric("bus_bytes_per_token", "B", "tier@1", "lower", "Bytes over the bus per decoded token", optional=True),
    Metric("cpu_us_per_expert", "us", "tier@1", "lower", "CPU time for one expert, decoding one sequence", optional=True),
    Metric("bus_bytes_s", "B/s", "tier@1", "higher", "Rate of copies of missing experts", optional=True),
    Metric("nll_rel_diff", "fraction", "nll@1", "lower", "Relative difference of that NLL, device against CPU", optional=True),
    *_wide(),
)

METRICS: dict[str, Metric] = {m.name: m for m in _ALL}
"""Every metric the lab knows, in the order reports show them."""

CORE = tuple(name for name, metric in METRICS.items() if not metric.optional)
"""What every record owes: a number or a gap each."""
