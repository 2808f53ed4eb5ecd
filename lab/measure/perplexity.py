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

from lab.measure.scoring import chosen
from lab.metrics import METRICS
from lab.record import Measurement


@dataclass
class PerplexityTally:
    """Collects scored batches; `metrics` turns them into measurements."""

    nll: list[Tensor] = field(default_factory=list)
    window: list[Tensor] = field(default_factory=list)
    text_bytes: int = 0

    def add(self, log_p: Tensor, targets: Tensor, window: Tensor, token_bytes: Tensor) -> None:
        """Adds one batch of `score_windows`."""
        self.nll.append(chosen(log_p, targets).cpu())
        self.window.append(window.cpu())
        self.text_bytes += int(token_bytes[targets.cpu()].sum())

    def metrics(self, details: dict[str, object]) -> dict[str, Measurement]:
        """{ppl, bits_per_byte}. Raises ValueError when a likelihood is not finite."""
        nll, window = torch.cat(self.nll), torch.cat(self.window)
        if not bool(torch.isfinite(nll).all()):
            raise ValueError(f"negative log-likelihood is not finite from window {int(window[~torch.isfinite(nll)][0])} on")
        mean = float(nll.mean())
        count = torch.zeros(int(window.max()) + 1, dtype=torch.float64).index_add_(0, window, torch.ones_like(nll))
        total = torch.zeros_like(count).index_add_(0, window, nll)
        # Variance of a ratio estimator: windows hold different numbers of scored tokens.
        spread = total - mean * count
        n = len(count)
        stderr = math.sqrt(float(spread.square().sum()) * n / max(1, n - 1)) / float(count.sum()) if n > 1 else None
        shared = {**details, "scored_tokens": len(nll), "windows": n, "text_bytes": self.text_bytes, "nll_mean_nat": mean}
        ppl, bits = math.exp(mean), float(nll.sum()) / math.log(2) / self.text_bytes
        return {
            "ppl": Measurement(
                value=ppl,
                unit="ppl",
                protocol=METRICS["ppl"].protocol,
                stderr=None if stderr is None else ppl * stderr,
                details={**shared, "stderr_method": "delta method over windows"},
            ),
            "bits_per_byte": Measurement(value=bits, unit="bit/B", protocol=METRICS["bits_per_byte"].protocol, details=shared),
        }
