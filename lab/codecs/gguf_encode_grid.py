"""Encoders for the GGUF types that index a codebook of magnitudes with signs beside it: IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S.

Where the signs of eight weights are stored as seven bits (IQ2_XXS, IQ2_XS, IQ3_XXS), an even count of them is minus. A group with an odd count gives
up the sign of one weight: of the smallest or the second smallest, whichever costs less together with its nearest entry. Layouts as in `gguf_grid`.
What it does not do: use importances. llama-quantize insists on them for IQ2_XXS and IQ2_XS, and calibrated files do better than these in use.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from lab.codecs.gguf_encode_codebook import Codebook
from lab.codecs.gguf_encode_pack import join_bits, join_crumbs, join_nibbles, little_endian
from lab.codecs.gguf_encode_scales import GroupCoder, Steps, Unit, fit_blocks, in_batches, ratio
from lab.codecs.gguf_package import grid

_SHARES = tuple(0.5 + 0.07 * i for i in range(11))
"""First guesses for a group's scale, as shares of the one that puts its largest |w| on the largest level."""


class SignedGridCoder(GroupCoder):
    """Groups [n, g, m] as entries of magnitudes times signs; `even` where the count of minus signs of eight weights must be even."""

    def __init__(self, groups: Tensor, book: Codebook, even: bool) -> None:
        self.book, self.width = book, book.entries.shape[1]
        self.groups, self.negative, self.energy = groups, groups < 0, groups.square().sum(dim=-1)
        eights = groups.abs().unflatten(2, (-1, 8))
        self.choices = [eights]  # magnitudes [n, g, e, 8]; that of a weight whose sign is given up is negative
        if even:
            odd = self.negative.unflatten(2, (-1, 8)).sum(dim=-1, keepdim=True) % 2
            least = eights.argmin(dim=-1, keepdim=True)
            second = eights.scatter(-1, least, float("inf")).argmin(dim=-1, keepdim=True)
            self.choices = [torch.where((odd == 1).expand_as(eights).logical_and(_one_hot(at, eights)), -eights, eights) for at in (least, second)]

    def _shares(self, choice: Tensor, scale: Tensor) -> Tensor:
        """Magnitudes [n, g, e, 8] over scales [n, g] as vectors [n, g, e, 8 / width, width]; 0 where the scale is 0."""
        positive = (scale > 0)[..., None, None]
        return torch.where(positive, choice / torch.where(positive, scale[..., None, None], 1.0), 0.0).unflatten(-1, (-1, self.width))

    def error(self, scale: Tensor) -> Tensor:
        score = self.book.best_score(self._shares(self.choices[0], scale)).flatten(2).sum(dim=-1)
        return self.energy - 2 * scale.square() * score

    def moments(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        entry, negative = self.codes(scale)
        levels = self.book.entries[entry].flatten(2)
        return (torch.where(negative, -levels, levels) * self.groups).sum(dim=-1), levels.square().sum(dim=-1)

    def free_fit(self) -> tuple[Tensor, Tensor]:
        fullest = self.groups.abs().amax(dim=-1) / self.book.top
        best, least = torch.zeros_like(fullest), self.energy
        for share in _SHARES:
            error = self.error(fullest * share)
            best, least = torch.where(error < least, fullest * share, best), torch.minimum(error, least)
        dot, norm = self.moments(best)
        return ratio(dot, norm), norm

    def codes(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Scales [n, g] -> (int64 entry numbers [n, g, m / width], minus signs bool [n, g, m])."""
        shares = [self._shares(choice, scale) for choice in self.choices]
        entries = [self.book.nearest(share) for share in shares]  # [n, g, e, 8 / width]
        entry, magnitudes = entries[0], self.choices[0]
        if len(self.choices) == 2:
            first, second = (self.book.score(*found).sum(dim=-1, keepdim=True) for found in zip(shares, entries, strict=True))
            entry = torch.where(second > first, entries[1], entry)
            magnitudes = torch.where(second > first, self.choices[1], magnitudes)
        return entry.flatten(2), self.negative ^ (magnitudes.flatten(2) < 0)


def _one_hot(at: Tensor, like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=torch.bool, device=like.device).scatter_(-1, at, True)


@cache
def _book(name: str, device: torch.device) -> Codebook:
    return Codebook(grid(name).to(device, torch.float32))


def _fitted(name: str, group: int, steps: Steps, even: bool, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Blocks [n, 256] -> d as two bytes [n, 2], k int32 [n, g], entries int64 [n, 256 / width], signs as bits uint8 [n, 32]."""
    unit = Unit(blocks)
    coder = SignedGridCoder(unit.weights.unflatten(1, (-1, group)), _book(name, blocks.device), even)
    anchors = steps.factor(torch.arange(steps.values - 1, -1, -1)).tolist()
    d, k, scale = fit_blocks(coder, steps, anchors, unit)
    entry, negative = coder.codes(scale)
    return d.view(torch.uint8), k, entry.flatten(1), join_bits(negative.view(-1, 32, 8))


_QUARTERS, _HALVES, _ODD = Steps(0.125, 0.25, 16), Steps(0.25, 0.5, 16), Steps(1, 2, 16)
"""(0.5 + k) / 4, (0.5 + k) / 2 and 1 + 2 k."""


def _pairs(k: Tensor) -> Tensor:
    """4-bit k [n, g] -> bytes [n, g / 2], the first in the low half."""
    return join_nibbles(k.to(torch.uint8).unflatten(1, (-1, 2)), -1)


def _signs_and_scale(signs: Tensor, k: Tensor) -> Tensor:
    """Sign bits [n, 32] and k [n, 8] -> bytes [n, 8, 4] of words: four times the lower seven sign bits, then k."""
    place = torch.tensor([0, 7, 14, 21], device=signs.device)
    word = ((signs & 127).to(torch.int64).unflatten(1, (8, 4)) << place).sum(dim=2) | (k.to(torch.int64) << 28)
    return little_endian(word, 4).unflatten(1, (8, 4))


def _iq2_xxs(blocks: Tensor) -> Tensor:
    d, k, entry, signs = _fitted("IQ2_XXS", 32, _QUARTERS, True, blocks)
    groups = torch.cat((entry.to(torch.uint8).unflatten(1, (8, 4)), _signs_and_scale(signs, k)), dim=2)
    return torch.cat((d, groups.flatten(1)), dim=1)


def _iq2_xs(blocks: Tensor) -> Tensor:
    d, k, entry, signs = _fitted("IQ2_XS", 16, _QUARTERS, True, blocks)
    return torch.cat((d, little_endian(entry | ((signs & 127).to(torch.int64) << 9), 2), _pairs(k)), dim=1)


def _iq2_s(blocks: Tensor) -> Tensor:
    d, k, entry, signs = _fitted("IQ2_S", 16, _QUARTERS, False, blocks)
    high = join_crumbs((entry >> 8).to(torch.uint8).unflatten(1, (8, 4)), -1)
    return torch.cat((d, little_endian(entry, 1), signs, high, _pairs(k)), dim=1)


def _iq3_xxs(blocks: Tensor) -> Tensor:
    d, k, entry, signs = _fitted("IQ3_XXS", 32, _HALVES, True, blocks)
    return torch.cat((d, entry.to(torch.uint8), _signs_and_scale(signs, k).flatten(1)), dim=1)


def _iq3_s(blocks: Tensor) -> Tensor:
    d, k, entry, signs = _fitted("IQ3_S", 32, _ODD, False, blocks)
    ninth = join_bits((entry >> 8).unflatten(1, (8, 8)))
    return torch.cat((d, little_endian(entry, 1), ninth, signs, _pairs(k)), dim=1)


GRID_ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {
    name: partial(in_batches, encode)
    for name, encode in (("IQ2_XS", _iq2_xs), ("IQ3_S", _iq3_s), ("IQ2_XXS", _iq2_xxs), ("IQ3_XXS", _iq3_xxs), ("IQ2_S", _iq2_s))
}
"""float32 [n, cols] -> uint8 [n, row bytes], by type name."""
