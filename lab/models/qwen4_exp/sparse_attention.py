"""QSA: grouped-query attention restricted to the blocks of tokens that a small indexer selects, with a sigmoid output gate.

Visible tokens are cut from position 0 into blocks of `indexer_compress_ratio`; complete blocks are scored by the indexer and the best
`budget / ratio` are kept, plus the incomplete tail. With fewer visible tokens than the budget this is exactly dense attention. Source: transformers
5.24.0 (`Qwen4ExpTextAttention`, `...QSAIndexer`), which leaves equal scores to `topk`; see `_best` for what is done about them here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from lab.models.binder import Binder
from lab.models.qwen4_exp.config import Qwen4ExpConfig
from lab.models.qwen4_exp.norms import rms_norm


class AttentionState:
    """Per layer: keys and values [B, capacity, kv heads, d] and raw index keys [B, capacity, di], filled up to the model state's length."""

    def __init__(self, config: Qwen4ExpConfig, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        self.keys = torch.zeros(batch, capacity, config.num_kv_heads, config.head_dim, device=device, dtype=dtype)
        self.values = torch.zeros_like(self.keys)
        self.index_keys = torch.zeros(batch, capacity, config.indexer_head_dim, device=device, dtype=dtype)

    def nbytes(self) -> int:
        """Bytes allocated; a decode step reads at most this."""
        return self.keys.nbytes + self.values.nbytes + self.index_keys.nbytes


def rotary_tables(config: Qwen4ExpConfig, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos, sin [T, rotary_dim] for positions [T]. Text only: the three M-RoPE axes are equal, so it is ordinary rotary embedding."""
    half = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32, device=positions.device) / config.rotary_dim
    angles = positions.float()[:, None] / config.rope_theta**half
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class RotaryTables:
    """`rotary_tables` of positions 0 .. capacity - 1, made once per capacity: a captured step needs them at one address."""

    def __init__(self, config: Qwen4ExpConfig, device: torch.device, dtype: torch.dtype) -> None:
        self._config, self._device, self._dtype = config, device, dtype
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, capacity: int) -> tuple[Tensor, Tensor]:
        """cos and sin [capacity, rotary_dim]."""
        if capacity not in self._made:
            self._made[capacity] = rotary_tables(self._config, torch.arange(capacity, device=self._device), self._dtype)
        return self._made[capacity]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates the first rotary_dim of x [B, T, heads, d] (pairs i, i + rotary_dim/2), leaves the rest."""
    width = cos.shape[-1]
    turned, rest = x[..., :width], x[..., width:]
    first, second = turned.chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([turned * cos + torch.cat([-second, first], -1) * sin, rest], -1)


class Indexer:
    """Scores blocks of past tokens for each query. Keys are cached raw; they are pooled, normed and rotated when read."""

    def __init__(self, config: Qwen4ExpConfig, bind: Binder, prefix: str) -> None:
        self.config = config
        self.project = bind.linear(f"{prefix}.index_qk_proj.weight", (config.indexer_heads + 1) * config.indexer_head_dim, config.hidden_size, "small")
        self.q_norm = bind.vector(f"{prefix}.q_layernorm.weight", (config.indexer_head_dim,))
        self.k_norm = bind.vector(f"{prefix}.k_layernorm.weight", (config.indexer_head_dim,))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [B, T, H] -> (raw queries [B, T, heads, di], raw keys [B, T, di])."""
        c = self.config
        q, k = self.project(x).split([c.indexer_heads * c.indexer_head_dim, c.indexer_head_dim], -1)
        return q.unflatten(-1, (c.indexer_heads, -1)), k

    def scores(self, q: Tensor, raw_keys: Tensor, start: int) -> Tensor:
        """Block scores [B, T, blocks] (float32, >= 0) of queries at positions start.. for the complete blocks of raw_keys [B, S, di]."""
        c = self.config
        blocks = torch.arange(raw_keys.shape[1] // c.indexer_block, device=q.device) * c.indexer_block
        queries = rotary_tables(c, torch.arange(start, start + q.shape[1], device=q.device), q.dtype)
        return self._scored(q, raw_keys, queries, rotary_tables(c, blocks, q.dtype))

    def _scored(self, q: Tensor, raw_keys: Tensor, queries: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor]) -> Tensor:
        """`scores` with cos and sin of the queries' and of the blocks' positions."""
        c, blocks = self.config, len(keys[0])
        q = rotate(rms_norm(q, self.q_norm, c.rms_norm_eps), *queries)
        pooled = raw_keys[:, : blocks * c.indexer_block].unflatten(1, (blocks, c.indexer_block)).float().mean(2).to(raw_keys.dtype)
        pooled = rotate(rms_norm(pooled, self.k_norm, c.rms_norm_eps).unsqueeze(2), *keys).squeeze(2)
        per_head = torch.einsum("bthd,bnd->bthn", q.float(), pooled.float())
        return torch.relu(per_head).sum(2) * c.indexer_head_dim**-0.5

    def scores_at(self, index: Tensor, raw_keys: Tensor, position: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Block scores float32 [B, blocks] of one query at `position` (int64 [1], on the device), on shapes that do not depend on it: index [B, queries | key],
        raw_keys [B, capacity, di], tables cos and sin [capacity, rotary]; -inf where a block is not complete."""
        c, (cos, sin) = self.config, tables
        blocks = raw_keys.shape[1] // c.indexer_block
        q = index[:, : -c.indexer_head_dim].unflatten(-1, (c.indexer_heads, -1)).unsqueeze(1)
        starts = slice(0, blocks * c.indexer_block, c.indexer_block)
        scores = self._scored(q, raw_keys, (cos[position], sin[position]), (cos[starts], sin[starts]))[:, 0]
        return scores.masked_fill(torch.arange(blocks, device=index.device) >= (position + 1) // c.indexer_block, -torch.inf)

    def chosen_at(self, index: Tensor, raw_keys: Tensor, position: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """uint8 [B, blocks]: 1 for the budget's best blocks by `scores_at`, the earlier of equal ones. lab.kernels.indexer_step does both in two launches."""
        scores = self.scores_at(index, raw_keys, position, tables)
        order = scores.sort(stable=True, dim=-1, descending=True).indices[:, : self.config.indexer_budget // self.config.indexer_block]
        return torch.zeros_like(scores, dtype=torch.uint8).scatter_(-1, order, 1) * (scores > -torch.inf)

    def select(self, scores: Tensor, start: int, keys: int) -> Tensor:
        """Which of `keys` tokens each query may see, bool [B, T, keys]: the best complete blocks, and the tail up to the query itself."""
        c = self.config
        block, (batch, tokens, blocks) = c.indexer_block, scores.shape
        position = torch.arange(start, start + tokens, device=scores.device)
        complete = (position + 1) // block
        ready = torch.arange(blocks, device=scores.device) < complete[:, None]
        chosen = ready.expand(batch, -1, -1)
        budget = c.indexer_budget // block
        if blocks > budget:
            chosen = _best(scores, complete, budget) & ready
        token = torch.arange(keys, device=scores.device)
        tail = (token >= (complete * block)[:, None]) & (token <= position[:, None])
        return pad(chosen.repeat_interleave(block, -1), (0, keys - blocks * block)) | tail


def _best(scores: Tensor, complete: Tensor, budget: int) -> Tensor:
    """The `budget` best of each query's first `complete` blocks, bool like scores [B, T, blocks]; all of them where there are no more.

    Scores tie often: relu makes zeros. On the CPU each query's own row goes through `topk`, exactly as in transformers, so that both pick the same of
    equal blocks; elsewhere one stable sort for all queries prefers the earlier block, since a call per row would cost a launch each.
    """
    if scores.device.type != "cpu":
        hidden = torch.arange(scores.shape[-1], device=scores.device) >= complete[:, None]
        order = scores.masked_fill(hidden, -torch.inf).sort(stable=True, dim=-1, descending=True).indices[..., :budget]
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, True)
    chosen = torch.ones_like(scores, dtype=torch.bool)
    for count in complete[complete > budget].unique().tolist():
        rows = torch.where(complete == count)[0]
        best = scores[:, rows, :count].topk(budget, dim=-1).indices
        chosen[:, rows] = torch.zeros_like(chosen[:, rows]).scatter(-1, best, True)
    return chosen


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    """Softmax attention in float32 with scale d^-1/2. q [B, T, heads, d]; k, v [B, S, kv, d]; visible bool [B, T, S] -> [B, T, heads, d]."""
    groups = q.shape[2] // k.shape[2]
    q = q.unflatten(2, (-1, groups))
    logits = torch.einsum("btkgd,bskd->bkgts", q, k) * q.shape[-1] ** -0.5
    weights = logits.float().masked_fill(~visible[:, None, None], -torch.inf).softmax(-1).to(q.dtype)
    return torch.einsum("bkgts,bskd->btkgd", weights, v).flatten(2, 3)


class SparseAttention:
    """One QSA block: x [B, T, H] -> y [B, T, H]."""

    def __init__(self, config: Qwen4ExpConfig, bind: Binder, prefix: str) -> None:
        self.config = config
        hidden, d = config.hidden_size, config.head_dim
        self.q = bind.linear(f"{prefix}.q_proj.weight", config.num_heads * d * 2, hidden, "trunk")
        self.k = bind.linear(f"{prefix}.k_proj.weight", config.num_kv_heads * d, hidden, "trunk")
        self.v = bind.linear(f"{prefix}.v_proj.weight", config.num_kv_heads * d, hidden, "trunk")
        self.o = bind.linear(f"{prefix}.o_proj.weight", hidden, config.num_heads * d, "trunk")
        self.q_norm = bind.vector(f"{prefix}.q_norm.weight", (d,))
        self.k_norm = bind.vector(f"{prefix}.k_norm.weight", (d,))
        self.indexer = Indexer(config, bind, f"{prefix}.indexer")
        self.attend = attend

    def __call__(self, x: Tensor, state: AttentionState | None, start: int) -> Tensor:
        """Tokens at positions start..start+T-1; `state` is extended in place. Without a state, start must be 0."""
        c = self.config
        tokens, end = x.shape[1], start + x.shape[1]
        q, gate = self.q(x).unflatten(-1, (c.num_heads, 2 * c.head_dim)).chunk(2, -1)
        k = self.k(x).unflatten(-1, (c.num_kv_heads, c.head_dim))
        v = self.v(x).unflatten(-1, (c.num_kv_heads, c.head_dim))
        cos, sin = rotary_tables(c, torch.arange(start, end, device=x.device), x.dtype)
        q = rotate(rms_norm(q, self.q_norm, c.rms_norm_eps), cos, sin)
        k = rotate(rms_norm(k, self.k_norm, c.rms_norm_eps), cos, sin)
        index_q, index_k = self.indexer.split(x)
        if state is not None:
            state.keys[:, start:end], state.values[:, start:end], state.index_keys[:, start:end] = k, v, index_k
            k, v, index_k = state.keys[:, :end], state.values[:, :end], state.index_keys[:, :end]
        visible = self.indexer.select(self.indexer.scores(index_q, index_k, start), start, end)
        read = self.attend(q, k, v, visible) * torch.sigmoid(gate)
        return self.o(read.reshape(x.shape[0], tokens, -1))
