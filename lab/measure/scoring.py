"""Next-token scores of a model over the evaluation windows: the one pass behind perplexity and divergence.

Windows go through in batches without a state. The batch size is part of a result's details: sparse selection and floating-point sums depend on it a
little, and the noise floor is measured by changing exactly that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Forward = Callable[[Tensor], Tensor]
"""ids [B, T] -> logits [B, T, V]."""


def score_windows(forward: Forward, windows: Tensor, scored: Tensor, batch: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yields per batch (log-probabilities float32 [n, V] of the scored positions, their targets [n], window index [n]), on the model's device.
    Position t is scored from the logits at t - 1, so a window's first token is never a target."""
    index = torch.arange(len(windows))
    for rows, mask, number in zip(windows.split(batch), scored.split(batch), index.split(batch), strict=True):
        logits = forward(rows)[:, :-1]
        keep = mask[:, 1:].to(logits.device)
        targets = rows[:, 1:].to(logits.device)[keep]
        window = number[:, None].expand(-1, rows.shape[1] - 1).to(logits.device)[keep]
        yield logits[keep].float().log_softmax(-1), targets, window


def chosen(log_p: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of each target in nat, float64 [n]."""
    return -log_p.gather(1, targets[:, None]).squeeze(1).double()


def mean_and_stderr(values: Tensor, window: Tensor) -> tuple[float, float | None]:
    """Mean of values [n] (float64) and its standard error, windows [n] taken as the independent units; None for a single window. Windows hold different
    numbers of values, so it is the delta method's variance of a ratio."""
    mean = float(values.mean())
    units, index = window.unique(return_inverse=True)
    n = len(units)
    if n < 2:
        return mean, None
    count = torch.zeros(n, dtype=torch.float64).index_add_(0, index, torch.ones_like(values))
    spread = torch.zeros(n, dtype=torch.float64).index_add_(0, index, values) - mean * count
    return mean, float((spread.square().sum() * n / (n - 1)).sqrt() / count.sum())
