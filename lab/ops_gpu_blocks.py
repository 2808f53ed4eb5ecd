"""Matrices and experts in a file's own block types (GGUF, and VQF's of the same blocks) through Triton, as operations of the engine.

Why apart from `ops_gpu`: these weights are transcoded losslessly at load into one skeleton of codes and scales (lab.kernels.gguf_gpu), whatever the type, so
that a file may mix types row block by row block. Resident bytes are then the skeleton's: more than the file's for some types, and counted as such.
Experts that are all in Q4_0 do not come here but go to planes (lab.ops_gpu), unless activations are float32.
What it does not prove: speed at prompts, where a matrix is decoded once per call and experts go slot by slot.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import silu

from lab.codecs import Codec, create
from lab.codecs.gguf import PART
from lab.codecs.vqf import VqfCodec
from lab.kernels.gguf_gpu_matrix import GpuMatrix
from lab.ops import Packed


def frame(codec: Codec) -> Codec | None:
    """The GGUF type whose bytes the codec's rows are, or None where they are no such blocks."""
    if isinstance(codec, VqfCodec):
        return create(codec.frame) if codec.tile is None and codec.plain in ("Q8_0", "Q4_0") else None
    return codec if codec.name.startswith("gguf:") else None


class Block:
    """One packed weight transcoded; its canonical parts are freed."""

    def __init__(self, packed: Packed) -> None:
        """Raises LabError where the type or the shape has no kernel."""
        known = frame(packed.codec)
        assert known is not None
        self.packed = packed
        self.matrix = GpuMatrix.make(known, {PART: packed.parts[PART]}, packed.shape)
        packed.parts = {}
        packed.held_as(self.matrix.nbytes())


class BlockLinear:
    """y = x W^T, whole or in row blocks; `order` as in `lab.ops.PackedLinear`."""

    kernel = "triton"

    def __init__(self, blocks: Sequence[Packed], order: Tensor | None) -> None:
        self.blocks, self.order = [Block(packed) for packed in blocks], order

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out] in x's dtype."""
        flat = x.reshape(-1, x.shape[-1])
        if self.order is not None:
            flat = flat[:, self.order]
        found = []
        for block in self.blocks:
            rows, cols = block.packed.shape
            block.packed.count(len(flat), 2 * len(flat) * rows * cols)
            found.append(block.matrix.times(flat.contiguous()))
        return (found[0] if len(found) == 1 else torch.cat(found, -1)).view(*x.shape[:-1], -1)


class JoinedLinear:
    """Several maps of one input as one product: x [..., in] -> their outputs side by side. Each goes on serving alone, from the same memory."""

    def __init__(self, ops: Sequence[BlockLinear], matrix: GpuMatrix) -> None:
        self.blocks, self.matrix = [block for op in ops for block in op.blocks], matrix

    def __call__(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        for block in self.blocks:
            block.packed.count(len(flat), 2 * len(flat) * block.packed.shape[0] * block.packed.shape[1])
        return self.matrix.times(flat.contiguous()).view(*x.shape[:-1], -1)


def join(ops: Sequence[object]) -> JoinedLinear | None:
    """The maps as one, or None where they are no blocks of one type, or read their inputs in another order."""
    held = [op for op in ops if isinstance(op, BlockLinear) and op.order is None]
    if len(held) < len(ops) or len(ops) < 2:
        return None
    matrix = GpuMatrix.joined([block.matrix for op in held for block in op.blocks])
    return None if matrix is None else JoinedLinear(held, matrix)


class BlockExperts:
    """Routed experts, one (token, expert) slot at a time: nothing depends on counts, so that nothing waits for the device."""

    kernel = "triton"

    def __init__(self, gate_up: Sequence[Packed], down: Packed) -> None:
        self.gate_up, self.down = [Block(packed) for packed in gate_up], Block(down)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden], ids [T, k], weights [T, k] -> [T, hidden]."""
        slots = ids.flatten()
        found = [self._slots(block, x, slots) for block in self.gate_up]
        gate, up = found[0].chunk(2, -1) if len(found) == 1 else found
        y = self._slots(self.down, silu(gate) * up, slots)
        return (y.unflatten(0, ids.shape) * weights.unsqueeze(-1)).sum(1)

    @staticmethod
    def _slots(block: Block, x: Tensor, slots: Tensor) -> Tensor:
        experts, rows, cols = block.packed.shape
        block.packed.count(len(slots), 2 * len(slots) * rows * cols, block.packed.nbytes() // experts * min(len(slots), experts))
        return block.matrix.slots(x.contiguous(), slots)
