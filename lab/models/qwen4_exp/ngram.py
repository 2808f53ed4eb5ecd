"""PLE: one hashed table of 2- and 3-gram embeddings, injected into all residual streams before one layer.

Each token hashes with its one and two predecessors into rows of a large table (51 GB in Flash-Next); the rows become a gated value added to every
stream. Hash constants are int64 and must stay exact: a float32 cast of them gives fluent, wrong text. Source: transformers 5.24.0
(`Qwen4ExpTextNGramEmbedding`, `...PLELayer`); a token that is EOS hides everything before it from later tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from lab.models.binder import Binder
from lab.models.qwen4_exp.config import Qwen4ExpConfig
from lab.models.qwen4_exp.norms import grouped_rms_norm

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _splitmix64(value: int) -> int:
    """Finaliser of the splitmix64 generator (Steele, Lea, Flood 2014), 64-bit wrap-around."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def hash_multipliers(config: Qwen4ExpConfig, ple_index: int = 0) -> list[int]:
    """The odd int64 multipliers, one per n-gram position, small enough that token * multiplier never overflows."""
    bound = max(1, ((1 << 63) - 1) // config.vocab_size // 2)
    seed = config.ngram_seed + 10007 * ple_index
    return [2 * (_splitmix64((seed + _GOLDEN * (i + 1)) & _MASK) % bound) + 1 for i in range(config.ngram_size)]


def head_sizes(config: Qwen4ExpConfig) -> list[int]:
    """Rows per hashed head: the first primes >= ngram_vocab_size_base, in order."""
    sizes: list[int] = []
    candidate = config.ngram_vocab_base
    while len(sizes) < config.ngram_heads:
        if candidate > 1 and all(candidate % d for d in range(2, math.isqrt(candidate) + 1)):
            sizes.append(candidate)
        candidate += 1
    return sizes


def head_offsets(config: Qwen4ExpConfig) -> list[int]:
    """First row of each head in the one table."""
    sizes = head_sizes(config)
    return [sum(sizes[:i]) for i in range(len(sizes))]


def table_rows(config: Qwen4ExpConfig) -> int:
    """Rows of the table: the heads' rows, padded to the divisor."""
    divisor = config.ngram_vocab_divisor
    return -(-sum(head_sizes(config)) // divisor) * divisor


class PleState:
    """The last n-1 token ids [B, n-1] and the convolution's past inputs [B, (K-1)*dilation, C*H]."""

    def __init__(self, config: Qwen4ExpConfig, batch: int, device: torch.device, dtype: torch.dtype) -> None:
        self.tokens = torch.full((batch, config.ngram_size - 1), config.eos_token_id, dtype=torch.int64, device=device)
        reach = (config.ple_conv_kernel - 1) * config.ngram_size
        self.conv = torch.zeros(batch, reach, config.streams_width, device=device, dtype=dtype)

    def nbytes(self) -> int:
        """Bytes a decode step reads of this state."""
        return self.tokens.nbytes + self.conv.nbytes


def ngram_row_ids(history: Tensor, config: Qwen4ExpConfig, multipliers: Tensor, sizes: Tensor, offsets: Tensor) -> Tensor:
    """history int64 [B, n-1+T] (older context first, EOS where there is none) -> table rows int64 [B, T, heads]."""
    reach = config.ngram_size - 1
    tokens = history.shape[1] - reach
    current = history[:, reach:]
    key = current * multipliers[0]
    hidden = torch.zeros_like(current, dtype=torch.bool)
    blocks = []
    for back in range(1, config.ngram_size):
        previous = history[:, reach - back : reach - back + tokens]
        # Once a predecessor is EOS, it and everything older reads as EOS.
        hidden = hidden | (previous == config.eos_token_id)
        key = key ^ (torch.where(hidden, config.eos_token_id, previous) * multipliers[back])
        span = slice((back - 1) * config.heads_per_ngram, back * config.heads_per_ngram)
        blocks.append(key.unsqueeze(-1) % sizes[span] + offsets[span])
    return torch.cat(blocks, -1)


class NGramInjection:
    """The PLE module: (streams [B, T, C*H], ids [B, T]) -> what to add to the streams."""

    def __init__(self, config: Qwen4ExpConfig, bind: Binder, prefix: str) -> None:
        self.config = config
        wide, width = config.streams_width, config.ple_embed_dim // config.ngram_heads
        self.key = bind.linear(f"{prefix}.key_proj.weight", wide, config.ple_embed_dim, "trunk")
        self.value = bind.linear(f"{prefix}.value_proj.weight", config.hidden_size, config.ple_embed_dim, "trunk")
        self.norms = [bind.vector(f"{prefix}.norm_{n}.weight", (wide,)) for n in ("key", "query", "conv")]
        self.taps = bind.vector(f"{prefix}.conv1d.weight", (wide, 1, config.ple_conv_kernel))
        inner = f"{prefix}.ple_embedding"
        self.multipliers = bind.integers(f"{inner}.layer_multipliers", hash_multipliers(config))
        self.sizes = bind.integers(f"{inner}.ngram_heads_vocab_sizes", head_sizes(config))
        self.offsets = bind.integers(f"{inner}.ngram_heads_offsets", head_offsets(config))
        self.table = bind.table(f"{inner}.ngram_embedding", table_rows(config), width)

    def __call__(self, streams: Tensor, ids: Tensor, state: PleState | None) -> Tensor:
        """Advances `state` in place. Gate: sigmoid of the signed square root of <key, query> / sqrt(H), per stream."""
        c = self.config
        reach = c.ngram_size - 1
        history = pad(ids, (reach, 0), value=c.eos_token_id) if state is None else torch.cat([state.tokens, ids], 1)
        rows = ngram_row_ids(history, c, self.multipliers, self.sizes, self.offsets)
        embedded = self.table(rows).flatten(-2)
        split = (c.hc_count, c.hidden_size)
        key, query = (
            grouped_rms_norm(t, w, c.hc_count, c.rms_norm_eps).unflatten(-1, split) for t, w in ((self.key(embedded), self.norms[0]), (streams, self.norms[1]))
        )
        match = (key * query).sum(-1, keepdim=True) / math.sqrt(c.hidden_size)
        gate = torch.sigmoid(match.abs().clamp_min(1e-6).sqrt() * match.sign())
        gated = (gate * self.value(embedded).unsqueeze(-2)).flatten(-2)
        if state is not None:
            state.tokens.copy_(history[:, -reach:])
        return gated + silu(self._convolve(grouped_rms_norm(gated, self.norms[2], c.hc_count, c.rms_norm_eps), state))

    def _convolve(self, x: Tensor, state: PleState | None) -> Tensor:
        """Depthwise causal convolution with dilation ngram_size over tokens, x [B, T, C*H]; the last tap is the current token."""
        taps = self.taps.squeeze(1).to(x.dtype)
        kernel, tokens, dilation = taps.shape[1], x.shape[1], self.config.ngram_size
        reach = (kernel - 1) * dilation
        history = pad(x, (0, 0, reach, 0)) if state is None else torch.cat([state.conv, x], 1)
        if state is not None:
            state.conv.copy_(history[:, -reach:])
        return torch.stack([history[:, i * dilation : i * dilation + tokens] * taps[:, i] for i in range(kernel)]).sum(0)
