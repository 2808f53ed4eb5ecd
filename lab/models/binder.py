"""How a model gets its weights without knowing where they come from.

A model module asks a `Binder` for its operations by Hugging Face parameter name: a linear map, a stack of experts, a table of rows, a small
vector. A checkpoint binder streams tensors from files and encodes them with a path's codecs; a training binder hands out parameters; a
synthetic one makes random codes. The forward code is the same for all, so what is trained, measured and compared is one model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

Linear = Callable[[Tensor], Tensor]
"""x [..., in] -> y [..., out], in x's dtype."""

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x [T, hidden], ids int64 [T, k], weights [T, k]) -> weighted sum of down(silu(gate x) * up x) over the k experts, [T, hidden]."""

Table = Callable[[Tensor], Tensor]
"""row ids int64 [...] -> rows [..., width] in the compute dtype."""


class Binder(Protocol):
    """Source of a model's operations. Names are full Hugging Face names without the `model.` or `model.language_model.` prefix."""

    def linear(self, name: str, out_features: int, in_features: int, component: str) -> Linear:
        """The matrix `name` [out, in] as an operation. `component` decides codec and placement; `small` keeps source precision."""

    def vector(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A small float parameter (norm weight, convolution taps, decay), float32 on the compute device."""

    def integers(self, name: str, default: list[int]) -> Tensor:
        """An int64 constant of the file, or `default` where the source has none. Never goes through a float."""

    def experts(self, prefix: str, count: int, width: int, hidden: int) -> Experts:
        """The routed experts below `prefix` (`...mlp.experts`)."""

    def table(self, prefix: str, rows: int, width: int) -> Table:
        """The n-gram table below `prefix` (`...ngram_embedding`)."""

    def embedding(self, name: str, rows: int, width: int) -> Table:
        """The token embedding, always in source precision."""

    def at_layer(self, layer: int | None) -> None:
        """Says which layer (None: outside the layers) the following requests belong to, for counting and streaming."""
