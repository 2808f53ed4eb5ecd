"""The n-gram module (PLE) of a chained decode step: hashed rows of one token, and after table and projections everything else in one launch.

Why: written in torch this one module is about 80 small launches, more than a tenth of a step's. A program owns one stream of one token: norms of key,
query and gated value, the gate, the dilated convolution with its history, and what the next mixer's norm needs of the result.
Definition: lab.models.qwen4_exp.ngram. What it does not prove: speed of the table's rows where they lie in host memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lab.kernels.backend import chain_ptx, inputs_ready, jit, launch_options, let_next_start, require, require_gpu
from lab.kernels.mixer_step import Streams
from lab.kernels.quads import _SHRINK, quad_place


@jit
def _hash_kernel(
    ids_ptr: tl.tensor, tokens_ptr: tl.tensor, multipliers_ptr: tl.tensor, sizes_ptr: tl.tensor, offsets_ptr: tl.tensor, rows_ptr: tl.tensor,
    EOS: tl.constexpr, REACH: tl.constexpr, HEADS: tl.constexpr, PLACES: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (token): table rows [tokens, REACH * HEADS] from its id and the REACH before it, which move on by one. All int64, exact."""
    let_next_start(PTX)
    inputs_ready(PTX)
    token = tl.program_id(0)
    current = tl.load(ids_ptr + token)
    key = current * tl.load(multipliers_ptr)
    hidden = current < 0  # no token is
    place = tl.arange(0, PLACES)
    for back in tl.static_range(1, REACH + 1):
        previous = tl.load(tokens_ptr + token * REACH + (REACH - back))
        hidden = hidden | (previous == EOS)  # once a predecessor is EOS, it and everything older reads as EOS
        key = key ^ (tl.where(hidden, EOS, previous) * tl.load(multipliers_ptr + back))
        head = (back - 1) * HEADS + place
        size = tl.load(sizes_ptr + head, mask=place < HEADS, other=1)
        row = key % size + tl.load(offsets_ptr + head, mask=place < HEADS, other=0)
        tl.store(rows_ptr + token * (REACH * HEADS) + head, row, mask=place < HEADS)
    for i in tl.static_range(REACH):
        moved = tl.load(tokens_ptr + token * REACH + i + 1) if i + 1 < REACH else current
        tl.store(tokens_ptr + token * REACH + i, moved)


@jit
def _normed(value: tl.tensor, weight: tl.tensor, HIDDEN: tl.constexpr, EPS: tl.constexpr, KIND: tl.constexpr) -> tl.tensor:
    """value / rms(value) * weight, rounded to KIND, as float32. Places beyond HIDDEN are zero."""
    return (value * tl.rsqrt(tl.sum(value * value, axis=0) / HIDDEN + EPS) * weight).to(KIND).to(tl.float32)


@jit
def _inject_kernel(
    mixed_ptr: tl.tensor, streams_ptr: tl.tensor, key_norm_ptr: tl.tensor, query_norm_ptr: tl.tensor, conv_norm_ptr: tl.tensor, taps_ptr: tl.tensor,
    history_ptr: tl.tensor, norm_ptr: tl.tensor, scaled_ptr: tl.tensor, square_ptr: tl.tensor, EPS: tl.constexpr,
    COUNT: tl.constexpr, HIDDEN: tl.constexpr, BLOCK: tl.constexpr, KERNEL: tl.constexpr, DILATION: tl.constexpr, PTX: tl.constexpr,
) -> None:  # fmt: skip
    """Program (token, stream). mixed [tokens, COUNT * HIDDEN keys | HIDDEN values]; history [tokens, (KERNEL - 1) * DILATION, COUNT * HIDDEN], oldest
    first, moves on by one; taps float32 [KERNEL, COUNT * HIDDEN]."""
    let_next_start(PTX)
    token, stream = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, BLOCK)
    inside = place < HIDDEN
    wide = stream * HIDDEN + place
    REACH: tl.constexpr = (KERNEL - 1) * DILATION
    kind: tl.constexpr = streams_ptr.dtype.element_ty
    history = history_ptr + token * (REACH * COUNT * HIDDEN) + wide
    kept = ()
    for i in tl.static_range(REACH):
        kept = kept + (tl.load(history + i * (COUNT * HIDDEN), mask=inside, other=0),)  # type: ignore[assignment]  # noqa: RUF005 (unknown to Triton)
    convolved = tl.zeros([BLOCK], dtype=tl.float32)
    for i in tl.static_range(KERNEL - 1):
        convolved += kept[i * DILATION].to(tl.float32) * tl.load(taps_ptr + i * (COUNT * HIDDEN) + wide, mask=inside, other=0)
    tap = tl.load(taps_ptr + (KERNEL - 1) * (COUNT * HIDDEN) + wide, mask=inside, other=0)
    key_norm = 1.0 + tl.load(key_norm_ptr + wide, mask=inside, other=0)
    query_norm = 1.0 + tl.load(query_norm_ptr + wide, mask=inside, other=0)
    conv_norm = 1.0 + tl.load(conv_norm_ptr + wide, mask=inside, other=0)
    norm = 1.0 + tl.load(norm_ptr + wide, mask=inside, other=0)
    inputs_ready(PTX)
    mixed = mixed_ptr + token * ((COUNT + 1) * HIDDEN)
    here = (token * COUNT + stream) * HIDDEN
    value = tl.load(streams_ptr + here + place, mask=inside, other=0).to(tl.float32)
    key = _normed(tl.load(mixed + wide, mask=inside, other=0).to(tl.float32), key_norm, HIDDEN, EPS, kind)
    match = tl.sum(key * _normed(value, query_norm, HIDDEN, EPS, kind), axis=0) / (HIDDEN**0.5)
    root = tl.sqrt(tl.maximum(tl.abs(match), 1e-6))
    gate = 1.0 / (1.0 + tl.exp(tl.where(match < 0, root, tl.where(match > 0, -root, 0.0))))
    gated = (gate * tl.load(mixed + COUNT * HIDDEN + place, mask=inside, other=0).to(tl.float32)).to(kind).to(tl.float32)
    current = _normed(gated, conv_norm, HIDDEN, EPS, kind)
    convolved += current * tap
    for i in tl.static_range(REACH):
        tl.store(history + i * (COUNT * HIDDEN), kept[i + 1] if i + 1 < REACH else current.to(kind), mask=inside)
    value = (value + gated + convolved / (1.0 + tl.exp(-convolved))).to(kind)
    tl.store(streams_ptr + here + place, value, mask=inside)
    float_value = tl.where(inside, value.to(tl.float32), 0.0)
    tl.store(scaled_ptr + here + quad_place(place, HIDDEN), (float_value * norm * _SHRINK).to(tl.float16), mask=inside)
    tl.store(square_ptr + token * COUNT + stream, tl.sum(float_value * float_value, axis=0))


def hashed_rows(ids: Tensor, tokens: Tensor, multipliers: Tensor, sizes: Tensor, offsets: Tensor, eos: int) -> Tensor:
    """ids int64 [B, 1] and the tokens before them int64 [B, n - 1], which take the ids in -> table rows int64 [B, 1, heads]."""
    batch, reach = tokens.shape
    require(tokens.is_contiguous() and ids.is_contiguous() and ids.numel() == batch, "n-gram step", f"ids {list(ids.shape)}, history {list(tokens.shape)}")
    require_gpu("n-gram step", ids, tokens)
    rows = torch.empty(batch, 1, len(sizes), dtype=torch.int64, device=ids.device)
    heads = len(sizes) // reach
    _hash_kernel[(batch,)](
        ids, tokens, multipliers, sizes, offsets, rows, eos, reach, heads, triton.next_power_of_2(heads), chain_ptx(), num_warps=1, **launch_options()
    )
    return rows


def inject(
    mixed: Tensor, streams: Streams, norms: tuple[Tensor, Tensor, Tensor], taps: Tensor, history: Tensor, dilation: int, norm: Tensor, eps: float
) -> Streams:
    """mixed [B, C * H | H] (keys and values of the token's n-grams); `norms` of key, query and convolution; taps float32 [kernel, C * H]; history
    [B, (kernel - 1) * dilation, C * H] moves on -> streams with the module's output added in place, ready for the mixer with `norm`."""
    batch, count, hidden = streams.raw.shape
    require(mixed.shape == (batch, (count + 1) * hidden) and mixed.is_contiguous() and history.is_contiguous(), "n-gram step", f"mixed {list(mixed.shape)}")
    require_gpu("n-gram step", mixed, streams.raw, history)
    block = triton.next_power_of_2(hidden)
    square = torch.empty(batch, count, 1, dtype=torch.float32, device=mixed.device)
    _inject_kernel[(batch, count)](
        mixed, streams.raw, *norms, taps, history, norm, streams.scaled, square, eps, count, hidden, block, len(taps), dilation, chain_ptx(),
        num_warps=min(16, max(1, block // 256)), **launch_options(),
    )  # fmt: skip
    return Streams(streams.raw, streams.scaled, square)
