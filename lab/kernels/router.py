"""Router: softmax over all experts and the k largest, one program per token.

Why a kernel: torch needs four launches for it, each about as long as the work of one token; the result stays on the device, so that a CUDA graph can
replay what follows. Equal logits go to the lower expert number. What it does not prove: the same choice as another implementation on ties or on logits
that differ by rounding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.backend import jit, require, require_gpu


@jit
def _route_kernel(
    logits_ptr: tl.tensor, ids_ptr: tl.tensor, weights_ptr: tl.tensor, experts: tl.tensor,
    TOPK: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr, NORMALISE: tl.constexpr,
) -> None:  # fmt: skip
    """Program (token): k rounds of maximum and removal over WIDTH >= experts logits."""
    token = tl.program_id(0)
    expert = tl.arange(0, WIDTH)
    logits = tl.load(logits_ptr + token * experts + expert, mask=expert < experts, other=float("-inf")).to(tl.float32)
    top = tl.max(logits, axis=0)
    full = tl.sum(tl.exp(logits - top), axis=0)
    place = tl.arange(0, PLACES)
    values = tl.full([PLACES], float("-inf"), dtype=tl.float32)
    numbers = tl.full([PLACES], -1, dtype=tl.int32)
    for i in tl.static_range(TOPK):
        best = tl.max(logits, axis=0)
        number = tl.min(tl.where(logits == best, expert, WIDTH), axis=0)
        values = tl.where(place == i, best, values)
        numbers = tl.where((place == i) & (number < experts), number, numbers)  # -1 where nothing is left
        logits = tl.where(expert == number, float("-inf"), logits)
    chosen = tl.exp(values - top)
    total = tl.sum(chosen, axis=0) + 0.0 * full if NORMALISE else full  # `full` carries any logit's NaN, which the maxima skip
    tl.store(ids_ptr + token * TOPK + place, numbers, mask=place < TOPK)
    tl.store(weights_ptr + token * TOPK + place, chosen / total, mask=place < TOPK)


def route(logits: Tensor, k: int, normalise: bool = True) -> tuple[Tensor, Tensor]:
    """logits [T, experts] -> (ids int32 [T, k], weights float32 [T, k]), largest first; weights sum to 1 where `normalise`.

    A token whose logits hold NaN gets NaN weights. Raises LabError unless 1 <= k <= experts.
    """
    require(logits.ndim == 2 and 1 <= k <= logits.shape[1], "router", f"k={k} does not fit logits {list(logits.shape)}")
    require_gpu("router", logits)
    tokens, experts = logits.shape
    ids = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    width = triton.next_power_of_2(experts)
    _route_kernel[(tokens,)](logits.contiguous(), ids, weights, experts, k, triton.next_power_of_2(k), width, normalise, num_warps=min(4, max(1, width // 512)))
    return ids, weights


def reference_route(logits: Tensor, k: int, normalise: bool = True) -> tuple[Tensor, Tensor]:
    """The same in plain torch, as lab.models.qwen4_exp.moe computes it."""
    weights, ids = logits.softmax(-1, dtype=torch.float32).topk(k, dim=-1)
    return ids.to(torch.int32), weights / weights.sum(-1, keepdim=True) if normalise else weights
