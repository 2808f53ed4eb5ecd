"""Around a prompt's experts: the router's choice for every token, slots put in the order of their experts, and the sum of a token's slots.

Why: everything stays on the device, so that a prompt can be captured and Python waits for nothing; torch's sort alone takes longer than half of the
products at 512 tokens. Equal logits go to the lower expert, as in lab.kernels.router. What it does not prove: the same choice as another
implementation on logits that differ by rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.backend import jit, require, require_gpu
from lab.kernels.rows_step import choose_experts

_SLOTS = 256  # slots of one grouping program
TILES = (16, 32, 64, 96, 128)
"""Places that a tile may have: one or two powers of two, the second of at least 16."""


@jit
def _route_kernel(
    logits_ptr: tl.tensor, ids_ptr: tl.tensor, weights_ptr: tl.tensor, share_ptr: tl.tensor, stride: tl.tensor, EXPERTS: tl.constexpr,
    TOPK: tl.constexpr, PLACES: tl.constexpr, WIDTH: tl.constexpr, NORMALISE: tl.constexpr,
) -> None:  # fmt: skip
    """Program (token): the TOPK largest of EXPERTS 16-bit logits, their softmax weights, and the sigmoid of the logit after them."""
    token = tl.program_id(0)
    row = logits_ptr + token.to(tl.int64) * stride
    choose_experts(row, ids_ptr, weights_ptr, share_ptr, token, EXPERTS, TOPK, PLACES, WIDTH, NORMALISE)


@dataclass(frozen=True)
class Groups:
    """Slots in the order of their experts. `order` int32 [slots]: slot number by place; `ends` int32 [E]: places up to and with each expert;
    `tiles` int32 [most tiles, 4]: expert (-1: no such tile), first place, end of the expert's places, unused; `block`: places of a tile."""

    order: Tensor
    ends: Tensor
    tiles: Tensor
    block: int


@jit
def _count_kernel(ids_ptr: tl.tensor, counts_ptr: tl.tensor, rank_ptr: tl.tensor, slots: tl.tensor, SLOTS: tl.constexpr) -> None:
    """Program (slots): each slot's place among its expert's, in the order in which programs arrive."""
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    inside = slot < slots
    expert = tl.load(ids_ptr + slot, mask=inside, other=0).to(tl.int32)
    tl.store(rank_ptr + slot, tl.atomic_add(counts_ptr + expert, 1, mask=inside), mask=inside)


@jit
def _ends_kernel(
    counts_ptr: tl.tensor, ends_ptr: tl.tensor, tile_ends_ptr: tl.tensor, tiles_ptr: tl.tensor, experts: tl.tensor, tiles: tl.tensor,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr,
) -> None:  # fmt: skip
    """One program: sums over the experts before each, and -1 for tiles that do not exist."""
    expert = tl.arange(0, WIDTH)
    count = tl.load(counts_ptr + expert, mask=expert < experts, other=0)
    tl.store(ends_ptr + expert, tl.cumsum(count, axis=0), mask=expert < experts)
    needed = (count + BLOCK - 1) // BLOCK
    tl.store(tile_ends_ptr + expert, tl.cumsum(needed, axis=0), mask=expert < experts)
    total = tl.sum(needed, axis=0)
    for start in range(0, tiles, STEP):
        tile = start + tl.arange(0, STEP)
        tl.store(tiles_ptr + tile * 4, tl.full([STEP], -1, dtype=tl.int32), mask=(tile >= total) & (tile < tiles))


@jit
def _place_kernel(
    ids_ptr: tl.tensor, rank_ptr: tl.tensor, counts_ptr: tl.tensor, ends_ptr: tl.tensor, tile_ends_ptr: tl.tensor, order_ptr: tl.tensor, tiles_ptr: tl.tensor,
    slots: tl.tensor, BLOCK: tl.constexpr, SLOTS: tl.constexpr,
) -> None:  # fmt: skip
    """Program (slots): every slot to its place; the first slot of a tile writes the tile's entry."""
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    inside = slot < slots
    expert = tl.load(ids_ptr + slot, mask=inside, other=0).to(tl.int32)
    rank = tl.load(rank_ptr + slot, mask=inside, other=0)
    count = tl.load(counts_ptr + expert, mask=inside, other=0)
    end = tl.load(ends_ptr + expert, mask=inside, other=0)
    first = end - count
    tl.store(order_ptr + first + rank, slot, mask=inside)
    tile = tl.load(tile_ends_ptr + expert, mask=inside, other=0) - (count + BLOCK - 1) // BLOCK + rank // BLOCK
    heads = inside & (rank % BLOCK == 0)
    tl.store(tiles_ptr + tile * 4, expert, mask=heads)
    tl.store(tiles_ptr + tile * 4 + 1, first + rank, mask=heads)
    tl.store(tiles_ptr + tile * 4 + 2, end, mask=heads)


def group_slots(ids: Tensor, experts: int) -> Groups:
    """ids integer [T, k], all in 0..experts-1 -> Groups, without waiting for the device. Which of an expert's places a slot gets may differ from run to
    run; no result depends on it."""
    flat = ids.contiguous().flatten()
    slots = flat.numel()
    block = tile_places(slots, experts)
    most = min(slots, -(-slots // block) + experts)
    counts = torch.zeros(experts, dtype=torch.int32, device=ids.device)
    rank, order = (torch.empty(slots, dtype=torch.int32, device=ids.device) for _ in range(2))
    ends, tile_ends = (torch.empty(experts, dtype=torch.int32, device=ids.device) for _ in range(2))
    tiles = torch.empty(most, 4, dtype=torch.int32, device=ids.device)
    grid = (triton.cdiv(slots, _SLOTS),)
    _count_kernel[grid](flat, counts, rank, slots, _SLOTS)
    _ends_kernel[(1,)](counts, ends, tile_ends, tiles, experts, most, block, triton.next_power_of_2(experts), 1024)
    _place_kernel[grid](flat, rank, counts, ends, tile_ends, order, tiles, slots, block, _SLOTS)
    return Groups(order, ends, tiles, block)


def tile_places(slots: int, experts: int) -> int:
    """Places of a tile: one and a half standard deviations above an expert's mean, so that most experts' weights are decoded once and few places are empty."""
    mean = slots / experts
    return next((places for places in TILES if places >= mean + 1.5 * mean**0.5), TILES[-1])


@jit
def _sum_kernel(
    y_ptr: tl.tensor, shared_ptr: tl.tensor, share_ptr: tl.tensor, out_ptr: tl.tensor,
    TOPK: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, SHARED: tl.constexpr,
) -> None:  # fmt: skip
    """Program (token, columns): the token's TOPK rows added in order, then its share of the shared expert."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = column < WIDTH
    total = tl.zeros([TILE], dtype=tl.float32)
    for k in tl.static_range(TOPK):
        total += tl.load(y_ptr + (token * TOPK + k) * WIDTH + column, mask=inside, other=0).to(tl.float32)
    if SHARED:  # rounded first, so that a sum made elsewhere (experts that stream through a buffer) gives the same bits
        total = total.to(out_ptr.dtype.element_ty).to(tl.float32)
        total += tl.load(shared_ptr + token * WIDTH + column, mask=inside, other=0).to(tl.float32) * tl.load(share_ptr + token)
    tl.store(out_ptr + token * WIDTH + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def sum_slots(y: Tensor, k: int, shared: Tensor | None = None, share: Tensor | None = None) -> Tensor:
    """y [T * k, width] -> [T, width]: a token's k rows added, plus share [T] times shared [T, width] if given. Sums are float32, in order."""
    tokens, width = len(y) // k, y.shape[1]
    require(y.is_contiguous() and (shared is None or shared.is_contiguous()), "sum of slots", "needs contiguous rows")
    require_gpu("sum of slots", y)
    out = torch.empty(tokens, width, dtype=y.dtype, device=y.device)
    tile = min(1024, triton.next_power_of_2(width))
    grid = tokens, triton.cdiv(width, tile)
    _sum_kernel[grid](y, y if shared is None else shared, y if share is None else share, out, k, width, tile, shared is not None, num_warps=4)
    return out


def route_prompt(logits: Tensor, experts: int, k: int, normalise: bool) -> tuple[Tensor, Tensor, Tensor]:
    """16-bit logits [T, more than experts], the shared gate's after the experts' -> (ids int32 [T, k], weights float32 [T, k], the shared expert's share
    float32 [T]). Raises LabError unless 1 <= k <= experts < 65,536."""
    fits = logits.element_size() == 2 and logits.stride(1) == 1 and logits.shape[1] > experts
    require(fits and 1 <= k <= experts < 1 << 16, "route prompt", f"logits {logits.dtype} {list(logits.shape)}")
    require_gpu("route prompt", logits)
    tokens = len(logits)
    ids = torch.empty(tokens, k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, k, dtype=torch.float32, device=logits.device)
    share = torch.empty(tokens, dtype=torch.float32, device=logits.device)
    _route_kernel[(tokens,)](
        logits, ids, weights, share, logits.stride(0), experts, k, triton.next_power_of_2(k), triton.next_power_of_2(experts), normalise, num_warps=1
    )
    return ids, weights, share
