"""A prompt's attention and indexer against the plain code: continued caches, chosen blocks, ties, an incomplete tail, sizes that divide by nothing."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from lab.kernels.attention_prefill import attend_prompt, norm_rotate
from lab.kernels.indexer_prefill import block_keys, block_scores, choose_blocks
from lab.kernels.verify import poisoned, relative_error
from lab.models.qwen4_exp.norms import rms_norm
from lab.models.qwen4_exp.sparse_attention import attend, rotate
from tests.kernels.support import DEVICE, TOLERANCE


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(torch.float16)


def tables(tokens: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(tokens, width // 2, device=DEVICE).repeat(1, 2) * 6
    return angles.cos().to(torch.float16), angles.sin().to(torch.float16)


def bits_of(chosen: torch.Tensor) -> torch.Tensor:
    """bool [..., blocks] -> int32 words, lowest bit first."""
    wide = torch.nn.functional.pad(chosen, (0, -chosen.shape[-1] % 32)).unflatten(-1, (-1, 32)).long()
    words = (wide << torch.arange(32, device=chosen.device)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def test_norm_and_rotation() -> None:
    x, weight, turn, out = half(2, 5, 3, 32), torch.randn(16, device=DEVICE) / 4, tables(5, 8), torch.zeros(2, 9, 3, 16, dtype=torch.float16, device=DEVICE)
    first = x[..., :16]
    norm_rotate(first, weight, turn, 1e-6, out[:, 2:7])
    want = rotate(rms_norm(first.float(), weight, 1e-6), *(t.float() for t in turn))
    assert relative_error(out[:, 2:7], want) < TOLERANCE and not out[:, :2].any() and not out[:, 7:].any()


@pytest.mark.parametrize("select", [False, True])
@pytest.mark.parametrize(("tokens", "start"), [(21, 0), (5, 30)])
def test_attention(select: bool, tokens: int, start: int) -> None:
    batch, heads, kv, d, capacity, block = 2, 4, 2, 16, 40, 4
    q, keys, values, gates = half(batch, tokens, heads, d), half(batch, capacity, kv, d), half(batch, capacity, kv, d), half(batch, tokens, heads, 2 * d)
    end = start + tokens
    position, key = torch.arange(start, end, device=DEVICE)[:, None], torch.arange(end, device=DEVICE)
    chosen = torch.rand(batch, tokens, end // block, device=DEVICE) < 0.4
    visible = (key <= position).expand(batch, -1, -1)
    if select:
        wide = torch.nn.functional.pad(chosen.repeat_interleave(block, -1), (0, end % block))
        visible = visible & (wide | (key >= (position + 1) // block * block))
        visible[..., 0, 0] |= ~visible[..., 0, :].any(-1)
    want = attend(q.float(), keys[:, :end].float(), values[:, :end].float(), visible) * torch.sigmoid(gates[..., d:].float())
    with poisoned():
        got = attend_prompt(q, keys, values, gates[..., d:], start, bits_of(chosen) if select else None, block, (16, 16, 1, 1))
    same = visible.any(-1) if select else torch.ones(batch, tokens, dtype=torch.bool, device=DEVICE)
    rows = same & ((position.squeeze(1) + 1) % block != 0) if select else same  # a query that may see nothing at all has no answer
    assert relative_error(got[rows], want.flatten(2)[rows]) < TOLERANCE


def test_block_keys_and_scores() -> None:
    raw, weight, turn, q = half(2, 30, 16), torch.randn(16, device=DEVICE) / 4, tables(30, 8), half(2, 11, 2, 16)
    with poisoned():
        keys = block_keys(raw, 7, weight, turn, 4, 1e-6)
        scores = block_scores(q, keys, 17, 4)
    pooled = raw[:, :28].unflatten(1, (7, 4)).float().mean(2).to(torch.float16)
    want = rotate(rms_norm(pooled.float(), weight, 1e-6).unsqueeze(2), *(t[:28:4].float() for t in turn)).squeeze(2)
    assert relative_error(keys, want) < TOLERANCE
    per_head = torch.relu(torch.einsum("bthd,bnd->bthn", q.float(), keys.float())).sum(2) / 4
    assert relative_error(scores, per_head) < 1e-5


def test_the_best_blocks_are_chosen_and_ties_go_to_the_earlier() -> None:
    scores = torch.rand(2, 9, 41, device=DEVICE).mul(4).round().div(4)  # many equal ones, zeros among them
    scores[0, 0] = 0
    start, block, budget = 148, 4, 6
    bits = choose_blocks(scores, start, block, budget)
    for b in range(2):
        for t in range(9):
            complete = (start + t + 1) // block
            order = scores[b, t, :complete].sort(stable=True, descending=True).indices[:budget]
            want = torch.zeros(41, dtype=torch.bool, device=DEVICE).scatter_(0, order, True)
            assert torch.equal(bits[b, t], bits_of(want)), (b, t)
    assert torch.equal(choose_blocks(scores, 3, block, budget)[0, 0], bits_of(torch.arange(41, device=DEVICE) < 1))
