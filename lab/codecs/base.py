"""What every codec is: a lossless or lossy way to hold a matrix of weights as a few named tensors ("parts").

Why one interface: the engines, the artifact writers, the capacity ledger and the kernels' tests all ask the same questions (encode, decode,
how many bytes, which rows), so that a new codec is one new file. All leading dimensions of a weight are stacked matrices (experts); every
part keeps them first, so that `part[ids]` selects experts. A codec holds options and no weights.
What it does not prove: that a decode is fast on a GPU (that is the kernels' business) or that a layout equals a vendor's closed one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, ClassVar

import torch
from torch import Tensor

from lab.errors import LabError

Parts = dict[str, Tensor]

# Weights per piece while encoding: temporaries of 4 MiB stay near a CPU's caches; a GPU needs larger pieces to be busy, and a full card has room for some
# float64 copies of one.
_CHUNK_CPU, _CHUNK_GPU = 1 << 20, 1 << 23


class Codec(ABC):
    """One way to store a weight [..., rows, cols]. Subclasses set the class attributes and implement the abstract methods."""

    name: ClassVar[str]
    defaults: ClassVar[dict[str, Any]] = {}
    shared: ClassVar[frozenset[str]] = frozenset()  # parts without a row dimension: scales of a whole matrix
    col_multiple: ClassVar[int] = 1
    plausible: tuple[float, float] = (0.9, 0.2)  # (least cosine, largest relative row-norm error) of a sound encoding

    def __init__(self, **options: Any) -> None:
        """Raises LabError on an unknown option or a value that `check_options` refuses."""
        unknown = sorted(set(options) - set(self.defaults))
        if unknown:
            raise LabError(f"codec {self.name}: unknown option {', '.join(unknown)}; known: {', '.join(sorted(self.defaults)) or 'none'}")
        self.options: dict[str, Any] = {**self.defaults, **options}
        self.check_options()

    def check_options(self) -> None:
        """Raises LabError where a resolved option has a bad value; may normalise `self.options` (lists to tuples)."""

    @abstractmethod
    def encode(self, weight: Tensor) -> Parts:
        """Floating [..., rows, cols] -> parts on the same device. Raises LabError on non-finite values or a shape the codec cannot hold."""

    @abstractmethod
    def decode(self, parts: Parts, cols: int) -> Tensor:
        """Parts -> float32 [..., rows, cols], with whatever leading dimensions the parts have."""

    @abstractmethod
    def row_bytes(self, cols: int) -> int:
        """Bytes that belong to one row alone. Raises LabError where `cols` does not fit the codec."""

    def shared_bytes(self, rows: int, cols: int) -> int:
        """Bytes per matrix that its rows share (block scales, global scales)."""
        return 0

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of a weight of this shape [..., rows, cols]; equals `parts_nbytes(encode(weight))`."""
        *lead, rows, cols = shape
        return prod(lead) * (rows * self.row_bytes(cols) + self.shared_bytes(rows, cols))

    def bits_per_weight(self, rows: int, cols: int) -> float:
        """Stored bits per weight of a [rows, cols] matrix, scales included."""
        return 8 * self.nbytes((rows, cols)) / (rows * cols)

    def select(self, parts: Parts, index: Tensor | int) -> Parts:
        """Stacked matrices by position on dim 0: an int drops the dimension, an index tensor [n] gives n matrices."""
        return {key: take(part, index) for key, part in parts.items()}

    def take_rows(self, parts: Parts, ids: Tensor) -> Parts:
        """Rows of a 2-D table: `ids` integer [n] -> parts that decode to [n, cols]. Parts shared by all rows stay as they are."""
        return {key: part if key in self.shared else take(part, ids) for key, part in parts.items()}

    def check_cols(self, cols: int, shape: Sequence[int] | None = None) -> None:
        """Raises LabError where rows of `cols` weights cannot be stored."""
        if cols < 1 or cols % self.col_multiple:
            what = f"shape {list(shape)}" if shape is not None else f"{cols} columns"
            raise LabError(f"codec {self.name}: {what}: the last dimension must be a positive multiple of {self.col_multiple}")

    def check_weight(self, weight: Tensor) -> None:
        """Raises LabError unless `weight` is a non-empty floating [..., rows, cols] with columns that fit. Values are checked by `finite`."""
        if weight.ndim < 2 or not weight.is_floating_point() or weight.numel() == 0:
            raise LabError(f"codec {self.name}: needs a non-empty floating [..., rows, cols], not {weight.dtype} {list(weight.shape)}")
        self.check_cols(weight.shape[-1], weight.shape)

    def finite(self, chunk: Tensor) -> Tensor:
        """`chunk` as contiguous float32. Raises LabError where it holds NaN or infinity, before or after the cast."""
        chunk = chunk.to(torch.float32).contiguous()
        if chunk.numel() and not bool(torch.isfinite(torch.stack(chunk.aminmax())).all()):  # both are NaN where anything is; one pass instead of three
            raise LabError(f"codec {self.name}: the weight holds NaN or infinity; refuse the file or repair it before encoding")
        return chunk

    def chunks(self, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """(rows, float32 [n, cols]) pieces of the weight seen as [all rows, cols], so that temporaries stay bounded on large stacks."""
        flat = weight.reshape(-1, weight.shape[-1])
        step = max(1, (_CHUNK_CPU if weight.device.type == "cpu" else _CHUNK_GPU) // flat.shape[-1])
        for start in range(0, flat.shape[0], step):
            rows = slice(start, min(start + step, flat.shape[0]))
            yield rows, self.finite(flat[rows])


def take(part: Tensor, index: Tensor | int) -> Tensor:
    """`part[index]` on dim 0 for every dtype: indexing of 8-bit floats is missing on some backends, so they travel as bytes."""
    if part.dtype == torch.float8_e4m3fn:
        return part.view(torch.uint8)[index].view(part.dtype)
    return part[index]


def divided(values: Tensor, by: float) -> Tensor:
    """values / by, rounded as division is. By a plain number torch multiplies with its reciprocal on a GPU, which can end one bit beside."""
    return values / torch.full((), by, dtype=values.dtype, device=values.device)


def parts_nbytes(parts: Parts) -> int:
    """Bytes of all parts as stored, views counted by their own shape."""
    return sum(part.numel() * part.element_size() for part in parts.values())
