"""What stands between the products of a plain transformer's decode step, one launch each: residual sum with norm, and the gate of the MLP.

Why: in torch a norm is six tiny operations and the gate two, and a layer has two norms. Here a program owns one token's vector; the sum is rounded to the
activations' dtype before it is normed, as the plain code does (lab.models.transformer.model). `reference_*` are the same in plain torch: what tests compare
with and what the step runs where there is no GPU. What it does not prove: speed for prompts, which go through the plain code.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import silu

from lab.kernels.backend import jit, launch_options, require, require_gpu, silu_mul, use_ptx, wait_for_inputs

_GATE_BLOCK = 1024


@jit
def _norm_kernel(
    x_ptr: tl.tensor, y_ptr: tl.tensor, weight_ptr: tl.tensor, normed_ptr: tl.tensor,
    HIDDEN: tl.constexpr, BLOCK: tl.constexpr, EPS: tl.constexpr, ADD: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (token): x += y where ADD, normed = x / rms(x) * weight."""
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    weight = tl.load(weight_ptr + column, mask=inside, other=0)  # depends on no kernel before
    wait_for_inputs(PTX)
    here = tl.program_id(0) * HIDDEN + column
    value = tl.load(x_ptr + here, mask=inside, other=0).to(tl.float32)
    if ADD:
        value = (value + tl.load(y_ptr + here, mask=inside, other=0).to(tl.float32)).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + here, value, mask=inside)
        value = value.to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, axis=0) / HIDDEN + EPS) * weight
    tl.store(normed_ptr + here, normed.to(normed_ptr.dtype.element_ty), mask=inside)


@jit
def _gate_kernel(both_ptr: tl.tensor, out_ptr: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr, PTX: tl.constexpr) -> None:
    """Program (columns, token): silu(gate) * up in float32, rounded once."""
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    wait_for_inputs(PTX)
    gate = tl.load(both_ptr + token * 2 * width + column, mask=column < width, other=0).to(tl.float32)
    up = tl.load(both_ptr + (token * 2 + 1) * width + column, mask=column < width, other=0).to(tl.float32)
    tl.store(out_ptr + token * width + column, silu_mul(gate, up).to(out_ptr.dtype.element_ty), mask=column < width)


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [B, H], changed in place to x + y where y [B, H] is given; weight float32 [H] -> (x, x / sqrt(mean x^2 + eps) * weight) in x's dtype.
    Raises LabError where a tensor is not contiguous or has another shape."""
    fits = x.is_contiguous() and weight.shape == x.shape[1:] and (y is None or (y.is_contiguous() and y.shape == x.shape))
    require(fits, "residual norm", f"x is {list(x.shape)}, weight {list(weight.shape)}; all must be contiguous")
    require_gpu("residual norm", x, weight)
    normed = torch.empty_like(x)
    block = triton.next_power_of_2(x.shape[1])
    _norm_kernel[(len(x),)](
        x, x if y is None else y, weight, normed, x.shape[1], block, eps, y is not None, use_ptx(),
        num_warps=min(16, max(1, block // 256)), **launch_options(),
    )  # fmt: skip
    return x, normed


def gated(both: Tensor) -> Tensor:
    """both [B, 2 W], gates first -> silu(gate) * up [B, W]. Raises LabError where it is not contiguous."""
    require(both.ndim == 2 and both.is_contiguous() and both.shape[1] % 2 == 0, "gate", f"both is {list(both.shape)}")
    require_gpu("gate", both)
    width = both.shape[1] // 2
    out = torch.empty(len(both), width, dtype=both.dtype, device=both.device)
    _gate_kernel[(triton.cdiv(width, _GATE_BLOCK), len(both))](both, out, width, _GATE_BLOCK, use_ptx(), num_warps=4, **launch_options())
    return out


def reference_add_norm(x: Tensor, y: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`add_norm` in plain torch; x itself stays as it was."""
    x = x if y is None else x + y
    wide = x.float()
    return x, (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def reference_gated(both: Tensor) -> Tensor:
    """`gated` in plain torch."""
    gate, up = both.chunk(2, -1)
    return silu(gate) * up
