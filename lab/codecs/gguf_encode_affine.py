"""Encoders for GGUF K blocks with scales and minima: Q2_K, Q4_K, Q5_K. w ~ q (d scale) - dmin minimum, q from 0, integers scale and minimum per group.

Why least squares throughout: for given codes the best scale and minimum of a group, and the best d and dmin of a block, are a 2 x 2 system. Groups
are fitted freely, the integers by trial of neighbours, d and dmin from all codes; a step that does not lower a block's error is not taken, and zeros
are where it starts.
What it does not do: store a group whose weights all exceed 0 with a positive offset; ggml's writers keep minima in w <= 0 as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lab.codecs.gguf_encode_pack import join_bits, join_crumbs, join_nibbles
from lab.codecs.gguf_encode_scales import Steps, Unit, fit_block_scale, in_batches, ratio

_CUTS, _LEANS = tuple(-0.3 + 0.1 * i for i in range(7)), (-0.5, 0.0, 0.5, 1.0, 1.5)
"""First guesses for a group's range: how much of the weights' own it leaves out (negative: reaches beyond), and how much of that at the low end."""


class Affine(NamedTuple):
    """Scale and minimum, each float32 or int32 [n, g]."""

    scale: Tensor
    minimum: Tensor


class AffineCoder:
    """Groups [n, g, m] with codes 0 .. top."""

    def __init__(self, groups: Tensor, top: int) -> None:
        self.groups, self.top = groups, top
        self.total, self.count = groups.sum(dim=-1), groups.shape[-1]

    def codes(self, at: Affine) -> Tensor:
        """float32 [n, g, m]: the nearest codes; 0 where the scale is 0."""
        scale = at.scale[..., None]
        share = torch.where(scale > 0, (self.groups + at.minimum[..., None]) / torch.where(scale > 0, scale, 1.0), 0.0)
        return share.round().clamp(0, self.top)

    def error(self, at: Affine) -> Tensor:
        """Squared error [n, g] with the nearest codes."""
        return (self.groups - at.scale[..., None] * self.codes(at) + at.minimum[..., None]).square().sum(dim=-1)

    def solved(self, codes: Tensor) -> Affine:
        """Least squares for given codes, with the minimum not below 0."""
        dot, first, second = (self.groups * codes).sum(dim=-1), codes.sum(dim=-1), codes.square().sum(dim=-1)
        spread = self.count * second - first.square()
        scale, minimum = ratio(self.count * dot - first * self.total, spread), ratio(first * dot - second * self.total, spread)
        # Codes that are all equal determine no scale: code 0 leaves the minimum alone, others are a scale without a minimum.
        flat = spread <= 0
        minimum = torch.where(flat & (second == 0), -self.total / self.count, minimum)
        bound = (minimum <= 0) | (flat & (second > 0))
        return Affine(torch.where(bound, ratio(dot, second), scale).clamp(min=0), torch.where(bound, 0.0, minimum))

    def free_fit(self) -> Affine:
        """Best scale and minimum of each group, from ranges about the weights' own."""
        low, high = self.groups.amin(dim=-1).clamp(max=0), self.groups.amax(dim=-1).clamp(min=0)
        best = Affine(torch.zeros_like(low), torch.zeros_like(low))
        least = self.error(best)
        for cut in _CUTS:
            for lean in _LEANS:
                span = (high - low) * (1 - cut * 6 / (self.top + 3))  # four levels gain by a cut this large, sixteen and more by less
                start = low + (high - low - span) * lean
                found = self.solved(self.codes(Affine(span / self.top, -start)))
                best, least = self._better(best, least, found)
        for _ in range(3):
            best, least = self._better(best, least, self.solved(self.codes(best)))
        return best

    def _better(self, best: Affine, least: Tensor, found: Affine) -> tuple[Affine, Tensor]:
        error = self.error(found)
        better = error < least
        return Affine(torch.where(better, found.scale, best.scale), torch.where(better, found.minimum, best.minimum)), torch.minimum(error, least)


def _stored(d: Affine, k: Affine) -> Affine:
    return Affine(d.scale * k.scale, d.minimum * k.minimum)


def _best_k(coder: AffineCoder, d: Affine, around: Affine, most: int) -> tuple[Affine, Tensor]:
    """Each group's best of the nine neighbours -> (integers, summed error [n, 1])."""
    best, least = around, coder.error(_stored(d, around))
    for up in (-1, 0, 1):
        for down in (-1, 0, 1):
            k = Affine((around.scale + up).clamp(0, most), (around.minimum + down).clamp(0, most))
            error = coder.error(_stored(d, k))
            better = error < least
            best = Affine(torch.where(better, k.scale, best.scale), torch.where(better, k.minimum, best.minimum))
            least = torch.minimum(error, least)
    return best, least.sum(dim=1, keepdim=True)


def _solved_d(coder: AffineCoder, d: Affine, k: Affine, unit: Unit) -> Affine:
    """Least squares for d and dmin [n, 1] over a block's codes and integers. Stays at `d` where they are not determined."""
    rising = coder.codes(_stored(d, k)) * k.scale[..., None]  # w ~ d rising - dmin minimum
    falling = k.minimum[..., None].to(torch.float32).expand_as(rising)
    rr, rf, ff = (rising * rising).sum((1, 2)), (rising * falling).sum((1, 2)), (falling * falling).sum((1, 2))
    rw, fw = (rising * coder.groups).sum((1, 2)), (falling * coder.groups).sum((1, 2))
    spread = rr * ff - rf.square()
    both = spread > 1e-6 * rr * ff  # else one of the two says what the other says
    scale = torch.where(both, ratio(rw * ff - rf * fw, spread), ratio(rw, rr))[:, None]
    minimum = torch.where(both, ratio(rw * rf - fw * rr, spread), d.minimum[:, 0])[:, None]
    return Affine(unit.rounded(scale.clamp(min=0)), unit.rounded(minimum.clamp(min=0)))


def _fitted(blocks: Tensor, group: int, top: int, most: int) -> tuple[Tensor, Affine, Tensor]:
    """Blocks [n, 256] -> (d and dmin as bytes uint8 [n, 4], integers uint8 [n, g] each, codes uint8 [n, g, group])."""
    unit = Unit(blocks)
    coder = AffineCoder(unit.weights.unflatten(1, (-1, group)), top)
    free, steps = coder.free_fit(), Steps(0, 1, most + 1)
    anchors = range(most, most // 2, -1)
    curvature = coder.codes(free).square().sum(dim=-1)
    (d_scale, wanted_scale), (d_minimum, wanted_minimum) = (
        fit_block_scale(ideal, weight, steps, anchors, unit) for ideal, weight in ((free.scale, curvature), (free.minimum, torch.ones_like(curvature)))
    )
    moved = Affine(d_scale, d_minimum)
    k = around = Affine(steps.nearest(free.scale / moved.scale), steps.nearest(free.minimum / moved.minimum))
    d = Affine(torch.zeros_like(d_scale), torch.zeros_like(d_minimum))
    error = coder.groups.square().sum((1, 2))[:, None]
    for turn in range(3):
        if turn:
            moved, around = _solved_d(coder, d, k, unit), k
        moved_k, moved_error = _best_k(coder, moved, around, most)
        better = moved_error < error
        d = Affine(*(torch.where(better, new, old) for new, old in zip(moved, d, strict=True)))
        k = Affine(*(torch.where(better, new, old) for new, old in zip(moved_k, k, strict=True)))
        error = torch.where(better, moved_error, error)
    halves = torch.cat((unit.stored(d.scale, wanted_scale), unit.stored(d.minimum, wanted_minimum)), dim=1)
    return halves.view(torch.uint8), Affine(*(part.to(torch.uint8) for part in k)), coder.codes(_stored(d, k)).to(torch.uint8)


def _six_bits(k: Affine) -> Tensor:
    """Eight 6-bit scales and minima -> 12 bytes: see `gguf_k`, which reads them."""
    first = (k.scale[:, :4] & 63) | ((k.scale[:, 4:] >> 4) << 6)
    second = (k.minimum[:, :4] & 63) | ((k.minimum[:, 4:] >> 4) << 6)
    return torch.cat((first, second, (k.scale[:, 4:] & 15) | ((k.minimum[:, 4:] & 15) << 4)), dim=1)


def _q2_k(blocks: Tensor) -> Tensor:
    halves, k, codes = _fitted(blocks, 16, 3, 15)
    return torch.cat((k.scale | (k.minimum << 4), join_crumbs(codes.view(-1, 2, 4, 32)).flatten(1), halves), dim=1)


def _q4_k(blocks: Tensor) -> Tensor:
    halves, k, codes = _fitted(blocks, 32, 15, 63)
    return torch.cat((halves, _six_bits(k), join_nibbles(codes.view(-1, 4, 2, 32)).flatten(1)), dim=1)


def _q5_k(blocks: Tensor) -> Tensor:
    halves, k, codes = _fitted(blocks, 32, 31, 63)
    fifth = join_bits(codes >> 4, -2)
    return torch.cat((halves, _six_bits(k), fifth, join_nibbles((codes & 15).view(-1, 4, 2, 32)).flatten(1)), dim=1)


AFFINE_ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {
    name: partial(in_batches, encode) for name, encode in (("Q4_K", _q4_k), ("Q5_K", _q5_k), ("Q2_K", _q2_k))
}
"""float32 [n, cols] -> uint8 [n, row bytes], by type name."""
