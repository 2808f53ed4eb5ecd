"""The two codecs that change a weight least: bf16 (the source precision) and symmetric int8 with one scale per 128 inputs.

Why int8 g128: it is the trunk format of the stacks compared here ("W8A16 trunk", int8 W8A8 with a scale per 128); the published words leave
scale dtype and rounding open, so the scale is our choice: bf16, which has float32's range (fp16 loses groups below 1e-5) at half its bytes.
What it does not prove: W8A8 quality. Activations stay in the engine's precision here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lab.codecs.base import Codec, Parts, divided


class Bf16(Codec):
    """Parts: weight bf16 [..., rows, cols]. Round to nearest even; bf16 input passes unchanged (shared, not copied)."""

    name = "bf16"
    plausible = (0.9999, 0.001)

    def encode(self, weight: Tensor) -> Parts:
        self.check_weight(weight)
        for _ in self.chunks(weight):  # for the check of values alone
            pass
        stored = weight.to(torch.bfloat16)
        self.finite(stored.abs().amax())  # float32 above bf16's range rounds to infinity
        return {"weight": stored}

    def decode(self, parts: Parts, cols: int) -> Tensor:
        return parts["weight"].to(torch.float32)

    def row_bytes(self, cols: int) -> int:
        self.check_cols(cols)
        return 2 * cols


class Int8G128(Codec):
    """Parts: weight int8 [..., rows, cols], scale bf16 [..., rows, ceil(cols / 128)]. w = int8 * scale, int8 in -127..127.

    The last group of a row may be short. scale = max|w| / 127 rounded up to bf16, so that nothing saturates and |error| <= scale / 2.
    """

    name = "int8_g128"
    group = 128
    plausible = (0.999, 0.005)

    def encode(self, weight: Tensor) -> Parts:
        self.check_weight(weight)
        rows, cols = weight.shape[:-1].numel(), weight.shape[-1]
        groups = -(-cols // self.group)
        stored = torch.empty(rows, cols, dtype=torch.int8, device=weight.device)
        scales = torch.empty(rows, groups, dtype=torch.bfloat16, device=weight.device)
        for where, chunk in self.chunks(weight):
            padded = torch.nn.functional.pad(chunk, (0, groups * self.group - cols)).unflatten(-1, (groups, self.group))
            scale = round_up_bf16(divided(padded.abs().amax(dim=-1), 127))
            wide = scale.to(torch.float32)[..., None]
            codes = (padded / torch.where(wide > 0, wide, 1.0)).round_().clamp_(-127, 127)
            stored[where] = codes.to(torch.int8).flatten(-2)[:, :cols]
            scales[where] = scale
        return {"weight": stored.view(weight.shape), "scale": scales.view(*weight.shape[:-1], groups)}

    def decode(self, parts: Parts, cols: int) -> Tensor:
        values, scale = parts["weight"].to(torch.float32), parts["scale"].to(torch.float32)
        whole = cols // self.group * self.group
        if whole:
            body = values[..., :whole].unflatten(-1, (-1, self.group))
            body.mul_(scale[..., : whole // self.group, None])
        if whole < cols:
            values[..., whole:].mul_(scale[..., -1:])
        return values

    def row_bytes(self, cols: int) -> int:
        self.check_cols(cols)
        return cols + 2 * -(-cols // self.group)


def round_up_bf16(scale: Tensor) -> Tensor:
    """Non-negative float32 -> the least bf16 at or above it. Zero stays zero. Rounding up keeps max|w| inside the code range."""
    rounded = scale.to(torch.bfloat16)
    # For positive finite floats the next value up is the next integer of the bit pattern.
    return (rounded.view(torch.int16) + (rounded.to(torch.float32) < scale).to(torch.int16)).view(torch.bfloat16)
