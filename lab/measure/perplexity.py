"""Perplexity and bits per byte, protocol `ppl/window@1`.

exp(mean negative log-likelihood) over scored tokens: windows of `context` tokens every `stride` tokens, each token scored once with at least
context - stride tokens before it (the first window excepted); no BOS is added; EOS separators are scored. The standard error is that of the mean over
windows. Numbers of different tokenizers compare through bits per byte only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lab.measure.scoring import chosen, mean_and_stderr
from lab.metrics import METRICS
from lab.record import Measurement

_LARGEST_NLL = 700.0
"""exp of more than this is no float."""


def perplexity_of(nll: Tensor, unit: Tensor, name: str) -> tuple[float, float | None, float]:
    """(perplexity, its standard error or None, mean negative log-likelihood in nat) of likelihoods float64 [n], the units [n] (each a `name`) taken as
    independent. Raises ValueError when a likelihood is not finite, or the perplexity no number."""
    if not bool(torch.isfinite(nll).all()):
        raise ValueError(f"negative log-likelihood is not finite from {name} {int(unit[~torch.isfinite(nll)][0])} on")
    mean, stderr = mean_and_stderr(nll, unit)
    if mean > _LARGEST_NLL:
        raise ValueError(f"mean negative log-likelihood is {mean:.4g} nat: the perplexity is no finite number")
    ppl = math.exp(mean)
    return ppl, None if stderr is None else ppl * stderr, mean


@dataclass
class PerplexityTally:
    """Collects scored batches; `metrics` turns them into measurements. `token_bytes` as in `Corpus`."""

    token_bytes: Tensor | None
    nll: list[Tensor] = field(default_factory=list)
    window: list[Tensor] = field(default_factory=list)
    text_bytes: int = 0

    def add(self, log_p: Tensor, targets: Tensor, window: Tensor) -> None:
        """Adds one batch of `score_windows`."""
        self.nll.append(chosen(log_p, targets).cpu())
        self.window.append(window.cpu())
        if self.token_bytes is not None:
            self.text_bytes += int(self.token_bytes[targets.cpu()].sum())

    def metrics(self, details: dict[str, object]) -> dict[str, Measurement]:
        """{ppl, bits_per_byte}; the latter only where token ids spell bytes. Raises ValueError when a likelihood is not finite."""
        nll, window = torch.cat(self.nll), torch.cat(self.window)
        ppl, stderr, mean = perplexity_of(nll, window, "window")
        shared = {**details, "scored_tokens": len(nll), "windows": len(window.unique()), "nll_mean_nat": mean}
        found = {
            "ppl": Measurement(
                value=ppl,
                unit="ppl",
                protocol=METRICS["ppl"].protocol,
                stderr=stderr,
                details={**shared, "stderr_method": "delta method over windows"},
            )
        }
        if self.text_bytes:
            bits = float(nll.sum()) / math.log(2) / self.text_bytes
            details = {**shared, "text_bytes": self.text_bytes}
            found["bits_per_byte"] = Measurement(value=bits, unit="bit/B", protocol=METRICS["bits_per_byte"].protocol, details=details)
        return found
