"""Causal grouped-query attention with rotary positions and, in Qwen3, a norm on every head's queries and keys.

Few torch calls per layer: decoding one token costs little arithmetic, so calls count. What all layers share (tables, mask) comes with the `Step`; queries
and keys are normed and rotated as one tensor; keys and values go straight into the cache. Source: transformers 5.24.0, `LlamaAttention`, `Qwen3Attention`.
What it does not prove: which kernel torch picks for the product on another device.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lab.models.binder import Binder
from lab.models.transformer.config import TransformerConfig
from lab.models.transformer.norms import rms_norm
from lab.models.transformer.rope import rotary_tables, rotate

_ANY_LENGTH = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Without cuDNN's: it makes a plan for every length it has not seen, and a token decoded has one more key than the one before. 252 steps at new lengths took
20 s on an H200, the same lengths again under 3 s."""
Cache = tuple[Tensor, Tensor]
"""Keys and values of one layer, each [B, kv heads, capacity, d]."""


@dataclass(frozen=True)
class Step:
    """What one forward pass of the positions start..end-1 shares between layers. `mask` [T, end] is added to the scores; None where torch's own causal
    mask, or none, is right."""

    start: int
    end: int
    cos: Tensor
    sin: Tensor
    mask: Tensor | None


def new_step(inverse: Tensor, start: int, end: int, dtype: torch.dtype) -> Step:
    """The step of these positions, on the device of the inverse frequencies [d / 2]."""
    mask = None
    if start and end - start > 1:
        mask = torch.full((end - start, end), -torch.inf, dtype=dtype, device=inverse.device).triu(start + 1)
    return Step(start, end, *rotary_tables(inverse, start, end, dtype), mask)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention with scale d^-1/2. q [B, T, heads, d]; k, v [B, kv heads, S, d] with heads a multiple of kv heads -> [B, T, heads * d].

    One token sees all S. Several see what `mask` [T, S] leaves them, or, without one, each the tokens up to itself (S = T)."""
    batch, tokens, heads, width = q.shape
    groups = heads // k.shape[1]
    if tokens == 1:
        # The heads that share keys stand where tokens would: keys are read once, not once per head, and nothing is copied.
        with nullcontext() if q.device.type == "cpu" else sdpa_kernel(_ANY_LENGTH):
            return scaled_dot_product_attention(q.reshape(batch, -1, groups, width), k, v).reshape(batch, 1, -1)
    if groups > 1 and q.device.type != "cpu":
        # torch's memory-saving kernels for GPUs do not all take shared keys, and without them the scores [heads, T, S] are written out.
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    read = scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=k.shape[1] != heads)
    return read.transpose(1, 2).reshape(batch, tokens, -1)


class Attention:
    """One attention block: x [B, T, H] -> y [B, T, H]."""

    def __init__(self, config: TransformerConfig, bind: Binder, prefix: str) -> None:
        hidden, d, queries, keys = config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads
        self.heads, self.head_dim, self.eps = (queries, keys), d, config.rms_norm_eps
        self.q = bind.linear(f"{prefix}.q_proj.weight", queries * d, hidden, "trunk")
        self.k = bind.linear(f"{prefix}.k_proj.weight", keys * d, hidden, "trunk")
        self.v = bind.linear(f"{prefix}.v_proj.weight", keys * d, hidden, "trunk")
        self.o = bind.linear(f"{prefix}.o_proj.weight", hidden, queries * d, "trunk")
        self.norm: Tensor | None = None
        if config.qk_norm:
            q_norm, k_norm = (bind.vector(f"{prefix}.{n}_norm.weight", (d,)) for n in ("q", "k"))
            self.norm = torch.cat([q_norm.expand(queries, d), k_norm.expand(keys, d)])

    def __call__(self, x: Tensor, step: Step, cache: Cache | None) -> Tensor:
        """`cache` is extended in place. Without one, the step must start at 0."""
        split = (*x.shape[:2], -1)
        both = torch.cat([self.q(x), self.k(x)], -1).view(*split[:2], sum(self.heads), -1)
        if self.norm is not None:
            both = rms_norm(both, self.norm, self.eps)
        q, k = rotate(both, step.cos, step.sin).split(self.heads, 2)
        k, v = k.transpose(1, 2), self.v(x).view(*split[:2], self.heads[1], -1).transpose(1, 2)
        if cache is not None:
            keys, values = cache
            keys[:, :, step.start : step.end], values[:, :, step.start : step.end] = k, v
            k, v = keys[:, :, : step.end], values[:, :, : step.end]
        return self.o(attend(q, k, v, step.mask))
