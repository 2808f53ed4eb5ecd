"""The tiled layouts of VQF files as maps of bytes: plain blocks of 32 weights to tiles of 4 or 8 rows, and back. Nothing is decoded, nothing is lost.

Why one map: all four layouts gather the blocks of R rows at the same 32 columns into one tile, which holds the R float16 scales in row order and then
the rows' codes in turns of `unit` bytes; 4-bit codes have 0x88 flipped in besides, which makes each half byte a signed number. Facts: Kestrel's
vqf_convert (qk_repack.c), as put down in the project's notes on VQF, section 1.5.
What it does not prove: which layout a file is in; its header does not always say (`lab.artifacts.vqf_blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lab.errors import LabError

BLOCK = 32
"""Weights per block, along a row."""

SCALE_BYTES = 2
"""A float16 before the codes of each block."""


@dataclass(frozen=True)
class Tile:
    """`rows` x 32 weights: their scales, then `unit` bytes of each row in turn, every code byte XOR `flip`."""

    name: str
    rows: int
    unit: int
    flip: int

    def check(self, rows: int, what: str) -> None:
        """Raises LabError, beginning with `what`, where `rows` rows are no whole tiles."""
        if rows < 1 or rows % self.rows:
            raise LabError(f"{what}: {rows} rows are no whole tiles of {self.rows} ({self.name})")

    def tiled(self, blocks: Tensor, block_bytes: int) -> Tensor:
        """Plain blocks uint8 [..., rows, blocks a row * block_bytes] -> tiles uint8 [..., rows / R, blocks a row, R * block_bytes], a copy."""
        *lead, rows, row_bytes = blocks.shape
        self.check(rows, "tiling")
        count, codes = row_bytes // block_bytes, block_bytes - SCALE_BYTES
        split = blocks.reshape(-1, rows // self.rows, self.rows, count, block_bytes)
        out = torch.empty(split.shape[0], rows // self.rows, count, self.rows * block_bytes, dtype=torch.uint8, device=blocks.device)
        scales, units = self._parts(out, codes)
        scales.copy_(split[..., :SCALE_BYTES].permute(0, 1, 3, 2, 4))
        units.copy_(split[..., SCALE_BYTES:].unflatten(-1, (codes // self.unit, self.unit)).permute(0, 1, 3, 4, 2, 5))
        if self.flip:
            out[..., self.rows * SCALE_BYTES :].bitwise_xor_(self.flip)
        return out.view(*lead, rows // self.rows, count, self.rows * block_bytes)

    def plain(self, tiles: Tensor) -> Tensor:
        """The way back: tiles [..., tile rows, blocks a row, tile bytes], in any strides -> plain blocks [..., rows, bytes a row], a copy."""
        *lead, groups, count, tile_bytes = tiles.shape
        block_bytes = tile_bytes // self.rows
        codes = block_bytes - SCALE_BYTES
        split = tiles.reshape(-1, groups, count, tile_bytes)
        out = torch.empty(split.shape[0], groups, self.rows, count, block_bytes, dtype=torch.uint8, device=tiles.device)
        scales, units = self._parts(split, codes)
        out[..., :SCALE_BYTES] = scales.permute(0, 1, 3, 2, 4)
        out[..., SCALE_BYTES:].unflatten(-1, (codes // self.unit, self.unit)).copy_(units.permute(0, 1, 4, 2, 3, 5))
        if self.flip:
            out[..., SCALE_BYTES:].bitwise_xor_(self.flip)
        return out.view(*lead, groups * self.rows, count * block_bytes)

    def rows_of(self, tiles: Tensor, ids: Tensor) -> Tensor:
        """Rows `ids` int [n] of one matrix [tile rows, blocks a row, tile bytes] as plain blocks [n, bytes a row]; only their tiles are touched."""
        count, tile_bytes = tiles.shape[-2:]
        block_bytes = tile_bytes // self.rows
        picked = tiles[ids // self.rows]
        scales, units = self._parts(picked, block_bytes - SCALE_BYTES)
        lane = (ids % self.rows).to(torch.int64)
        each = torch.arange(len(ids), device=ids.device)
        out = torch.empty(len(ids), count, block_bytes, dtype=torch.uint8, device=tiles.device)
        out[..., :SCALE_BYTES] = scales[each, :, lane]
        out[..., SCALE_BYTES:] = units[each, :, :, lane].flatten(-2)
        if self.flip:
            out[..., SCALE_BYTES:].bitwise_xor_(self.flip)
        return out.flatten(-2)

    def _parts(self, tiles: Tensor, codes: int) -> tuple[Tensor, Tensor]:
        """Views of tiles [..., tile bytes]: scales [..., R, 2] and codes [..., codes / unit, R, unit]."""
        border = self.rows * SCALE_BYTES
        scales = tiles[..., :border].unflatten(-1, (self.rows, SCALE_BYTES))
        return scales, tiles[..., border:].unflatten(-1, (codes // self.unit, self.rows, self.unit))


Q8_8X8 = Tile("8x8 tiles", rows=8, unit=4, flip=0)
Q8_4X4 = Tile("4x4 tiles", rows=4, unit=4, flip=0)
Q4_4X4 = Tile("4x4 tiles", rows=4, unit=4, flip=0x88)
Q4_8X8L = Tile("8x8l tiles", rows=8, unit=8, flip=0x88)
