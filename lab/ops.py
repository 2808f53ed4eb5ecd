"""The engine's operations on encoded weights in plain PyTorch: linear map, routed experts, row table.

Weights stay packed; every call decodes what it needs and multiplies, so resident bytes and bytes read are the codec's own. This is the reference
that runs on any device; it is not fast at low bits, because each decode costs arithmetic. Every operation counts itself in `lab.counters` where
it decodes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from lab.codecs import Codec, Parts, parts_nbytes
from lab.counters import Counters


class Packed:
    """An encoded weight of a component: the codec, its parts, and the counter key of operations on it."""

    def __init__(self, codec: Codec, parts: Parts, shape: tuple[int, ...], layer: int | None, component: str, counters: Counters) -> None:
        self.codec, self.parts, self.shape, self.counters = codec, parts, shape, counters
        self.device = next(iter(parts.values())).device
        self.key = (layer, component, codec.name, self.device.type)

    def nbytes(self) -> int:
        """Bytes resident."""
        return parts_nbytes(self.parts)

    def decode(self, parts: Parts, dtype: torch.dtype, rows: int, flops: int, nbytes: int | None = None) -> Tensor:
        """Decodes `parts` (all of them, or a selection) to `dtype` and counts one call on `rows` rows of activations, reading `nbytes` of weights
        (default: all of `parts`; fewer where a selection repeats)."""
        self.counters.add(self.key, rows, parts_nbytes(parts) if nbytes is None else nbytes, flops)
        if self.codec.name == "bf16":  # no detour through float32 where the stored dtype is the one computed in
            return parts["weight"].to(dtype)
        return self.codec.decode(parts, self.shape[-1]).to(dtype)


class PackedLinear:
    """y = x W^T for an encoded W [out, in]."""

    def __init__(self, weight: Packed) -> None:
        self.weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out] in x's dtype."""
        rows = x.numel() // x.shape[-1]
        return linear(x, self.weight.decode(self.weight.parts, x.dtype, rows, 2 * rows * self.weight.shape[0] * self.weight.shape[1]))


class PackedExperts:
    """Routed experts from two encoded stacks: gate_up [E, 2 width, hidden] (gate rows first) and down [E, hidden, width]."""

    def __init__(self, gate_up: Packed, down: Packed) -> None:
        self.gate_up, self.down = gate_up, down

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden], ids [T, k], weights [T, k] -> [T, hidden]. Few tokens: one batched product over the (token, expert) slots; many: one
        product per expert over its tokens. Both decode each expert that is used, once per slot or once per call."""
        if ids.numel() <= self.gate_up.shape[0]:
            return self._by_slot(x, ids, weights)
        out = torch.zeros_like(x)
        for expert in range(self.gate_up.shape[0]):
            token, slot = torch.where(ids == expert)
            if token.numel():
                y = self._expert(x[token], expert)
                out.index_add_(0, token, y * weights[token, slot].unsqueeze(-1))
        return out

    def _expert(self, x: Tensor, expert: int) -> Tensor:
        gate, up = linear(x, self._decoded(self.gate_up, expert, x.dtype, x.shape[0])).chunk(2, -1)
        return linear(silu(gate) * up, self._decoded(self.down, expert, x.dtype, x.shape[0]))

    def _by_slot(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        flat = ids.flatten()
        slots = x.repeat_interleave(ids.shape[1], 0).unsqueeze(-1)
        gate, up = (self._decoded(self.gate_up, flat, x.dtype, flat.numel()) @ slots).squeeze(-1).chunk(2, -1)
        y = (self._decoded(self.down, flat, x.dtype, flat.numel()) @ (silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        return (y.unflatten(0, ids.shape) * weights.unsqueeze(-1)).sum(1)

    @staticmethod
    def _decoded(stack: Packed, index: Tensor | int, dtype: torch.dtype, rows: int) -> Tensor:
        flops = 2 * rows * stack.shape[1] * stack.shape[2]
        chosen = stack.codec.select(stack.parts, index)
        # Slots that share an expert need its bytes once, whatever this reference implementation gathers.
        nbytes = None if isinstance(index, int) else parts_nbytes(chosen) * int(index.unique().numel()) // max(1, index.numel())
        return stack.decode(chosen, dtype, rows, flops, nbytes)


class PackedTable:
    """Rows of an encoded table [rows, width], decoded after the gather."""

    def __init__(self, weight: Packed, dtype: torch.dtype, compute_device: torch.device) -> None:
        self.weight, self.dtype, self.compute_device = weight, dtype, compute_device

    def __call__(self, ids: Tensor) -> Tensor:
        """ids [...] -> [..., width] on the compute device."""
        flat = ids.flatten().to(self.weight.device)
        rows = self.weight.decode(self.weight.codec.take_rows(self.weight.parts, flat), self.dtype, flat.numel(), 0)
        return rows.view(*ids.shape, -1).to(self.compute_device)
