"""What a stage owes that moves an engine from CPU to a device: likelihood of fixed passages, share of products, and the device against its CPU twin.

One place that says which measures a cell takes: on a CPU the two that need no other side, on a device all of them. What cannot be measured becomes a gap
of its own metrics and leaves the others standing. Nothing here decides whether a number may stand; the parent does, from the record.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lab.attempt import one_line
from lab.cell import Cell
from lab.engines.local import LocalEngine, is_out_of_memory
from lab.errors import GapError, LabError
from lab.measure.greedy import greedy_metrics
from lab.measure.passages import nll_metric, passages_nll
from lab.measure.products import decoding, random_outputs, verify_metric
from lab.measure.segments import gemm_share
from lab.measure.text import Corpus
from lab.measure.twin import multiples, one_side, run_twin
from lab.metrics import METRICS
from lab.record import Measurement, Status

TWO_SIDED = (
    "prefill_multiple",
    "decode_multiple",
    "end_to_end_multiple",
    "greedy_match_tokens",
    "greedy_compared_tokens",
    "verify_max_rel_err",
    "nll_rel_diff",
)
"""Metrics of a device against the CPU."""
STAGE = (*TWO_SIDED, "gemm_share", "corpus_nll_mean")
"""All metrics of a stage."""


@dataclass
class Found:
    """Measurements, and why others are missing."""

    metrics: dict[str, Measurement] = field(default_factory=dict)
    gaps: dict[str, tuple[Status, str]] = field(default_factory=dict)

    def attempt(self, names: tuple[str, ...], measure: Callable[[], dict[str, Measurement]]) -> None:
        """Keeps what `measure` gives; what it cannot give becomes a gap of `names`."""
        try:
            self.metrics |= measure()
        except GapError as error:
            self.gaps |= dict.fromkeys(names, (error.status, one_line(error)))
        except LabError as error:
            self.gaps |= dict.fromkeys(names, (Status.UNSUPPORTED, one_line(error)))
        except ValueError as error:
            self.gaps |= dict.fromkeys(names, (Status.NUMERIC_INVALID, one_line(error)))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            self.gaps |= dict.fromkeys(names, (Status.OOM, one_line(error)))


def stage_measures(engine: LocalEngine, cell: Cell, root: Path, corpus: Corpus, phase: Callable[[str, str], None]) -> Found:
    """Every metric of STAGE, as a measurement or a gap. `phase` is told what begins. The model is measured as it was loaded; its counters stay consistent."""
    found = Found()
    phase("stage", "likelihood of the fixed passages")
    found.attempt(("corpus_nll_mean",), lambda: {"corpus_nll_mean": nll_metric(passages_nll(engine, corpus), corpus)})
    phase("stage", "share of the matrix products, under the profiler")
    found.attempt(("gemm_share",), lambda: {"gemm_share": gemm_share(engine, corpus)})
    if engine.device.type == "cpu":
        reason = "not applicable: the device is the CPU, which is the other side of this comparison"
        found.gaps |= dict.fromkeys(TWO_SIDED, (Status.UNSUPPORTED, reason))
    else:
        found.attempt(TWO_SIDED, lambda: _against_cpu(engine, cell, root, corpus, phase))
    return found


def _against_cpu(engine: LocalEngine, cell: Cell, root: Path, corpus: Corpus, phase: Callable[[str, str], None]) -> dict[str, Measurement]:
    phase("stage", "greedy ids, likelihood and times on the device")
    device = one_side(engine, corpus, cell.bench.warmup, cell.bench.repeats)
    phase("stage", "the same on the CPU, in a process of its own")
    cpu, outputs = run_twin(cell, root)
    phase("stage", "every matrix product, device against CPU")
    return {
        **multiples(cpu, device),
        **greedy_metrics(cpu.greedy, device.greedy, corpus),
        "verify_max_rel_err": verify_metric(outputs, random_outputs(engine), engine.dtype, len(decoding(engine))),
        "nll_rel_diff": rel_diff(nll_metric(cpu.nll, corpus), nll_metric(device.nll, corpus)),
    }


def rel_diff(cpu: Measurement, device: Measurement) -> Measurement:
    """nll_rel_diff from both sides' corpus_nll_mean."""
    differences = [
        {"start": a["start"], "cpu_nat": a["nll_mean_nat"], "device_nat": b["nll_mean_nat"]}
        for a, b in zip(cpu.details["passages"], device.details["passages"], strict=True)
    ]
    details: dict[str, Any] = {
        "definition": "|device - CPU| / CPU of corpus_nll_mean, the same passages on both",
        "cpu_nat": cpu.value,
        "device_nat": device.value,
        "sign": "device above CPU" if device.value > cpu.value else "device not above CPU",
        "passages": differences,
    }
    known = METRICS["nll_rel_diff"]
    return Measurement(value=abs(device.value - cpu.value) / cpu.value, unit=known.unit, protocol=known.protocol, details=details)
