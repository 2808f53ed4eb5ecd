"""The engine's operations through Triton kernels: the same calls as in `lab.ops`, on weights repacked once at load.

Why apart: `lab.ops` is the reference and runs everywhere. Here a weight whose codec has a kernel gives up its canonical parts (they are freed) and is
multiplied from its planes; one that has none keeps the reference, and the reason is recorded beside it. Every operation counts itself under its
codec's name, as the reference does. What it does not prove: speed, which the records of a cell show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from lab.codecs.gguf import PART
from lab.errors import LabError
from lab.ops import Packed, PackedExperts, PackedLinear, PackedTable

LOW_BIT = ("w3_levels", "q2_levels", "q2_g32")
TABLES = ("e4m3", "q2_rows")
DISABLED = "disable=kernels"
NO_TRITON = "triton is not installed"
FAULTS = (DISABLED, NO_TRITON)
"""Reasons to stay with the reference that are no limit of a kernel: where there is one for the weight, the path did not run as it should."""
_HALVES = (torch.bfloat16, torch.float16)
_Made = TypeVar("_Made")


def unavailable(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot serve this device and compute dtype, or None."""
    if find_spec("triton") is None:
        return NO_TRITON
    from lab.kernels.backend import interpreted

    if device.type != "cuda" and not interpreted():
        return f"kernels need a GPU, not {device.type}"
    return None if dtype in _HALVES else f"kernels take 16-bit activations, not {str(dtype).removeprefix('torch.')}"


class KernelLinear:
    """y = x W^T for an int8_g128 matrix in planes; float32 activations are multiplied with the decoded matrix."""

    kernel = "triton"

    def __init__(self, packed: Packed) -> None:
        """Takes over the weight: its canonical parts are freed."""
        from lab.kernels.planes import repack
        from lab.kernels.trunk import Int8Linear

        self.packed = packed
        self.int8 = Int8Linear(repack(packed.codec, packed.parts, packed.shape[-1]))
        packed.parts = {}

    def count(self, rows: int) -> None:
        """Counts one call on `rows` rows of activations."""
        self.packed.count(rows, 2 * rows * self.packed.shape[0] * self.packed.shape[1])

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out] in x's dtype."""
        self.count(x.numel() // x.shape[-1])
        if x.dtype in _HALVES:
            return self.int8(x)
        return self.int8.decoded(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)


class KernelExperts:
    """Routed experts in planes: slot by slot for a few tokens, grouped by expert on the device for many."""

    kernel = "triton"

    def __init__(self, gate_up: Packed, down: Packed, up: Packed | None = None) -> None:
        """Takes over the stacks: their canonical parts are freed. `up`: in files' blocks of 4 bits, where `gate_up` may be the gate alone."""
        from lab.kernels.backend import require
        from lab.kernels.experts import LowBitExperts
        from lab.kernels.experts_bf16 import Bf16Experts
        from lab.kernels.planes import repack, repack_nibbles

        self.stacks = [gate_up, down] if up is None else [gate_up, up, down]
        experts, rows, hidden = gate_up.shape
        fits = tuple(down.shape) == (experts, hidden, rows // 2 if up is None else rows) and (up is None or up.shape == gate_up.shape)
        require(fits, "experts", f"stacks {[list(stack.shape) for stack in self.stacks]} do not fit")  # before anything is freed
        self.slots: LowBitExperts | Bf16Experts
        if in_nibbles(gate_up):
            halves = gate_up.parts[PART].chunk(2, 1) if up is None else [gate_up.parts[PART], up.parts[PART]]
            first = repack_nibbles(halves, gate_up.shape[-1])
            del halves
            for stack in self.stacks[:-1]:
                stack.parts = {}
                stack.held_as(first.nbytes() // (len(self.stacks) - 1))
            second = repack_nibbles([down.parts[PART]], down.shape[-1])
            down.parts = {}
            down.held_as(second.nbytes())
            self.slots = LowBitExperts(first, second)
        elif gate_up.codec.name == "bf16":
            self.slots = Bf16Experts(gate_up.parts["weight"], down.parts["weight"])
        else:
            first = repack(gate_up.codec, gate_up.parts, gate_up.shape[-1], halves=2)
            gate_up.parts = {}
            self.slots = LowBitExperts(first, repack(down.codec, down.parts, down.shape[-1]))
            down.parts = {}

    def count(self, slots: int) -> None:
        """Counts one call on `slots` (token, expert) pairs. Bytes: each pair's expert, at most all experts once; pairs that share one are counted twice,
        because finding them would wait for the device. One token's experts are always different, so there the count is exact."""
        for stack in self.stacks:
            experts, rows, cols = stack.shape
            stack.count(slots, 2 * slots * rows * cols, stack.nbytes() // experts * min(slots, experts))

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden], ids [T, k], weights [T, k] -> [T, hidden]."""
        from lab.kernels.experts_prefill import FEW_TOKENS, grouped_experts

        self.count(ids.numel())
        if len(x) <= FEW_TOKENS:
            return self.slots(x, ids, weights)
        return grouped_experts(self.slots, x, ids, weights)


class KernelTable:
    """Rows of an e4m3 or q2_rows table, decoded while they are gathered."""

    kernel = "triton"

    def __init__(self, packed: Packed, dtype: torch.dtype, device: torch.device) -> None:
        """`device`: where rows are wanted; the table may lie in pinned host memory."""
        from lab.kernels.table import Table

        self.packed, self.dtype = packed, dtype
        self.table = Table(packed.codec, packed.parts, packed.shape[-1], device)
        self._row_bytes = packed.codec.row_bytes(packed.shape[-1])

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., width]."""
        self.packed.count(ids.numel(), 0, ids.numel() * self._row_bytes)
        return self.table(ids, self.dtype)


def has_kernel(op: Any) -> bool:
    """Whether there is a kernel for the operation's codecs and its form; shapes and dtypes that it does not take are another matter."""
    if isinstance(op, PackedLinear):
        return bool(_of_files(op.blocks)) or (len(op.blocks) == 1 and op.order is None and op.blocks[0].codec.name == "int8_g128")
    if isinstance(op, PackedExperts):
        stacks = (*op.gate_up, op.down)
        names = {stack.codec.name for stack in stacks}
        return bool(_of_files(stacks)) or (len(op.gate_up) == 1 and len(names) == 1 and names <= {*LOW_BIT, "bf16"})
    return op.weight.codec.name in TABLES


def linear(op: PackedLinear, dtype: torch.dtype) -> tuple[Any, str | None]:
    """(the operation, why it stayed with the reference or None)."""
    block = op.blocks[0]
    if blocks := _of_files(op.blocks):
        return _in_blocks(blocks, op, lambda made: made.BlockLinear(op.blocks, op.order))
    if len(op.blocks) > 1 or op.order is not None or block.codec.name != "int8_g128":
        return op, f"no kernel for {block.codec.name}" if len(op.blocks) == 1 else "several row blocks"
    found, reason = _tried(block.device, dtype, lambda: KernelLinear(block))
    return found or op, reason


def experts(op: PackedExperts, dtype: torch.dtype) -> tuple[Any, str | None]:
    """The same for a layer's experts."""
    stacks: Sequence[Packed] = (*op.gate_up, op.down)
    names = {stack.codec.name for stack in stacks}
    if _of_files(stacks):
        if dtype in _HALVES and len(op.gate_up) <= 2 and all(in_nibbles(stack) for stack in stacks):
            found, reason = _tried(op.down.device, dtype, lambda: KernelExperts(op.gate_up[0], op.down, *op.gate_up[1:]))
            return found or op, reason
        return _in_blocks(stacks, op, lambda made: made.BlockExperts(op.gate_up, op.down))
    if len(op.gate_up) > 1 or len(names) > 1 or not names <= {*LOW_BIT, "bf16"}:
        return op, f"no kernel for {', '.join(sorted(names))} in {len(stacks)} stacks"
    found, reason = _tried(op.down.device, dtype, lambda: KernelExperts(op.gate_up[0], op.down))
    return found or op, reason


def in_nibbles(stack: Packed) -> bool:
    """Whether a stack is in blocks of a file that the kernels of planes take: 4 bits, symmetric, one float16 scale for 32 weights."""
    from lab.kernels.planes import NIBBLES
    from lab.ops_gpu_blocks import frame

    known = frame(stack.codec)
    return known is not None and known.name == NIBBLES


def _of_files(stacks: Sequence[Packed]) -> Sequence[Packed]:
    """The stacks where all are in block types that the transcoding kernels know, else none."""
    from lab.ops_gpu_blocks import frame

    return stacks if all(frame(stack.codec) is not None for stack in stacks) else ()


def _in_blocks(stacks: Sequence[Packed], op: Any, make: Callable[[ModuleType], Any]) -> tuple[Any, str | None]:
    """The operation on transcoded blocks, which take float32 activations, too."""
    import lab.ops_gpu_blocks as made

    found, reason = _tried(stacks[0].device, torch.bfloat16, lambda: make(made))
    return found or op, reason


def table(op: PackedTable, dtype: torch.dtype) -> tuple[PackedTable | KernelTable, str | None]:
    """The same for the n-gram table, which may be in another memory than the rest: the kernel reads it there if it is pinned."""
    found, reason = _tried(op.compute_device, torch.bfloat16 if dtype == torch.float32 else dtype, lambda: KernelTable(op.weight, op.dtype, op.compute_device))
    return found or op, reason


def _tried(device: torch.device, dtype: torch.dtype, make: Callable[[], _Made]) -> tuple[_Made | None, str | None]:
    if reason := unavailable(device, dtype):
        return None, reason
    try:
        return make(), None
    except LabError as error:
        return None, str(error)
