"""w3_levels: eight integer levels, one E4M3 scale per 64 weights, 32 codes in 3 words - 3.125 bits per weight and 4 bytes per matrix.

Why with options: the public words are "levels [-8,-5,-3,-1,1,3,5,8]", "e4m3 scale/64", "32 codes in 3 uint32"; code order, code numbering and
the meaning of "/64" are open, so each reading is a named option and the record keeps which one ran.
Our addition: a float32 power-of-two factor per matrix, because an E4M3 scale below 2^-9 vanishes. With `matrix_factor=False` small weights fit
the "div64" reading better than "direct" (their scales leave E4M3's subnormals), which speaks for it but proves nothing.
What it does not prove: that a released checkpoint decodes right. Only a golden vector from its author settles that.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from lab.codecs.base import Codec, Parts
from lab.codecs.fit import E4M3_MAX, SortedGroups, absmax_per_matrix, nearest_codes, power_of_two_factor
from lab.codecs.packing import CODE_ORDERS, pack3, unpack3
from lab.errors import LabError

LEVELS = (-8.0, -5.0, -3.0, -1.0, 1.0, 3.0, 5.0, 8.0)
_CHOICES = {
    "code_order": CODE_ORDERS,
    "code_numbering": ("ascending", "sign_magnitude"),
    "scale_meaning": ("direct", "div8", "div64"),
    "scale": ("search", "absmax"),
    "matrix_factor": (True, False),
}
_DIVISOR = {"direct": 1.0, "div8": 8.0, "div64": 64.0}


class W3Levels(Codec):
    """Parts: codes uint8 [..., rows, cols * 3/8] (view int32 for words), scale e4m3 [..., rows, cols/64], factor float32 [..., 1] (optional).

    w = level[code] * scale / divisor * factor. Options:
    code_order: "straight" or "10_10_10_2", see `packing.pack3`.
    code_numbering: "ascending" (code 0 = -8, 7 = 8) or "sign_magnitude" (bits 0-1 pick 1, 3, 5, 8; bit 2 is the sign, so code 0 = +1).
    scale_meaning: "direct" (w = level * scale: "scale/64" = per 64 weights), "div64" ("scale/64" = divided by 64), "div8" (levels are eighths).
    scale: "search" (least squared error, also over the neighbouring E4M3 values) or "absmax" (largest |w| on level 8).
    matrix_factor: hold a power of two per matrix; without it scales must lie within E4M3's range or encode raises LabError.
    """

    name = "w3_levels"
    defaults: ClassVar[dict[str, Any]] = {
        "code_order": "straight",
        "code_numbering": "ascending",
        "scale_meaning": "direct",
        "scale": "search",
        "matrix_factor": True,
    }
    shared = frozenset({"factor"})
    group = 64
    col_multiple = 64
    plausible = (0.92, 0.15)

    def check_options(self) -> None:
        for key, known in _CHOICES.items():
            value = self.options[key]
            if value not in known or isinstance(value, bool) != isinstance(known[0], bool):
                raise LabError(f"codec {self.name}: {key}={value!r} is not one of: {', '.join(map(str, known))}")

    @property
    def levels(self) -> tuple[float, ...]:
        """Level by code, without the scale's divisor."""
        return LEVELS if self.options["code_numbering"] == "ascending" else (*LEVELS[4:], *LEVELS[3::-1])

    @property
    def divisor(self) -> float:
        """What level * scale is divided by: 1, 8 or 64."""
        return _DIVISOR[self.options["scale_meaning"]]

    def encode(self, weight: Tensor) -> Parts:
        self.check_weight(weight)
        *lead, rows, cols = weight.shape
        flat_rows, device = weight.shape[:-1].numel(), weight.device
        codes = torch.empty(flat_rows, cols * 3 // 8, dtype=torch.uint8, device=device)
        scales = torch.empty(flat_rows, cols // self.group, dtype=torch.float8_e4m3fn, device=device)
        factor = torch.ones(weight.shape[:-2].numel(), dtype=torch.float32, device=device)
        if self.options["matrix_factor"]:
            factor = power_of_two_factor(absmax_per_matrix(weight) * self.divisor, LEVELS)
        unit = (factor / self.divisor).repeat_interleave(rows)  # [all rows]: what a scale of 1 stands for
        number = torch.tensor([self.levels.index(level) for level in LEVELS], dtype=torch.uint8, device=device)
        for where, chunk in self.chunks(weight):
            groups = chunk.view(-1, self.group)
            fit = SortedGroups(groups, LEVELS)
            group_unit = unit[where].repeat_interleave(cols // self.group)
            scale = fit.best_scale() if self.options["scale"] == "search" else fit.absmax_scale()
            if not self.options["matrix_factor"]:
                self._check_range(scale / group_unit, fit.absmax > 0)
            if self.options["scale"] == "search":
                stored = fit.round_e4m3(scale, group_unit)
            else:
                stored = (scale / group_unit).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
            ascending = nearest_codes(groups, stored.to(torch.float32) * group_unit, LEVELS)
            codes[where] = pack3(number[ascending.to(torch.int32)].view(len(chunk), cols), self.options["code_order"])
            scales[where] = stored.view(len(chunk), -1)
        parts = {"codes": codes.view(*lead, rows, -1), "scale": scales.view(*lead, rows, -1)}
        return {**parts, "factor": factor.view(*lead, 1)} if self.options["matrix_factor"] else parts

    def _check_range(self, scale: Tensor, used: Tensor) -> None:
        """Raises LabError where raw scales overflow E4M3 or a group that is not zero would get scale 0."""
        if bool((scale > E4M3_MAX).any()) or bool((used & (scale < 2**-10)).any()):
            raise LabError(
                f"codec {self.name}: group scales {float(scale.min()):.3g} .. {float(scale.max()):.3g} leave E4M3's 2^-9 .. 448; "
                "set matrix_factor=true or another scale_meaning"
            )

    def decode(self, parts: Parts, cols: int) -> Tensor:
        values = unpack3(parts["codes"], tuple(level / self.divisor for level in self.levels), self.options["code_order"])
        scale = parts["scale"].to(torch.float32)
        if "factor" in parts:
            scale = scale * parts["factor"][..., None]
        values.unflatten(-1, (-1, self.group)).mul_(scale[..., None])
        return values

    def row_bytes(self, cols: int) -> int:
        self.check_cols(cols)
        return cols * 3 // 8 + cols // self.group

    def shared_bytes(self, rows: int, cols: int) -> int:
        return 4 if self.options["matrix_factor"] else 0
