"""float8_e4m3fn weights with a bf16 scale: one per matrix, or one per 128x128 block as in the FP8 release.

Why both: the FP8 release stores experts in blocks (`weight_scale_inv`, bf16, ceil(rows/128) x ceil(cols/128)) and the n-gram table with one
global bf16 scale (`weight_scale`, bf16 [1]). `from_release` adopts such tensors bit for bit, so that the reference path runs on released bytes.
What it does not cover: E4M3FNUZ (another bias, older AMD GPUs), which a file must not be read as.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from lab.codecs.base import Codec, Parts, divided, take
from lab.codecs.fit import E4M3_MAX
from lab.codecs.plain import round_up_bf16
from lab.errors import LabError

BLOCK = 128


class E4M3(Codec):
    """Parts, scale="global": weight e4m3 [..., rows, cols], weight_scale bf16 [..., 1]. scale="block128": weight, weight_scale_inv bf16
    [..., ceil(rows/128), ceil(cols/128)]. w = e4m3 * scale in both ("inv" is the release's word). Scale = max|w| / 448 rounded up to bf16.
    """

    name = "e4m3"
    defaults: ClassVar[dict[str, Any]] = {"scale": "global"}
    shared = frozenset({"weight_scale"})
    plausible = (0.995, 0.02)

    def check_options(self) -> None:
        if self.options["scale"] not in ("global", "block128"):
            raise LabError(f"codec e4m3: scale={self.options['scale']!r} is not one of: global, block128")

    @property
    def scale_key(self) -> str:
        """The scale part's name, as in the release."""
        return "weight_scale" if self.options["scale"] == "global" else "weight_scale_inv"

    def encode(self, weight: Tensor) -> Parts:
        self.check_weight(weight)
        *lead, rows, cols = weight.shape
        stored = torch.empty(weight.shape[:-2].numel(), rows, cols, dtype=torch.float8_e4m3fn, device=weight.device)
        scales = torch.empty(len(stored), *self._scale_shape(rows, cols), dtype=torch.bfloat16, device=weight.device)
        for i, matrix in enumerate(weight.reshape(-1, rows, cols)):  # one matrix at a time keeps the float32 copy small
            values = self.finite(matrix)
            if self.options["scale"] == "global":
                amax = values.abs().amax()[None]
            else:
                grid = torch.nn.functional.pad(values.abs(), (0, -cols % BLOCK, 0, -rows % BLOCK))
                amax = grid.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).amax(dim=(1, 3))
            scales[i] = round_up_bf16(divided(amax, E4M3_MAX))
            wide = self._spread(scales[i], rows, cols)
            stored[i] = (values / torch.where(wide > 0, wide, 1.0)).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
        return {"weight": stored.view(weight.shape), self.scale_key: scales.view(*lead, *scales.shape[1:])}

    def decode(self, parts: Parts, cols: int) -> Tensor:
        values = e4m3_to_float(parts["weight"])
        return values.mul_(self._spread(parts[self.scale_key], values.shape[-2], cols))

    def _scale_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        return (1,) if self.options["scale"] == "global" else (-(-rows // BLOCK), -(-cols // BLOCK))

    def _spread(self, scale: Tensor, rows: int, cols: int) -> Tensor:
        """Stored scales -> float32 that broadcasts over [..., rows, cols]."""
        wide = scale.to(torch.float32)
        if self.options["scale"] == "global":
            return wide[..., None]
        if wide.shape[-2] != rows:  # after take_rows there is one scale row per weight row
            wide = wide.repeat_interleave(BLOCK, dim=-2)[..., :rows, :]
        return wide.repeat_interleave(BLOCK, dim=-1)[..., :cols]

    def row_bytes(self, cols: int) -> int:
        self.check_cols(cols)
        return cols

    def shared_bytes(self, rows: int, cols: int) -> int:
        shape = self._scale_shape(rows, cols)
        return 2 * (shape[0] if len(shape) == 1 else shape[0] * shape[1])

    def take_rows(self, parts: Parts, ids: Tensor) -> Parts:
        """As in the base; with block scales each row brings its own copy of its block's scales [n, ceil(cols/128)]."""
        if self.options["scale"] == "global":
            return super().take_rows(parts, ids)
        rows = parts["weight"].shape[0]
        where = torch.where(ids < 0, ids + rows, ids)
        scale = parts["weight_scale_inv"]
        return {"weight": take(parts["weight"], ids), "weight_scale_inv": scale[where if scale.shape[0] == rows else where // BLOCK]}


def from_release(weight: Tensor, scale: Tensor) -> tuple[E4M3, Parts]:
    """Released tensors -> (codec, parts) that hold the very same storage; nothing is requantised.

    weight float8_e4m3fn [..., rows, cols]; scale bf16, either [..., ceil(rows/128), ceil(cols/128)] (`weight_scale_inv`, stacked as the weight)
    or one value per matrix [..., 1] (`weight_scale` of the n-gram table). Raises LabError on another dtype or shape, or on NaN.
    """
    if weight.dtype != torch.float8_e4m3fn or scale.dtype != torch.bfloat16 or weight.ndim < 2:
        raise LabError(f"codec e4m3: a release has float8_e4m3fn weights and bf16 scales, not {weight.dtype} and {scale.dtype}")
    if not bool(torch.isfinite(scale).all()) or bool(((weight.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise LabError("codec e4m3: the released tensors hold NaN or infinity")
    lead = tuple(weight.shape[:-2])
    choices: dict[str, Any] = {kind: lead + E4M3(scale=kind)._scale_shape(*weight.shape[-2:]) for kind in ("global", "block128")}
    for kind, shape in choices.items():
        if tuple(scale.shape) == shape:
            codec = E4M3(scale=kind)
            return codec, {"weight": weight, codec.scale_key: scale}
    raise LabError(f"codec e4m3: scale {list(scale.shape)} fits neither reading of weight {list(weight.shape)}: {choices}")


def e4m3_to_float(weight: Tensor) -> Tensor:
    """float8_e4m3fn -> float32, exact for every finite value.

    On a CPU torch converts value by value (2.7 ns); moving the 7 low bits into a float16's place is exact too, because float16 has one exponent
    bit more and a bias larger by 8 (hence 2^8), and subnormals map to subnormals. NaN would come out as 480: `encode` and `from_release` let
    none in.
    """
    if weight.device.type != "cpu":
        return weight.to(torch.float32)
    shifted = (weight.view(torch.int8).to(torch.int16) << 7) & -0x4001  # sign extension fills bit 14, which must be clear
    return shifted.view(torch.float16).to(torch.float32).mul_(256.0)
