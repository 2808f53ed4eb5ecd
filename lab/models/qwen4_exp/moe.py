"""Mixture of experts: softmax router, top-k routed experts, and one shared expert behind a sigmoid gate.

The router works in float32 and renormalises the k chosen probabilities to sum 1 (`norm_topk_prob`). The routed experts are one operation given
by the binder, because they are where paths differ most. Source: transformers 5.24.0, `Qwen4ExpTextSparseMoeBlock`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from lab.models.binder import Binder
from lab.models.qwen4_exp.config import Qwen4ExpConfig


class SparseMoe:
    """x [B, T, H] -> routed + shared expert output [B, T, H]."""

    def __init__(self, config: Qwen4ExpConfig, bind: Binder, prefix: str) -> None:
        self.config = config
        hidden, shared = config.hidden_size, config.shared_width
        self.gate = bind.linear(f"{prefix}.gate.weight", config.num_experts, hidden, "small")
        self.experts = bind.experts(f"{prefix}.experts", config.num_experts, config.expert_width, hidden)
        self.shared_gate = bind.linear(f"{prefix}.shared_expert_gate.weight", 1, hidden, "small")
        self.shared = [bind.linear(f"{prefix}.shared_expert.{p}_proj.weight", shared, hidden, "trunk") for p in ("gate", "up")]
        self.shared_down = bind.linear(f"{prefix}.shared_expert.down_proj.weight", hidden, shared, "trunk")

    def route(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """flat [T, H] -> (expert ids int64 [T, k], weights [T, k] in flat's dtype)."""
        probabilities = self.gate(flat).softmax(-1, dtype=torch.float32)
        weights, ids = probabilities.topk(self.config.experts_per_token, dim=-1)
        if self.config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights.to(flat.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """Routes every token on its own; the batch shape does not enter."""
        flat = x.flatten(0, 1)
        ids, weights = self.route(flat)
        shared = self.shared_down(silu(self.shared[0](flat)) * self.shared[1](flat))
        return (self.experts(flat, ids, weights) + torch.sigmoid(self.shared_gate(flat)) * shared).view_as(x)
