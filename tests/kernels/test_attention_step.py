"""Attention of one token against the model's own attention: cache entries, lengths in every piece, hidden blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")

from lab.kernels.attention_step import attend, prepare
from lab.kernels.verify import poisoned, relative_error
from lab.models.qwen4_exp import sparse_attention
from lab.models.qwen4_exp.norms import rms_norm
from tests.kernels.support import DEVICE

HEADS, KV, D, DI, CAPACITY, ROTARY = 6, 2, 32, 16, 150, 8


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def tables() -> tuple[Tensor, Tensor]:
    angles = torch.arange(CAPACITY, device=DEVICE)[:, None] / 100 ** (torch.arange(ROTARY // 2, device=DEVICE) / (ROTARY // 2))
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize(("position", "select"), [(0, False), (33, False), (149, False), (70, True), (149, True)])
def test_one_token(position: int, select: bool) -> None:
    batch, block = 2, 4
    mixed, index = draw(batch, 2 * D * (HEADS + KV)), draw(batch, 3 * DI + DI)
    norms, cos_sin = (draw(D) / 4, draw(D) / 4), tables()
    keys, values, index_keys = draw(batch, CAPACITY, KV, D), draw(batch, CAPACITY, KV, D), draw(batch, CAPACITY, DI)
    keys[:, position + 1 :], values[:, position + 1 :] = float("nan"), float("nan")  # what is not filled yet must not be read
    where = torch.tensor([position], dtype=torch.int32, device=DEVICE)
    with poisoned():
        query = prepare(mixed, index, where, cos_sin, norms, HEADS, 1e-6, keys, values, index_keys)
    at = position + 1
    raw, gate = mixed[:, : HEADS * 2 * D].view(batch, 1, HEADS, 2 * D).chunk(2, -1)
    k, v = mixed[:, HEADS * 2 * D :].view(batch, 2, 1, KV, D).unbind(1)
    cos, sin = (t[position:at] for t in cos_sin)
    q = sparse_attention.rotate(rms_norm(raw, norms[0], 1e-6), cos, sin)
    assert relative_error(query, q[:, 0]) < 1e-5
    assert relative_error(keys[:, position], sparse_attention.rotate(rms_norm(k, norms[1], 1e-6), cos, sin)[:, 0]) < 1e-5
    assert torch.equal(values[:, position], v[:, 0])
    assert torch.equal(index_keys[:, position], index[:, -DI:])

    blocks = CAPACITY // block
    chosen = (torch.rand(batch, blocks, device=DEVICE) > 0.7).to(torch.uint8) if select else None
    visible = torch.ones(batch, 1, at, dtype=torch.bool, device=DEVICE)
    if chosen is not None:
        token = torch.arange(at, device=DEVICE)
        seen = torch.nn.functional.pad(chosen, (0, 1))[:, token // block].bool()
        visible = (seen | (token >= at // block * block))[:, None]
        visible[0, 0, 0], chosen[0, 0] = True, 1  # at least one key
        visible[:, :, :block] |= chosen[:, None, :1].bool()
    with poisoned():
        got = attend(query, keys, values, where, mixed, chosen, block)
    want = sparse_attention.attend(q, keys[:, :at], values[:, :at], visible) * torch.sigmoid(gate)
    assert relative_error(got, want.flatten(1)) < 1e-5
