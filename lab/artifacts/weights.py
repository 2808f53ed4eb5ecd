"""What a file of weights is to the engine: matrices, vectors, expert stacks and tables by Hugging Face name, each as it is stored.

Why one interface: safetensors, GGUF and VQF name, split, permute and pack the same model differently. What a format did to a tensor is undone (or
said: `column_order`) by its reader, so that models, binder and codecs know no format. Nothing is requantised here: a matrix comes out in the codec and
the bytes of the file.
What it does not prove: that the values are sound. Names and shapes are checked by `lab.artifacts.inspection`, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer
from torch import Tensor

from lab.codecs import Codec, Parts


@dataclass(frozen=True)
class Stored:
    """A weight [..., rows, cols] in its file's encoding. Parts may be views of a mapped file: never write into them."""

    codec: Codec
    parts: Parts
    shape: tuple[int, ...]


class Weights(Protocol):
    """Weights by Hugging Face name without the `model.` or `model.language_model.` prefix. Every method raises LabError naming file and tensor."""

    where: str
    """The file or folder, for errors."""

    def matrix(self, name: str) -> Sequence[Stored]:
        """The matrix as row blocks [rows_i, cols] in order: usually one; several where the file splits it, perhaps in different codecs."""

    def column_order(self, name: str) -> Tensor | None:
        """int64 [cols] where the file's columns are in another order than the model's inputs: column c of the file multiplies input order[c]. None: the same.

        Rows are always put in order by the reader; columns cannot be moved inside a packed block.
        """

    def vector(self, name: str) -> Tensor:
        """A small parameter in floating point, in Hugging Face's definition (a norm's weight without a folded 1, A_log and not -exp(A_log))."""

    def integers(self, name: str) -> Tensor:
        """An int64 constant."""

    def experts(self, prefix: str, count: int) -> tuple[Sequence[Stored], Sequence[Stored]]:
        """(row blocks of gate_up: one [E, 2 width, hidden] with gate rows first, or gate and up apart; the one block of down [E, hidden, width])."""

    def table_shards(self, prefix: str) -> int:
        """Number of row blocks of the table below `prefix`."""

    def table_shard(self, prefix: str, index: int) -> Stored:
        """Row block `index` of the table: read one at a time, because a table may be larger than memory."""


class Artifact(Protocol):
    """A model's files, opened and checked as far as their headers go."""

    path: Path
    format: str
    """safetensors, gguf or vqf."""

    def config(self) -> Any:
        """The sizes, as the architecture's own config object (`lab.models`)."""

    def weights(self) -> Weights:
        """The tensors."""

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that belongs to the files."""

    def inspect(self) -> dict[str, Any]:
        """{format, layout, sha256, files, bytes, layers, vocab_size, tensors, ...}: everything checked that can be without loading. Raises LabError."""
