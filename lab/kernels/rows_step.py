"""Small 16-bit matrices of one decode step (router, shared gate, indexer), and the router's choice with the shared expert's share, one launch each.

Why: the vendor's product takes 5 us for a 512 x 2560 matrix at one token and cannot start before the kernel ahead has ended. Here a program holds its few rows
in registers by then. The choice packs a 16-bit logit and its expert's number into one integer, so that a single maximum finds both; equal logits
go to the lower number, as in lab.kernels.router. What it does not prove: speed beyond 8 tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.backend import jit, launch_options, require, require_gpu, use_ptx, wait_for_inputs

_ROWS = 2


@jit
def _rows_kernel(
    x_ptr: tl.tensor, weight_ptr: tl.tensor, out_ptr: tl.tensor, rows: tl.tensor,
    M: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (rows): ROWS rows for all M tokens, out [M, rows]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = column < COLUMNS
    weight = tl.load(weight_ptr + row[:, None].to(tl.int64) * COLUMNS + column[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0).to(tl.float32)
    wait_for_inputs(PTX)
    for m in range(M):
        x = tl.load(x_ptr + m * COLUMNS + column, mask=inside, other=0).to(tl.float32)
        tl.store(out_ptr + m * rows + row, tl.sum(weight * x[None, :], axis=1).to(out_ptr.dtype.element_ty), mask=row < rows)


@jit
def choose_experts(
    row: tl.tensor, ids_ptr: tl.tensor, weights_ptr: tl.tensor, share_ptr: tl.tensor, token: tl.tensor, EXPERTS: tl.constexpr, TOPK: tl.constexpr,
    PLACES: tl.constexpr, WIDTH: tl.constexpr, NORMALISE: tl.constexpr,
) -> None:  # fmt: skip
    """Of one token whose 16-bit logits begin at `row`: the TOPK largest of EXPERTS, their softmax weights, and the sigmoid of the logit after them."""
    expert = tl.arange(0, WIDTH)
    stored = tl.load(row + expert, mask=expert < EXPERTS, other=float("-inf"))
    value = stored.to(tl.float32)
    bits = stored.to(tl.int16, bitcast=True).to(tl.int32)
    # A 16-bit float orders like its bits once a negative one's other bits are turned over; below them the expert's number, turned over too.
    key = tl.where(expert < EXPERTS, ((bits ^ tl.where(bits < 0, 0x7FFF, 0)) << 16) | (0xFFFF - expert), -2147483648)
    top = tl.max(value, axis=0)
    full = tl.sum(tl.exp(value - top), axis=0)
    place = tl.arange(0, PLACES)
    numbers = tl.full([PLACES], 0, dtype=tl.int32)
    for i in tl.static_range(TOPK):
        best = tl.max(key, axis=0)
        numbers = tl.where(place == i, 0xFFFF - (best & 0xFFFF), numbers)
        key = tl.where(key == best, -2147483648, key)
    chosen = tl.load(row + numbers, mask=place < TOPK, other=float("-inf")).to(tl.float32)
    weight = tl.exp(chosen - top)
    total = tl.sum(weight, axis=0) + 0.0 * full if NORMALISE else full  # `full` carries any logit's NaN
    tl.store(ids_ptr + token * TOPK + place, numbers, mask=place < TOPK)
    tl.store(weights_ptr + token * TOPK + place, weight / total, mask=place < TOPK)
    tl.store(share_ptr + token, 1.0 / (1.0 + tl.exp(-tl.load(row + EXPERTS).to(tl.float32))))


@jit
def _choose_kernel(
    logits_ptr: tl.tensor, ids_ptr: tl.tensor, weights_ptr: tl.tensor, share_ptr: tl.tensor, EXPERTS: tl.constexpr, STRIDE: tl.constexpr,
    TOPK: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr, NORMALISE: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (token): `choose_experts` of its logits."""
    token = tl.program_id(0)
    wait_for_inputs(PTX)
    choose_experts(logits_ptr + token * STRIDE, ids_ptr, weights_ptr, share_ptr, token, EXPERTS, TOPK, PLACES, WIDTH, NORMALISE)


def small_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [M, in], weight [out, in] in a 16-bit or 32-bit dtype -> x W^T [M, out] in x's dtype, summed in float32. Raises LabError on another width."""
    require(x.ndim == 2 and x.shape[1] == weight.shape[1] and x.is_contiguous() and weight.is_contiguous(), "rows step", f"x is {list(x.shape)}")
    require_gpu("rows step", x, weight)
    out = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)
    _rows_kernel[(triton.cdiv(len(weight), _ROWS),)](
        x, weight, out, len(weight), len(x), x.shape[1], triton.next_power_of_2(x.shape[1]), _ROWS, use_ptx(), num_warps=4, **launch_options()
    )
    return out


def choose(logits: Tensor, k: int, normalise: bool) -> tuple[Tensor, Tensor, Tensor]:
    """16-bit logits [B, experts + 1], the shared gate's last -> (ids int32 [B, k], weights float32 [B, k], the shared expert's share float32 [B, 1]).
    Raises LabError unless 1 <= k <= experts < 65,536."""
    experts = logits.shape[1] - 1
    require(logits.element_size() == 2 and logits.is_contiguous() and 1 <= k <= experts < 1 << 16, "choose", f"logits {logits.dtype} {list(logits.shape)}")
    require_gpu("choose", logits)
    ids = torch.empty(len(logits), k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(len(logits), k, dtype=torch.float32, device=logits.device)
    share = torch.empty(len(logits), 1, dtype=torch.float32, device=logits.device)
    _choose_kernel[(len(logits),)](
        logits, ids, weights, share, experts, experts + 1, k, triton.next_power_of_2(k), triton.next_power_of_2(experts), normalise, use_ptx(),
        num_warps=1, **launch_options(),
    )  # fmt: skip
    return ids, weights, share
