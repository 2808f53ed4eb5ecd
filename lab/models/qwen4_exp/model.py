"""The whole `qwen4_exp` text model: embedding, layers, final mixer, head; and the state a sequence carries.

One forward serves training, prefill and decode; only the token count differs. `layers=N` is the first N layers with the final mixer and head, and
needs no attention layer among them. B sequences of equal length advance together. Vision tower and draft head (MTP) are not part of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lab.errors import LabError
from lab.models.binder import Binder
from lab.models.qwen4_exp.config import Qwen4ExpConfig
from lab.models.qwen4_exp.delta import DeltaState, GatedDelta
from lab.models.qwen4_exp.hyper import HyperMixer, write_back
from lab.models.qwen4_exp.moe import SparseMoe
from lab.models.qwen4_exp.ngram import NGramInjection, PleState
from lab.models.qwen4_exp.sparse_attention import AttentionState, SparseAttention


class ModelState:
    """Everything B sequences carry from step to step, allocated once for `capacity` tokens."""

    def __init__(self, config: Qwen4ExpConfig, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> None:
        self.length, self.capacity = 0, capacity
        self.layers: list[DeltaState | AttentionState] = [
            AttentionState(config, batch, capacity, device, dtype) if sparse else DeltaState(config, batch, device, dtype) for sparse in config.is_sparse
        ]
        self.ple = None if config.ple_layer is None else PleState(config, batch, device, dtype)
        self.graph: Any = None
        """The captured step on these tensors, where the engine made one (lab.engines.graphs)."""
        self._empty_token = config.eos_token_id
        self._choice = config.indexer_budget + config.indexer_block

    def reset(self) -> None:
        """Empties it in place: addresses stay. Keys beyond the length are never read, so they stay, too."""
        self.length = 0
        for own in self.layers:
            if isinstance(own, DeltaState):
                own.conv.zero_()
                own.memory.zero_()
        if self.ple is not None:
            self.ple.tokens.fill_(self._empty_token)
            self.ple.conv.zero_()

    def take(self, other: ModelState) -> None:
        """Becomes what `other` is: the same sequences after the same tokens. Raises LabError where they do not fit."""
        if other.length > self.capacity:
            raise LabError(f"{other.length} tokens do not fit a state of {self.capacity}")
        pairs: list[tuple[Tensor, Tensor]] = []
        for own, its in zip(self.layers, other.layers, strict=True):
            if isinstance(own, DeltaState) and isinstance(its, DeltaState):
                pairs += [(own.conv, its.conv), (own.memory, its.memory)]
            elif isinstance(own, AttentionState) and isinstance(its, AttentionState):
                pairs += [(getattr(own, name)[:, : other.length], getattr(its, name)[:, : other.length]) for name in ("keys", "values", "index_keys")]
        if self.ple is not None and other.ple is not None:
            pairs += [(self.ple.tokens, other.ple.tokens), (self.ple.conv, other.ple.conv)]
        for kind in {own.dtype for own, _ in pairs}:
            same = [pair for pair in pairs if pair[0].dtype == kind]
            torch._foreach_copy_([own for own, _ in same], [its for _, its in same])
        self.length = other.length

    def nbytes(self) -> int:
        """Bytes of all state tensors."""
        return sum(s.nbytes() for s in self.layers) + (0 if self.ple is None else self.ple.nbytes())

    def read_bytes(self) -> float:
        """Bytes of state one decode step reads at the present length: keys and values up to it, everything else whole."""
        filled = self.length / self.capacity
        return sum(s.nbytes() * (filled if isinstance(s, AttentionState) else 1) for s in self.layers) + (self.ple.nbytes() if self.ple else 0)

    def chosen_bytes(self) -> float:
        """Bytes of state one decode step has to read at the present length: as `read_bytes`, but of keys and values what the indexer chooses at most."""
        spare = max(0, self.length - self._choice) / self.capacity
        return self.read_bytes() - spare * sum(s.keys.nbytes + s.values.nbytes for s in self.layers if isinstance(s, AttentionState))


class Layer:
    """One decoder layer: optional PLE injection, then a token mixer (GDN or QSA) and the experts, each inside a hyper-connection."""

    def __init__(self, config: Qwen4ExpConfig, bind: Binder, index: int) -> None:
        prefix = f"layers.{index}"
        self.ple = NGramInjection(config, bind, f"{prefix}.ple") if index == config.ple_layer else None
        self.attn_mixer = HyperMixer(config, bind, f"{prefix}.attn_hyper_connection")
        self.attention: SparseAttention | None = None
        self.delta: GatedDelta | None = None
        if config.is_sparse[index]:
            self.attention = SparseAttention(config, bind, f"{prefix}.self_attn")
        else:
            self.delta = GatedDelta(config, bind, f"{prefix}.linear_attn")
        self.mlp_mixer = HyperMixer(config, bind, f"{prefix}.mlp_hyper_connection")
        self.moe = SparseMoe(config, bind, f"{prefix}.mlp")

    def __call__(self, streams: Tensor, ids: Tensor, state: ModelState | None, mixer_state: DeltaState | AttentionState | None) -> Tensor:
        """streams [B, T, C*H] -> streams; advances the layer's own state."""
        if self.ple is not None:
            streams = streams + self.ple(streams, ids, None if state is None else state.ple)
        x, injection = self.attn_mixer(streams)
        if self.attention is not None:
            assert mixer_state is None or isinstance(mixer_state, AttentionState)
            y = self.attention(x, mixer_state, 0 if state is None else state.length)
        else:
            assert self.delta is not None and (mixer_state is None or isinstance(mixer_state, DeltaState))
            y = self.delta(x, mixer_state, 0 if state is None else state.length)
        assert injection is not None
        streams = write_back(streams, y, injection)
        x, injection = self.mlp_mixer(streams)
        assert injection is not None
        return write_back(streams, self.moe(x), injection)


class Qwen4Exp:
    """The text model. `bind` is asked layer by layer, so a streaming binder never holds more than one layer of source tensors."""

    def __init__(self, config: Qwen4ExpConfig, bind: Binder) -> None:
        self.config = config
        bind.at_layer(None)
        self.embed = bind.embedding("embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.layers = []
        for index in range(config.num_layers):
            bind.at_layer(index)
            self.layers.append(Layer(config, bind, index))
        bind.at_layer(None)
        self.mixer = HyperMixer(config, bind, "hyper_connection_mixer", combine=False)
        head = "embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        self.head = bind.linear(head, config.vocab_size, config.hidden_size, "head")
        self.prompt: Any = None
        """The same pass through fused kernels, for several tokens at a time, where the engine found one for its device (lab.models.qwen4_exp.prompt)."""

    def hidden(self, ids: Tensor, state: ModelState | None = None, depth: int | None = None) -> Tensor:
        """ids int64 [B, T] -> final hidden states [B, T, H]; advances `state` by T tokens. `depth` stops after the first layers (training).
        Raises LabError when the tokens do not fit the state's capacity."""
        if state is not None and state.length + ids.shape[1] > state.capacity:
            raise LabError(f"{state.length} + {ids.shape[1]} tokens do not fit a state of {state.capacity}")
        if self.prompt is not None and ids.shape[1] > 1 and depth is None and self.prompt.fits(ids, state):
            hidden: Tensor = self.prompt(ids, state)
            return hidden
        streams = self.embed(ids).repeat(1, 1, self.config.hc_count)
        for index, layer in enumerate(self.layers[:depth]):
            streams = layer(streams, ids, state, None if state is None else state.layers[index])
        if state is not None:
            state.length += ids.shape[1]
        return self.mixer(streams)[0]

    def logits(self, ids: Tensor, state: ModelState | None = None, last_only: bool = False) -> Tensor:
        """ids [B, T] -> logits [B, T, V] (or [B, 1, V] of the last token)."""
        hidden = self.hidden(ids, state)
        return self.head(hidden[:, -1:] if last_only else hidden)

    def new_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> ModelState:
        """An empty state for `batch` sequences of up to `capacity` tokens."""
        return ModelState(self.config, batch, capacity, device, dtype)
