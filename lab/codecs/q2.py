"""2-bit codecs: `q2_levels` (a naive first attempt), `q2_g32` (what a scale per 32 buys), `q2_rows` (the n-gram table's rows).

Why three: the lab shows the step from a row scale to a fine scale on the same experts, and squeezes the table to 44 bytes per 160-wide row.
All store 4 codes per byte, least significant first, and w = level[code] * scale. LLOYD_MAX are the optimal levels for a Gaussian, unit variance,
4 levels: J. Max, "Quantizing for minimum distortion", IRE Trans. IT-6 (1960), table I; the fit rescales them, so only their ratio matters.
What it does not prove: usable models. A 2-bit weight cosine of .94 is an error of 12 % in energy.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite
from typing import Any, ClassVar

import torch
from torch import Tensor

from lab.codecs.base import Codec, Parts
from lab.codecs.fit import SortedGroups, absmax_per_matrix, nearest_codes, power_of_two_factor
from lab.codecs.packing import pack2, unpack2
from lab.codecs.w3 import LEVELS as W3_LEVELS
from lab.errors import LabError

LLOYD_MAX = (-1.510, -0.4528, 0.4528, 1.510)
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "e4m3": torch.float8_e4m3fn}


class _TwoBit(Codec):
    """Shared encode and decode. Parts: codes uint8 [..., rows, cols/4], scale [..., rows, groups], factor float32 [..., 1] with E4M3 scales."""

    shared = frozenset({"factor"})
    col_multiple = 4
    group: int | None = None  # weights per scale; None: the whole row
    scale_dtypes: tuple[str, ...] = ("float32",)

    def check_options(self) -> None:
        levels = self.options["levels"]
        numbers = isinstance(levels, Sequence) and all(isinstance(level, int | float) and isfinite(level) for level in levels)
        if not numbers or len(levels) != 4 or not all(a < b for a, b in pairwise(levels)):
            raise LabError(f"codec {self.name}: levels={levels!r} is not 4 increasing numbers")
        self.options["levels"] = tuple(float(level) for level in levels)
        for key, known in (("scale", ("search", "absmax")), ("scale_dtype", self.scale_dtypes)):
            if self.options[key] not in known:
                raise LabError(f"codec {self.name}: {key}={self.options[key]!r} is not one of: {', '.join(known)}")
        if self.options["scale"] == "absmax":  # norms grow with the outlier that sets the scale: at most by its ratio to the rms
            self.plausible = (0.25, 20.0) if self.group is None else (0.7, 0.7)

    @property
    def levels(self) -> tuple[float, ...]:
        """Level by code, increasing."""
        levels: tuple[float, ...] = self.options["levels"]
        return levels

    @property
    def _fine(self) -> bool:
        return bool(self.options["scale_dtype"] == "e4m3")

    def encode(self, weight: Tensor) -> Parts:
        self.check_weight(weight)
        *lead, rows, cols = weight.shape
        group, flat_rows, device = self.group or cols, weight.shape[:-1].numel(), weight.device
        dtype = _DTYPES[self.options["scale_dtype"]]
        codes = torch.empty(flat_rows, cols // 4, dtype=torch.uint8, device=device)
        scales = torch.empty(flat_rows, cols // group, dtype=dtype, device=device)
        factor = power_of_two_factor(absmax_per_matrix(weight), self.levels) if self._fine else None
        for where, chunk in self.chunks(weight):
            groups = chunk.view(-1, group)
            fit = SortedGroups(groups, self.levels)
            scale = fit.best_scale() if self.options["scale"] == "search" else fit.absmax_scale()
            if factor is None:
                stored = scale.to(dtype)
                if not bool(torch.isfinite(stored).all()):
                    raise LabError(f"codec {self.name}: a scale of {float(scale.max()):.3g} overflows {self.options['scale_dtype']}")
                used = stored.to(torch.float32)
            else:
                unit = factor.repeat_interleave(rows)[where].repeat_interleave(cols // group)
                stored = fit.round_e4m3(scale, unit)
                used = stored.to(torch.float32) * unit
            codes[where] = pack2(nearest_codes(groups, used, self.levels).view(len(chunk), cols))
            scales[where] = stored.view(len(chunk), -1)
        parts = {"codes": codes.view(*lead, rows, -1), "scale": scales.view(*lead, rows, -1)}
        return parts if factor is None else {**parts, "factor": factor.view(*lead, 1)}

    def decode(self, parts: Parts, cols: int) -> Tensor:
        values = unpack2(parts["codes"], self.levels)
        scale = parts["scale"].to(torch.float32)
        if "factor" in parts:
            scale = scale * parts["factor"][..., None]
        values.unflatten(-1, (-1, self.group or cols)).mul_(scale[..., None])
        return values

    def row_bytes(self, cols: int) -> int:
        self.check_cols(cols)
        return cols // 4 + cols // (self.group or cols) * _DTYPES[self.options["scale_dtype"]].itemsize

    def shared_bytes(self, rows: int, cols: int) -> int:
        return 4 if self._fine else 0


class Q2Levels(_TwoBit):
    """4 of the 8 levels of w3_levels, one scale per row: the first attempt at 2 bits.

    The forum post does not say which four. Default (-8, -3, 3, 8): the outer pair that absmax scaling needs and the inner pair nearest to the
    Lloyd-Max ratio (8/3 against 3.33). scale="absmax" is what a first attempt does: the row's one outlier sets the step of all its weights.
    """

    name = "q2_levels"
    defaults: ClassVar[dict[str, Any]] = {"levels": (-8.0, -3.0, 3.0, 8.0), "scale": "absmax", "scale_dtype": "float32"}
    scale_dtypes = ("float32", "bfloat16", "float16")
    plausible = (0.7, 0.3)

    def check_options(self) -> None:
        super().check_options()
        if not set(self.levels) <= set(W3_LEVELS):
            raise LabError(f"codec {self.name}: levels={list(self.levels)} are not 4 of {[int(level) for level in W3_LEVELS]}")


class Q2G32(_TwoBit):
    """4 levels, one scale per 32 weights: 2.5 bits per weight with fp16 scales, 2.25 with E4M3 scales and a factor per matrix.

    fp16 scales lose precision below 6e-5 (weights below 1e-4); scale_dtype="bfloat16" or "e4m3" does not.
    """

    name = "q2_g32"
    defaults: ClassVar[dict[str, Any]] = {"levels": LLOYD_MAX, "scale": "search", "scale_dtype": "float16"}
    scale_dtypes = ("float16", "bfloat16", "e4m3")
    group = 32
    col_multiple = 32
    plausible = (0.8, 0.3)


class Q2Rows(_TwoBit):
    """The n-gram table's row: 2-bit codes and one float32 scale. 160 wide: 40 + 4 = 44 bytes."""

    name = "q2_rows"
    defaults: ClassVar[dict[str, Any]] = {"levels": LLOYD_MAX, "scale": "search", "scale_dtype": "float32"}
    plausible = (0.7, 0.3)
