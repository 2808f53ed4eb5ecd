"""GGUF blocks transcoded at load, without loss, into one skeleton that a GPU multiplies well: words of codes, levels, scales, 8 rows side by side.

Why transcode: in a file's block the codes of one group lie in several places, next to 2-byte scales at odd addresses, and codebook entries need large
tables. Here codes of 1, 2, 4 or 8 bits lie in order, a level is arithmetic or one of 16 entries, and small scales stay small: K and IQ types keep their
float16 per 256 weights beside one byte per group. Eight rows side by side let one thread take them all: one activation serves eight weights.
What it costs: bytes, where a type packs tighter than whole bits (IQ2_XS 4.6 bits for 2.3, Q6_K 8.6 for 6.6). What it does not prove: speed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from lab.codecs import Codec, Parts
from lab.codecs.gguf import _BLOCKS, _FLOATS, PART, GgufCodec
from lab.codecs.gguf_bits import Terms, half, numbers
from lab.kernels.backend import require
from lab.kernels.gguf_gpu_types import SPECS, BlockSpec

ROWS = 8
"""Rows side by side in one block."""
_PIECE_CPU, _PIECE_GPU = 1 << 20, 1 << 24  # weights transcoded at a time; temporaries take about ten bytes a weight


@dataclass(frozen=True)
class GpuBlocks:
    """A stack of matrices [E, rows, cols] (or, `stacked` false, one matrix as a stack of one) of one GGUF type. All tensors on one device.

    words int32 [E, blocks, cols * bits / 32, 8]: a row's codes in order, the first in the lowest bits. scale [E, blocks, n, 8], n the groups, or,
    with `small` int8 [E, blocks, groups, 8], the number of 256s: scale = scale * small * spec.unit. offset as scale, and with `small_offset` the
    minimum, which is taken away: - offset * small_offset. table float32 [16]: the level by code. Rows beyond the last hold zeros.
    Of a float type `spec` is None, `words` are the floats [E, rows, cols], and `scale` is empty.
    """

    name: str
    spec: BlockSpec | None
    rows: int
    cols: int
    stacked: bool
    words: Tensor
    scale: Tensor
    small: Tensor | None = None
    offset: Tensor | None = None
    small_offset: Tensor | None = None
    table: Tensor | None = None

    def nbytes(self) -> int:
        """Bytes resident, padding rows included."""
        held = (self.words, self.scale, self.small, self.offset, self.small_offset)
        return sum(part.nbytes for part in held if part is not None)

    def shape(self) -> tuple[int, ...]:
        """[E, rows, cols] or [rows, cols]."""
        return (len(self.words), self.rows, self.cols) if self.stacked else (self.rows, self.cols)


def transcode(codec: Codec, parts: Parts, cols: int) -> GpuBlocks:
    """GGUF blocks uint8 [rows, row bytes] or [E, rows, row bytes] -> GpuBlocks on the same device; decodes to the same float32 bits.

    Raises LabError for another codec, bytes that are not rows of `cols` weights, or a level that the type's table does not list.
    """
    require(isinstance(codec, GgufCodec), codec.name, "is no GGUF type; use a codec gguf:TYPE")
    assert isinstance(codec, GgufCodec)
    packed, name = parts[PART], codec.kind.name
    require(packed.ndim in {2, 3} and packed.numel() > 0, codec.name, f"blocks {list(packed.shape)} are not [rows, bytes] or [E, rows, bytes]")
    wanted = codec.row_bytes(cols)
    require(packed.shape[-1] == wanted, codec.name, f"a row of {cols} weights has {wanted} bytes, not {packed.shape[-1]}")
    stack = packed if packed.ndim == 3 else packed[None]
    experts, rows = stack.shape[:2]
    if name in _FLOATS:
        floats = numbers(stack, _FLOATS[name])
        return GpuBlocks(name, None, rows, cols, packed.ndim == 3, floats, floats.new_empty(0))
    spec, block_rows = SPECS[name], -(-rows // ROWS)
    tall = stack.reshape(1, experts * rows, wanted) if rows % ROWS == 0 else stack
    limit = _PIECE_CPU if packed.device.type == "cpu" else _PIECE_GPU
    step = max(ROWS, limit // cols // ROWS * ROWS)
    held: dict[str, Tensor] = {}
    for number, matrix in enumerate(tall):
        for start in range(0, len(matrix), step):
            for key, part in _piece(spec, _BLOCKS[name], codec, matrix[start : start + step]).items():
                if key not in held:
                    held[key] = torch.empty(experts * block_rows, part.shape[1], ROWS, dtype=part.dtype, device=part.device)
                place = number * block_rows + start // ROWS
                blocked = torch.nn.functional.pad(part, (0, 0, 0, -len(part) % ROWS)).unflatten(0, (-1, ROWS))
                held[key][place : place + len(blocked)] = blocked.transpose(1, 2)
    stacks = {key: part.unflatten(0, (experts, block_rows)) for key, part in held.items()}
    return GpuBlocks(name, spec, rows, cols, packed.ndim == 3, **stacks, table=None if spec.step else _table(spec.levels, packed.device))


def decode(blocks: GpuBlocks) -> Tensor:
    """GpuBlocks -> float32 [E, rows, cols] or [rows, cols], the reference of every kernel: bit-equal to the codec's decode."""
    if blocks.spec is None:
        return blocks.words.to(torch.float32).view(blocks.shape())
    spec = blocks.spec
    codes = _unpacked(_row_major(blocks.words), spec.bits)
    levels = torch.tensor(spec.levels, dtype=torch.float32, device=codes.device)
    groups = levels[codes.to(torch.int32)].unflatten(-1, (-1, spec.group))  # [E, padded rows, groups, group]
    scale = _row_major(blocks.scale).to(torch.float32)
    if blocks.small is not None:
        scale = scale.repeat_interleave(spec.per_super, -1) * _row_major(blocks.small) * spec.unit
    values = groups * scale[..., None]
    if blocks.offset is not None:
        offset = _row_major(blocks.offset).to(torch.float32)
        if blocks.small_offset is not None:
            offset = -(offset.repeat_interleave(spec.per_super, -1) * _row_major(blocks.small_offset))
        values += offset[..., None]
    return values.flatten(-2)[:, : blocks.rows].reshape(blocks.shape())


def _piece(spec: BlockSpec, unpack: Callable[[Tensor], Terms], codec: GgufCodec, raw: Tensor) -> dict[str, Tensor]:
    """uint8 [r, row bytes] -> the fields of GpuBlocks as [r, n]."""
    blocks = raw.reshape(-1, codec.kind.nbytes)
    found: dict[str, Tensor] = {}
    if spec.supers:
        # With the block's float16 replaced by 1, what the codec calls the scale is the small integer, whatever the float16 was.
        blocks = blocks.clone()
        for key, at in zip(("scale", "offset"), spec.supers, strict=False):
            found[key] = _take_super(blocks, at).view(len(raw), -1)
        terms = unpack(blocks)
        found["small"] = _integers(terms.scale, spec.unit).view(len(raw), -1)
        if terms.offset is not None:
            found["small_offset"] = _integers(terms.offset, -1.0).view(len(raw), -1)
    else:
        terms = unpack(blocks)
        found["scale"] = terms.scale.to(spec.scale).view(len(raw), -1)
        if terms.offset is not None:
            found["offset"] = terms.offset.to(spec.scale).view(len(raw), -1)
    codes = _code_of(spec.levels, raw.device)[terms.codes.reshape(len(raw), -1).view(torch.uint8).to(torch.int32)]
    if len(spec.levels) < 256:
        require(not bool((codes == 255).any()), codec.name, "a codebook of the installed gguf package has a level that is not in lab.kernels.gguf_gpu_types")
    found["words"] = _packed(codes, spec.bits)
    return found


def _take_super(blocks: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of each block [n, 1], and 1.0 (0x3C00) in its place. -1: its four digits are the high halves of bytes 49, 51, 53, 55."""
    if at >= 0:
        held = half(blocks, at).to(torch.float16)
        blocks[:, at : at + 2] = torch.tensor([0x00, 0x3C], dtype=torch.uint8, device=blocks.device)
        return held
    digits = blocks[:, 49:56:2]
    low, high = (digits[:, 0::2] >> 4), (digits[:, 1::2] & 0xF0)
    held = (low | high).contiguous().view(torch.float16)
    blocks[:, 49:56:2] = (digits & 15) | torch.tensor([0x00, 0x00, 0xC0, 0x30], dtype=torch.uint8, device=blocks.device)
    return held


def _integers(scales: Tensor, unit: float) -> Tensor:
    """Small scales as float32 -> int8, in units of `unit`."""
    return (scales / unit).to(torch.int8)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """uint8 [r, n] -> int32 [r, n * bits / 32], the first code in the lowest bits."""
    per_byte = codes.unflatten(-1, (-1, 8 // bits))
    joined = per_byte[..., 0].clone()
    for place in range(1, 8 // bits):
        joined |= per_byte[..., place] << (place * bits)
    return joined.view(torch.int32)


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """The inverse of `_packed`."""
    packed = words.contiguous().view(torch.uint8)
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=words.device)
    return ((packed[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _row_major(part: Tensor) -> Tensor:
    """[E, blocks, n, 8] -> [E, padded rows, n]."""
    return part.transpose(-1, -2).flatten(1, 2)


@cache
def _code_of(levels: tuple[int, ...], device: torch.device) -> Tensor:
    """uint8 [256]: the code by level (modulo 256), 255 where there is none."""
    table = torch.full((256,), 255, dtype=torch.uint8)
    table[torch.tensor(levels) & 255] = torch.arange(len(levels), dtype=torch.uint8)
    return table.to(device)


@cache
def _table(levels: tuple[int, ...], device: torch.device) -> Tensor:
    """float32 [16] by code; zeros beyond the last level."""
    return torch.tensor([*levels, *(0,) * (16 - len(levels))], dtype=torch.float32, device=device)
