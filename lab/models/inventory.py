"""A binder that only writes down what a model asks for: names, shapes, components. No tensor is made.

The forward code itself is therefore the one list of a model's tensors; checking a checkpoint and accounting its bytes read it from here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from lab.models.binder import Experts, Linear, Table


def _never(*_: Tensor) -> Tensor:
    raise RuntimeError("an inventory holds no weights to compute with")


@dataclass
class InventoryBinder:
    """Requests by name. `layer_of` says in which layer each was made (None: outside the layers)."""

    linears: dict[str, tuple[tuple[int, int], str]] = field(default_factory=dict)
    vectors: dict[str, tuple[int, ...]] = field(default_factory=dict)
    constants: dict[str, list[int]] = field(default_factory=dict)
    expert_stacks: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    tables: dict[str, tuple[int, int]] = field(default_factory=dict)
    embeddings: dict[str, tuple[int, int]] = field(default_factory=dict)
    layer_of: dict[str, int | None] = field(default_factory=dict)
    layer: int | None = None

    def at_layer(self, layer: int | None) -> None:
        """Remembers the layer of the following requests."""
        self.layer = layer

    def linear(self, name: str, out_features: int, in_features: int, component: str) -> Linear:
        """Notes a matrix [out, in]."""
        self.linears[name], self.layer_of[name] = ((out_features, in_features), component), self.layer
        return _never

    def vector(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Notes a small float tensor; returns a meta tensor of its shape."""
        self.vectors[name], self.layer_of[name] = shape, self.layer
        return torch.empty(shape, device="meta")

    def integers(self, name: str, default: list[int]) -> Tensor:
        """Notes an int64 constant and the value derived for it."""
        self.constants[name], self.layer_of[name] = default, self.layer
        return torch.tensor(default)

    def experts(self, prefix: str, count: int, width: int, hidden: int) -> Experts:
        """Notes a stack of routed experts."""
        self.expert_stacks[prefix], self.layer_of[prefix] = (count, width, hidden), self.layer
        return _never

    def table(self, prefix: str, rows: int, width: int) -> Table:
        """Notes the n-gram table."""
        self.tables[prefix], self.layer_of[prefix] = (rows, width), self.layer
        return _never

    def embedding(self, name: str, rows: int, width: int) -> Table:
        """Notes the token embedding."""
        self.embeddings[name], self.layer_of[name] = (rows, width), self.layer
        return _never

    def weights(self) -> dict[str, int]:
        """Weights by component, as the sizes define them: what has to be resident when a component is complete."""
        found: dict[str, int] = {}
        for (rows, cols), component in self.linears.values():
            found[component] = found.get(component, 0) + rows * cols
        found["experts"] = sum(3 * count * width * hidden for count, width, hidden in self.expert_stacks.values())
        found["ple"] = sum(rows * width for rows, width in self.tables.values())
        found["embed"] = sum(rows * width for rows, width in self.embeddings.values())
        return {component: weights for component, weights in sorted(found.items()) if weights}

    def rows_per_token(self, experts_per_token: int, ngram_heads: int) -> list[tuple[int | None, str, int]]:
        """(layer, component, rows of activations its operations see for every token): matrices of the trunk once each, both matrices of each chosen
        expert, one row per n-gram head. The head is left out: decoding asks it for the last token only."""
        found: dict[tuple[int | None, str], int] = {}
        for name, (_, component) in self.linears.items():
            if component == "trunk":
                found[self.layer_of[name], component] = found.get((self.layer_of[name], component), 0) + 1
        found |= {(self.layer_of[prefix], "experts"): 2 * experts_per_token for prefix in self.expert_stacks}
        found |= {(self.layer_of[prefix], "ple"): ngram_heads for prefix in self.tables}
        return [(layer, component, rows) for (layer, component), rows in found.items()]

    def component_layers(self) -> dict[str, list[int | None]]:
        """The layers in which each component exists: {"experts": [0, 1, ...], "ple": [1], "head": [None], ...}."""
        found: dict[str, set[int | None]] = {}
        for name, (_, component) in self.linears.items():
            found.setdefault(component, set()).add(self.layer_of[name])
        for kind, names in (("experts", self.expert_stacks), ("ple", self.tables), ("embed", self.embeddings)):
            for name in names:
                found.setdefault(kind, set()).add(self.layer_of[name])
        return {kind: sorted(layers, key=lambda x: -1 if x is None else x) for kind, layers in sorted(found.items())}
