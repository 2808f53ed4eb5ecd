"""VQF's encodings as codecs `vqf:TYPE`: the file's bytes stay as they are, tiled or not, and decode in plain torch.

Why raw bytes: what is measured is what the file holds, mapped and not copied. A tiled type has the same values as its plain one; `TILED` says which belongs
to which, and `Tile` moves between the two without loss. The frames are those of ggml's Q8_0 and Q4_0, so `lab.codecs.gguf` decodes them.
What it does not prove: the speed of an engine that multiplies tiles as they lie; here they are put back into rows first.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import ClassVar

import torch
from torch import Tensor

from lab.codecs.base import Codec, Parts, take
from lab.codecs.gguf import GGUF_CODECS
from lab.codecs.gguf import PART as _GGUF_PART
from lab.codecs.gguf_bits import half
from lab.codecs.vqf_encode import GROUP, encoded
from lab.codecs.vqf_tiles import BLOCK, Q4_4X4, Q4_8X8L, Q8_4X4, Q8_8X8, Tile
from lab.errors import LabError

PART = "blocks"
"""Plain types: uint8 [..., rows, bytes a row]. Tiled types: uint8 [..., rows / R, cols / 32, bytes a tile]."""

ROWS = "rows"
"""What `take_rows` makes of a tiled matrix: the chosen rows as plain blocks, since single rows are no whole tiles."""


class VqfCodec(Codec):
    """One subclass per type, see `VQF_CODECS`. `plain` names the type whose values these are, `tile` how its blocks lie (None: row by row)."""

    plain: ClassVar[str]
    tile: ClassVar[Tile | None]
    frame: ClassVar[str]  # the GGUF type with the same bytes
    block: ClassVar[int]  # weights per block
    block_bytes: ClassVar[int]

    def encode(self, weight: Tensor) -> Parts:
        """As in the base. Raises LabError where rows are no whole tiles, and where a scale or value does not fit float16."""
        self.check_weight(weight)
        rows, cols = weight.shape[-2:]
        if self.tile is not None:
            self.tile.check(rows, f"codec {self.name}")
        packed = torch.empty(*weight.shape[:-1], self.row_bytes(cols), dtype=torch.uint8, device=weight.device)
        flat = packed.view(-1, packed.shape[-1])
        for where, chunk in self.chunks(weight):
            flat[where] = encoded(self.plain, chunk)
            if not self._is_finite(flat[where], cols):
                raise LabError(f"codec {self.name}: weights up to {float(chunk.abs().max()):.3g} do not fit its 16-bit floats; scale the tensor first")
        return self.laid_out(packed)

    def _is_finite(self, blocks: Tensor, cols: int) -> bool:
        """Whether all weights of plain blocks are; where blocks have scales, that is whether these are."""
        values = self._decoded(blocks, cols) if self.block == 1 else half(blocks.reshape(-1, self.block_bytes), 0)
        return bool(torch.isfinite(torch.stack(values.aminmax())).all())  # one pass; NaN and infinities reach the ends

    def laid_out(self, packed: Tensor) -> Parts:
        """Plain blocks [..., rows, bytes a row] of the type `plain` as this type's parts; a tiled type copies."""
        return {PART: packed if self.tile is None else self.tile.tiled(packed, self.block_bytes)}

    def plain_blocks(self, parts: Parts) -> Tensor:
        """The way back: parts -> plain blocks [..., rows, bytes a row]; a tiled type copies."""
        if self.tile is None or ROWS in parts:
            return parts[PART if self.tile is None else ROWS]
        return self.tile.plain(parts[PART])

    def decode(self, parts: Parts, cols: int) -> Tensor:
        """As in the base. Raises LabError where the parts' bytes are not those of `cols` weights a row."""
        packed = parts.get(PART)
        if self.tile is not None and packed is not None:
            self.check_cols(cols)
            expected = (cols // self.block, self.tile.rows * self.block_bytes)
            if packed.shape[-2:] != expected:
                raise LabError(f"codec {self.name}: rows of {cols} weights lie in tiles {list(expected)}, not {list(packed.shape[-2:])}")
        return self._decoded(self.plain_blocks(parts), cols)

    def _decoded(self, blocks: Tensor, cols: int) -> Tensor:
        if blocks.shape[-1] != self.row_bytes(cols):
            raise LabError(f"codec {self.name}: a row of {cols} weights has {self.row_bytes(cols)} bytes, not {blocks.shape[-1]}")
        return GGUF_CODECS[self.frame]().decode({_GGUF_PART: blocks}, cols)

    def row_bytes(self, cols: int) -> int:
        self.check_cols(cols)
        return cols // self.block * self.block_bytes

    def nbytes(self, shape: Sequence[int]) -> int:
        """As in the base. Raises LabError where the rows are no whole tiles."""
        *lead, rows, cols = shape
        if self.tile is not None:
            self.tile.check(rows, f"codec {self.name}")
        return prod(lead) * rows * self.row_bytes(cols)

    def take_rows(self, parts: Parts, ids: Tensor) -> Parts:
        """As in the base; rows of a tiled matrix come out as plain blocks."""
        if self.tile is None or ROWS in parts:
            return {key: take(part, ids) for key, part in parts.items()}
        return {ROWS: self.tile.rows_of(parts[PART], ids)}


def in_rows(codec: Codec, parts: Parts) -> tuple[Codec, Parts]:
    """The same weight with tiles put into rows: packed, lossless, as many bytes. Anything else than a tiled VQF type comes back as it is."""
    if not isinstance(codec, VqfCodec) or codec.tile is None:
        return codec, parts
    return VQF_CODECS[f"vqf:{codec.plain}"](), {PART: codec.plain_blocks(parts)}


def _codec(name: str, plain: str, tile: Tile | None, plausible: tuple[float, float]) -> type[VqfCodec]:
    frame, block, block_bytes = _FRAMES[plain]

    class TypeCodec(VqfCodec):
        col_multiple = GROUP if plain == "G256" else block

    TypeCodec.name, TypeCodec.plain, TypeCodec.tile, TypeCodec.plausible = f"vqf:{name}", plain, tile, plausible
    TypeCodec.frame, TypeCodec.block, TypeCodec.block_bytes = f"gguf:{frame}", block, block_bytes
    return TypeCodec


_FRAMES = {
    "F32": ("F32", 1, 4),
    "F16": ("F16", 1, 2),
    "Q8_0": ("Q8_0", BLOCK, 34),
    "G256": ("Q8_0", BLOCK, 34),
    "Q4I": ("Q8_0", BLOCK, 34),
    "Q4_0": ("Q4_0", BLOCK, 18),
}
"""Plain type -> (GGUF type of the same bytes, weights per block, bytes per block)."""

_EXACT, _EIGHT, _FOUR = (0.9999, 0.002), (0.999, 0.02), (0.98, 0.05)
"""`Codec.plausible` by bits. Cutting to float16 loses up to 0.1 % of a value; scales of weights below 1e-3 are subnormal float16, off by some percent."""

_CODECS = [
    _codec("F32", "F32", None, _EXACT),
    _codec("F16", "F16", None, _EXACT),
    _codec("Q8_0", "Q8_0", None, _EIGHT),
    _codec("Q8_0_8X8", "Q8_0", Q8_8X8, _EIGHT),
    _codec("Q8_0_4X4", "Q8_0", Q8_4X4, _EIGHT),
    _codec("G256", "G256", None, _EIGHT),
    _codec("G256_8X8", "G256", Q8_8X8, _EIGHT),
    _codec("G256_4X4", "G256", Q8_4X4, _EIGHT),
    _codec("Q4I", "Q4I", None, _FOUR),
    _codec("Q4_0", "Q4_0", None, _FOUR),
    _codec("Q4_0_4X4", "Q4_0", Q4_4X4, _FOUR),
    _codec("Q4_8X8L", "Q4_0", Q4_8X8L, _FOUR),
]

VQF_CODECS: dict[str, type[VqfCodec]] = {codec.name: codec for codec in _CODECS}
"""Codec classes by name. `Q4_8X8L` is what a file's x8_* copies are in; the others are named by plain type and tile."""


def vqf_codec(plain: str, tile: str = "") -> VqfCodec:
    """The codec of a plain type, in tiles `8X8`, `4X4` or none. Raises LabError for a pair that no file has."""
    name = f"vqf:{plain}_{tile}" if tile else f"vqf:{plain}"
    if name not in VQF_CODECS:
        raise LabError(f"codec {name}: no VQF file holds it; known: {', '.join(VQF_CODECS)}")
    return VQF_CODECS[name]()
