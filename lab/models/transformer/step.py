"""One decode step of a plain transformer with fixed shapes: no host read, no shape that depends on the position, so that it can be captured as a graph.

The same weights and the same state as the plain forward code, which it must equal to rounding; tests compare both. The position is a number on the device.
Matrices that read the same input are one launch where their kernels can be joined. Around the products stand the kernels of lab.kernels; where there is no
GPU, or heads have a size without a kernel, their plain-torch references. What it does not prove: that a step can be captured, which the engine tries
and records (lab.engines.graphs).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lab.engines.strips import StripExperts, StripLinear
from lab.errors import LabError
from lab.kernels import cache_step, residual_step
from lab.models.qwen4_exp.step_parts import Stacked
from lab.models.transformer.attention import Attention, Cache
from lab.models.transformer.mlp import DenseMlp, RoutedMlp
from lab.models.transformer.model import Layer, Transformer, TransformerState
from lab.models.transformer.rope import rotary_tables
from lab.ops_gpu import unavailable


@dataclass(frozen=True)
class Between:
    """What a step does between its products, as lab.kernels.residual_step and cache_step define it."""

    add_norm: Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]
    gated: Callable[[Tensor], Tensor]
    prepare: Callable[..., Tensor]
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


KERNELS = Between(residual_step.add_norm, residual_step.gated, cache_step.prepare, cache_step.attend)
PLAIN = Between(residual_step.reference_add_norm, residual_step.reference_gated, cache_step.reference_prepare, cache_step.reference_attend)


Joint = tuple[object, str, str, tuple[str, ...], tuple[int, ...]]
"""(holder, attribute, kind, names of the matrices, rows of each)."""


class StepAttention:
    """x [B, H], normed -> y [B, H], adding to the layer's cache."""

    def __init__(self, block: Attention, between: Between) -> None:
        self.block, self.between = block, between
        self.project = Stacked(block.q, block.k, block.v)

    def __call__(self, x: Tensor, position: Tensor, tables: cache_step.Tables, cache: Cache) -> Tensor:
        block, between = self.block, self.between
        query = between.prepare(self.project(x), position, tables, block.norm, block.heads[0], block.eps, *cache)
        return block.o(between.attend(query, *cache, position))


class StepDense:
    """x [B, H], normed -> the MLP's output [B, H]."""

    def __init__(self, mlp: DenseMlp, between: Between) -> None:
        self.mlp, self.gated = mlp, between.gated
        self.gate_up = Stacked(mlp.gate, mlp.up)

    def __call__(self, x: Tensor) -> Tensor:
        return self.mlp.down(self.gated(self.gate_up(x)))


class StepRouted:
    """The same for routed experts: the model's own operations, which take any number of rows."""

    def __init__(self, mlp: RoutedMlp) -> None:
        self.mlp = mlp

    def __call__(self, x: Tensor) -> Tensor:
        return self.mlp.experts(x, *self.mlp.route(x))


class StepLayer:
    """One layer: x [B, H] and the output still to be added to it -> the same of this layer."""

    def __init__(self, layer: Layer, between: Between) -> None:
        """Raises LabError where weights would be rebuilt inside the step."""
        self.layer, self.add_norm = layer, between.add_norm
        self.attention = StepAttention(layer.attention, between)
        self.mlp: StepDense | StepRouted = StepRouted(layer.mlp) if isinstance(layer.mlp, RoutedMlp) else StepDense(layer.mlp, between)
        _require_resident(layer)

    def __call__(self, x: Tensor, added: Tensor | None, position: Tensor, tables: cache_step.Tables, cache: Cache) -> tuple[Tensor, Tensor]:
        layer = self.layer
        x, normed = self.add_norm(x, added, layer.attention_norm, layer.eps)
        x, normed = self.add_norm(x, self.attention(normed, position, tables, cache), layer.mlp_norm, layer.eps)
        return x, self.mlp(normed)

    def stacked(self) -> list[Joint]:
        """The products that are one operation for several matrices."""
        own = self.layer.attention
        heads, d = own.heads, own.head_dim
        found: list[Joint] = [(self.attention, "project", "attention", ("q", "k", "v"), (heads[0] * d, heads[1] * d, heads[1] * d))]
        if isinstance(self.mlp, StepDense):
            found.append((self.mlp, "gate_up", "mlp", ("gate", "up"), (self.mlp.mlp.width,) * 2))
        return found


class TransformerStep:
    """A model's step: (ids int64 [B, 1], state, position int32 [1]) -> logits [B, 1, V]. Weights are joined once, here."""

    def __init__(self, model: Transformer, device: torch.device, dtype: torch.dtype, between: Between | None = None) -> None:
        """`between`: by default kernels where they can run. Raises LabError with the reason where this model has no step."""
        self.model, self.device, self.dtype = model, device, dtype
        c = model.config
        reason = unavailable(device, torch.bfloat16) or cache_step.refused(c.num_heads, c.num_kv_heads, c.head_dim)
        self.between = between or (KERNELS if reason is None else PLAIN)
        self.layers = [StepLayer(layer, self.between) for layer in model.layers]
        self._tables: dict[int, cache_step.Tables] = {}

    def tables(self, capacity: int) -> cache_step.Tables:
        """cos and signed sin [capacity, head_dim] of every position, made once per capacity."""
        if capacity not in self._tables:
            cos, sin = rotary_tables(self.model.inverse.to(self.device), 0, capacity, self.dtype)
            self._tables[capacity] = cos.squeeze(1).contiguous(), sin.squeeze(1).contiguous()
        return self._tables[capacity]

    def __call__(self, ids: Tensor, state: TransformerState, position: Tensor) -> Tensor:
        """Advances the tensors of `state` by one token; `state.length` is the caller's business."""
        tables = self.tables(state.capacity)
        x = self.model.embed(ids).squeeze(1).contiguous()
        added: Tensor | None = None
        for layer, cache in zip(self.layers, state.layers, strict=True):
            x, added = layer(x, added, position, tables, cache)
        _, normed = self.between.add_norm(x, added, self.model.norm, self.model.config.rms_norm_eps)
        return self.model.head(normed).unsqueeze(1)


def _require_resident(layer: Layer) -> None:
    """Raises LabError where an operation fetches its weights anew at every call: a captured copy would read memory that is gone."""
    for op in (*vars(layer.attention).values(), *vars(layer.mlp).values()):
        strips = [op.strip] if isinstance(op, StripLinear) else [*op.gate_up, op.down] if isinstance(op, StripExperts) else []
        if not all(strip.stays() for strip in strips):
            raise LabError("weights are rebuilt while running: a budget is below what the strips take")
