"""Model architectures of the local engine, by the names that `conf/model` uses (`lab.compose.ARCHITECTURES`).

Why one door: artifacts, engine and ledger ask here for sizes, forward code and the list of tensors, and name no architecture themselves. What has forward
code is imported when it is asked for.
"""

from __future__ import annotations

from typing import Any, Protocol, Self

import torch
from torch import Tensor

from lab.errors import LabError
from lab.models.binder import Binder, Linear
from lab.models.inventory import InventoryBinder

TRANSFORMERS = ("llama", "qwen3", "qwen3_moe")
"""Names of the plain transformers, which share one model (`lab.models.transformer`)."""


class ModelConfig(Protocol):
    """What every architecture's sizes offer."""

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""

    @property
    def num_layers(self) -> int:
        """Decoder layers."""

    @property
    def eos_token_id(self) -> int:
        """The token that ends a text."""

    @property
    def experts_per_token(self) -> int:
        """Routed experts of a token, 0 in a dense model."""

    @property
    def ngram_heads(self) -> int:
        """Rows that a token looks up in the n-gram table, 0 without one."""

    def truncated(self, layers: int) -> Self:
        """The first `layers` layers. Raises LabError outside the model."""


class State(Protocol):
    """What B sequences carry from step to step. `length` tokens of `capacity` are filled."""

    length: int
    capacity: int

    def nbytes(self) -> int:
        """Bytes of all state tensors."""

    def read_bytes(self) -> float:
        """Bytes of state that one decode step reads at the present length."""


class Model(Protocol):
    """Forward code with its operations bound."""

    layers: list[Any]
    head: Linear

    def hidden(self, ids: Tensor, state: Any = None) -> Tensor:
        """ids int64 [B, T] -> final hidden states [B, T, H]."""

    def logits(self, ids: Tensor, state: Any = None, last_only: bool = False) -> Tensor:
        """ids int64 [B, T] -> logits [B, T or 1, V]."""

    def new_state(self, batch: int, capacity: int, device: torch.device, dtype: torch.dtype) -> State:
        """An empty state."""


def read_config(arch: str, data: dict[str, Any], where: str) -> ModelConfig:
    """Sizes from a parsed config.json. Raises LabError naming the field, or for an architecture without forward code."""
    if arch == "qwen4_exp":
        from lab.models.qwen4_exp.config import from_dict

        return from_dict(data, where)
    if arch in TRANSFORMERS:
        from lab.models.transformer import config

        return config.from_dict(data, where)
    raise LabError(f"{where}: no forward code for the architecture {arch!r}; there is code for qwen4_exp, {', '.join(TRANSFORMERS)}")


def build(config: ModelConfig, bind: Binder) -> Model:
    """The model of these sizes, its weights asked from `bind` layer by layer."""
    from lab.models.qwen4_exp.config import Qwen4ExpConfig

    if isinstance(config, Qwen4ExpConfig):
        from lab.models.qwen4_exp.model import Qwen4Exp

        return Qwen4Exp(config, bind)
    from lab.models.transformer.config import TransformerConfig
    from lab.models.transformer.model import Transformer

    assert isinstance(config, TransformerConfig)
    return Transformer(config, bind)


def inventory(config: ModelConfig) -> InventoryBinder:
    """What a model of these sizes asks for, without making a tensor."""
    binder = InventoryBinder()
    build(config, binder)
    return binder
