"""Bytes of the block types of GGUF and VQF files, by the names paths give them: `gguf:IQ2_XS`, `vqf:Q4_0`.

A plan needs their sizes whether or not an engine can multiply them. Each type stores a fixed number of bytes per block of consecutive weights of a row. GGUF's
types are those of `lab.codecs.gguf_types`, VQF's those of `lab.codecs.vqf`, tiled or not. Nothing here says how a block is decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from lab.codecs.gguf_types import TYPES
from lab.codecs.vqf import VQF_CODECS
from lab.errors import LabError

_VQF = {name.removeprefix("vqf:"): (kind.block, kind.block_bytes) for name, kind in VQF_CODECS.items()}
_FAMILIES = {"gguf": {name: (kind.block, kind.nbytes) for name, kind in TYPES.items()}, "vqf": _VQF}  # (weights, bytes) per block
_GGUF_FALLBACK = ("IQ4_NL", "F16")
"""What llama.cpp's quantiser stores where a row is no multiple of the asked type's block: a type of 32, else 16 bits."""


@dataclass(frozen=True)
class FileType:
    """A block type. `name` is the full one, such as `gguf:Q2_0`."""

    name: str
    weights: int
    bytes: int

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a weight [..., cols] of this shape."""
        return prod(shape[:-1]) * (shape[-1] // self.weights) * self.bytes


def is_file_type(codec: str) -> bool:
    """Whether the codec's name is that of a file's block type."""
    return codec.partition(":")[0] in _FAMILIES


def file_type(codec: str, cols: int) -> FileType:
    """The type that holds rows of `cols` weights where `codec` was asked for; for GGUF another one where its block does not divide the row.

    Raises LabError for an unknown type, and for a VQF row that does not fit.
    """
    family, _, asked = codec.partition(":")
    types = _FAMILIES[family]
    if asked not in types:
        raise LabError(f"codec {codec}: unknown type; choose from: {', '.join(f'{family}:{name}' for name in types)}")
    for name in (asked, *(_GGUF_FALLBACK if family == "gguf" else ())):
        weights, size = types[name]
        if cols % weights == 0:
            return FileType(f"{family}:{name}", weights, size)
    raise LabError(f"codec {codec}: rows of {cols} weights are no multiple of its block of {types[asked][0]}")
