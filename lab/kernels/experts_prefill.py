"""Routed experts for many tokens: slots grouped by expert on the device, then one tile kernel per product that decodes weights in the matrix units' registers.

Why: a prompt sends a few dozen tokens to every expert, so each expert's weights are read and decoded once per tile of tokens and never written out. Nothing
is read back to the host: the grid covers the worst case and programs without a tile leave at once. bf16 stacks go through torch's grouped product.
What it does not prove: the best tile for a very uneven router, where one expert takes many tiles and decodes its weights in each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear, silu

from lab.kernels.backend import interpreted, require, use_ptx
from lab.kernels.experts import LowBitExperts
from lab.kernels.experts_bf16 import Bf16Experts
from lab.kernels.experts_tiles import down_kernel, gate_up_kernel
from lab.kernels.fragments import arrange_columns, gain, operand_ptx, padded
from lab.kernels.moe_prefill import Groups, group_slots, sum_slots
from lab.kernels.planes import CHUNK, Planes

FEW_TOKENS = 8
"""Up to how many tokens a program per slot is used (lab.kernels.experts)."""
Shape = tuple[int, int, int]
"""(weight rows per program, warps, pipeline stages)."""
DownShape = tuple[int, int, int, int]
"""(weight rows per pass, passes per program, warps, pipeline stages)."""


def run_of(block: int) -> int:
    """Runs of an operand's columns (lab.kernels.fragments): with 16 places the units of one warp are twice as fast as those of four."""
    return 4 if block == 16 else 2


def gate_up_shape(block: int) -> Shape:
    """The launch shapes of the first product by places of a tile."""
    return (64, 2, 3) if block == 16 else (64, 4, 3)


def down_shape(block: int) -> DownShape:
    """The same for the second product, whose loop over 640 columns is too short to be filled and emptied for every block of rows."""
    return (64, 5, 2, 3) if block == 16 else (128, 1, 4, 3)


def grouped_experts(experts: LowBitExperts | Bf16Experts, x: Tensor, ids: Tensor, weights: Tensor, between: Callable[[], object] = lambda: None) -> Tensor:
    """x [T, hidden] 16-bit, ids integer [T, k] in 0..E-1, weights [T, k] -> weighted sum over the slots, [T, hidden] in x's dtype. `between` is called when
    the last launch that reads gate and up has been made and none that reads down: stacks that stream through a buffer come and go on their own."""
    if isinstance(experts, Bf16Experts):
        return _grouped_bf16(experts, x, ids, weights, between)
    return sum_slots(slot_outputs(experts, x.contiguous(), ids, weights.contiguous(), between), ids.shape[1])


def slot_outputs(experts: LowBitExperts, x: Tensor, ids: Tensor, weights: Tensor, between: Callable[[], object] = lambda: None) -> Tensor:
    """The same before the sum, [T * k, hidden]: every slot's weighted output. Raises LabError on another width or dtype."""
    first = experts.gate_up_planes
    require(x.ndim == 2 and x.shape[1] == first.cols and x.element_size() == 2, "experts prefill", f"x is {x.dtype} {list(x.shape)}")
    groups = group_slots(ids, len(first.words))
    h = gate_up(first, arrange_columns(x, run_of(groups.block)), groups, ids.shape[1])
    between()
    return down(experts.down_planes, h, groups, weights)


def gate_up(planes: Planes, x: Tensor, groups: Groups, k: int, shape: Shape | None = None) -> Tensor:
    """Arranged x [T, padded hidden] -> arranged silu(gate) * up by place, [slots, padded width] in x's dtype."""
    width = padded(planes.rows)
    h = torch.empty(len(groups.order), width, dtype=x.dtype, device=x.device)
    rows, warps, stages = shape or gate_up_shape(groups.block)
    gate_up_kernel[(width // rows, len(groups.tiles))](
        x, groups.order, groups.tiles, *_tensors(planes), h, k, width, *_constants(planes, x.dtype), rows, *_places(groups.block),
        run_of(groups.block), _kind(x.dtype), use_ptx(), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return h


def down(planes: Planes, h: Tensor, groups: Groups, weights: Tensor, shape: DownShape | None = None) -> Tensor:
    """Arranged h [slots, padded width] by place, weights [T, k] -> weighted outputs by slot, [slots, hidden] in h's dtype."""
    y = torch.empty(len(groups.order), planes.rows, dtype=h.dtype, device=h.device)
    rows, passes, warps, stages = shape or down_shape(groups.block)
    passes = min(passes, triton.cdiv(planes.rows, rows))
    down_kernel[(triton.cdiv(planes.rows, rows * passes), len(groups.tiles))](
        h, groups.order, weights, groups.tiles, *_tensors(planes), y, planes.rows, *_constants(planes, h.dtype), rows, passes, *_places(groups.block),
        run_of(groups.block), _kind(h.dtype), use_ptx(), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return y


def _places(block: int) -> tuple[int, int]:
    """M and EXTRA: a tile's places as one or two powers of two."""
    most = 1 << (block.bit_length() - 1)
    return most, block - most


def _kind(dtype: torch.dtype) -> tl.dtype:
    """What is multiplied: the activations' dtype; float32 in the interpreter, whose bfloat16 is wrong."""
    if interpreted():
        return tl.float32
    return tl.bfloat16 if dtype == torch.bfloat16 else tl.float16


@cache
def _shifts(per: int, device: torch.device) -> Tensor:
    """int32: how far each of `per` scales in a word must be shifted down."""
    return torch.arange(per, dtype=torch.int32, device=device) * (32 // per)


def _tensors(planes: Planes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Words, scales as words, shifts, units."""
    return planes.words, planes.scale.view(torch.int32), _shifts(4 // planes.scale.element_size(), planes.words.device), planes.unit


def _constants(planes: Planes, dtype: torch.dtype) -> tuple[int | float | str, ...]:
    """BLOCKS, CHUNKS, GROUP_CHUNKS, BITS, STORED, LUT, ASM0, ASM1, GAIN."""
    stored = 8 * planes.scale.element_size() * (-1 if planes.scale.dtype == torch.bfloat16 else 1)
    bf16 = dtype == torch.bfloat16
    ptx = (operand_ptx(planes.lut, planes.bits, half, bf16) if use_ptx() else "" for half in (0, 1))
    left = gain(planes.bits, bf16, use_ptx())
    return planes.words.shape[2], planes.cols // CHUNK, planes.group // CHUNK, planes.bits, stored, planes.lut, *ptx, left


def _grouped_bf16(experts: Bf16Experts, x: Tensor, ids: Tensor, weights: Tensor, between: Callable[[], object]) -> Tensor:
    """bf16 stacks through torch's grouped product; one product per expert where torch has none for this device."""
    count = len(experts.down_weight)
    groups = group_slots(ids, count)
    order = groups.order.long()
    sorted_x = x[order // ids.shape[1]]
    grouped = getattr(torch, "_grouped_mm", None)
    y = torch.empty(ids.numel(), x.shape[1], dtype=x.dtype, device=x.device)
    if grouped is not None and x.is_cuda and x.dtype == torch.bfloat16:
        gate, up = grouped(sorted_x, experts.gate_up_weight.transpose(1, 2), offs=groups.ends).chunk(2, -1)
        between()
        y[order] = grouped(silu(gate) * up, experts.down_weight.transpose(1, 2), offs=groups.ends)
    else:
        pieces = sorted_x.split(torch.diff(groups.ends.cpu(), prepend=torch.zeros(1, dtype=torch.int32)).tolist())
        both = [linear(piece, matrix.to(x.dtype)).chunk(2, -1) for piece, matrix in zip(pieces, experts.gate_up_weight, strict=True)]
        between()
        y[order] = torch.cat([linear(silu(gate) * up, matrix.to(x.dtype)) for (gate, up), matrix in zip(both, experts.down_weight, strict=True)])
    return (y.view(*ids.shape, -1) * weights.to(x.dtype).unsqueeze(-1)).sum(1)
