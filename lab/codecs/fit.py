"""Best scale for groups of weights that share a few levels: w ~ scale * level, nearest level, least squared error.

Why sorted groups: with prefix sums of the sorted weights, what a candidate scale would give (its least-squares numerator and denominator)
needs one binary search per level boundary instead of a pass over the weights, and for two magnitudes every possible assignment can be tried,
so that case is solved exactly (the Lloyd condition of Max, "Quantizing for minimum distortion", IRE Trans. IT-6, 1960, on the sample itself).
Why fixed point: a CPU and a GPU add floats in different orders, and one scale in a thousand then rounds to another float16. Integers add up to the
same everywhere; what follows is done number by number in float64, so that a weight has the same bytes whichever device encoded it.
What it does not do: weigh errors by activations. This is weight space only; calibrated methods (GPTQ) need data the codecs do not see.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from lab.codecs.base import divided

# Scales tried, as a share of the one that puts the largest weight on the largest level. Below .15 even a row of 2560 heavy-tailed weights
# gains nothing; above 1 the outer level is left for rounding down. 60 points instead of 20 gain 1e-5 of cosine.
_GRID = tuple(0.15 * (1.25 / 0.15) ** (i / 19) for i in range(20))
E4M3_MAX = 448.0  # largest finite float8_e4m3fn (OCP 8-bit floating point specification, 2023)
_FIXED = 2.0**36
"""Units of the fixed point to the largest weight of a group: sums of 2^17 weights stay exact in float64, each 2^12 times finer than a float32 near 1."""


def _fixed(values: Tensor) -> Tensor:
    """float in -1..1 -> int64 in units of 1 / _FIXED."""
    return (values.to(torch.float64) * _FIXED).round_().to(torch.int64)


def is_symmetric(levels: Sequence[float]) -> bool:
    """Whether the increasing levels are -a, ..., -b, b, ..., a."""
    return all(low == -high for low, high in zip(levels, reversed(levels), strict=True))


class SortedGroups:
    """Groups [n, g] of float32 weights prepared for scale search against increasing `levels`; works in units of each group's largest |w|."""

    def __init__(self, groups: Tensor, levels: Sequence[float]) -> None:
        self.absmax = groups.abs().amax(dim=-1)  # [n]
        unit = torch.where(self.absmax > 0, self.absmax, 1.0)
        self.symmetric = is_symmetric(levels)
        steps = tuple(level for level in levels if level > 0) if self.symmetric else tuple(levels)
        self.top = max(abs(level) for level in steps)
        self.anchors = sorted({abs(level) for level in steps if level})
        self.steps = steps
        self.sorted = ((groups.abs() if self.symmetric else groups) / unit[:, None]).sort(dim=-1).values
        self.prefix = torch.nn.functional.pad(_fixed(self.sorted).cumsum(dim=-1), (1, 0)).to(torch.float64) / _FIXED  # [n, g + 1]

    @cached_property
    def energy(self) -> Tensor:
        """<w, w> float64 [n, 1]."""
        return _fixed(self.sorted.square()).sum(dim=-1, keepdim=True).to(torch.float64) / _FIXED

    def _moments(self, share: Tensor) -> tuple[Tensor, Tensor]:
        """Scales float64 [n, k] in units of absmax -> (<w, q>, <q, q>) float64 [n, k], q the nearest levels at each scale."""
        boundaries = share.new_tensor([(low + high) / 2 for low, high in pairwise(self.steps)])
        cuts = (share[:, :, None] * boundaries).flatten(1).to(torch.float32)
        below = torch.searchsorted(self.sorted, cuts, right=True)  # weights at or under each boundary
        total, count = self.prefix[:, -1:], self.sorted.shape[1]
        sums = self.prefix.gather(1, below).unflatten(1, (share.shape[1], -1))
        counts = below.unflatten(1, (share.shape[1], -1))
        dot, norm = self.steps[0] * total, torch.full_like(total, self.steps[0] ** 2 * count)
        for i, (low, high) in enumerate(pairwise(self.steps)):  # in this order on every device
            dot = dot + (total - sums[..., i]) * (high - low)
            norm = norm + (count - counts[..., i]) * (high**2 - low**2)
        return dot.expand_as(share), norm.expand_as(share)

    def absmax_scale(self) -> Tensor:
        """[n] scales that put the largest |w| on the largest level."""
        return divided(self.absmax, self.top)

    def best_scale(self) -> Tensor:
        """[n] scales of (nearly) least squared error; exact where the levels have two magnitudes. Zero groups get 0."""
        if self.symmetric and len(self.steps) == 2:
            # Assignments monotone in |w|: the j smallest take the low level. All g + 1 of them; the best is nearest-level by optimality.
            low, high = self.steps
            dot = high * self.prefix[:, -1:] - (high - low) * self.prefix
            low_count = torch.arange(self.prefix.shape[1], device=dot.device, dtype=dot.dtype)
            norm = high**2 * self.sorted.shape[1] - (high**2 - low**2) * low_count
            # Of equals (all weights the same) the one with more low levels: its scale is the larger and rounds to a nearer float.
            best = len(norm) - 1 - (dot * dot / norm).flip(-1).argmax(dim=-1, keepdim=True)
            return (self.absmax * (dot.gather(1, best) / norm[best])[:, 0]).to(torch.float32)
        shares = [f / self.top for f in _GRID] + [1 / level for level in self.anchors]
        share = self.prefix.new_tensor(shares).expand(len(self.sorted), -1)
        dot, norm = self._moments(share)
        gain = torch.where(norm > 0, dot.clamp(min=0).square() / norm, 0.0)
        best = gain.argmax(dim=-1, keepdim=True)
        share = share.gather(1, best)
        for _ in range(2):  # least squares for the codes found, then the codes for that scale; each step lowers the error
            dot, norm = self._moments(share)
            share = torch.where((norm > 0) & (dot > 0), dot / norm, share)
        return torch.where(self.absmax > 0, self.absmax * share[:, 0], 0.0).to(torch.float32)

    def error(self, scale: Tensor) -> Tensor:
        """Scales [n, k] -> squared error float64 [n, k] in units of absmax^2 with the nearest levels at each scale."""
        share = scale.to(torch.float64) / torch.where(self.absmax > 0, self.absmax, 1.0)[:, None]
        dot, norm = self._moments(share)
        return self.energy - 2 * share * dot + share.square() * norm

    def round_e4m3(self, scale: Tensor, factor: Tensor) -> Tensor:
        """Scales [n] with factors [n] -> float8_e4m3fn [n] so that e4m3 * factor errs least: the nearest value and both its neighbours."""
        nearest = (scale / factor).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32)
        around = torch.stack((nearest, nearest - 1, nearest + 1), dim=-1).clamp(0, 0x7E).to(torch.uint8)  # 0x7E is 448, 0x7F NaN
        best = self.error(around.view(torch.float8_e4m3fn).to(torch.float32) * factor[:, None]).argmin(dim=-1, keepdim=True)
        chosen = around.gather(1, best)[:, 0]
        return torch.where(self.absmax > 0, chosen, 0).to(torch.uint8).view(torch.float8_e4m3fn)


def nearest_codes(groups: Tensor, scale: Tensor, levels: Sequence[float]) -> Tensor:
    """Groups [n, g], scales [n] -> uint8 [n, g]: position in the increasing `levels` of the one nearest to w / scale (ties go down).

    Compares w with scale * boundary, so that a zero scale needs no division.
    """
    codes = torch.zeros(groups.shape, dtype=torch.uint8, device=groups.device)
    for low, high in pairwise(levels):
        codes += groups > (scale * ((low + high) / 2))[:, None]
    return codes


def power_of_two_factor(absmax: Tensor, levels: Sequence[float]) -> Tensor:
    """[...] largest |w| per matrix -> float32 factors 2^k under which no group scale exceeds E4M3's 448 (1 for a zero matrix).

    A power of two keeps level * e4m3 * factor exact in bf16 (at most 4 + 4 significant bits), so that no kernel can round it differently.
    """
    smallest = min(abs(level) for level in levels if level)
    largest_scale = divided(absmax.to(torch.float64), smallest)  # a group of equal weights may sit on the smallest level
    bits = divided(largest_scale, E4M3_MAX).view(torch.int64)  # a logarithm may be a bit beside a power of two, and ROCm has no frexp
    above = (bits >> 52) - 1023 + ((bits & ((1 << 52) - 1)) != 0)
    exponent = torch.where(largest_scale > 0, above, 0).to(torch.float64)
    return torch.exp2(exponent.clamp(-126, 127)).to(torch.float32)


def absmax_per_matrix(weight: Tensor) -> Tensor:
    """[..., rows, cols] -> [stacked matrices] largest |w| in float32, without a copy of the weight."""
    flat = weight.reshape(-1, weight.shape[-2] * weight.shape[-1])
    return torch.maximum(flat.amax(dim=-1), -flat.amin(dim=-1)).to(torch.float32)
