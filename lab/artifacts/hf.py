"""A checkpoint folder in the Hugging Face layout as the engine sees it: config.json, tokenizer.json and safetensors.

Every layout is adopted as it is: bf16, e4m3 with its scales, or float16 and float32 (as GGUF's plain floats; as bf16 where every value fits it exactly).
Apart from `checkpoint`, which reads tensors by name and knows no codec.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from lab.artifacts.checkpoint import Checkpoint
from lab.artifacts.inspection import inspect_folder, load_tokenizer
from lab.artifacts.weights import Stored
from lab.codecs import create
from lab.codecs.e4m3 import from_release
from lab.errors import LabError
from lab.models import ModelConfig, read_config
from lab.models.fields import config_json

_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_WIDER = {torch.float16: "gguf:F16", torch.float32: "gguf:F32"}
"""Codecs of what does not fit bf16."""


class HfArtifact:
    """The folder at `path`, holding a model of the architecture `arch`."""

    format = "safetensors"

    def __init__(self, path: Path, arch: str) -> None:
        """Raises LabError where there is no such folder."""
        if not path.is_dir():
            raise LabError(f"{path}: no such artifact folder (model.artifact)")
        self.path, self.arch = path, arch

    def config(self) -> ModelConfig:
        """Sizes from config.json. Raises LabError naming the field."""
        return read_config(self.arch, config_json(self.path / "config.json"), str(self.path / "config.json"))

    def weights(self) -> HfWeights:
        """The tensors. Raises LabError naming a file that is missing or truncated."""
        return HfWeights(Checkpoint(self.path))

    def tokenizer(self) -> Tokenizer:
        """tokenizer.json. Raises LabError."""
        return load_tokenizer(self.path)

    def inspect(self) -> dict[str, Any]:
        """As `lab.artifacts.inspection` has it. Raises LabError."""
        return inspect_folder(self.path, self.config())


class HfWeights:
    """`lab.artifacts.weights.Weights` over a checkpoint."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.where = checkpoint, str(checkpoint.folder)

    def matrix(self, name: str) -> Sequence[Stored]:
        """One block. Block scales beside it are honoured."""
        scale = f"{name}_scale_inv" if f"{name}_scale_inv" in self.checkpoint else None
        return (self._stored(self.checkpoint.get(name), self.checkpoint.get(scale) if scale else None, name),)

    def column_order(self, name: str) -> Tensor | None:
        """None: columns are in the model's order."""
        return None

    def vector(self, name: str) -> Tensor:
        """As stored. Raises LabError for anything but bf16, float16 and float32."""
        stored = self.checkpoint.get(name)
        if stored.dtype not in _FLOATS:
            raise LabError(f"{self.where}: {name} is stored as {stored.dtype}; small parameters must be bf16, float16 or float32")
        return stored

    def integers(self, name: str) -> Tensor:
        """Raises LabError when it is stored as anything but int64."""
        value = self.checkpoint.get(name)
        if value.dtype != torch.int64:
            raise LabError(f"{self.where}: {name} is stored as {value.dtype}; hash constants must be int64")
        return value

    def experts(self, prefix: str, count: int) -> tuple[Sequence[Stored], Sequence[Stored]]:
        """Two stacks, gate rows before up rows."""
        gate_up, down = ((self._stored(*self.checkpoint.expert_stack(prefix, count, kind), f"{prefix}.{kind}"),) for kind in ("gate_up", "down"))
        return gate_up, down

    def table_shards(self, prefix: str) -> int:
        """Shards of the release, or 1."""
        return len(self.checkpoint.table(prefix)[0])

    def table_shard(self, prefix: str, index: int) -> Stored:
        """One shard, with the table's global scale where it has one."""
        names, scale = self.checkpoint.table(prefix)
        return self._stored(self.checkpoint.get(names[index]), scale, names[index])

    def _stored(self, stored: Tensor, scale: Tensor | None, name: str) -> Stored:
        """The tensor as it is in the file: bf16, wider floats, or e4m3 with its released scale. Raises LabError for values that are no numbers."""
        if scale is not None:
            return Stored(*from_release(stored, scale), tuple(stored.shape))
        if stored.dtype not in _FLOATS:
            raise LabError(f"{self.where}: {name} is stored as {stored.dtype} without a scale; expected bf16, or e4m3 with its scale")
        exact = stored.dtype == torch.bfloat16 or torch.equal(stored.to(torch.bfloat16).to(stored.dtype), stored)
        source = create("bf16" if exact else _WIDER[stored.dtype])
        try:
            return Stored(source, source.encode(stored), tuple(stored.shape))
        except LabError as error:
            raise LabError(f"{self.where}: {name}: {error}") from None
