"""A GGUF matrix, or a stack of experts, resident on a GPU and multiplied there: what an engine holds instead of a file's blocks.

Few tokens are multiplied from the codes; more decode the matrix once to the activations' dtype and use the vendor's product, since a prompt's product
costs more than the pass over the weights. What it does not prove: where the better border lies; 8 is what the kernel takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from lab.codecs import Codec, Parts
from lab.kernels.backend import require
from lab.kernels.gguf_gpu import ROWS, GpuBlocks, transcode
from lab.kernels.gguf_gpu_product import TOKENS, dequantise, expert_slots, product


class GpuMatrix:
    """One matrix [rows, cols] or a stack [E, rows, cols] of a GGUF type."""

    def __init__(self, blocks: GpuBlocks) -> None:
        self.blocks = blocks

    @classmethod
    def make(cls, codec: Codec, parts: Parts, shape: Sequence[int]) -> GpuMatrix:
        """Transcodes the codec's parts, on the device where they lie. Raises LabError where they are not a tensor of this shape or no GGUF type."""
        blocks = transcode(codec, parts, shape[-1])
        require(blocks.shape() == tuple(shape), codec.name, f"the blocks hold {list(blocks.shape())} weights, not {list(shape)}")
        return cls(blocks)

    def times(self, x: Tensor) -> Tensor:
        """x [n, cols] float32, float16 or bfloat16 -> [n, rows] in x's dtype. Raises LabError on a stack, another dtype or width."""
        plain = self.blocks.spec is None and self.blocks.words.dtype == x.dtype
        if len(x) <= TOKENS and not plain:
            return product(self.blocks, x)
        require(not self.blocks.stacked and x.ndim == 2 and x.shape[1] == self.blocks.cols, f"gguf:{self.blocks.name}", f"x is {list(x.shape)}")
        return linear(x, self.blocks.words[0] if plain else dequantise(self.blocks, x.dtype))

    def slots(self, x: Tensor, ids: Tensor) -> Tensor:
        """x [s, cols], or [t, cols] where s / t slots in a row share one; ids integer [s], -1 for none -> [s, rows]. Raises LabError as `expert_slots`."""
        return expert_slots(self.blocks, ids, x)

    def decoded(self, dtype: torch.dtype) -> Tensor:
        """All weights [rows, cols] or [E, rows, cols] in `dtype`."""
        return dequantise(self.blocks, dtype)

    def nbytes(self) -> int:
        """Bytes resident."""
        return self.blocks.nbytes()

    @staticmethod
    def joined(matrices: Sequence[GpuMatrix]) -> GpuMatrix | None:
        """One matrix of all rows, in order, or None where they are stacks, differ in type or width, or end inside a block of rows. The given ones become views
        of it, so that no weight is held twice."""
        held = [matrix.blocks for matrix in matrices]
        first = held[0]
        if any(b.stacked or b.spec is None or (b.name, b.cols, b.scale.dtype) != (first.name, first.cols, first.scale.dtype) or b.rows % ROWS for b in held):
            return None
        names = [name for name in _BY_ROWS if getattr(first, name) is not None]
        parts: dict[str, Any] = {name: torch.cat([getattr(b, name) for b in held], 1) for name in names}
        whole = replace(first, rows=sum(b.rows for b in held), **parts)
        start = 0
        for matrix in matrices:
            own, count = matrix.blocks, matrix.blocks.rows // ROWS
            views: dict[str, Any] = {name: part.narrow(1, start, count) for name, part in parts.items()}
            matrix.blocks = replace(own, **views)
            start += count
        return GpuMatrix(whole)


_BY_ROWS = ("words", "scale", "small", "offset", "small_offset")
"""The fields of GpuBlocks that lie block of rows by block of rows."""
