"""The tensors of a model and the state of a sequence, as sizes: what a ledger is counted from.

One small form for every architecture. `qwen4_exp` fills it from its real forward code (`lab.capacity.qwen4_exp`); the plain transformers below have no
forward code here, so their list is written down and held against published file sizes in the tests. Vision towers and draft heads are left out: no path
loads them. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lab.models.fields import Fields

Kind = Literal["matrix", "experts", "table", "embedding", "vector"]


@dataclass(frozen=True)
class Weight:
    """One stored tensor. `layer` is None outside the layers. `experts` are stacks [count, rows, cols]; a `table` is read by rows."""

    name: str
    component: str
    kind: Kind
    shape: tuple[int, ...]
    layer: int | None = None

    @property
    def count(self) -> int:
        """Number of weights."""
        return prod(self.shape)


@dataclass(frozen=True)
class ModelSizes:
    """A model cut to its first layers. `state_bytes(batch, tokens)` is what that many sequences of that length carry, `table_rows` the rows a token
    looks up in the n-gram table, `widest` the widest row of activations. `released` names the codec (and options) of components that the release
    does not store in 16 bits."""

    weights: tuple[Weight, ...]
    layers: int
    vocab_size: int
    widest: int
    state_bytes: Callable[[int, int], int]
    experts_per_token: int = 0
    table_rows: int = 0
    released: dict[str, tuple[str, dict[str, str]]] = field(default_factory=dict)

    @property
    def expert_layers(self) -> list[int]:
        """The layers that have routed experts, in order."""
        return sorted({w.layer for w in self.weights if w.kind == "experts" and w.layer is not None})


TRANSFORMERS = ("qwen3", "qwen3_moe", "llama")
"""The architectures of `transformer_sizes`."""


def transformer_sizes(fields: Fields, arch: str, layers: int, scalar_bytes: int) -> ModelSizes:
    """Sizes of a model of `TRANSFORMERS` from the fields of a Hugging Face config.json; keys and values take `scalar_bytes` per number.

    qwen3 has a norm on queries and keys, qwen3_moe experts in every layer that `decoder_sparse_step` and `mlp_only_layers` leave them. The head is
    listed even where it is tied to the embedding: files with low-bit heads store both. Raises LabError naming the field.
    """
    whole = fields.whole
    hidden, vocab, heads, intermediate = whole("hidden_size"), whole("vocab_size"), whole("num_attention_heads"), whole("intermediate_size")
    kv_heads, head_dim = whole("num_key_value_heads", heads), whole("head_dim", hidden // heads)
    total, count = whole("num_hidden_layers"), whole("num_experts") if arch == "qwen3_moe" else 0
    if not 1 <= layers <= total:
        raise fields.refuse(f"the model has {total} layers, not {layers}")
    dense = fields.data.get("mlp_only_layers") or []
    chosen = whole("num_experts_per_tok", most=count) if count else 0
    if not isinstance(dense, list):
        raise fields.refuse(f"mlp_only_layers {dense!r}: expected a list of layer numbers")
    queries, keys = heads * head_dim, kv_heads * head_dim
    found = [Weight("embed_tokens", "embed", "embedding", (vocab, hidden))]

    def add(layer: int, name: str, *shape: int, component: str = "trunk", kind: Kind = "matrix") -> None:
        found.append(Weight(name, component, kind, shape, layer))

    for layer in range(layers):
        for name, rows, cols in (("q", queries, hidden), ("k", keys, hidden), ("v", keys, hidden), ("o", hidden, queries)):
            add(layer, name, rows, cols)
        sparse = count and (layer + 1) % whole("decoder_sparse_step", 1) == 0 and layer not in dense
        width = whole("moe_intermediate_size") if sparse else intermediate
        lead = (count,) if sparse else ()
        for name, rows, cols in (("gate", width, hidden), ("up", width, hidden), ("down", hidden, width)):
            add(layer, name, *lead, rows, cols, component="experts" if sparse else "trunk", kind="experts" if sparse else "matrix")
        if sparse:
            add(layer, "router", count, hidden, component="small")
        for name, width in (("attn_norm", hidden), ("ffn_norm", hidden), *((("q_norm", head_dim), ("k_norm", head_dim)) if arch != "llama" else ())):
            add(layer, name, width, component="vectors", kind="vector")
    found += [Weight("final_norm", "vectors", "vector", (hidden,)), Weight("lm_head", "head", "matrix", (vocab, hidden))]
    return ModelSizes(
        weights=tuple(found),
        layers=layers,
        vocab_size=vocab,
        widest=max(hidden, queries, intermediate),
        state_bytes=lambda batch, tokens: 2 * layers * batch * tokens * keys * scalar_bytes,
        experts_per_token=chosen,
    )
