"""The tensors of a `qwen4exp` GGUF in the order of the file, each with the rows that go into it, read and changed piece by piece.

Why streams: the table is larger than memory, and an expert stack in float32 nearly is. Every tensor is read when its turn comes and given on as float32
rows in pieces; what is done to it on the way stands in `lab.artifacts.gguf_names_qwen4exp`.
What it does not prove: that the rows are encoded well; `lab.convert.gguf` compares them after encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from lab.artifacts import gguf_names_qwen4exp as names
from lab.artifacts.gguf_names_qwen4exp import Change, Order, ValueHeads
from lab.artifacts.weights import Stored, Weights
from lab.models import inventory
from lab.models.qwen4_exp.config import Qwen4ExpConfig

_PIECE = 1 << 22
"""Weights decoded at a time: 16 MiB of float32."""


@dataclass(frozen=True)
class Outgoing:
    """A tensor to write. `rows` gives it as float32 [n, shape[-1]] pieces in order. A vector is F32 in every file."""

    name: str
    shape: tuple[int, ...]
    layer: int | None
    vector: bool
    rows: Callable[[], Iterator[Tensor]]


class _Experts:
    """The stacks of the layer that was asked for last: three tensors of the file come from one read."""

    def __init__(self, weights: Weights) -> None:
        self.weights, self.prefix = weights, ""
        self.held: tuple[Sequence[Stored], Sequence[Stored]] = ((), ())

    def blocks(self, prefix: str, count: int, part: int) -> tuple[Stored, slice]:
        """(a stack, the rows of each of its matrices that are part 0 gate, 1 up or 2 down)."""
        if prefix != self.prefix:
            self.held = ((), ())  # the old layer is let go before the new one is read
            self.prefix, self.held = prefix, self.weights.experts(prefix, count)
        gate_up, down = self.held
        if part == 2 or len(gate_up) == 2:
            return (down[0] if part == 2 else gate_up[part]), slice(None)
        width = gate_up[0].shape[1] // 2
        return gate_up[0], slice(part * width, (part + 1) * width)


def outgoing(config: Qwen4ExpConfig, weights: Weights) -> list[Outgoing]:
    """Every tensor of the file: those outside the layers, the layers in order, the table. Nothing is read yet."""
    wanted, experts = inventory(config), _Experts(weights)
    heads = ValueHeads(config.linear_num_key_heads, config.linear_num_value_heads, config.key_dim, config.linear_value_head_dim)
    shapes: dict[str, tuple[int, ...]] = {**{name: shape for name, (shape, _) in wanted.linears.items()}, **wanted.embeddings}
    out = [Outgoing(gguf, shapes[name], None, False, partial(_matrix, weights, name)) for name, gguf in names.GLOBAL_MATRICES.items() if name in shapes]
    for name, (gguf, change) in names.GLOBAL_VECTORS.items():
        out.append(_vector(weights, heads, name, gguf, change, wanted.vectors[name], None))
    for layer in range(config.num_layers):
        prefix, block = f"layers.{layer}.", f"blk.{layer}."
        for suffix, (gguf, change) in names.VECTORS.items():
            if (name := prefix + suffix) in wanted.vectors:
                out.append(_vector(weights, heads, name, block + gguf, change, wanted.vectors[name], layer))
        for suffix, (gguf, change) in names.MATRICES.items():
            if (name := prefix + suffix) in shapes:
                order = heads.to_file(change)
                along = partial(_matrix, columns=order) if change is Change.COLUMNS else partial(_matrix, order=order)
                out.append(Outgoing(block + gguf, shapes[name], layer, False, partial(along, weights, name)))
        hf, query, key = names.INDEXER
        if (name := prefix + hf) in shapes:
            rows, cols = shapes[name]
            border = rows - config.indexer_head_dim
            for gguf, part in ((query, range(border)), (key, range(border, rows))):
                out.append(Outgoing(block + gguf, (len(part), cols), layer, False, partial(_matrix, weights, name, part=part)))
        count, width, hidden = wanted.expert_stacks[f"{prefix}mlp.experts"]
        for part_number, gguf in enumerate(names.EXPERTS):
            shape = (count, hidden, width) if part_number == 2 else (count, width, hidden)
            out.append(Outgoing(block + gguf, shape, layer, False, partial(_stack, experts, f"{prefix}mlp.experts", count, part_number)))
    out += [Outgoing(names.TABLE, shape, None, False, partial(_table, weights, name)) for name, shape in wanted.tables.items()]
    return out


def _vector(weights: Weights, heads: ValueHeads, name: str, gguf: str, change: Change, shape: tuple[int, ...], layer: int | None) -> Outgoing:
    flat = (shape[0], shape[2]) if change in (Change.TAPS, Change.TAPS_QKV) else shape
    return Outgoing(gguf, flat, layer, True, partial(_changed, weights, name, change, heads))


def _changed(weights: Weights, name: str, change: Change, heads: ValueHeads) -> Iterator[Tensor]:
    values = weights.vector(name).to(torch.float32)
    if change is Change.PLUS_ONE:
        values = values + 1.0
    if change is Change.DECAY:
        values = -torch.exp(values)
    if change in (Change.TAPS, Change.TAPS_QKV):
        values = values.squeeze(1)
    order = heads.to_file(Change.QKV if change is Change.TAPS_QKV else change)
    if order is not None:
        values = values[torch.from_numpy(order)]
    yield values.view(-1, values.shape[-1])


def _matrix(weights: Weights, name: str, order: Order | None = None, columns: Order | None = None, part: range | None = None) -> Iterator[Tensor]:
    """Rows of a matrix, in `order`, or the `part` of them; or with its columns in the order `columns`."""
    (stored,) = weights.matrix(name)
    ids = torch.arange(stored.shape[0]) if part is None else torch.arange(part.start, part.stop)
    if order is not None:
        ids = torch.from_numpy(order)
    for rows in _decoded(stored, ids):
        yield rows if columns is None else rows[:, torch.from_numpy(columns)]


def _stack(experts: _Experts, prefix: str, count: int, part: int) -> Iterator[Tensor]:
    stored, rows = experts.blocks(prefix, count, part)
    step = max(1, _PIECE // (stored.shape[1] * stored.shape[2]))
    for ids in torch.arange(count).split(step):
        yield stored.codec.decode(stored.codec.select(stored.parts, ids), stored.shape[-1])[:, rows].reshape(-1, stored.shape[-1])


def _table(weights: Weights, prefix: str) -> Iterator[Tensor]:
    for index in range(weights.table_shards(prefix)):
        stored = weights.table_shard(prefix, index)
        yield from _decoded(stored, torch.arange(stored.shape[0]))


def _decoded(stored: Stored, ids: Tensor) -> Iterator[Tensor]:
    for some in ids.split(max(1, _PIECE // stored.shape[-1])):
        yield stored.codec.decode(stored.codec.take_rows(stored.parts, some), stored.shape[-1])
