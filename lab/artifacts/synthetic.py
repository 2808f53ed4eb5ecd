"""Weights that exist nowhere: random codes in the path's own codecs, at a model's true sizes, made where they will be computed with.

Why: speed, memory and placement of a model do not need its 360 GB of files. A few rows are drawn, encoded with the real codec and repeated in random
order, so that every part has the layout, the bytes and the spread of real weights, and no encoding of billions of weights is waited for.
What it does not prove: anything about quality. Perplexity is a gap by definition, and a router of random rows spreads tokens as random rows do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from lab.artifacts.inspection import load_tokenizer
from lab.artifacts.weights import Stored
from lab.cell import SYNTHETIC
from lab.codecs import Codec, Parts, create
from lab.codecs.base import take
from lab.errors import LabError
from lab.models import ModelConfig, inventory, read_config

SEED = 20260826
_SPREAD = 0.02
"""Standard deviation of drawn weights: that of the initialisation of these models (`initializer_range` of transformers' configurations)."""
_POOL_ROWS = 512
_STRIDE = 193  # no divisor in common with the pool's rows
_LONG_ROWS = 1 << 20


class SyntheticArtifact:
    """A model of the sizes in `geometry`, a config.json; texts are read with the tokenizer in `tokenizer_folder`, whose ids are all below its vocabulary."""

    format = "synthetic"

    def __init__(self, geometry: Path, arch: str, tokenizer_folder: Path) -> None:
        """Raises LabError where the sizes cannot be read."""
        self.path, self.arch, self._tokenizer = geometry, arch, tokenizer_folder
        try:
            self._data = json.loads(geometry.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise LabError(f"{geometry}: artifact={SYNTHETIC} needs the model's sizes (model.geometry), and they are not readable ({error})") from None

    def config(self) -> ModelConfig:
        """The sizes. Raises LabError naming the field."""
        return read_config(self.arch, self._data, str(self.path))

    def weights(self, layers: int, codecs: Mapping[str, Codec], device: torch.device, host: frozenset[str] = frozenset()) -> SyntheticWeights:
        """Weights of the first `layers` layers: components of `codecs` in those, the rest in bf16; on `device`, those of `host` on the CPU."""
        return SyntheticWeights(self.config().truncated(layers), codecs, device, host, f"{SYNTHETIC} weights of {self.path.name}")

    def tokenizer(self) -> Tokenizer:
        """Another model's, so that routers see real text. Raises LabError where it does not fit the vocabulary."""
        found = load_tokenizer(self._tokenizer)
        if max(found.get_vocab().values()) >= self.config().vocab_size:
            raise LabError(f"{self._tokenizer}: its tokens do not fit the {self.config().vocab_size} rows of the {SYNTHETIC} model")
        return found

    def inspect(self) -> dict[str, Any]:
        """{format, layout, sha256, bytes, layers, vocab_size, tokenizer}; sha256 is that of the sizes and the seed. Raises LabError."""
        config = self.config()
        self.tokenizer()
        digest = hashlib.sha256(json.dumps([self._data, SEED], sort_keys=True).encode()).hexdigest()
        return {
            "format": self.format,
            "layout": f"random codes in the path's codecs, seed {SEED}",
            "sha256": digest,
            "files": {},
            "bytes": 0,
            "layers": config.num_layers,
            "vocab_size": config.vocab_size,
            "tokens_from": f"the tokenizer of {self._tokenizer.name}",
        }


class SyntheticWeights:
    """`lab.artifacts.weights.Weights` of random codes, made anew at every request on the device where they stay."""

    def __init__(self, config: ModelConfig, codecs: Mapping[str, Codec], device: torch.device, host: frozenset[str], where: str) -> None:
        self.where, self._device, self._host = where, device, host
        self._codecs = {"small": create("bf16"), "embed": create("bf16"), **codecs}
        self._wanted = inventory(config)
        self._random = {kind: torch.Generator(kind).manual_seed(SEED) for kind in {device.type, "cpu"}}

    def matrix(self, name: str) -> Sequence[Stored]:
        """One block in the component's codec."""
        if name in self._wanted.embeddings:
            return (self._stored("embed", self._wanted.embeddings[name]),)
        shape, component = self._known(self._wanted.linears, name)
        return (self._stored(component, shape),)

    def column_order(self, name: str) -> Tensor | None:
        """None."""
        return None

    def vector(self, name: str) -> Tensor:
        """Small random numbers: a norm near one, a decay near exp(-1)."""
        shape = self._known(self._wanted.vectors, name)
        return _SPREAD * torch.randn(shape, generator=self._random[self._device.type], device=self._device)

    def integers(self, name: str) -> Tensor:
        """The constants that seed and sizes give: hashes must stay in the table."""
        return torch.tensor(self._known(self._wanted.constants, name))

    def experts(self, prefix: str, count: int) -> tuple[Sequence[Stored], Sequence[Stored]]:
        """Both stacks."""
        count, width, hidden = self._known(self._wanted.expert_stacks, prefix)
        return (self._stored("experts", (count, 2 * width, hidden)),), (self._stored("experts", (count, hidden, width)),)

    def table_shards(self, prefix: str) -> int:
        """One: it is made in its place."""
        return 1

    def table_shard(self, prefix: str, index: int) -> Stored:
        """The whole table."""
        return self._stored("ple", self._known(self._wanted.tables, prefix))

    def _known(self, table: Mapping[str, Any], name: str) -> Any:
        if name not in table:
            raise LabError(f"{self.where}: the model has no {name}")
        return table[name]

    def _stored(self, component: str, shape: tuple[int, ...]) -> Stored:
        codec = self._codecs.get(component) or create("bf16")
        device = torch.device("cpu") if component in self._host else self._device
        return Stored(codec, random_parts(codec, shape, device, self._random[device.type]), shape)


def random_parts(codec: Codec, shape: tuple[int, ...], device: torch.device, random: torch.Generator) -> Parts:
    """Parts of a weight [..., rows, cols]: rows of a small encoded matrix, repeated in a scattered order. Where rows share a part (a matrix's scales), all
    rows are drawn, except for a table too long for that, whose one scale is the small matrix's."""
    *lead, rows, cols = shape
    whole = bool(codec.shared) and rows <= _LONG_ROWS
    drawn = codec.encode(_SPREAD * torch.randn(rows if whole else min(rows, _POOL_ROWS), cols, generator=random, device=device))
    if whole:
        return {key: part.expand(*lead, *part.shape).contiguous() for key, part in drawn.items()}
    return {key: part if key in codec.shared else _scattered(part, prod(lead) * rows).view(*lead, rows, *part.shape[1:]) for key, part in drawn.items()}


def _scattered(pool: Tensor, rows: int) -> Tensor:
    """`rows` rows of the pool. The order is fixed, so that the parts of a row stay together; a piece at a time, because a table is gigabytes."""
    whole = torch.empty(rows, *pool.shape[1:], dtype=pool.dtype, device=pool.device)
    for start in range(0, rows, _LONG_ROWS):
        count = min(_LONG_ROWS, rows - start)
        whole[start : start + count] = take(pool, torch.arange(start, start + count, device=pool.device) * _STRIDE % len(pool))
    return whole
