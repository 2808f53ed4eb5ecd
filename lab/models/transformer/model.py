"""A whole plain transformer: embedding, layers, final norm, head; and the KV cache of a sequence.

One forward serves prefill, chunks after a filled cache, and decode; only the token count differs. `layers=N` is the first N layers with the final norm and
head. B sequences of equal length advance together. Parameters are read once, when the model is built: it is for inference, not for training.
Source: transformers 5.24.0, `LlamaModel`, `Qwen3Model`, `Qwen3MoeModel`, `Qwen3VLTextModel` (text alone).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lab.errors import LabError
from lab.models.binder import Binder
from lab.models.transformer.attention import Attention, Cache, Step, new_step
from lab.models.transformer.config import TransformerConfig
from lab.models.transformer.mlp import DenseMlp, RoutedMlp
from lab.models.transformer.norms import rms_norm
from lab.models.transformer.rope import inverse_frequencies


class TransformerState:
    """Keys and values of B sequences, allocated once for `capacity` tokens; the first `length` are filled, and nothing behind them is ever read."""

    def __init__(self, config: TransformerConfig, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        self.length, self.capacity, self.batch = 0, capacity, batch
        self.cache = torch.empty(config.num_layers, 2, batch, config.num_kv_heads, capacity, config.head_dim, device=device, dtype=dtype)
        self.layers: list[Cache] = [(layer[0], layer[1]) for layer in self.cache]
        self.graph: Any = None
        """The captured step on these tensors, where the engine made one (lab.engines.graphs)."""

    def reset(self) -> None:
        """Empties it in place: addresses stay, and so does what lies behind the length, which is never read."""
        self.length = 0

    def take(self, other: TransformerState) -> None:
        """Becomes what `other` is: the same sequences after the same tokens. Raises LabError where they do not fit."""
        if other.length > self.capacity or other.batch != self.batch:
            raise LabError(f"{other.batch} sequences of {other.length} tokens do not fit a state of {self.batch} sequences and {self.capacity} tokens")
        self.cache[..., : other.length, :].copy_(other.cache[..., : other.length, :])
        self.length = other.length

    def nbytes(self) -> int:
        """Bytes allocated."""
        return self.cache.nbytes

    def read_bytes(self) -> float:
        """Bytes of state one decode step reads at the present length: keys and values up to it."""
        return self.cache[..., : self.length, :].nbytes


class Layer:
    """One decoder layer: attention, then MLP or experts, each on the normed residual stream and added to it."""

    def __init__(self, config: TransformerConfig, bind: Binder, index: int) -> None:
        prefix, self.eps = f"layers.{index}", config.rms_norm_eps
        self.attention_norm = bind.vector(f"{prefix}.input_layernorm.weight", (config.hidden_size,))
        self.attention = Attention(config, bind, f"{prefix}.self_attn")
        self.mlp_norm = bind.vector(f"{prefix}.post_attention_layernorm.weight", (config.hidden_size,))
        self.mlp: DenseMlp | RoutedMlp = (RoutedMlp if config.is_sparse[index] else DenseMlp)(config, bind, f"{prefix}.mlp")

    def __call__(self, x: Tensor, step: Step, cache: Cache | None) -> Tensor:
        """x [B, T, H] -> [B, T, H]; extends `cache`."""
        x = x + self.attention(rms_norm(x, self.attention_norm, self.eps), step, cache)
        return x + self.mlp(rms_norm(x, self.mlp_norm, self.eps))


class Transformer:
    """The text model. `bind` is asked layer by layer, so a streaming binder never holds more than one layer of source tensors."""

    def __init__(self, config: TransformerConfig, bind: Binder) -> None:
        self.config = config
        self.inverse = inverse_frequencies(config.rope, config.head_dim)
        bind.at_layer(None)
        self.embed = bind.embedding("embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = []
        for index in range(config.num_layers):
            bind.at_layer(index)
            self.layers.append(Layer(config, bind, index))
        bind.at_layer(None)
        self.norm = bind.vector("norm.weight", (config.hidden_size,))
        head = "embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        self.head = bind.linear(head, config.vocab_size, config.hidden_size, "head")

    def hidden(self, ids: Tensor, state: TransformerState | None = None) -> Tensor:
        """ids int64 [B, T] -> final hidden states [B, T, H]; advances `state` by T tokens. Raises LabError when they do not fit the state."""
        batch, tokens = ids.shape
        start = 0
        if state is not None:
            start = state.length
            if start + tokens > state.capacity:
                raise LabError(f"{start} + {tokens} tokens do not fit a state of {state.capacity}")
            if batch != state.batch:
                raise LabError(f"{batch} sequences do not fit a state of {state.batch} sequences")
        x = self.embed(ids)
        self.inverse = self.inverse.to(x.device)
        step = new_step(self.inverse, start, start + tokens, x.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, step, None if state is None else state.layers[index])
        if state is not None:
            state.length += tokens
        return rms_norm(x, self.norm, self.config.rms_norm_eps)

    def logits(self, ids: Tensor, state: TransformerState | None = None, last_only: bool = False) -> Tensor:
        """ids [B, T] -> logits [B, T, V] (or [B, 1, V] of the last token)."""
        hidden = self.hidden(ids, state)
        return self.head(hidden[:, -1:] if last_only else hidden)

    def new_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> TransformerState:
        """An empty state for `batch` sequences of up to `capacity` tokens."""
        return TransformerState(self.config, batch, capacity, device, dtype)
