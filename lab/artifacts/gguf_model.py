"""A GGUF file as an artifact: config and tokenizer from its metadata, weights by Hugging Face name straight from the map.

Why layouts: each architecture renames, permutes, splits and folds in its own way; a `Layout` says which tensors give which rows, and the rest is common.
Packed rows are moved whole, never decoded and encoded again, so what is measured is the file.
What it does not prove: that the values are sound; names, types and shapes are checked by `inspect` (`lab.artifacts.gguf_inspection`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from torch import Tensor

from lab.artifacts.gguf import Gguf, open_gguf
from lab.artifacts.gguf_cursor import quoted
from lab.artifacts.gguf_file import GgufTensor
from lab.artifacts.gguf_metadata import Metadata
from lab.artifacts.gguf_tokenizer import read_tokenizer
from lab.artifacts.weights import Stored
from lab.codecs.gguf import GgufCodec, codec_of, parts_of
from lab.errors import LabError
from lab.models import ModelConfig, read_config

_TRANSFORMER = "lab.artifacts.gguf_transformer:TransformerLayout"
LAYOUTS = {
    "llama": ("llama", _TRANSFORMER),
    "qwen3": ("qwen3", _TRANSFORMER),
    "qwen3moe": ("qwen3_moe", _TRANSFORMER),
    "qwen4exp": ("qwen4_exp", "lab.artifacts.gguf_qwen4exp:Qwen4ExpLayout"),
}
"""general.architecture -> (the lab's name of the architecture, module and class of its layout). A new architecture is a new line."""


@dataclass(frozen=True)
class Piece:
    """One tensor of the file that gives rows of a matrix."""

    tensor: str
    """GGUF name."""

    row_order: tuple[int, ...] | npt.NDArray[np.int64] | None = None
    """Row r of the result is row row_order[r] of the file's tensor; packed rows are taken whole. May be a part of the rows. None: all, as they are."""


class Layout(Protocol):
    """What an architecture's GGUF names and transforms mean in Hugging Face's terms. Names are without `model.`. Every method raises LabError for an
    unknown name; none of them needs the named tensors to be in the file (the caller looks them up), except `vector`, which reads."""

    def __init__(self, gguf: Gguf) -> None:
        """Reads and checks the metadata (`lab.artifacts.gguf_metadata.Metadata(gguf)`); raises LabError in one line naming file and key."""

    def config(self) -> dict[str, Any]:
        """The model's config.json in Hugging Face's words, incl. model_type, for the architecture's from_dict."""

    def matrix(self, name: str) -> Sequence[Piece]:
        """The pieces whose rows, one after the other, are the matrix."""

    def column_order(self, name: str) -> Tensor | None:
        """As `lab.artifacts.weights.Weights.column_order`."""

    def vector(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """The parameter in Hugging Face's definition and shape. read(GGUF name) gives the tensor decoded to float32; undo a folded +1, -exp(A_log), ..."""

    def integers(self, name: str) -> Tensor:
        """An int64 constant from a metadata array."""

    def experts(self, prefix: str) -> tuple[Sequence[Piece], Sequence[Piece]]:
        """(pieces of gate and up [E, width, hidden] each, or one of gate_up [E, 2 width, hidden]; the one piece of down). No row orders."""

    def table(self, prefix: str) -> Sequence[Piece]:
        """The row blocks of the table below `prefix`, in order. No row orders."""

    def unused(self) -> frozenset[str]:
        """Tensors of the file that the text model does not need (an MTP block, rope_freqs), so that a tensor nobody knows can be named."""


class GgufArtifact:
    """The model in the file at `path`, with its shards, or exactly the files `path` and `more`."""

    format = "gguf"

    def __init__(self, path: Path, *more: Path) -> None:
        """Raises LabError where a file is broken, the architecture has no layout, or its metadata do not hold."""
        self.path, self.gguf = path, open_gguf(path, *more)
        self.metadata = Metadata(self.gguf)
        self.architecture = self.metadata.arch
        if self.architecture not in LAYOUTS:
            raise self.metadata.refuse("general.architecture", f"is {quoted(self.architecture)}; supported: {', '.join(LAYOUTS)}")
        self.arch, place = LAYOUTS[self.architecture]
        module, name = place.split(":")
        self.layout: Layout = getattr(import_module(module), name)(self.gguf)

    def config(self) -> ModelConfig:
        """The sizes, from the metadata and the embedding's rows. Raises LabError."""
        return read_config(self.arch, self.layout.config(), str(self.path))

    def weights(self) -> GgufWeights:
        """The tensors, as they lie in the map."""
        return GgufWeights(self.gguf, self.layout, str(self.path))

    def tokenizer(self) -> Tokenizer:
        """As `lab.artifacts.gguf_tokenizer` makes it. Raises LabError."""
        return read_tokenizer(self.metadata)

    def inspect(self) -> dict[str, Any]:
        """As `lab.artifacts.gguf_inspection` has it. Raises LabError."""
        from lab.artifacts.gguf_inspection import inspect_gguf

        return inspect_gguf(self)


class GgufWeights:
    """`lab.artifacts.weights.Weights` over a GGUF model."""

    def __init__(self, gguf: Gguf, layout: Layout, where: str) -> None:
        self.gguf, self.layout, self.where = gguf, layout, where

    def matrix(self, name: str) -> Sequence[Stored]:
        """The file's blocks without a copy; only a block whose rows are moved is copied, packed as it is."""
        return [self._stored(piece, 2) for piece in self.layout.matrix(name)]

    def column_order(self, name: str) -> Tensor | None:
        """The layout's."""
        return self.layout.column_order(name)

    def vector(self, name: str) -> Tensor:
        """float32, in Hugging Face's definition."""
        return self.layout.vector(name, lambda stored: decoded(self.gguf, stored))

    def integers(self, name: str) -> Tensor:
        """The layout's, from the metadata."""
        return self.layout.integers(name)

    def experts(self, prefix: str, count: int) -> tuple[Sequence[Stored], Sequence[Stored]]:
        """Gate and up as the file has them, apart as a rule. Raises LabError where a stack has another number of experts."""
        pieces = self.layout.experts(prefix)
        gate_up, down = ([self._stored(piece, 3) for piece in group] for group in pieces)
        for piece, stored in zip((*pieces[0], *pieces[1]), (*gate_up, *down), strict=True):
            if stored.shape[0] != count:
                raise LabError(f"{self.where}: tensor {quoted(piece.tensor)} holds {stored.shape[0]} experts; the metadata say {count}")
        return gate_up, down

    def table_shards(self, prefix: str) -> int:
        """Usually 1."""
        return len(self.layout.table(prefix))

    def table_shard(self, prefix: str, index: int) -> Stored:
        """One block."""
        return self._stored(self.layout.table(prefix)[index], 2)

    def _stored(self, piece: Piece, dimensions: int) -> Stored:
        tensor, codec = readable(self.gguf, piece.tensor)
        shape = (1, *tensor.shape) if dimensions == 2 and len(tensor.shape) == 1 else tensor.shape  # a single row: files differ in its writing
        if len(shape) != dimensions:
            raise LabError(f"{self.where}: tensor {quoted(piece.tensor)} has shape {list(tensor.shape)}; expected {dimensions} dimensions")
        raw = self.gguf.raw(piece.tensor).reshape(*shape[:-1], -1)
        if piece.row_order is not None:
            order = np.asarray(piece.row_order, dtype=np.int64)
            if dimensions != 2 or order.ndim != 1 or not order.size or order.min() < 0 or order.max() >= len(raw):
                raise LabError(f"{self.where}: tensor {quoted(piece.tensor)} has {len(raw)} rows, but row {order.max(initial=0)} is needed; wrong shape")
            raw, shape = raw[order], (len(order), shape[-1])
        return Stored(codec, parts_of(raw), shape)


def readable(gguf: Gguf, name: str) -> tuple[GgufTensor, GgufCodec]:
    """A tensor with its codec. Raises LabError where it is missing, has a type without codec, or comes with an outer scale that nothing here applies."""
    tensor = gguf.tensors.get(name)
    if tensor is None:
        raise LabError(f"{gguf.files[0].path}: tensor {quoted(name)} is missing; the file is incomplete or of another architecture")
    for companion in (f"{name.removesuffix('.weight')}.{kind}" for kind in ("scale", "input_scale")):
        if companion in gguf.tensors:
            raise LabError(f"{tensor.path}: tensor {quoted(name)} has an outer scale in {quoted(companion)} (NVFP4), which is not supported")
    try:
        return tensor, codec_of(tensor.type)
    except LabError as error:
        raise LabError(f"{tensor.path}: tensor {quoted(name)}: {error}") from None


def decoded(gguf: Gguf, name: str) -> Tensor:
    """A tensor of any shape as float32, for the small ones. Raises LabError as `readable` does."""
    tensor, codec = readable(gguf, name)
    return codec.decode(parts_of(gguf.raw(name)), tensor.shape[-1])
