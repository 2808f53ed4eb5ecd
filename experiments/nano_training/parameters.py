"""Trainable weights for the engine's own forward code, and the checkpoint they are saved as.

The model that is trained is the model that is measured: this binder hands `lab.models.qwen4_exp` float32 parameters under their Hugging Face names
instead of encoded tensors. Experts are computed densely (every expert for every token, masked by the routing weights), which at 16 small experts is
faster on a GPU than gathering, and equal in value.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, embedding, linear, silu

from lab.models.binder import Experts, Linear, Table


class ParameterBinder:
    """Creates (or adopts from `tensors`) one float32 parameter per name; `parameters` and `constants` hold them all."""

    def __init__(self, device: torch.device, seed: int = 0, tensors: dict[str, Tensor] | None = None) -> None:
        self.device, self.tensors = device, tensors
        self.generator = torch.Generator().manual_seed(seed)
        self.training, self.dropout = False, 0.0
        self.parameters: dict[str, nn.Parameter] = {}
        self.constants: dict[str, Tensor] = {}

    def at_layer(self, layer: int | None) -> None:
        """Nothing to do: parameters are all in memory."""

    def _parameter(self, name: str, shape: tuple[int, ...], initial: Tensor | None = None, std: float = 0.02) -> nn.Parameter:
        if name not in self.parameters:
            if self.tensors is not None:
                value = self.tensors[name].float()
                if tuple(value.shape) != shape:
                    raise ValueError(f"{name}: shape {tuple(value.shape)}, expected {shape}")
            else:
                value = torch.randn(shape, generator=self.generator) * std if initial is None else initial.clone()
            self.parameters[name] = nn.Parameter(value.to(self.device))
        return self.parameters[name]

    def linear(self, name: str, out_features: int, in_features: int, component: str) -> Linear:
        """A parameter [out, in], initialised with std 1/sqrt(in); block outputs start smaller because they add to the residual streams."""
        del component
        closes = name.endswith(("out_proj.weight", "o_proj.weight", "down_proj.weight"))
        weight = self._parameter(name, (out_features, in_features), std=(0.3 if closes else 1.0) / math.sqrt(in_features))
        return lambda x: self._drop(linear(x, weight)) if closes else linear(x, weight)

    def _drop(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout, self.training)

    def vector(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Norm weights start at 0 (zero-centred) or 1 (GDN output norm); decays and taps as in the released class's initialisation."""
        if name.endswith("linear_attn.norm.weight") or name.endswith("dt_bias"):
            initial = torch.ones(shape)
        elif name.endswith("A_log"):
            initial = torch.empty(shape).uniform_(0.01, 16, generator=self.generator).log()
        elif name.endswith("ple.conv1d.weight"):
            initial = torch.zeros(shape)
        elif name.endswith("conv1d.weight"):
            initial = torch.empty(shape).uniform_(-0.5, 0.5, generator=self.generator)
        else:
            initial = torch.zeros(shape)
        return self._parameter(name, shape, initial)

    def integers(self, name: str, default: list[int]) -> Tensor:
        """The hash constants, kept as int64."""
        value = torch.tensor(default, dtype=torch.int64) if self.tensors is None else self.tensors[name]
        self.constants[name] = value
        return value.to(self.device)

    def experts(self, prefix: str, count: int, width: int, hidden: int) -> Experts:
        """All experts at once: two matrix products over the concatenated experts, the routing weights in between."""
        gate_up = self._parameter(f"{prefix}.gate_up_proj", (count, 2 * width, hidden), std=1 / math.sqrt(hidden))
        down = self._parameter(f"{prefix}.down_proj", (count, hidden, width), std=0.3 / math.sqrt(width))

        def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            gate, up = linear(x, gate_up.flatten(0, 1)).unflatten(-1, (count, 2 * width)).chunk(2, -1)
            share = torch.zeros(x.shape[0], count, device=x.device, dtype=weights.dtype).scatter(1, ids, weights)
            return self._drop((silu(gate) * up * share.to(x.dtype).unsqueeze(-1)).flatten(1) @ down.transpose(1, 2).flatten(0, 1))

        return run

    def table(self, prefix: str, rows: int, width: int) -> Table:
        """The n-gram table as one parameter; it is cut into shards when saved."""
        weight = self._parameter(f"{prefix}.weight", (rows, width), std=0.5)
        return lambda ids: self._drop(embedding(ids, weight))

    def embedding(self, name: str, rows: int, width: int) -> Table:
        """The token embedding."""
        weight = self._parameter(name, (rows, width), std=0.5)
        return lambda ids: embedding(ids, weight)


def checkpoint_tensors(binder: ParameterBinder, shards: int) -> dict[str, Tensor]:
    """bf16 tensors (constants int64) under the released names, prefix `model.`, the n-gram table in `shards` equal parts."""
    saved: dict[str, Tensor] = {}
    for name, parameter in binder.parameters.items():
        value = parameter.detach().to("cpu", torch.bfloat16)
        if name.endswith("ngram_embedding.weight"):
            stem = name.removesuffix("weight")
            for i, part in enumerate(value.chunk(shards)):
                saved[f"model.{stem}shard_{i}.weight"] = part.contiguous()
        else:
            saved[name if name == "lm_head.weight" else f"model.{name}"] = value.contiguous()
    saved.update({f"model.{name}": value.cpu().contiguous() for name, value in binder.constants.items()})
    return saved


def from_checkpoint(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `checkpoint_tensors`: names without prefix, the table's shards joined."""
    plain = {name.removeprefix("model."): value for name, value in tensors.items()}
    shards = sorted((n for n in plain if ".shard_" in n), key=lambda n: int(n.split(".shard_")[1].split(".")[0]))
    if shards:
        plain[shards[0].split("shard_")[0] + "weight"] = torch.cat([plain.pop(n) for n in shards])
    return plain
