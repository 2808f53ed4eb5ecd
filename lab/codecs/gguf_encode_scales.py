"""Scales of 256-weight GGUF blocks: one float16 d per block, a small integer k per group, w ~ d * (start + step * k) * code.

Why by search: group scales are first fitted freely, then d is chosen so that the integers can express them, and both are refined on the true
squared error: neighbouring k by trial, d by least squares for the codes found. A step that does not lower a block's error is not taken, and
zeros are where it starts.
What it does not do: weigh errors by activations, or prove the optimum; codes, k and d are improved in turn, not jointly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK = 256
_BLOCKS = 4096  # blocks encoded at a time: temporaries of 4 MiB per float32 tensor
_F16_MAX, _F16_OVERFLOW = 65504.0, 65520.0  # largest finite float16, and the least magnitude that rounds to infinity (IEEE 754)


class Steps(NamedTuple):
    """Factors a group's integer k in [0, values) stands for: start + step * k."""

    start: float
    step: float
    values: int

    def factor(self, k: Tensor) -> Tensor:
        """Integers k -> float32 factors of the same shape."""
        return self.start + self.step * k.to(torch.float32)

    def nearest(self, factor: Tensor) -> Tensor:
        """float32 -> the int32 k of the nearest factor. NaN gives 0."""
        return ((factor - self.start) / self.step).round().nan_to_num(0.0).clamp(0, self.values - 1).to(torch.int32)


class Unit:
    """Blocks float32 [n, 256] divided by a power of two near their largest |w|, so that squares neither overflow nor vanish.

    `weights` [n, 256] are exact quotients below 2 in magnitude, `size` [n, 1] are the powers.
    """

    def __init__(self, blocks: Tensor) -> None:
        # The exponent bits of a float32 alone are the power of two at or below it; zero and subnormals give 0.
        power = (blocks.abs().amax(dim=1, keepdim=True).view(torch.int32) & 0x7F800000).view(torch.float32)
        self.size = torch.where(power > 0, power, 1.0)
        self.weights = blocks / self.size

    def rounded(self, scale: Tensor) -> Tensor:
        """Scales [n, 1] in this unit -> the nearest ones whose true size is a finite float16."""
        return self._half(scale).to(torch.float32) / self.size

    def _half(self, scale: Tensor) -> Tensor:
        return (scale * self.size).clamp(-_F16_MAX, _F16_MAX).to(torch.float16)

    def stored(self, scale: Tensor, wanted: Tensor) -> Tensor:
        """Rounded scales [n, 1] -> float16 [n, 1] to store: infinite where the scale `wanted` at first did not fit float16."""
        half = self._half(scale)
        return torch.where((wanted * self.size).abs() < _F16_OVERFLOW, half, torch.full_like(half, float("inf")))


class GroupCoder(ABC):
    """Groups of one batch of blocks and what they become at given scales. Everything is per group: float32 [n, groups]."""

    energy: Tensor  # <w, w>

    @abstractmethod
    def free_fit(self) -> tuple[Tensor, Tensor]:
        """(best scale, curvature): the error grows by about curvature * (scale - best)^2 around it."""

    @abstractmethod
    def error(self, scale: Tensor) -> Tensor:
        """Squared error with the best codes at each scale."""

    @abstractmethod
    def moments(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """(<w, q>, <q, q>) of the best codes q at each scale."""


def in_batches(encode: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Applies `encode`, float32 [n, 256] -> uint8 [n, bytes], batch by batch to rows [r, cols] -> uint8 [r, row bytes]."""
    return torch.cat([encode(batch) for batch in rows.reshape(-1, BLOCK).split(_BLOCKS)]).view(len(rows), -1)


def ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator, and 0 where the denominator is not positive."""
    return torch.where(denominator > 0, numerator / torch.where(denominator > 0, denominator, 1.0), 0.0)


def fit_block_scale(ideal: Tensor, curvature: Tensor, steps: Steps, anchors: Sequence[float], unit: Unit) -> tuple[Tensor, Tensor]:
    """Group scales [n, g] -> (d rounded to float16, d as wanted) [n, 1] that express them with least curvature-weighted squared error.

    Tries the scales that put the group scale of largest magnitude on each of the factors `anchors`.
    """
    extreme = ideal.gather(1, ideal.abs().argmax(dim=1, keepdim=True))
    best, wanted, least = (torch.zeros_like(extreme) for _ in range(3))
    least += float("inf")
    for anchor in anchors:
        free = extreme / anchor
        d = unit.rounded(free)
        cost = (curvature * (ideal - d * steps.factor(steps.nearest(ideal / d))).square()).sum(dim=1, keepdim=True)
        better = cost < least
        best, wanted, least = torch.where(better, d, best), torch.where(better, free, wanted), torch.where(better, cost, least)
    return best, wanted


def fit_blocks(coder: GroupCoder, steps: Steps, anchors: Sequence[float], unit: Unit, rounds: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """-> (float16 d [n, 1] to store, int32 k [n, g], float32 group scales [n, g] in the unit, as they will be read)."""
    ideal, curvature = coder.free_fit()
    moved, wanted = fit_block_scale(ideal, curvature, steps, anchors, unit)
    around = steps.nearest(ideal / moved)
    d, k, error = torch.zeros_like(moved), torch.zeros_like(around), coder.energy.sum(dim=1, keepdim=True)
    for turn in range(rounds + 1):
        if turn:
            factor = steps.factor(k)
            dot, norm = coder.moments(d * factor)
            moved = unit.rounded(ratio((factor * dot).sum(dim=1, keepdim=True), (factor.square() * norm).sum(dim=1, keepdim=True)))
            around = k
        moved_k, moved_error = _best_k(coder, steps, moved, around)
        better = moved_error < error
        d, k, error = torch.where(better, moved, d), torch.where(better, moved_k, k), torch.where(better, moved_error, error)
    return unit.stored(d, wanted), k, d * steps.factor(k)


def _best_k(coder: GroupCoder, steps: Steps, d: Tensor, around: Tensor) -> tuple[Tensor, Tensor]:
    """Each group's best of k - 1, k, k + 1 -> (k [n, g], summed error [n, 1])."""
    best, least = around, coder.error(d * steps.factor(around))
    for shift in (-1, 1):
        k = (around + shift).clamp(0, steps.values - 1)
        error = coder.error(d * steps.factor(k))
        best, least = torch.where(error < least, k, best), torch.minimum(error, least)
    return best, least.sum(dim=1, keepdim=True)
