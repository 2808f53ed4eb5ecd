"""What a decode step multiplies with: a model's own operations, joined where one launch can do the work of several.

Matrices that read the same input become row blocks of one; their planes are laid side by side once and the originals become views of them, so that no
weight is held twice and prompts go on using the same operations. What cannot be joined is called as it is. Every operation counts itself as before.
What it does not prove: that joining is faster at every size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from lab.errors import LabError
from lab.kernels.experts import LowBitExperts
from lab.kernels.experts_bf16 import Bf16Experts
from lab.kernels.planes import ROWS, Planes
from lab.kernels.rows_step import small_product
from lab.kernels.trunk import Int8Linear
from lab.ops import Packed, PackedLinear
from lab.ops_gpu import KernelLinear
from lab.ops_gpu_blocks import BlockLinear, join


def joined(planes: Sequence[Planes], dim: int) -> Planes | None:
    """One matrix from several of the same width along `dim` of the words (1: halves, 2: blocks of rows), or None where they do not fit together."""
    first = planes[0]
    same = all((p.bits, p.group, p.cols, p.lut, p.scale.dtype) == (first.bits, first.group, first.cols, first.lut, first.scale.dtype) for p in planes)
    fits = all(p.rows == first.rows for p in planes) if dim == 1 else all(p.rows % ROWS == 0 for p in planes)
    if not same or not fits or any(len(p.words) > 1 or p.halves > 1 or float(p.unit) != float(first.unit) for p in planes):
        return None
    words, scale = (torch.cat([getattr(p, name) for p in planes], dim) for name in ("words", "scale"))
    return Planes(words, scale, first.unit, first.lut, first.bits, first.group, first.rows if dim == 1 else sum(p.rows for p in planes), first.cols)


def _share(ops: Sequence[KernelLinear], whole: Planes, dim: int) -> None:
    """Makes each operation's planes a view of the joined ones, so that its own copy is freed."""
    start = 0
    for op in ops:
        own, size = op.int8.planes, op.int8.planes.words.shape[dim]
        op.int8.planes = replace(own, words=whole.words.narrow(dim, start, size), scale=whole.scale.narrow(dim, start, size))
        start += size


class Stacked:
    """Several linear maps of one input: x [B, in] -> their outputs side by side [B, sum of out]."""

    def __init__(self, *ops: Any) -> None:
        self.ops = ops
        self.whole: Int8Linear | None = None
        self.blocks = join(ops)
        if all(isinstance(op, KernelLinear) for op in ops) and (planes := joined([op.int8.planes for op in ops], 2)) is not None:
            _share(ops, planes, 2)
            self.whole = Int8Linear(planes)

    def __call__(self, x: Tensor) -> Tensor:
        if self.blocks is not None:
            return self.blocks(x)
        if self.whole is None or x.element_size() != 2:
            found = [op(x) for op in self.ops]
            return found[0] if len(found) == 1 else torch.cat(found, -1)
        for op in self.ops:
            op.count(len(x))
        return self.whole(x)


def _decoded(op: PackedLinear | BlockLinear, dtype: torch.dtype) -> Tensor:
    """The whole matrix [out, in], its row blocks joined and its columns in the order of the activations."""
    found = [block.decode(block.parts, dtype) if isinstance(block, Packed) else block.matrix.decoded(dtype) for block in op.blocks]
    whole = torch.cat(found)
    return whole if op.order is None else torch.empty_like(whole).index_copy_(1, op.order.long(), whole)


def as_filed(*ops: Any) -> list[Tensor] | None:
    """The bfloat16 matrices [out, in] of operations that all multiply with the file's own weights in their order, or None."""
    found = []
    for op in ops:
        if not isinstance(op, PackedLinear) or len(op.blocks) != 1 or op.order is not None or op.blocks[0].codec.name != "bf16":
            return None
        found.append(op.blocks[0].parts["weight"])
    return found if all(weight.dtype == torch.bfloat16 and weight.is_contiguous() for weight in found) else None


class Small:
    """Matrices of a few rows, decoded once and stacked, for kernels that read rows themselves. x [B, in] -> [B, sum of out]."""

    def __init__(self, dtype: torch.dtype, *ops: Any) -> None:
        """Raises LabError for an operation that is no packed matrix."""
        for op in ops:
            if not isinstance(op, PackedLinear | BlockLinear):
                raise LabError(f"decode step: a small matrix is {type(op).__name__}, not packed")
        self.packed = [block if isinstance(block, Packed) else block.packed for op in ops for block in op.blocks]
        self.weight = torch.cat([_decoded(op, dtype) for op in ops]).contiguous()

    def count(self, rows: int) -> None:
        """Counts one call."""
        for packed in self.packed:
            packed.count_product(rows)

    def __call__(self, x: Tensor) -> Tensor:
        self.count(len(x))
        return small_product(x, self.weight)


def _one_expert(ops: Sequence[Any], gate: Tensor, up: Tensor, down: Tensor) -> Bf16Experts:
    """The shared expert as the only one of a stack. The first two operations' weights become views of the joined ones, so that their own copies are freed."""
    both = torch.cat([gate, up])
    for op, part in zip(ops, both.split(len(gate)), strict=True):
        op.blocks[0].parts["weight"] = part
    return Bf16Experts(both[None], down[None])


class Shared:
    """The shared expert in two halves, so that the first can run beside the router: share * down(silu(gate x) * up x)."""

    def __init__(self, gate: Any, up: Any, down: Any) -> None:
        self.gate, self.up, self.down = gate, up, down
        self.fused: LowBitExperts | Bf16Experts | None = None
        self.ids: dict[int, Tensor] = {}
        self._tiles: tuple[Any, ...] = ((8, 64, 1, 4),), ((8, 32, 1, 2),)
        if (filed := as_filed(gate, up, down)) is not None:
            self.fused, self._tiles = _one_expert((gate, up), *filed), ((), ())
        elif all(isinstance(op, KernelLinear) for op in (gate, up, down)) and (both := joined([gate.int8.planes, up.int8.planes], 1)) is not None:
            _share((gate, up), both, 1)
            self.fused = LowBitExperts(both, down.int8.planes)

    def inner(self, x: Tensor) -> Tensor:
        """silu(gate x) * up x [B, width], which does not wait for the router."""
        if self.fused is None or x.element_size() != 2:
            return silu(self.gate(x)) * self.up(x)
        self.gate.count(len(x))
        self.up.count(len(x))
        return self.fused.gate_up(x, self._none(x), *self._tiles[0])

    def outer(self, h: Tensor, share: Tensor, dtype: torch.dtype) -> Tensor:
        """`share` times the down projection of `inner`'s result."""
        if self.fused is None or h.ndim < 3:
            return share.to(dtype) * self.down(h)
        self.down.count(len(h))
        return self.fused.down(h, self._none(h), share, dtype, *self._tiles[1])

    def _none(self, x: Tensor) -> Tensor:
        """Expert 0 for every token: the only one."""
        found = self.ids.get(len(x))
        if found is None:
            found = self.ids[len(x)] = torch.zeros(len(x), 1, dtype=torch.int32, device=x.device)
        return found
