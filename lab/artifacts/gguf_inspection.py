"""Checks a GGUF model before anything is loaded and says what it is.

Every tensor that the model will ask for must be in the file with its shape and a type that has a codec, hash constants must equal the derived ones, the
tokenizer must fit the embedding, and a tensor that nobody knows is refused: a bias or a scale that is passed over gives fluent text and wrong numbers.
What it does not prove: that the values are sound; only small vectors are looked at.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lab.artifacts.gguf import Gguf
from lab.artifacts.gguf_cursor import quoted
from lab.artifacts.gguf_model import Layout, Piece, decoded, readable
from lab.artifacts.gguf_tokenizer import tokenizer_facts
from lab.artifacts.inspection import digests
from lab.errors import LabError
from lab.models import ModelConfig, inventory

if TYPE_CHECKING:
    from lab.artifacts.gguf_model import GgufArtifact


def inspect_gguf(artifact: GgufArtifact) -> dict[str, Any]:
    """{format, layout, sha256, files, bytes, layers, vocab_size, tensors, types per component, bits_per_weight, architecture, block_count, tokenizer, unused}.
    Raises LabError in one line."""
    gguf, config = artifact.gguf, artifact.config()
    needed = _Needed(gguf, artifact.layout, config)
    _check_unknown(gguf, artifact.layout, set(needed.component))
    _check_tokenizer(artifact, config)
    used = [gguf.tensors[name] for name in needed.component]
    types: dict[str, Counter[str]] = defaultdict(Counter)
    for tensor in used:
        types[needed.component[tensor.name]][tensor.type.name] += 1
    weights = sum(prod(tensor.shape) for tensor in used)
    files = [file.path for file in gguf.files]
    return {
        "format": "gguf",
        "layout": f"{artifact.architecture}: {', '.join(f'{n} {kind}' for kind, n in Counter(t.type.name for t in used).most_common())}",
        **digests(files),
        "bytes": sum(path.stat().st_size for path in files),
        "layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "tensors": len(gguf.tensors),
        "types": {component: dict(found.most_common()) for component, found in sorted(types.items())},
        "bits_per_weight": 8 * sum(tensor.nbytes for tensor in used) / weights,
        "architecture": artifact.architecture,
        "block_count": artifact.metadata.whole(".block_count"),
        "tokenizer": tokenizer_facts(artifact.metadata),
        "unused": sorted(set(gguf.tensors) - set(needed.component)),
    }


class _Needed:
    """The file's tensors that the model asks for, each with its component; made by asking for every one and checking it."""

    def __init__(self, gguf: Gguf, layout: Layout, config: ModelConfig) -> None:
        self.gguf, self.layout, self.where = gguf, layout, gguf.files[0].path
        self.component: dict[str, str] = {}
        self.taken: dict[str, npt.NDArray[np.bool_]] = {}  # rows of the tensors of which pieces take chosen rows
        wanted = inventory(config)
        for name, size in wanted.embeddings.items():
            self._rows(name, layout.matrix(name), size, "embed")
        for name, (size, component) in wanted.linears.items():
            self._rows(name, layout.matrix(name), size, component)
        for name, shape in wanted.vectors.items():
            self._vector(name, shape)
        for prefix, (count, width, hidden) in wanted.expert_stacks.items():
            gate_up, down = layout.experts(prefix)
            for piece in gate_up:
                self._same(prefix, piece.tensor, self._shape(piece.tensor, "experts"), (count, 2 * width // len(gate_up), hidden))
            for piece in down:
                self._same(prefix, piece.tensor, self._shape(piece.tensor, "experts"), (count, hidden, width))
        for prefix, size in wanted.tables.items():
            self._rows(prefix, layout.table(prefix), size, "ple")
        for name, value in wanted.constants.items():
            if (found := layout.integers(name).tolist()) != value:
                raise LabError(f"{self.where}: {name} is {found}, but seed and sizes give {value}; this table needs other hash constants")
        for stored, rows in self.taken.items():
            if not rows.all():
                raise LabError(f"{self.where}: tensor {quoted(stored)} has {len(rows)} rows, of which the model takes {rows.sum()}; the metadata ask for fewer")

    def _shape(self, stored: str, component: str) -> tuple[int, ...]:
        tensor, _ = readable(self.gguf, stored)
        self.component.setdefault(stored, component)
        return tensor.shape

    def _rows(self, name: str, pieces: Sequence[Piece], shape: tuple[int, int], component: str) -> None:
        """Checks pieces whose rows together are the matrix."""
        rows = 0
        for piece in pieces:
            found = self._shape(piece.tensor, component)
            found = (1, *found) if len(found) == 1 else found  # a single row: files differ in its writing
            if len(found) != 2 or found[1] != shape[1]:
                self._same(name, piece.tensor, found, shape)
            order = np.arange(0) if piece.row_order is None else np.asarray(piece.row_order, dtype=np.int64)
            if order.max(initial=0) >= found[0]:
                raise LabError(f"{self.where}: {name} needs row {order.max()} of {quoted(piece.tensor)}, which has {found[0]} rows")
            if len(order):
                self.taken.setdefault(piece.tensor, np.zeros(found[0], dtype=np.bool_))[order] = True
            rows += len(order) or found[0]
        if rows != shape[0]:
            self._same(name, ", ".join(piece.tensor for piece in pieces), (rows, shape[1]), shape)

    def _vector(self, name: str, shape: tuple[int, ...]) -> None:
        read: list[str] = []

        def reading(stored: str) -> Tensor:
            read.append(stored)
            return decoded(self.gguf, stored)

        found = tuple(self.layout.vector(name, reading).shape)
        self._same(name, ", ".join(read), found, shape)
        for stored in read:
            self.component.setdefault(stored, "small")

    def _same(self, name: str, stored: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if found != shape:
            raise LabError(f"{self.where}: {name} ({stored}) has shape {list(found)}, the metadata ask for {list(shape)}")


def _check_unknown(gguf: Gguf, layout: Layout, needed: set[str]) -> None:
    unknown = sorted(set(gguf.tensors) - needed - layout.unused())
    if unknown:
        first = ", ".join(quoted(name) for name in unknown[:3])
        raise LabError(f"{gguf.files[0].path}: {len(unknown)} tensors that this architecture does not compute with, first {first}; another kind of model")


def _check_tokenizer(artifact: GgufArtifact, config: ModelConfig) -> None:
    tokens = len(artifact.metadata.texts("tokenizer.ggml.tokens"))
    declared = artifact.metadata.whole(".vocab_size", tokens)
    if not tokens == declared == config.vocab_size:
        raise LabError(f"{artifact.path}: {tokens} tokens, vocab_size {declared} and {config.vocab_size} rows of token_embd.weight; the three must be equal")
    artifact.tokenizer()
