"""Divergence from the reference path at the same depth, protocol `kld@1`, and its noise floor.

KL(reference || path) per scored token, over the first windows of the evaluation text; mean, 99th percentile and the share of tokens with the same
top choice. The noise floor is the reference against itself with another batch shape: a divergence near it says nothing. The reference's
log-probabilities are computed once per artifact, depth, text, device and code, in a process of their own, and kept as a file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lab.measure.scoring import mean_and_stderr
from lab.metrics import METRICS
from lab.record import Measurement

MAX_WINDOWS = 16
"""Windows compared; full log-probabilities are kept for these, so their number bounds the file's size."""


_ROWS = 256
"""Rows compared at a time: float64 copies of a large vocabulary's rows are what bounds memory."""


def kl_divergence(reference: Tensor, other: Tensor) -> Tensor:
    """KL(reference || other) in nat per row, from log-probabilities [n, V]; float64 [n]. Both are normalised again in float64: rounded to float32 their
    sums differ from one by more than a small divergence."""
    found = []
    for rows, others in zip(reference.split(_ROWS), other.split(_ROWS), strict=True):
        p, q = rows.double().log_softmax(-1), others.double().log_softmax(-1)
        found.append((p.exp() * (p - q)).sum(-1))
    return torch.cat(found)


@dataclass
class DivergenceTally:
    """Compares batches with the reference's log-probabilities [n, V], taken in the same order."""

    reference: Tensor
    position: int = 0
    kld: list[Tensor] = field(default_factory=list)
    agree: list[Tensor] = field(default_factory=list)
    window: list[Tensor] = field(default_factory=list)

    @property
    def full(self) -> bool:
        """Whether every reference row has been compared."""
        return self.position >= len(self.reference)

    def add(self, log_p: Tensor, window: Tensor) -> None:
        """Compares the next rows, with their window indices [n]; rows past the reference's last are left out."""
        rows = self.reference[self.position : self.position + len(log_p)].to(log_p.device)
        log_p = log_p[: len(rows)]
        self.position += len(rows)
        self.kld.append(kl_divergence(rows, log_p).cpu())
        self.agree.append((rows.argmax(-1) == log_p.argmax(-1)).cpu())
        self.window.append(window[: len(rows)].cpu())

    def summary(self) -> dict[str, float]:
        """{mean, stderr (absent for one window), median, p99, max, top1, tokens}. Raises ValueError when a divergence is not finite."""
        kld, agree = torch.cat(self.kld), torch.cat(self.agree)
        if not bool(torch.isfinite(kld).all()):
            raise ValueError("a divergence is not finite: the path gives zero probability where the reference does not")
        mean, stderr = mean_and_stderr(kld, torch.cat(self.window))
        return {
            "mean": mean,
            **({} if stderr is None else {"stderr": stderr}),
            "median": float(kld.median()),
            "p99": float(kld.quantile(0.99)),
            "max": float(kld.max()),
            "top1": float(agree.double().mean()),
            "tokens": float(len(kld)),
        }


def divergence_metrics(summary: dict[str, float], noise_floor: dict[str, float], details: dict[str, Any]) -> dict[str, Measurement]:
    """{kld_mean, kld_p99, top1_agreement} with the noise floor beside each."""
    values = {"kld_mean": ("mean", "nat"), "kld_p99": ("p99", "nat"), "top1_agreement": ("top1", "fraction")}
    return {
        name: Measurement(
            value=summary[key],
            unit=unit,
            stderr=summary.get("stderr") if name == "kld_mean" else None,
            protocol=METRICS[name].protocol,
            details={**details, "noise_floor": noise_floor[key], "median": summary["median"], "max": summary["max"], "scored_tokens": int(summary["tokens"])},
        )
        for name, (key, unit) in values.items()
    }
