"""Two training-only losses, attached to the engine's model from outside so that the engine has no training code.

Router balance: the usual product of load and probability per expert (Fedus et al. 2021, arXiv 2101.03961, eq. 4). Indexer: cross-entropy from the
attention mass per block of tokens to the indexer's block scores, so that sparse selection learns what dense attention looks at (the idea of
DeepSeek-V3.2's sparse-attention warm-up); its input is detached, it teaches the indexer only. While `dense` is true attention ignores the selection.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lab.models.qwen4_exp.model import Qwen4Exp
from lab.models.qwen4_exp.moe import SparseMoe
from lab.models.qwen4_exp.sparse_attention import SparseAttention, attend


class AuxiliaryLosses:
    """Wraps the routers and attention blocks of a model; `collect()` returns and clears what the last forward pass left."""

    def __init__(self, model: Qwen4Exp) -> None:
        self.dense = True
        self.balance: list[Tensor] = []
        self.indexer: list[Tensor] = []
        for layer in model.layers:
            self._watch_router(layer.moe)
            if layer.attention is not None:
                self._watch_attention(layer.attention)

    def collect(self) -> tuple[Tensor, Tensor]:
        """(mean router balance loss, mean indexer loss); zeros where nothing ran."""
        result = tuple(torch.stack(x).mean() if x else torch.zeros(()) for x in (self.balance, self.indexer))
        self.balance, self.indexer = [], []
        return result[0], result[1]

    def _watch_router(self, moe: SparseMoe) -> None:
        gate = moe.gate

        def watched(x: Tensor) -> Tensor:
            logits = gate(x)
            probabilities = logits.softmax(-1, dtype=torch.float32)
            chosen = probabilities.topk(moe.config.experts_per_token, dim=-1).indices
            load = torch.zeros_like(probabilities).scatter(1, chosen, 1.0).mean(0)
            self.balance.append((load * probabilities.mean(0)).sum() * moe.config.num_experts / moe.config.experts_per_token)
            return logits

        moe.gate = watched

    def _watch_attention(self, attention: SparseAttention) -> None:
        indexer = attention.indexer
        split, scores = indexer.split, indexer.scores
        seen: list[Tensor] = []

        def watched_scores(q: Tensor, raw_keys: Tensor, start: int) -> Tensor:
            result = scores(q, raw_keys, start)
            seen.append(result)
            return result

        def watched_attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
            if not self.dense:
                seen.clear()
                return attend(q, k, v, visible)
            causal = torch.ones_like(visible).tril()
            mass, read = attention_mass(q, k, v, causal, indexer.config.indexer_block)
            self.indexer.append(block_loss(seen.pop(), mass, indexer.config.indexer_block))
            return read

        indexer.split = _detached(split)  # type: ignore[method-assign, assignment]
        indexer.scores = watched_scores  # type: ignore[method-assign]
        attention.attend = watched_attend


def _detached(split: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    return lambda x: split(x.detach())


def attention_mass(q: Tensor, k: Tensor, v: Tensor, causal: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """(detached attention mass per complete block [B, T, S // block], averaged over heads; attention output [B, T, heads, d])."""
    groups = q.shape[2] // k.shape[2]
    logits = torch.einsum("btkgd,bskd->bkgts", q.unflatten(2, (-1, groups)), k) * q.shape[-1] ** -0.5
    weights = logits.masked_fill(~causal[:, None, None], -torch.inf).softmax(-1)
    read = torch.einsum("bkgts,bskd->btkgd", weights, v).flatten(2, 3)
    whole = weights.shape[-1] // block * block
    return weights.detach().mean((1, 2))[..., :whole].unflatten(-1, (-1, block)).sum(-1), read


def block_loss(scores: Tensor, mass: Tensor, block: int) -> Tensor:
    """Cross-entropy of softmax(scores) against the mass normalised over complete visible blocks; queries with fewer than two blocks do not count."""
    tokens, blocks = scores.shape[1], scores.shape[2]
    ready = torch.arange(blocks, device=scores.device) < ((torch.arange(tokens, device=scores.device) + 1) // block)[:, None]
    target = mass * ready
    target = target / target.sum(-1, keepdim=True).clamp_min(1e-9)
    log_p = scores.masked_fill(~ready, -1e9).log_softmax(-1)
    rows = ready.sum(-1) >= 2
    return -(target * log_p * ready).sum(-1)[:, rows].mean()
