"""The indexer of one new token: scores of all complete blocks in one launch, the best of them as bytes in a second; no shape depends on the position.

Why: in plain torch this was some 25 launches an attention layer over the whole capacity. With it a layer took 158 us more after 4,096 tokens than after none;
now 19, the attention itself included (experiments/kernel_log.md).
Blocks are pooled, normed and rotated where they are scored, as their raw keys are all that is kept; programs whose blocks are not complete leave at once.
The selection is that of a prompt (lab.kernels.indexer_prefill): equal scores go to the earlier block. Definition: `Indexer.chosen_at` of
lab.models.qwen4_exp.sparse_attention.
What it does not prove: the same choice as another order of summation would make on near ties.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.attention_step import normed_rotated
from lab.kernels.backend import chain_ptx, inputs_ready, jit, launch_options, let_next_start, require, require_gpu
from lab.kernels.indexer_prefill import MOST_BLOCKS, best_blocks, choice_launch, pooled_keys

_TILE = 16  # blocks of one program


@jit
def _score_kernel(
    index_ptr: tl.tensor, raw_ptr: tl.tensor, q_weight_ptr: tl.tensor, k_weight_ptr: tl.tensor, cos_ptr: tl.tensor, sin_ptr: tl.tensor,
    position_ptr: tl.tensor, out_ptr: tl.tensor, blocks: tl.tensor, raw_batch: tl.tensor,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, ROTARY: tl.constexpr, M: tl.constexpr, EPS: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (blocks, sequence): sum over heads of relu(q . key) / sqrt(D), float32, of its complete blocks; of others nothing is written."""
    sequence = tl.program_id(1).to(tl.int64)
    let_next_start(PTX)
    inputs_ready(PTX)
    position = tl.load(position_ptr)
    complete = (position + 1) // BLOCK
    first = tl.program_id(0) * M
    if first < complete:
        kind: tl.constexpr = raw_ptr.dtype.element_ty
        block = first + tl.arange(0, M)
        keys = pooled_keys(raw_ptr + sequence * raw_batch, k_weight_ptr, cos_ptr, sin_ptr, block, block < complete, kind, BLOCK, D, ROTARY, M, EPS)
        total = tl.zeros([M], dtype=tl.float32)
        for head in tl.static_range(HEADS):
            row = index_ptr + sequence * ((HEADS + 1) * D) + head * D
            q = normed_rotated(row, q_weight_ptr, cos_ptr + position * ROTARY, sin_ptr + position * ROTARY, D, ROTARY, EPS).to(kind).to(tl.float32)
            total += tl.maximum(tl.sum(keys * q[None, :], axis=1), 0.0)
        tl.store(out_ptr + sequence * blocks + block, total * (D**-0.5), mask=block < complete)


@jit
def _choose_kernel(
    scores_ptr: tl.tensor, position_ptr: tl.tensor, chosen_ptr: tl.tensor, blocks: tl.tensor,
    BUDGET: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (sequence): 1 for the BUDGET best of the complete blocks (for all where there are no more), else 0."""
    sequence = tl.program_id(0).to(tl.int64)
    let_next_start(PTX)
    inputs_ready(PTX)
    complete = (tl.load(position_ptr) + 1) // BLOCK
    chosen = best_blocks(scores_ptr + sequence * blocks, complete, BUDGET, WIDTH)
    block = tl.arange(0, WIDTH)
    tl.store(chosen_ptr + sequence * blocks + block, chosen.to(tl.uint8), mask=block < blocks)


def block_scores(
    index: Tensor, raw_keys: Tensor, position: Tensor, tables: tuple[Tensor, Tensor], norms: tuple[Tensor, Tensor], heads: int, block: int, eps: float
) -> Tensor:
    """index [B, heads * di queries | di key] of the token at `position` (int32 [1]), raw_keys [B, capacity, di] with its own entry already there, tables cos
    and sin [capacity, rotary], norms of queries and keys float32 [di] -> scores float32 [B, capacity // block]; entries of blocks that are not complete are
    left as they were. Raises LabError for shapes that do not fit."""
    batch, capacity, d = raw_keys.shape
    blocks = capacity // block
    require(index.shape == (batch, (heads + 1) * d) and index.is_contiguous() and d & (d - 1) == 0, "indexer step", f"index {list(index.shape)}")
    require(raw_keys.stride(1) == d and len(tables[0]) >= capacity and blocks > 0, "indexer step", f"raw keys {list(raw_keys.shape)}")
    require_gpu("indexer step", index, raw_keys)
    scores = torch.empty(batch, blocks, dtype=torch.float32, device=index.device)
    _score_kernel[(triton.cdiv(blocks, _TILE), batch)](
        index, raw_keys, *norms, *tables, position, scores, blocks, raw_keys.stride(0), heads, d, block, tables[0].shape[1], _TILE, eps, chain_ptx(),
        num_warps=4, **launch_options(),
    )  # fmt: skip
    return scores


def choose_blocks(scores: Tensor, position: Tensor, block: int, budget: int) -> Tensor:
    """scores float32 [B, blocks], not negative, at `position` (int32 [1]) -> uint8 [B, blocks]: 1 for the `budget` best complete blocks, for all of them where
    there are no more. Raises LabError beyond MOST_BLOCKS."""
    batch, blocks = scores.shape
    require(blocks <= MOST_BLOCKS, "indexer step", f"{blocks} blocks; at most {MOST_BLOCKS}")
    chosen = torch.empty(batch, blocks, dtype=torch.uint8, device=scores.device)
    width, warps = choice_launch(blocks)
    _choose_kernel[(batch,)](scores, position, chosen, blocks, budget, block, width, chain_ptx(), num_warps=warps, **launch_options())
    return chosen
