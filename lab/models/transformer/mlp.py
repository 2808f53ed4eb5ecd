"""The two feed-forward blocks of plain transformers: one gated MLP, or routed experts behind a softmax router.

The router works in float32; the k chosen probabilities are divided by their sum only where `norm_topk_prob` says so. The experts are one operation given
by the binder, because they are where paths differ most. Source: transformers 5.24.0, `LlamaMLP`, `Qwen3MoeTopKRouter`, `Qwen3MoeSparseMoeBlock`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from lab.models.binder import Binder
from lab.models.transformer.config import TransformerConfig


class DenseMlp:
    """x [B, T, H] -> down(silu(gate x) * up x) [B, T, H]."""

    def __init__(self, config: TransformerConfig, bind: Binder, prefix: str) -> None:
        self.width = config.mlp_width
        self.gate = bind.linear(f"{prefix}.gate_proj.weight", config.mlp_width, config.hidden_size, "trunk")
        self.up = bind.linear(f"{prefix}.up_proj.weight", config.mlp_width, config.hidden_size, "trunk")
        self.down = bind.linear(f"{prefix}.down_proj.weight", config.hidden_size, config.mlp_width, "trunk")

    def __call__(self, x: Tensor) -> Tensor:
        """Every token on its own."""
        return self.down(silu(self.gate(x)) * self.up(x))


class RoutedMlp:
    """x [B, T, H] -> weighted sum of the chosen experts [B, T, H]."""

    def __init__(self, config: TransformerConfig, bind: Binder, prefix: str) -> None:
        self.experts_per_token, self.normalise = config.experts_per_token, config.norm_topk_prob
        self.gate = bind.linear(f"{prefix}.gate.weight", config.num_experts, config.hidden_size, "small")
        self.experts = bind.experts(f"{prefix}.experts", config.num_experts, config.expert_width, config.hidden_size)

    def route(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """flat [T, H] -> (expert ids int64 [T, k], weights [T, k] in flat's dtype)."""
        probabilities = self.gate(flat).softmax(-1, dtype=torch.float32)
        weights, ids = probabilities.topk(self.experts_per_token, dim=-1)
        if self.normalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights.to(flat.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Routes every token on its own; the batch shape does not enter."""
        flat = x.flatten(0, 1)
        return self.experts(flat, *self.route(flat)).view_as(x)
