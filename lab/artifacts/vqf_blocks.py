"""In which layout the bytes of quantised matrices really lie, told by rules that every block of the converter obeys.

Why: the flag word cannot tell 8-bit 4x4 tiles from plain rows, and 0x1 files come from a converter that nobody has. The rules: the largest weight of an 8-bit
block gets code +-127, that of a 4-bit block code 0 (-8 as q4i), and scales of one matrix lie within a few powers of two. Read in another layout, the places
of scales hold codes and most blocks break a rule. On Gaussian and heavy-tailed
weights the right layout fits 100 % of the blocks and a wrong one 54 % at most (tests/artifacts/test_vqf_blocks.py).
What it does not prove: anything where several layouts fit, or none, as with blocks of another encoder. Then it says so and nothing is decided.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lab.codecs.gguf_bits import half
from lab.codecs.vqf import VqfCodec, vqf_codec

FITS = 0.95
"""A layout fits where this share of the blocks obeys the rules."""

_BANDS, _BAND_ROWS = 16, 8  # 8 rows begin and end at the same byte in every layout
_OCTAVES = 5.0  # how far from the median a scale may lie


def shares(bands: Tensor, codecs: list[VqfCodec], cols: int) -> dict[str, float]:
    """Codec name -> share of blocks that obey its rules. `bands` uint8 [n, bytes of 8 rows]: places in a matrix, each at a multiple of 8 rows."""
    found = {}
    for codec in codecs:
        blocks = _plain(bands, codec, cols).reshape(-1, codec.block_bytes)
        found[codec.name] = float((_RULES[codec.plain](blocks) & _near_the_median(blocks)).double().mean())
    return found


def fitting(bands: Tensor, codecs: list[VqfCodec], cols: int) -> list[str]:
    """Names of the codecs whose rules the blocks obey."""
    return [name for name, share in shares(bands, codecs, cols).items() if share >= FITS]


def sampled_bands(matrix: Tensor, rows: int) -> Tensor:
    """uint8 [n, bytes of 8 rows]: up to 16 bands spread over one matrix of `rows` rows (a multiple of 8), given by its bytes uint8 [bytes]."""
    bands = matrix.view(rows // _BAND_ROWS, -1)
    count = min(_BANDS, len(bands))
    picked = [i * (len(bands) - 1) // max(1, count - 1) for i in range(count)]
    return bands[torch.tensor(picked)]


def candidates(plain: str) -> list[VqfCodec]:
    """The layouts that matrices of a plain type could be in."""
    tiles = {"Q8_0": ("", "8X8", "4X4"), "G256": ("", "8X8", "4X4"), "Q4_0": ("", "4X4"), "Q4I": ("",)}[plain]
    return [vqf_codec(plain, tile) for tile in tiles]


def _plain(bands: Tensor, codec: VqfCodec, cols: int) -> Tensor:
    if codec.tile is None:
        return bands
    return codec.tile.plain(bands.reshape(len(bands), _BAND_ROWS // codec.tile.rows, cols // codec.block, -1))


def _near_the_median(blocks: Tensor) -> Tensor:
    """bool [n]: the scale is finite and within some octaves of the median, or zero, or belongs to a block of zeros (which 4-bit blocks scale by 1)."""
    scale = half(blocks, 0)[:, 0].abs()
    octave = scale.log2()
    middle = octave[torch.isfinite(octave)].median() if bool(torch.isfinite(octave).any()) else torch.tensor(0.0)
    codes = blocks[:, 2:]
    same = (codes == codes[:, :1]).all(dim=1)
    return torch.isfinite(scale) & ((scale == 0) | ((octave - middle).abs() <= _OCTAVES) | same)


def _eight_bit(blocks: Tensor) -> Tensor:
    codes = blocks[:, 2:].view(torch.int8).to(torch.int16).abs()
    return (codes.amax(dim=1) == 127) | (half(blocks, 0)[:, 0] == 0)


def _eight_bit_by_256(blocks: Tensor) -> Tensor:
    """One block of eight reaches 127; all eight have one scale. Blocks beyond the last whole group are not looked at."""
    whole = len(blocks) // 8 * 8
    groups = blocks[:whole].view(-1, 8, blocks.shape[1])
    codes = groups[..., 2:].view(torch.int8).to(torch.int16).abs()
    scales = groups[..., :2]
    sound = ((codes.amax(dim=(1, 2)) == 127) | (half(groups[:, 0], 0)[:, 0] == 0)) & (scales == scales[:, :1]).all(dim=2).all(dim=1)
    return torch.cat((sound.repeat_interleave(8), torch.ones(len(blocks) - whole, dtype=torch.bool)))


def _four_bit(blocks: Tensor) -> Tensor:
    codes = torch.cat((blocks[:, 2:] & 15, blocks[:, 2:] >> 4), dim=1)
    return (codes.amin(dim=1) == 0) | (codes == 8).all(dim=1)


def _four_bit_as_int8(blocks: Tensor) -> Tensor:
    codes = blocks[:, 2:].view(torch.int8)
    return ((codes.amin(dim=1) == -8) & (codes.amax(dim=1) <= 7)) | (codes == 0).all(dim=1)


_RULES: dict[str, Callable[[Tensor], Tensor]] = {"Q8_0": _eight_bit, "G256": _eight_bit_by_256, "Q4_0": _four_bit, "Q4I": _four_bit_as_int8}
