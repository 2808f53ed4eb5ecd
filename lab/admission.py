"""Which of the worker's findings become numbers of the record, and why the others do not.

The gates from `load` on (`lab.gates`), in their order: how the worker ended, whether the claimed path ran (`lab.evidence`), valid numbers, parity
of the model with itself, then rates, then plausibility. A cell that fails as a whole admits no number; a metric that fails alone becomes a gap and
the others stand - but no speed stands beside invalid output. Passing says that nothing speaks against a number, not that it is right.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lab.cell import Cell
from lab.gates import not_checked, passed
from lab.metrics import CORE, METRICS, WIDE
from lab.placement.checks import least_together, shares_slots
from lab.record import Gap, GateResult, Measurement, Status, WorkerResult

MAX_ROOFLINE_PCT = 105.0
"""Above the physical bound by more than its own measuring error (5 %), a rate cannot be right."""
MIN_REPEATS = 5
"""As many as a bench must have (`lab.cell.BenchSpec`)."""
_TIMED_UNITS = ("tok/s",)
_OUTPUT = ("ppl", "bits_per_byte", "kld_mean", "kld_p99", "top1_agreement", "corpus_nll_mean", "ppl_llama_half")
"""Metrics made from the model's output: an invalid one among them makes every speed of the attempt meaningless."""

_NEVER_ZERO = ("load_s", "resident_bytes", "peak_memory_bytes", "decode_bytes_per_token")
"""Something was loaded, held and read: a zero here was not measured."""

# The values a metric can have at all: (lowest, highest), None = unbounded. Rounding may leave 1e-3 outside.
_ROUNDING = 1e-3
_POSSIBLE: dict[str, tuple[float | None, float | None]] = {
    "ppl": (1.0, None),
    "bits_per_byte": (0.0, None),
    "kld_mean": (0.0, None),
    "kld_p99": (0.0, None),
    "top1_agreement": (0.0, 1.0),
    "pp512_tok_s": (0.0, None),
    "tg128_tok_s": (0.0, None),
    "agg4_tg128_tok_s": (0.0, None),
    **dict.fromkeys(WIDE, (0.0, None)),
    "load_s": (0.0, None),
    "resident_bytes": (0.0, None),
    "peak_memory_bytes": (0.0, None),
    "decode_bytes_per_token": (0.0, None),
    "expert_cosine": (-1.0, 1.0),
    "ple_cosine": (-1.0, 1.0),
    "prefill_multiple": (0.0, None),
    "decode_multiple": (0.0, None),
    "end_to_end_multiple": (0.0, None),
    "greedy_match_tokens": (0.0, None),
    "greedy_compared_tokens": (1.0, None),
    "verify_max_rel_err": (0.0, None),
    "gemm_share": (0.0, 1.0),
    "expert_hit_rate": (0.0, 1.0),
    "bus_bytes_per_token": (0.0, None),
    "cpu_us_per_expert": (0.0, None),
    "bus_bytes_s": (0.0, None),
    "decode_experts_share": (0.0, 1.0),
    "prefill_experts_share": (0.0, 1.0),
    "corpus_nll_mean": (0.0, None),
    "ppl_llama_half": (1.0, None),
    "nll_rel_diff": (0.0, None),
}

EvidenceCheck = Callable[[Cell, dict[str, Any]], list[tuple[Status, str]]]
Refusal = tuple[Status, str]


@dataclass
class Decision:
    """The admitted metrics, the gaps by name, and the raw metrics that were not admitted. `stopped_at` names the gate where the status does not."""

    status: Status
    reason: str = ""
    metrics: dict[str, Measurement] = field(default_factory=dict)
    gaps: dict[str, Refusal] = field(default_factory=dict)
    unadmitted: dict[str, Measurement] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    gates: list[GateResult] = field(default_factory=list)
    stopped_at: str = ""

    def gaps_with(self, fill: str) -> dict[str, Gap]:
        """The gaps as a record holds them; `fill` is the command that would fill each."""
        return {name: Gap(status=status, reason=reason, fill=fill) for name, (status, reason) in self.gaps.items()}


def refuse(status: Status, reason: str, unadmitted: dict[str, Measurement] | None = None) -> Decision:
    """A decision without any number: every metric is a gap with this status and reason."""
    return Decision(status, reason, gaps=dict.fromkeys(CORE, (status, reason)), unadmitted=dict(unadmitted or {}))


def decide(cell: Cell, result: WorkerResult, check: EvidenceCheck | None = None) -> Decision:
    """Judge what the worker found. `check` stands in for `lab.evidence.check`."""
    if result.status is not Status.OK:
        return refuse(result.status, result.reason or "the worker gave no reason", result.metrics)
    findings = (check or _evidence_check())(cell, result.evidence)
    if findings:
        decision = refuse(*findings[0], result.metrics)
        decision.notes = [f"{status}: {reason}" for status, reason in findings[1:]]
        decision.gates = [passed("load")]
        return decision
    refusals = _refusals(result)
    if lost := _parity_problem(result.evidence):
        decision = refuse(Status.PARITY_FAILED, lost, result.metrics)
        decision.gates = [passed("load"), _residency(cell), _numeric(result, refusals)]
        return decision

    decision = Decision(Status.OK)
    for name, measurement in result.metrics.items():
        if name not in METRICS:
            decision.notes.append(f"{name} is no metric of lab.metrics and was left out")
            decision.unadmitted[name] = measurement
        elif name in refusals:
            decision.unadmitted[name] = measurement
            decision.gaps[name] = refusals[name]
        else:
            decision.metrics[name] = measurement
    for name in (*CORE, *(n for n in result.gaps if n in METRICS)):
        if name not in decision.metrics and name not in decision.gaps:
            decision.gaps[name] = _worker_gap(result.gaps.get(name))
    if not decision.metrics:
        status, reason = next(iter(decision.gaps.values()))
        return refuse(status, f"no metric was admitted; the first: {reason}", decision.unadmitted)
    decision.gates = _gates(cell, decision, result, refusals)
    return decision


def _refusals(result: WorkerResult) -> dict[str, Refusal]:
    """Why measurements may not stand as numbers, by metric. Speeds are judged last: beside invalid output none of them stands."""
    found = {name: refusal for name, m in result.metrics.items() if (refusal := result.gaps.get(name) or refusal_of(name, m, result))}
    if broken := _invalid_output(result):
        for name, measurement in result.metrics.items():
            if measurement.unit in _TIMED_UNITS and name not in found:
                found[name] = (Status.NUMERIC_INVALID, f"a speed does not stand beside invalid output ({broken})")
    return found


def _invalid_output(result: WorkerResult) -> str | None:
    """What shows that the model put out nonsense: NaN that the worker met, or a score that cannot be. None if nothing does."""
    for name in _OUTPUT:
        status, reason = result.gaps.get(name, (Status.OK, ""))
        if status is Status.NUMERIC_INVALID:
            return f"{name}: {reason}"
        if name in result.metrics and (impossible := _impossible(name, result.metrics[name])):
            return impossible
    return None


def _impossible(name: str, found: Measurement) -> str | None:
    """Which value lies outside what the metric can be, or None."""
    low, high = _POSSIBLE.get(name, (None, None))
    for value in (found.value, *found.samples):
        if (low is not None and value < low - _ROUNDING) or (high is not None and value > high + _ROUNDING):
            span = f"{low:g} to {'infinity' if high is None else format(high, 'g')}"
            return f"{name} {value:.6g} is impossible: its values go from {span}"
    return None


def _parity_problem(evidence: dict[str, Any]) -> str | None:
    """Why the model that ran disagrees with itself, or None: the same text whole and step by step must give the same distributions."""
    parity = evidence.get("parity")
    if parity is None or parity["kld_mean"] <= parity["tolerance"]:
        return None
    return (
        f"the same {parity['tokens']} tokens step by step and as a whole differ by a mean KLD of {parity['kld_mean']:.3g}, "
        f"above {parity['tolerance']:.3g}: the state kept between steps is wrong, so decoding speed says nothing"
    )


def _gates(cell: Cell, decision: Decision, result: WorkerResult, refusals: dict[str, Refusal]) -> list[GateResult]:
    """The gates of a cell that was admitted at least in part. A gate that had nothing to judge was not passed."""
    parity = result.evidence.get("parity")
    found = [passed("load"), _residency(cell), _numeric(result, refusals)]
    if parity:
        found.append(passed("parity", f"mean KLD {parity['kld_mean']:.3g} over {parity['tokens']} tokens"))
    else:
        found.append(not_checked("parity", "the worker did not compare steps with the whole"))
    rates = [name for name in result.metrics if name in METRICS and METRICS[name].unit in _TIMED_UNITS]
    missing = [name for name in decision.gaps if METRICS[name].unit in _TIMED_UNITS]
    found.append(_judged("speed", rates, missing))
    found.append(_judged("plausibility", list(decision.metrics), [f"{n}: {r}" for n, (s, r) in decision.gaps.items() if s is Status.IMPLAUSIBLE]))
    return found


def _residency(cell: Cell) -> GateResult:
    """The gate whose evidence held. A server shows requests and answers; where its weights lie and what computes them it does not."""
    if cell.engine == "server":
        return not_checked("residency", "a server shows neither its weights nor its operations; requests, model and cache were checked")
    return passed("residency")


def _numeric(result: WorkerResult, refusals: dict[str, Refusal]) -> GateResult:
    """Whether what the model put out is valid: the gaps and values of the metrics made from its output."""
    invalid = {**{n: g for n, g in result.gaps.items() if n not in result.metrics}, **refusals}
    return _judged("numeric", [n for n in _OUTPUT if n in result.metrics], [f"{n}: {r}" for n, (s, r) in invalid.items() if s is Status.NUMERIC_INVALID])


def _judged(gate: str, judged: list[str], refused: list[str]) -> GateResult:
    if refused:
        return GateResult(gate=gate, outcome="partly", detail="; ".join(refused))
    return passed(gate) if judged else not_checked(gate, "nothing was measured that it judges")


def refusal_of(name: str, found: Measurement, result: WorkerResult) -> Refusal | None:
    """Why this measurement may not stand as a number, or None. Metrics that need each other are looked up in `result`."""
    known = METRICS.get(name)
    if known is None:
        return None
    if (found.unit, found.protocol) != (known.unit, known.protocol):
        return Status.NUMERIC_INVALID, f"measured in {found.unit} by {found.protocol}, but {name} is in {known.unit} by {known.protocol}"
    if impossible := _impossible(name, found) or _inconsistent(found):
        return Status.NUMERIC_INVALID, impossible
    if name in _NEVER_ZERO and found.value == 0:
        return Status.IMPLAUSIBLE, f"{name} of zero is a measurement that did not happen"
    return _implausible(name, found, result)


def _inconsistent(found: Measurement) -> str | None:
    """Which of its own parts a measurement contradicts, or None: a record that was edited or half written must not lead with the odd one."""
    if found.stderr is not None and found.stderr < 0:
        return f"a standard error of {found.stderr:.6g} is impossible"
    bound = found.details.get("roofline_tok_s")
    share = None if not isinstance(bound, int | float) or bound <= 0 else 100 * found.value / bound
    if found.roofline_pct is not None and (found.roofline_pct < 0 or (share is not None and not math.isclose(found.roofline_pct, share, rel_tol=1e-6))):
        return f"{found.roofline_pct:.6g} % of the bound is not what value and bound give"
    if not found.samples:
        return None
    own = Measurement.from_samples(found.samples, found.unit, found.protocol)
    for part in ("value", "min", "max", "median"):
        has, should = getattr(found, part), getattr(own, part)
        if has is not None and not math.isclose(has, should, rel_tol=1e-9):
            return f"its {part} is {has:.6g}, its samples give {should:.6g}"
    return None


def _implausible(name: str, found: Measurement, result: WorkerResult) -> Refusal | None:
    vocabulary = result.evidence.get("vocab_size", result.artifact.get("vocab_size"))
    ppl = found if METRICS[name].unit == "ppl" else result.metrics.get("ppl") if known_protocol(name) == known_protocol("ppl") else None
    if ppl and isinstance(vocabulary, int) and ppl.value > vocabulary:
        return Status.IMPLAUSIBLE, f"perplexity {ppl.value:.6g} is above the vocabulary size {vocabulary}: worse than guessing"
    if found.roofline_pct is not None and found.roofline_pct > MAX_ROOFLINE_PCT:
        return Status.IMPLAUSIBLE, f"{found.roofline_pct:.1f} % of the physical bound: bytes or time are miscounted"
    if found.unit in _TIMED_UNITS:
        if found.value == 0:
            return Status.IMPLAUSIBLE, "a rate of zero is a measurement that did not happen"
        if len(found.samples) < MIN_REPEATS:
            return Status.NUMERIC_INVALID, f"{len(found.samples)} samples, at least {MIN_REPEATS} are needed: a rate without its repeats shows no spread"
        if min(found.samples) == max(found.samples):
            return Status.IMPLAUSIBLE, f"{len(found.samples)} repeats without any spread: the clock was not read"
    realised, requested = found.details.get("realised_tokens"), found.details.get("requested_tokens")
    if realised != requested:
        return Status.IMPLAUSIBLE, f"{realised} tokens were processed where {requested} were asked for"
    single = result.metrics.get(name.removeprefix("agg4_")) if name.startswith("agg4_tg") else None
    if single and found.value < least_together(single.value, shares_slots(result.evidence)):
        return Status.IMPLAUSIBLE, (
            f"four sequences together decode at {found.value:.6g} tok/s, slower than one alone at {single.value:.6g}: either measurement was disturbed"
        )
    return None


def known_protocol(name: str) -> str:
    """The protocol of a metric of `lab.metrics`."""
    return METRICS[name].protocol


def _worker_gap(given: Refusal | None) -> Refusal:
    """A metric without a value: as the worker explained it, or that it did not."""
    if given is None or given[0] is Status.OK:
        return Status.NOT_RUN, "the worker neither measured it nor said why"
    return given[0], given[1].strip() or "the worker gave no reason"


def _evidence_check() -> EvidenceCheck:
    from lab.evidence import check

    return check
