"""GGUF block types as codecs `gguf:TYPE`: the file's bytes stay as they are, and decoding is plain torch, bit-equal to ggml's.

Why raw blocks: the bytes that are measured are the bytes of the file, mapped and not copied, and a path can mix types per tensor as files do.
Decoding goes block batch by block batch, so that temporaries stay in a CPU's caches whatever the tensor's size.
What it does not prove: the speed of a tuned kernel, which multiplies without decoding; or that a file's values are sound. Scales that are NaN or
infinite decode to what they say.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from lab.codecs import gguf_grid, gguf_k, gguf_simple
from lab.codecs.base import Codec, Parts
from lab.codecs.gguf_bits import Terms, numbers
from lab.codecs.gguf_encode import ENCODERS
from lab.codecs.gguf_types import TYPES, GgufType
from lab.errors import LabError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PART = "blocks"
"""The one part: uint8 [..., rows, bytes per row]."""

# Weights decoded at a time: large enough that some twenty calls of torch per batch cost little, small enough for a cache; measured on two cores.
_BATCH_CPU, _BATCH_GPU = 1 << 20, 1 << 24


class GgufCodec(Codec):
    """Parts: blocks uint8 [..., rows, row_bytes], exactly as in the file. One subclass per type, see `GGUF_CODECS`."""

    kind: ClassVar[GgufType]

    def encode(self, weight: Tensor) -> Parts:
        """As in the base. Raises LabError for a type that is only read, and where a scale does not fit float16."""
        encoder = ENCODERS.get(self.kind.name)
        if encoder is None:
            raise LabError(f"codec {self.name}: only read, not encoded; types to encode: {', '.join(ENCODERS)}; llama-quantize makes the others")
        self.check_weight(weight)
        packed = torch.empty(*weight.shape[:-1], self.row_bytes(weight.shape[-1]), dtype=torch.uint8, device=weight.device)
        flat = packed.view(-1, packed.shape[-1])
        for where, chunk in self.chunks(weight):
            flat[where] = encoder(chunk)
            if not bool(torch.isfinite(self.decode({PART: flat[where]}, weight.shape[-1])).all()):
                raise LabError(f"codec {self.name}: weights up to {float(chunk.abs().max()):.3g} do not fit its 16-bit floats; scale the tensor first")
        return {PART: packed}

    def decode(self, parts: Parts, cols: int) -> Tensor:
        """As in the base, for parts with any leading dimensions. Raises LabError where the bytes per row are not those of `cols` weights."""
        packed = parts[PART]
        if packed.shape[-1] != self.row_bytes(cols):
            raise LabError(f"codec {self.name}: a row of {cols} weights has {self.row_bytes(cols)} bytes, not {packed.shape[-1]}")
        return self._decoded(packed).view(*packed.shape[:-1], cols)

    def row_bytes(self, cols: int) -> int:
        self.check_cols(cols)
        return self.kind.row_bytes(cols)

    @abstractmethod
    def _decoded(self, packed: Tensor) -> Tensor:
        """uint8 of whole rows -> float32 of as many weights, in any shape and never a view of the bytes."""


def _floats(dtype: torch.dtype, packed: Tensor) -> Tensor:
    # A copy even of F32: callers may write into what they get, and the bytes may be a file mapped read-only.
    return numbers(packed, dtype).to(torch.float32)


def _blocks(unpack: Callable[[Tensor], Terms], kind: GgufType, packed: Tensor) -> Tensor:
    blocks = packed.reshape(-1, kind.nbytes)
    out = torch.empty(len(blocks), kind.block, dtype=torch.float32, device=packed.device)
    step = (_BATCH_CPU if packed.device.type == "cpu" else _BATCH_GPU) // kind.block
    for batch, target in zip(blocks.split(step), out.split(step), strict=True):
        codes, scale, offset = unpack(batch)
        values = target.view(codes.shape)
        torch.mul(codes, scale[..., None], out=values)
        if offset is not None:
            values.add_(offset[..., None])
    return out


_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

_BLOCKS: dict[str, Callable[[Tensor], Terms]] = {
    "Q8_0": gguf_simple.q8_0,
    "Q4_0": gguf_simple.q4_0,
    "Q4_1": gguf_simple.q4_1,
    "Q5_0": gguf_simple.q5_0,
    "Q5_1": gguf_simple.q5_1,
    "Q2_K": gguf_k.q2_k,
    "Q3_K": gguf_k.q3_k,
    "Q4_K": gguf_k.q4_k,
    "Q5_K": gguf_k.q5_k,
    "Q6_K": gguf_k.q6_k,
    "IQ1_S": gguf_grid.iq1_s,
    "IQ1_M": gguf_grid.iq1_m,
    "IQ2_XXS": gguf_grid.iq2_xxs,
    "IQ2_XS": gguf_grid.iq2_xs,
    "IQ2_S": gguf_grid.iq2_s,
    "IQ3_XXS": gguf_grid.iq3_xxs,
    "IQ3_S": gguf_grid.iq3_s,
    "IQ4_NL": gguf_simple.iq4_nl,
    "IQ4_XS": gguf_simple.iq4_xs,
    "MXFP4": gguf_simple.mxfp4,
    "NVFP4": gguf_simple.nvfp4,
    "Q1_0": gguf_simple.q1_0,
    "Q2_0": gguf_simple.q2_0,
    "Q2_0_G128": gguf_simple.q2_0,
}

_PLAUSIBLE = {
    "F32": (0.9999, 0.001),
    "F16": (0.9999, 0.001),
    "BF16": (0.9999, 0.003),
    "Q8_0": (0.999, 0.005),
    "Q2_0": (0.8, 0.3),
    "MXFP4": (0.97, 0.2),
    "IQ3_S": (0.96, 0.06),
    "IQ3_XXS": (0.95, 0.08),
    "Q3_K": (0.95, 0.06),
    "Q2_K": (0.9, 0.15),
    "IQ2_S": (0.88, 0.15),
    "IQ2_XS": (0.87, 0.15),
    "IQ2_XXS": (0.84, 0.2),
    "IQ1_M": (0.78, 0.25),
    "IQ1_S": (0.7, 0.3),
}
"""`Codec.plausible` of the types that can be encoded; the others have 4 to 6 bits. A single row of one block strays farthest: MXFP4, whose scales are powers of
two, by up to 10 % in its norm, bf16 by 0.12 %. Least squares shortens: of 1,800 rows of one block, normal and heavy-tailed, the worst lost 20 % with IQ1_S and
10 % with IQ2_XXS, at cosines of 0.79 and 0.90. A scale that is dropped or applied twice is off by far more."""


def _codec(name: str, decoded: Callable[[Tensor], Tensor]) -> type[GgufCodec]:
    class TypeCodec(GgufCodec):
        kind = TYPES[name]
        col_multiple = kind.block
        plausible = _PLAUSIBLE.get(name, (0.98, 0.05))

        def _decoded(self, packed: Tensor) -> Tensor:
            return decoded(packed)

    TypeCodec.name = f"gguf:{name}"
    return TypeCodec


_CODECS = [_codec(name, partial(_floats, dtype)) for name, dtype in _FLOATS.items()]
_CODECS += [_codec(name, partial(_blocks, unpack, TYPES[name])) for name, unpack in _BLOCKS.items()]

GGUF_CODECS: dict[str, type[GgufCodec]] = {codec.name: codec for codec in _CODECS}
"""Codec classes by name, `gguf:F32` and so on. Types of the table that are not here (integers, F64, TQ1_0, TQ2_0) are read as bytes only."""


def codec_of(kind: GgufType) -> GgufCodec:
    """The codec of a type. Raises LabError for one that has none."""
    found = GGUF_CODECS.get(f"gguf:{kind.name}")
    if found is None:
        raise LabError(f"GGUF type {kind.name}: no codec; known: {', '.join(GGUF_CODECS)}")
    return found()


def parts_of(raw: npt.NDArray[np.uint8]) -> Parts:
    """A tensor's bytes, uint8 [..., row bytes], as codec parts without a copy. Mapped files are read-only: writing into the part would kill the process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nothing writes into parts
        return {PART: torch.from_numpy(raw)}
