"""Nearest entries of a GGUF codebook, by matrix product.

Why products: <u, e> - |e|^2 / 2 is largest for the entry e nearest to u, and one product gives it for all entries. u is first rounded to about a
thousandth of the largest level, so that every sum is exact in float32: the entry found does not depend on how a device orders its additions.
What it does not do: prune the codebook to a neighbourhood; every entry is looked at. Products cut to TF32 would lose the exactness, not the sense.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

# Scores held at a time: 8 MiB suit a CPU's caches; with as little a GPU would wait for its launches. The answer is the same.
_SCORES_CPU, _SCORES_GPU = 1 << 21, 1 << 24


class Codebook:
    """Entries float32 [e, m] of integers; m is 4 or 8 and the largest magnitude at most 63, else sums would need more than float32's 24 bits."""

    def __init__(self, entries: Tensor) -> None:
        self.entries = entries
        self.top = float(entries.abs().max())
        # Vectors are rounded to multiples of `step` and cut at 16 * 1024 steps, 8 to 16 times the largest level: 8 * 2^14 * 63 < 2^23 steps.
        self._step = 2.0 ** math.floor(math.log2(self.top)) / 1024
        self._columns = torch.cat((entries, entries.square().sum(dim=1, keepdim=True) / -2), dim=1).T.contiguous()

    def best_score(self, vectors: Tensor) -> Tensor:
        """float32 [..., m] -> [...]: the largest <u, e> - |e|^2 / 2, which is half of |u|^2 less the squared distance to the nearest entry."""
        return torch.cat([scores.amax(dim=1) for scores in self._scores(vectors)]).view(vectors.shape[:-1])

    def nearest(self, vectors: Tensor) -> Tensor:
        """float32 [..., m] -> int64 entry numbers [...]."""
        return torch.cat([scores.argmax(dim=1) for scores in self._scores(vectors)]).view(vectors.shape[:-1])

    def score(self, vectors: Tensor, entry: Tensor) -> Tensor:
        """float32 [..., m] and their entry numbers [...] -> <u, e> - |e|^2 / 2 [...]."""
        found = self.entries[entry]
        return (found * (vectors - found / 2)).sum(dim=-1)

    def _scores(self, vectors: Tensor) -> Iterator[Tensor]:
        """Scores [piece, e] of pieces of the vectors, in turn in the same memory."""
        width, count = vectors.shape[-1], self._columns.shape[1]
        piece = max(1, (_SCORES_CPU if vectors.device.type == "cpu" else _SCORES_GPU) // count)
        flat = vectors.reshape(-1, width)
        known = torch.ones(min(piece, len(flat)), width + 1, device=vectors.device)
        out = torch.empty(len(known), count, device=vectors.device)
        for part in flat.split(piece):
            rows, scores = known[: len(part)], out[: len(part)]
            rows[:, :width] = (part / self._step).round().clamp(-16384, 16384) * self._step
            yield torch.mm(rows, self._columns, out=scores)
