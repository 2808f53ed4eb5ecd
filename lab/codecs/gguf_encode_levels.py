"""Encoders for GGUF blocks of fixed levels whose groups carry signed integer scales: IQ4_XS, Q3_K, Q6_K.

Why both signs: the levels are lopsided (-4..3, -127..113), so a group may fit better upside down. Layouts as in `gguf_simple` and `gguf_k`.
What it does not do: match llama-quantize bit for bit; it weighs errors by w^2 where it has no importance matrix, this is plain squared error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from lab.codecs.gguf_encode_pack import join_bits, join_crumbs, join_nibbles
from lab.codecs.gguf_encode_scales import GroupCoder, Steps, Unit, fit_blocks, in_batches, ratio
from lab.codecs.gguf_simple import IQ4_LEVELS

Nearest = Callable[[Tensor], Tensor]
"""w / scale -> the nearest level, float32 of the same shape."""


class LevelCoder(GroupCoder):
    """Groups [n, g, m] against levels; `spans` are the first guesses, as the level on which the largest |w| falls, each tried with both signs."""

    def __init__(self, groups: Tensor, nearest: Nearest, spans: Sequence[float]) -> None:
        self.groups, self.nearest, self.spans = groups, nearest, spans
        self.energy = groups.square().sum(dim=-1)

    def levels(self, scale: Tensor) -> Tensor:
        """Scales [n, g] -> levels [n, g, m]; all of them the level nearest to 0 where the scale is 0."""
        return self.nearest(torch.where(scale[..., None] == 0, 0.0, self.groups / scale[..., None]))

    def error(self, scale: Tensor) -> Tensor:
        return (self.groups - scale[..., None] * self.levels(scale)).square().sum(dim=-1)

    def moments(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        levels = self.levels(scale)
        return (self.groups * levels).sum(dim=-1), levels.square().sum(dim=-1)

    def free_fit(self) -> tuple[Tensor, Tensor]:
        absmax = self.groups.abs().amax(dim=-1)
        best, gain, curvature = (torch.zeros_like(absmax) for _ in range(3))
        guesses = [absmax / span for span in self.spans]
        for guess in (*guesses, *(-guess for guess in guesses), None, None):
            # The last two start from the best scale so far: least squares for its codes, then the codes for that scale, and again.
            dot, norm = self.moments(best if guess is None else guess)
            explained = ratio(dot.square(), norm)
            better = explained > gain
            best, gain = torch.where(better, ratio(dot, norm), best), torch.where(better, explained, gain)
            curvature = torch.where(better, norm, curvature)
        return best, curvature


def _uniform(low: int, high: int) -> Nearest:
    return lambda share: share.round().clamp(low, high)


def _nearest_iq4(share: Tensor) -> Tensor:
    # Halfway between two of the integer levels is a multiple of 1/2, so every interval of that width has one nearest level.
    return _iq4_by_half(share.device).index_select(0, ((2 * share).floor() + 256).clamp(0, 511).to(torch.int32).flatten()).view(share.shape)


@cache
def _iq4_by_half(device: torch.device) -> Tensor:
    """float32 [512]: the level nearest to (i + 0.5) / 2 - 128."""
    return torch.tensor([min(IQ4_LEVELS, key=lambda level: abs(level - (i + 0.5) / 2 + 128)) for i in range(512)], dtype=torch.float32, device=device)


@cache
def _iq4_code(device: torch.device) -> Tensor:
    """uint8 [256]: code of a level, by level + 128."""
    codes = torch.zeros(256, dtype=torch.uint8)
    codes[torch.tensor(IQ4_LEVELS) + 128] = torch.arange(16, dtype=torch.uint8)
    return codes.to(device)


def _fitted(blocks: Tensor, group: int, nearest: Nearest, spans: Sequence[float], count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks [n, 256] -> (d as two bytes uint8 [n, 2], int32 scales [n, g] in -count/2 .. count/2 - 1, levels float32 [n, g, group])."""
    unit = Unit(blocks)
    coder = LevelCoder(unit.weights.unflatten(1, (-1, group)), nearest, spans)
    half = count // 2
    # Fewer steps than half of them would make the scales coarser; the upper end is -half or half - 1.
    anchors = [-half, *(sign * size for size in range(half - 1, half // 2, -1) for sign in (-1, 1))]
    d, k, scale = fit_blocks(coder, Steps(-half, 1, count), anchors, unit)
    return d.view(torch.uint8), k - half, coder.levels(scale)


def _iq4_xs(blocks: Tensor) -> Tensor:
    d, scale, levels = _fitted(blocks, 32, _nearest_iq4, [100 + 6 * i for i in range(10)], 64)
    biased = (scale + 32).to(torch.uint8)
    codes = _iq4_code(blocks.device)[(levels + 128).to(torch.int32)]
    halves = join_nibbles(codes.unflatten(2, (2, 16)))
    return torch.cat((d, join_crumbs((biased >> 4).view(-1, 2, 4), -1), join_nibbles((biased & 15).view(-1, 4, 2), -1), halves.flatten(1)), dim=1)


def _q3_k(blocks: Tensor) -> Tensor:
    d, scale, levels = _fitted(blocks, 16, _uniform(-4, 3), [2.6 + 0.2 * i for i in range(11)], 64)
    biased, codes = (scale + 32).to(torch.uint8), (levels + 4).to(torch.uint8).flatten(1)
    high = join_bits((codes >> 2).view(-1, 8, 32), -2)
    low = join_crumbs((codes & 3).view(-1, 2, 4, 32)).flatten(1)
    return torch.cat((high, low, join_nibbles((biased & 15).view(-1, 2, 8)), join_crumbs((biased >> 4).view(-1, 4, 4)), d), dim=1)


def _q6_k(blocks: Tensor) -> Tensor:
    d, scale, levels = _fitted(blocks, 16, _uniform(-32, 31), [29 + 0.5 * i for i in range(10)], 256)
    codes = (levels + 32).to(torch.uint8).flatten(1)
    low = join_nibbles((codes & 15).view(-1, 2, 2, 64)).flatten(1)
    high = join_crumbs((codes >> 4).view(-1, 2, 4, 32)).flatten(1)
    return torch.cat((low, high, scale.to(torch.int8).view(torch.uint8), d), dim=1)


LEVEL_ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {
    name: partial(in_batches, encode) for name, encode in (("IQ4_XS", _iq4_xs), ("Q6_K", _q6_k), ("Q3_K", _q3_k))
}
"""float32 [n, cols] -> uint8 [n, row bytes], by type name."""
