"""Rows of the n-gram table by number, decoded on the way: e4m3 with one scale, or 2-bit rows with a scale each (q2_rows).

Why: torch gathers, decodes and converts in several launches, and its 8-bit float gather is missing on some backends; here a token's 16 rows of 160 are
one launch of 16 small programs. A number outside the table gives a row of NaN, because reading elsewhere would give a fluent wrong row.
A table in pinned host memory is read where it lies, over the bus: Triton's launcher resolves the device's address of it on CUDA and HIP.
What it does not prove: how fast that is; a token's rows are a few kilobytes, and one round trip.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.codecs import Codec, Parts
from lab.codecs.e4m3 import E4M3
from lab.codecs.q2 import Q2Rows
from lab.kernels.backend import e4m3_to_half, jit, require, require_gpu


@jit
def _e4m3_kernel(
    ids_ptr: tl.tensor, table_ptr: tl.tensor, scale_ptr: tl.tensor, out_ptr: tl.tensor, rows: tl.tensor, COLS: tl.constexpr, WIDTH: tl.constexpr
) -> None:
    """Program (row): COLS bytes times the table's scale."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + place).to(tl.int64)
    inside = (row >= 0) & (row < rows)
    column = tl.arange(0, WIDTH)
    byte = tl.load(table_ptr + row * COLS + column, mask=column < tl.where(inside, COLS, 0), other=0)
    scale = tl.where(inside, tl.load(scale_ptr).to(tl.float32) * 256.0, float("nan"))
    value = e4m3_to_half(byte).to(tl.float32) * scale
    tl.store(out_ptr + place * COLS + column, value.to(out_ptr.dtype.element_ty), mask=column < COLS)


@jit
def _q2_kernel(
    ids_ptr: tl.tensor, codes_ptr: tl.tensor, scale_ptr: tl.tensor, levels_ptr: tl.tensor, out_ptr: tl.tensor, rows: tl.tensor,
    COLS: tl.constexpr, WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Program (row): COLS codes of two bits, level times the row's scale."""
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(ids_ptr + place).to(tl.int64)
    inside = (row >= 0) & (row < rows)
    column = tl.arange(0, WIDTH)
    byte = tl.load(codes_ptr + row * (COLS // 4) + column // 4, mask=column < tl.where(inside, COLS, 0), other=0).to(tl.int32)
    level = tl.load(levels_ptr + ((byte >> (column % 4 * 2)) & 3))
    scale = tl.load(scale_ptr + row, mask=inside, other=float("nan"))
    tl.store(out_ptr + place * COLS + column, (level * scale).to(out_ptr.dtype.element_ty), mask=column < COLS)


class Table:
    """An encoded table [rows, width] whose rows are gathered by number. Codecs: e4m3 with a global scale, q2_rows."""

    def __init__(self, codec: Codec, parts: Parts, cols: int, device: torch.device | None = None) -> None:
        """`device`: where rows are wanted, if the parts lie elsewhere. Raises LabError on another codec or scale, or parts that are not one table."""
        whole = isinstance(codec, Q2Rows) or (isinstance(codec, E4M3) and codec.options["scale"] == "global")
        require(whole, "table", f"codec {codec.name} {codec.options} has no table kernel; use q2_rows, or e4m3 with scale=global")
        require(
            all(part.is_contiguous() for part in parts.values()) and parts["codes" if isinstance(codec, Q2Rows) else "weight"].ndim == 2,
            "table",
            "needs one contiguous table",
        )
        self.codec, self.cols = codec, cols
        self.device = device or next(iter(parts.values())).device
        self.parts = {key: part.to(self.device) if key in codec.shared else part for key, part in parts.items()}
        for part in self.parts.values():
            if not part.is_cuda and self.device.type == "cuda":
                require(part.is_pinned(), "table", "lies in host memory that is not pinned, which the device cannot read")
            else:
                require_gpu("table", part)
        self.levels = torch.tensor(codec.levels, device=self.device) if isinstance(codec, Q2Rows) else None

    def __call__(self, ids: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """ids integer [...] on the device -> rows [..., width] in `dtype`; NaN rows where a number is outside the table."""
        require_gpu("table", ids)
        out = torch.empty(*ids.shape, self.cols, dtype=dtype, device=ids.device)
        grid, width, flat = (ids.numel(),), triton.next_power_of_2(self.cols), ids.contiguous()
        if self.levels is not None:
            codes = self.parts["codes"]
            _q2_kernel[grid](flat, codes, self.parts["scale"], self.levels, out, len(codes), self.cols, width, num_warps=1)
        else:
            stored = self.parts["weight"].view(torch.uint8)
            _e4m3_kernel[grid](flat, stored, self.parts["weight_scale"], out, len(stored), self.cols, width, num_warps=1)
        return out


def reference_table(codec: Codec, parts: Parts, cols: int, ids: Tensor) -> Tensor:
    """The same by the codec, float32 [..., cols]."""
    return codec.decode(codec.take_rows(parts, ids.flatten().long()), cols).view(*ids.shape, cols)
