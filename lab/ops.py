"""The engine's operations on encoded weights: linear map, routed experts, row table.

Weights stay packed; every call decodes what it needs and multiplies, so resident bytes and bytes read are the codec's own. On a CPU the native kernels
(`lab.kernels.native`) do both where they know the codec and could be built; plain PyTorch does it everywhere else, and is the reference. A matrix may
be several row blocks in different codecs, as files have them. Every operation counts itself in `lab.counters` where it decodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from lab.codecs import Codec, Parts, parts_nbytes
from lab.counters import Counters
from lab.kernels import native

MAX_NATIVE_ROWS = 16
"""Rows of activations up to which a product decodes in registers; with more, decoding once and one matrix product are faster."""


_NATIVE_DTYPES = (torch.float32, torch.bfloat16)
_buffers: dict[torch.dtype, Tensor] = {}


def _scratch(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Memory for one decoded matrix on the CPU, the same at every call: the pages of fresh memory cost more than decoding. Valid until the next call."""
    size = prod(shape)
    held = _buffers.get(dtype)
    if held is None or held.numel() < size:
        held = _buffers[dtype] = torch.empty(size, dtype=dtype)
    return held[:size].view(shape)


class Packed:
    """An encoded weight of a component: the codec, its parts, and the counter key of operations on it. `first` is False for the further row blocks of a
    matrix, whose rows of activations were counted with the first."""

    def __init__(self, codec: Codec, parts: Parts, shape: tuple[int, ...], layer: int | None, component: str, counters: Counters, first: bool = True) -> None:
        self.codec, self.parts, self.shape, self.counters, self.first = codec, parts, shape, counters, first
        self.device = next(iter(parts.values())).device
        self.key = (layer, component, codec.name, self.device.type)
        usable = self.device.type == "cpu" and native.unavailable() is None and native.supports(codec, shape[-1])
        self.prepared = native.prepare(codec, parts, shape[-1]) if usable else None
        self._nbytes = parts_nbytes(parts)
        self._ran = counters.kernels.setdefault(f"{component}: {codec.name} on {self.device.type}", set())

    def nbytes(self) -> int:
        """Bytes resident."""
        return self._nbytes

    def held_as(self, nbytes: int) -> None:
        """Says that a kernel holds the weight in its own form, of so many bytes."""
        self._nbytes = nbytes

    def count(self, rows: int, flops: int, nbytes: int | None = None) -> None:
        """Counts one call on `rows` rows of activations that reads `nbytes` of weights (default: all)."""
        self.counters.add(self.key, rows if self.first else 0, self._nbytes if nbytes is None else nbytes, flops)

    def count_product(self, rows: int) -> None:
        """Counts the whole matrix times `rows` rows of activations."""
        self.count(rows, 2 * rows * self.shape[0] * self.shape[1])

    def decode(self, parts: Parts, dtype: torch.dtype) -> Tensor:
        """`parts` (all of them, or a selection) as [..., rows, cols] in `dtype`."""
        if self.codec.name == "bf16":  # no detour through float32 where the stored dtype is the one computed in
            self._ran.add("torch")
            return parts["weight"].to(dtype)
        if self.prepared is not None and dtype in _NATIVE_DTYPES:
            self._ran.add("native decode")
            return native.decode(self.codec, parts, self.shape[-1], dtype)
        self._ran.add("torch")
        return self.codec.decode(parts, self.shape[-1]).to(dtype)

    def times(self, x: Tensor) -> Tensor:
        """x [n, in] -> [n, out] in x's dtype, counted."""
        self.count_product(x.shape[0])
        if self.prepared is None or self.codec.name == "bf16":
            return linear(x, self.decode(self.parts, x.dtype))
        if x.shape[0] <= MAX_NATIVE_ROWS:
            self._ran.add("native product")
            return self.prepared(x) if x.dtype is torch.float32 else self.prepared(x.float()).to(x.dtype)
        self._ran.add("native decode")
        return linear(x, self.prepared.decode(x.dtype, _scratch(self.shape, x.dtype)))

    def slot_products(self, x: Tensor, slots: Tensor) -> Tensor:
        """x [s, in] -> [s, out], row i through matrix slots[i] of the stack; not counted here."""
        if self.prepared is not None:
            self._ran.add("native product")
            return self.prepared.expert_products(slots, x.float()).to(x.dtype)
        return (self.decode(self.codec.select(self.parts, slots), x.dtype) @ x.unsqueeze(-1)).squeeze(-1)


class PackedLinear:
    """y = x W^T for an encoded W [out, in], whole or in row blocks. `order`, where given, says which input each of the blocks' columns multiplies."""

    def __init__(self, *blocks: Packed, order: Tensor | None = None) -> None:
        self.blocks, self.order = blocks, order

    def count(self, rows: int) -> None:
        """Counts one call that a kernel made with these weights."""
        for block in self.blocks:
            block.count_product(rows)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out] in x's dtype."""
        flat = x.reshape(-1, x.shape[-1])
        if self.order is not None:
            flat = flat[:, self.order]
        found = [block.times(flat) for block in self.blocks]
        return (found[0] if len(found) == 1 else torch.cat(found, -1)).view(*x.shape[:-1], -1)


class PackedExperts:
    """Routed experts from encoded stacks: gate_up as one [E, 2 width, hidden] (gate rows first) or gate and up apart, and down [E, hidden, width]."""

    def __init__(self, gate_up: Sequence[Packed], down: Packed) -> None:
        self.gate_up, self.down = tuple(gate_up), down

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden], ids [T, k], weights [T, k] -> [T, hidden]. Few tokens: one batched product over the (token, expert) slots; many: one
        product per expert over its tokens. Both decode each expert that is used, once per slot or once per call."""
        if ids.numel() <= self.down.shape[0]:
            return self._by_slot(x, ids, weights)
        out = torch.zeros_like(x)
        for expert in range(self.down.shape[0]):
            token, slot = torch.where(ids == expert)
            if token.numel():
                y = self._expert(x[token], expert)
                out.index_add_(0, token, y * weights[token, slot].unsqueeze(-1))
        return out

    def _expert(self, x: Tensor, expert: int) -> Tensor:
        gate, up = _halves([_one_expert(stack, x, expert) for stack in self.gate_up])
        return _one_expert(self.down, silu(gate) * up, expert)

    def _by_slot(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        flat = ids.flatten()
        slots = x.repeat_interleave(ids.shape[1], 0)
        gate, up = _halves([_slot_products(stack, slots, flat) for stack in self.gate_up])
        y = _slot_products(self.down, silu(gate) * up, flat)
        return (y.unflatten(0, ids.shape) * weights.unsqueeze(-1)).sum(1)


def _halves(found: Sequence[Tensor]) -> Sequence[Tensor]:
    """(gate, up) from one product of both or from two."""
    return found[0].chunk(2, -1) if len(found) == 1 else found


def _one_expert(stack: Packed, x: Tensor, expert: int) -> Tensor:
    """x [n, in] -> [n, out] through one expert of the stack."""
    chosen = stack.codec.select(stack.parts, expert)
    stack.count(x.shape[0], 2 * x.shape[0] * stack.shape[1] * stack.shape[2], parts_nbytes(chosen))
    return linear(x, stack.decode(chosen, x.dtype))


def _slot_products(stack: Packed, x: Tensor, slots: Tensor) -> Tensor:
    """x [s, in] -> [s, out], row i through expert slots[i]."""
    # Slots that share an expert need its bytes once, whatever an implementation gathers. On a GPU the most that can be: to look would wait for the device.
    distinct = int(slots.unique().numel()) if slots.device.type == "cpu" else min(len(slots), stack.shape[0])
    stack.count(len(slots), 2 * len(slots) * stack.shape[1] * stack.shape[2], stack.nbytes() // stack.shape[0] * distinct)
    return stack.slot_products(x, slots)


class PackedTable:
    """Rows of an encoded table [rows, width], whole or in row blocks, decoded after the gather."""

    def __init__(self, weight: Packed, dtype: torch.dtype, compute_device: torch.device) -> None:
        self.weight, self.dtype, self.compute_device = weight, dtype, compute_device

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., width] on the compute device."""
        flat = ids.flatten().to(self.weight.device)
        chosen = self.weight.codec.take_rows(self.weight.parts, flat)
        self.weight.count(flat.numel(), 0, parts_nbytes(chosen))
        return self.weight.decode(chosen, self.dtype).view(*ids.shape, -1).to(self.compute_device)
