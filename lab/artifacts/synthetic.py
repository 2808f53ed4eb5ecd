"""Weights that exist nowhere: random codes in the path's own codecs, at a model's true sizes, made where they will be computed with.

Why: speed, memory and placement of a model do not need its 360 GB of files. A few rows are drawn, encoded with the real codec and repeated in random
order, so that every part has the layout, the bytes and the spread of real weights, and no encoding of billions of weights is waited for.
What it does not prove: anything about quality. Perplexity is a gap by definition, and a router of random rows spreads tokens as random rows do.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
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
from lab.models.qwen4_exp.table_rows import with_table_rows

SEED = 20260826
_SPREAD = 0.02
"""Standard deviation of drawn weights: that of the initialisation of these models (`initializer_range` of transformers' configurations)."""
_POOL_ROWS = 512
_STRIDE = 193  # no divisor in common with the pool's rows
_LONG_ROWS = 1 << 20
_PIECE_BYTES = 1 << 26  # filled at a time: what is gathered is a copy before it is in its place


Allocate = Callable[[tuple[int, ...], torch.dtype, str], Tensor]
"""(shape, dtype, what it is for) -> memory on the host."""


def _plain(shape: tuple[int, ...], dtype: torch.dtype, what: str) -> Tensor:
    return torch.empty(shape, dtype=dtype)


class SyntheticArtifact:
    """A model of the sizes in `geometry`, a config.json; texts are read with the tokenizer in `tokenizer_folder`, whose ids are all below its vocabulary."""

    format = "synthetic"

    def __init__(self, geometry: Path, arch: str, tokenizer_folder: Path, table_rows: int | None = None) -> None:
        """`table_rows`: of a smaller n-gram table than the sizes give. Raises LabError where the sizes cannot be read."""
        self.path, self.arch, self._tokenizer = geometry, arch, tokenizer_folder
        try:
            self._data = json.loads(geometry.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise LabError(f"{geometry}: artifact={SYNTHETIC} needs the model's sizes (model.geometry), and they are not readable ({error})") from None

        self._table_rows = table_rows
        if table_rows is not None:
            self._data = with_table_rows(self._data, table_rows, str(geometry))

    def sizes(self) -> dict[str, Any]:
        """The fields of the config.json, with the smaller table where one is asked for."""
        return dict(self._data)

    def config(self) -> ModelConfig:
        """The sizes. Raises LabError naming the field."""
        return read_config(self.arch, self._data, str(self.path))

    def weights(
        self, layers: int, codecs: Mapping[str, Codec], device: torch.device, host: frozenset[str] = frozenset(), on_host: Allocate | None = None
    ) -> SyntheticWeights:
        """Weights of the first `layers` layers: components of `codecs` in those, the rest in bf16; on `device`, those of `host` in memory of `on_host`."""
        return SyntheticWeights(self.config().truncated(layers), codecs, device, host, f"{SYNTHETIC} weights of {self.path.name}", on_host)

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
            "layout": f"random codes in the path's codecs, seed {SEED}" + (f", n-gram table of {self._table_rows} rows" if self._table_rows else ""),
            "sha256": digest,
            "files": {},
            "bytes": 0,
            "layers": config.num_layers,
            "vocab_size": config.vocab_size,
            "tokens_from": f"the tokenizer of {self._tokenizer.name}",
        }


class SyntheticWeights:
    """`lab.artifacts.weights.Weights` of random codes, made anew at every request on the device where they stay."""

    def __init__(
        self, config: ModelConfig, codecs: Mapping[str, Codec], device: torch.device, host: frozenset[str], where: str, on_host: Allocate | None = None
    ) -> None:
        self.where, self._device, self._host, self._on_host = where, device, host, on_host or _plain
        self._codecs = {"small": create("bf16"), "embed": create("bf16"), **codecs}
        self._wanted = inventory(config)
        self._random = torch.Generator(device.type).manual_seed(SEED)

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
        return _SPREAD * torch.randn(shape, generator=self._random, device=self._device)

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
        """Weights of the host are made on the device, too, a piece at a time, and copied: a CPU takes minutes for what a GPU makes in seconds."""
        codec = self._codecs.get(component) or create("bf16")
        held: Allocate | None = None
        if component in self._host and self._device.type != "cpu":
            held = self._on_host
        return Stored(codec, random_parts(codec, shape, self._device, self._random, held, component), shape)


def random_parts(
    codec: Codec, shape: tuple[int, ...], device: torch.device, random: torch.Generator, held: Allocate | None = None, what: str = "weights"
) -> Parts:
    """Parts of a weight [..., rows, cols]: rows of a small encoded matrix, repeated in a scattered order. Where rows share a part (a matrix's scales), all
    rows are drawn, except for a table too long for that, whose one scale is the small matrix's. With `held` they end in that memory on the host."""
    *lead, rows, cols = shape
    whole = bool(codec.shared) and rows <= _LONG_ROWS
    drawn = codec.encode(_SPREAD * torch.randn(rows if whole else min(rows, _POOL_ROWS), cols, generator=random, device=device))
    if whole:
        found = {key: part.expand(*lead, *part.shape).contiguous() for key, part in drawn.items()}
        return found if held is None else {key: held(tuple(part.shape), part.dtype, what).copy_(part) for key, part in found.items()}
    found = {}
    for key, part in drawn.items():
        if key in codec.shared:
            found[key] = part if held is None else part.cpu()
            continue
        size = (prod(lead) * rows, *part.shape[1:])
        room = torch.empty(size, dtype=part.dtype, device=device) if held is None else held(size, part.dtype, what)
        found[key] = _scattered(part, room).view(*lead, rows, *part.shape[1:])
    return found


def _scattered(pool: Tensor, whole: Tensor) -> Tensor:
    """`whole` filled with rows of the pool. The order is fixed, so that the parts of a row stay together; a piece at a time, because a table is gigabytes."""
    rows, most = len(whole), max(1, _PIECE_BYTES // max(1, whole[0].nbytes))
    for start in range(0, rows, most):
        count = min(most, rows - start)
        whole[start : start + count] = take(pool, torch.arange(start, start + count, device=pool.device) * _STRIDE % len(pool))
    return whole
