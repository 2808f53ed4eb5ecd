"""Encoders for the GGUF types of shifted ternary codebooks: IQ1_S and IQ1_M. w ~ d (2 k + 1) (entry -+ 1/8), entries of eight weights -1, 0, 1.

Why both shifts are tried for each place that stores one: the shift is what lets a ternary entry say small weights. In eighths, as `gguf_grid` reads
them, an entry of either shift is one of 4,096 integer vectors. Layouts as there.
What it does not do: use importances, without which llama-quantize refuses IQ1_S and IQ1_M; hardly anything survives at this size without them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from lab.codecs.gguf_encode_codebook import Codebook
from lab.codecs.gguf_encode_pack import join_nibbles, little_endian
from lab.codecs.gguf_encode_scales import GroupCoder, Steps, Unit, fit_blocks, in_batches, ratio
from lab.codecs.gguf_package import grid

_SHARES = tuple(0.45 + 0.1 * i for i in range(7))
"""First guesses for a group's scale, as shares of the one that puts its largest |w| on the largest level."""

_ODD = Steps(0.125, 0.25, 8)
"""(2 k + 1) / 8: the factor of an entry in eighths."""


class TernaryCoder(GroupCoder):
    """Groups [n, g, m] as shifted entries; `shared` where all entries of a group have the same shift, else each has its own."""

    def __init__(self, groups: Tensor, shared: bool) -> None:
        self.groups, self.shared = groups, shared
        self.books = [_book(shift, groups.device) for shift in (1, -1)]
        self.eights, self.energy = groups.unflatten(2, (-1, 8)), groups.square().sum(dim=-1)

    def _vectors(self, scale: Tensor) -> Tensor:
        positive = (scale > 0)[..., None, None]
        return torch.where(positive, self.eights / torch.where(positive, scale[..., None, None], 1.0), 0.0)

    def error(self, scale: Tensor) -> Tensor:
        vectors = self._vectors(scale)
        plus, minus = (book.best_score(vectors) for book in self.books)
        score = torch.maximum(plus.sum(dim=-1), minus.sum(dim=-1)) if self.shared else torch.maximum(plus, minus).sum(dim=-1)
        return self.energy - 2 * scale.square() * score

    def moments(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        levels = torch.cat([book.entries for book in self.books])[self.codes(scale)].flatten(2)
        return (levels * self.groups).sum(dim=-1), levels.square().sum(dim=-1)

    def free_fit(self) -> tuple[Tensor, Tensor]:
        fullest = self.groups.abs().amax(dim=-1) / self.books[0].top
        best, least = torch.zeros_like(fullest), self.energy
        for share in _SHARES:
            error = self.error(fullest * share)
            best, least = torch.where(error < least, fullest * share, best), torch.minimum(error, least)
        dot, norm = self.moments(best)
        return ratio(dot, norm), norm

    def codes(self, scale: Tensor) -> Tensor:
        """Scales [n, g] -> int64 entry numbers [n, g, m / 8]; the 2,048 with the minus shift come after those with the plus shift."""
        vectors = self._vectors(scale)
        plus, minus = (book.nearest(vectors) for book in self.books)
        scores = [book.score(vectors, entry) for book, entry in zip(self.books, (plus, minus), strict=True)]
        if self.shared:
            scores = [score.sum(dim=-1, keepdim=True) for score in scores]
        return torch.where(scores[1] > scores[0], minus + len(self.books[0].entries), plus)


@cache
def _book(shift: int, device: torch.device) -> Codebook:
    """In eighths: the entries moved by an eighth up (1) or down (-1)."""
    return Codebook(8 * grid("IQ1_S").to(device, torch.float32) + shift)


def _fitted(blocks: Tensor, group: int, shared: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks [n, 256] -> float16 d [n, 1], int64 k [n, g], entry numbers int64 [n, 32]."""
    unit = Unit(blocks)
    coder = TernaryCoder(unit.weights.unflatten(1, (-1, group)), shared)
    anchors = _ODD.factor(torch.arange(_ODD.values - 1, -1, -1)).tolist()
    d, k, scale = fit_blocks(coder, _ODD, anchors, unit, rounds=1)
    return d, k.to(torch.int64), coder.codes(scale).flatten(1)


def _iq1_s(blocks: Tensor) -> Tensor:
    d, k, entry = _fitted(blocks, 32, True)
    fours = entry.unflatten(1, (8, 4))
    place = torch.tensor([0, 3, 6, 9], device=blocks.device)
    word = (((fours >> 8) & 7) << place).sum(dim=2) | (k << 12) | ((fours[..., 0] >> 11) << 15)
    return torch.cat((d.view(torch.uint8), little_endian(entry, 1), little_endian(word, 2)), dim=1)


def _iq1_m(blocks: Tensor) -> Tensor:
    d, k, entry = _fitted(blocks, 16, False)
    halves = join_nibbles((entry >> 8).to(torch.uint8).unflatten(1, (16, 2)), -1)
    place, nibble = torch.tensor([0, 3, 6, 9], device=blocks.device), torch.tensor([0, 4, 8, 12], device=blocks.device)
    d_bits = (d.view(torch.int16).to(torch.int64) >> nibble) & 15  # [n, 4], one in the top of each word
    word = (k.unflatten(1, (4, 4)) << place).sum(dim=2) | (d_bits << 12)
    return torch.cat((little_endian(entry, 1), halves, little_endian(word, 2)), dim=1)


TERNARY_ENCODERS: dict[str, Callable[[Tensor], Tensor]] = {name: partial(in_batches, encode) for name, encode in (("IQ1_S", _iq1_s), ("IQ1_M", _iq1_m))}
"""float32 [n, cols] -> uint8 [n, row bytes], by type name."""
