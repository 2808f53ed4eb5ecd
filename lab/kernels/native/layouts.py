"""What a codec's parts are to the kernels: which block type, which tensors in which order, which table.

Why apart from the calls: a codec is a Python object with options; the kernels know block types by number and raw bytes. Every shape and dtype is checked
here, once per weight, and nothing below looks again.
What it does not prove: that values are sound. Any bytes are valid blocks, and a scale may be NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import prod

import torch
from torch import Tensor

from lab.codecs import Codec, Parts, create
from lab.codecs.gguf import PART, GgufCodec
from lab.codecs.gguf_package import grid
from lab.codecs.plain import Bf16, Int8G128
from lab.codecs.q2 import Q2G32, Q2Levels, Q2Rows
from lab.codecs.vqf import VqfCodec
from lab.codecs.w3 import W3Levels
from lab.errors import LabError

# Shapes of the codebooks (ggml-common.h); the kernels index them with this many bits and check nothing.
_GRIDS = {"IQ2_XXS": (256, 8), "IQ2_XS": (512, 8), "IQ2_S": (1024, 8), "IQ3_XXS": (256, 4), "IQ3_S": (512, 4), "IQ1_S": (2048, 8)}
_GRID_OF = {**{name: name for name in _GRIDS}, "IQ1_M": "IQ1_S"}

_SCALES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Layout:
    """One weight as the kernels see it: `parts[i]` is [count, rows, ...] with bytes side by side in its last dimension; a factor is [count, 1, 1]."""

    kind: str
    parts: tuple[Tensor, ...]
    table: Tensor | None
    lead: tuple[int, ...]
    rows: int
    cols: int


def resolve(codec: Codec | str) -> Codec:
    """A codec object, or one made by name with its default options."""
    return create(codec) if isinstance(codec, str) else codec


def kind_of(codec: Codec) -> str | None:
    """The name of the block type, or None where the kernels have none for this codec and its options."""
    if isinstance(codec, GgufCodec):
        return codec.kind.name
    if isinstance(codec, VqfCodec):  # rows have GGUF's bytes; tiles are put into rows when a model is loaded
        return codec.frame.removeprefix("gguf:") if codec.tile is None else None
    if isinstance(codec, Bf16):
        return "BF16"
    if isinstance(codec, Int8G128):
        return "int8_g128"
    if isinstance(codec, Q2G32):
        return f"q2_g32:{codec.options['scale_dtype']}"
    if isinstance(codec, Q2Levels | Q2Rows):
        return f"q2_row:{codec.options['scale_dtype']}"
    if isinstance(codec, W3Levels):
        return f"w3_levels:{codec.options['code_order']}"
    return None


def column_multiple(codec: Codec) -> int:
    """What the columns of a row must be a multiple of. Kernels take 16 weights at a time; only GGUF's plain floats and bf16 may end anywhere."""
    return 16 if isinstance(codec, Int8G128 | Q2Levels | Q2Rows) else codec.col_multiple


def layout(codec: Codec, parts: Parts | Tensor, cols: int) -> Layout:
    """The layout of `parts` (GGUF: also the one tensor of blocks itself) that hold rows of `cols` weights. Raises LabError where they do not."""
    kind = kind_of(codec)
    if kind is None:
        raise LabError(f"codec {codec.name}: no native kernel; use lab.ops")
    if isinstance(parts, Tensor):
        parts = {PART: parts}
    codec.check_cols(cols)
    if cols % column_multiple(codec):
        raise LabError(f"codec {codec.name}: the native kernel needs columns in multiples of {column_multiple(codec)}, not {cols}; use lab.ops")
    names, dtypes, widths = _expected(codec, cols)
    first = parts.get(names[0])
    if first is None or first.ndim < 2:
        raise LabError(f"codec {codec.name}: part {names[0]} must be [..., rows, {widths[0]}]")
    lead, rows = tuple(first.shape[:-2]), first.shape[-2]
    flat: list[Tensor] = []
    for name, dtype, width in zip(names, dtypes, widths, strict=True):
        shape = (*lead, 1) if name == "factor" else (*lead, rows, width)
        part = parts.get(name)
        if part is None or part.dtype != dtype or tuple(part.shape) != shape or not part.is_cpu:
            found = "missing" if part is None else f"{part.dtype} {list(part.shape)} on {part.device}"
            raise LabError(f"codec {codec.name}: part {name} must be {dtype} {list(shape)} on the CPU for rows of {cols} weights; it is {found}")
        flat.append(_stacked(part[..., None] if name == "factor" else part, prod(lead)))
    return Layout(kind, tuple(flat), _table(codec), lead, rows, cols)


def _stacked(part: Tensor, count: int) -> Tensor:
    """[..., rows, width] -> [count, rows, width] whose last dimension has stride 1; copied only where that takes a copy."""
    stacked = part.reshape(count, *part.shape[-2:])
    return stacked if stacked.stride(-1) == 1 or stacked.shape[-1] == 1 else stacked.contiguous()


def _expected(codec: Codec, cols: int) -> tuple[Sequence[str], Sequence[torch.dtype], Sequence[int]]:
    """Names, dtypes and last dimensions of a codec's parts, codes first."""
    if isinstance(codec, GgufCodec | VqfCodec):  # which name their one part alike
        return [PART], [torch.uint8], [codec.row_bytes(cols)]
    if isinstance(codec, Bf16):
        return ["weight"], [torch.bfloat16], [cols]
    if isinstance(codec, Int8G128):
        return ["weight", "scale"], [torch.int8, torch.bfloat16], [cols, -(-cols // codec.group)]
    names = ["codes", "scale", "factor"]
    if isinstance(codec, W3Levels):
        known = 3 if codec.options["matrix_factor"] else 2
        return names[:known], [torch.uint8, torch.float8_e4m3fn, torch.float32][:known], [cols * 3 // 8, cols // codec.group, 1][:known]
    assert isinstance(codec, Q2G32 | Q2Levels | Q2Rows)
    scale = _SCALES[codec.options["scale_dtype"]]
    known = 3 if scale == torch.float8_e4m3fn else 2
    return names[:known], [torch.uint8, scale, torch.float32][:known], [cols // 4, cols // (codec.group or cols), 1][:known]


def _table(codec: Codec) -> Tensor | None:
    """The codebook int8 [entries, 4 or 8], or 16 float32 levels by code, repeated."""
    if isinstance(codec, GgufCodec):
        return _codebook(_GRID_OF[codec.kind.name]) if codec.kind.name in _GRID_OF else None
    if isinstance(codec, W3Levels):
        return _levels(tuple(level / codec.divisor for level in codec.levels))
    return _levels(codec.levels) if isinstance(codec, Q2G32 | Q2Levels | Q2Rows) else None


@cache
def _levels(levels: tuple[float, ...]) -> Tensor:
    return torch.tensor(levels, dtype=torch.float32).repeat(16 // len(levels))


@cache
def _codebook(name: str) -> Tensor:
    entries = grid(name).contiguous()
    if tuple(entries.shape) != _GRIDS[name]:
        raise LabError(f"codec gguf:{name}: the gguf package's codebook is {list(entries.shape)}, not {list(_GRIDS[name])}; install the pinned gguf")
    return entries
