"""The memory that a step of cold experts goes through: activations, experts and weights down to the CPU, its sums up again.

One set for all layers of an engine, because only one layer is at work at a time. The GPU's kernels write and read it where it lies, if it could be pinned;
if not, there is a twin on the device, and copies wait for it. What it does not prove: anything about speed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lab.errors import GapError
from lab.placement.pinned import PinnedMemory
from lab.record import Status


class Exchange:
    """Room for `most` tokens. `refused`: why the memory is not pinned, or None."""

    def __init__(self, device: torch.device, dtype: torch.dtype, pinned: PinnedMemory, most: int, hidden: int, top_k: int) -> None:
        self.device = device
        shapes = ((most, hidden), dtype), ((most, top_k), torch.int32), ((most, top_k), torch.float32), ((most, hidden), torch.float32)
        self.refused: str | None = None
        try:
            self._host = [pinned.empty(shape, kind, "the memory that cold experts' activations pass through") for shape, kind in shapes]
            self._down = self._host[:3]
        except GapError as error:
            if error.status is not Status.UNSUPPORTED:
                raise
            self.refused = str(error)
            self._host = [torch.empty(shape, dtype=kind) for shape, kind in shapes]
            self._down = [torch.empty_like(one, device=device) for one in self._host[:3]]

    def host(self, tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, ids int32, weights float32 and y float32 of so many tokens, as the CPU reads and writes them."""
        x, ids, weights, y = (one[:tokens] for one in self._host)
        return x, ids, weights, y

    def down(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where the device writes x, ids and weights."""
        x, ids, weights = (one[:tokens] for one in self._down)
        return x, ids, weights

    def lower(self, tokens: int) -> None:
        """Brings to the host what the device has written, where it could not write there itself. Waits for it."""
        if self.refused is not None:
            for own, its in zip(self.host(tokens), self.down(tokens), strict=False):
                own.copy_(its)

    def raised(self, tokens: int) -> Tensor:
        """y where the device can read it."""
        y = self._host[3][:tokens]
        return y if self.refused is None else y.to(self.device)
