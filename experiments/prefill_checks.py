"""Every kernel of a prompt against plain torch on this GPU, at Flash-Next's widths, with NaN-filled outputs; `experiments.prefill_bench` runs it first."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import pad, silu, softplus

from experiments.step_checks import DEVICE, DTYPE, HIDDEN, RANK, STREAMS, check_grouped, draw
from lab.codecs import create
from lab.kernels.attention_prefill import attend_prompt, norm_rotate
from lab.kernels.delta_intra import intra_chunks, reference_intra
from lab.kernels.delta_prefill import convolve_prompt, gated_norm_prompt, gates_prompt
from lab.kernels.hyper_step import reference_mix, reference_norm
from lab.kernels.indexer_prefill import block_keys, block_scores, choose_blocks
from lab.kernels.mixer_prefill import mix_prompt, norm_prompt, silu_prompt
from lab.kernels.moe_prefill import route_prompt, sum_slots
from lab.kernels.planes import NIBBLES, repack
from lab.kernels.router import reference_route
from lab.kernels.trunk_prefill import decode_into
from lab.kernels.verify import Error, poisoned, random_parts, relative_error
from lab.models.qwen4_exp.delta import chunked_scan
from lab.models.qwen4_exp.delta_rule import DeltaRule
from lab.models.qwen4_exp.norms import gated_rms_norm, l2_normalise, rms_norm
from lab.models.qwen4_exp.sparse_attention import attend, rotate


def mixer(tokens: int) -> Iterator[Error]:
    """Write-back with norm, and both projections from int8."""
    streams, norm, y, logits = draw(tokens, STREAMS, HIDDEN), torch.randn(STREAMS * HIDDEN, device=DEVICE) / 8, draw(tokens, HIDDEN), draw(tokens, 328)
    given = logits[:, 320:324]
    for pending in (False, True):
        want = reference_norm(streams, (y, None, torch.diag_embed(given.float())) if pending else None, norm, None, 1e-6)
        with poisoned():
            normed = norm_prompt(streams, y if pending else None, given if pending else None, norm, 1e-6)
        yield f"streams T={tokens} pending={pending}", relative_error(streams, want[0])
        yield f"normed T={tokens} pending={pending}", relative_error(normed, want[1])
    fresh = torch.full_like(streams, float("nan"))
    with poisoned():
        normed = norm_prompt(fresh, y, None, norm, 1e-6)
    yield f"first streams T={tokens}", relative_error(fresh, y[:, None].expand_as(fresh))
    codec, wide = create("int8_g128"), STREAMS * HIDDEN
    first, second = random_parts(codec, (RANK, wide), DEVICE), random_parts(codec, (wide, RANK), DEVICE)
    exact = codec.decode(first, wide), codec.decode(second, RANK)
    with poisoned():
        down, up = (torch.empty(rows, cols, dtype=DTYPE, device=DEVICE) for rows, cols in ((RANK + 8, wide), (wide, RANK)))
        down[RANK:] = 0
        decode_into(repack(codec, first, wide), down)
        decode_into(repack(codec, second, RANK), up)
        yield f"decoded T={tokens}", max(relative_error(down[:RANK], exact[0]), relative_error(up, exact[1]))
        mixed = mix_prompt(silu_prompt(torch.nn.functional.linear(normed.flatten(1), down), RANK, STREAMS), up, normed)
    yield f"mixed T={tokens}", relative_error(mixed, reference_mix(normed, *exact))


def delta(tokens: int, start: int) -> Iterator[Error]:
    """Convolution, gates, the rule from a memory, gated norm."""
    keys, d, heads, kernel = 2048, 128, 48, 4
    wide = 2 * keys + heads * d
    x, past, taps = draw(1, tokens, wide + 64)[..., :wide], draw(1, kernel - 1, wide), torch.randn(kernel, wide, device=DEVICE) / 2
    ring = torch.full((1, kernel, wide), 9.0, dtype=DTYPE, device=DEVICE)
    with poisoned():
        q, k, v = convolve_prompt(x, past, taps, ring, start, keys, d)
    history = torch.cat([past, x], 1).float()
    convolved = silu(sum((history[:, i : i + tokens] * taps[i] for i in range(kernel)), torch.zeros((), device=DEVICE)))
    wants = [*(l2_normalise(t.unflatten(-1, (-1, d))) for t in convolved[..., : 2 * keys].chunk(2, -1)), convolved[..., 2 * keys :].unflatten(-1, (-1, d))]
    for name, got, want in zip("qkv", (q, k, v), wants, strict=True):
        yield f"convolved {name} T={tokens}", relative_error(got, want)
    last = torch.stack([ring[:, (start + tokens - 1 - i) % kernel] for i in range(kernel)])
    yield f"ring T={tokens}", 0.0 if torch.equal(last, torch.stack([x[:, tokens - 1 - i] for i in range(kernel)])) else float("nan")
    ab, a_log, bias = draw(1, tokens, 2 * heads), torch.randn(heads, device=DEVICE) / 4, torch.randn(heads, device=DEVICE)
    with poisoned():
        decay, beta = gates_prompt(ab, a_log, bias)
    yield f"decay T={tokens}", relative_error(decay, -torch.exp(a_log) * softplus(ab[..., :heads].float() + bias))
    yield f"beta T={tokens}", relative_error(beta, torch.sigmoid(ab[..., heads:].float()))
    memory = torch.randn(1, heads, d, d, device=DEVICE) / 10
    kept = memory.clone()
    rules = [DeltaRule(torch.device(DEVICE), whole) for whole in (True, False)]
    queries, key_heads = (t.float().repeat_interleave(3, 2).transpose(1, 2) for t in (q, k))
    values, betas, decays = (t.float().transpose(1, 2) for t in (v, beta, decay / 8))
    want_read, want_memory = chunked_scan(queries * d**-0.5, key_heads, values, betas, decays, memory)
    for rule in rules:
        read, after = rule(q, k, v, decay / 8, beta, memory)
        yield f"{rule.name} T={tokens}", relative_error(read.transpose(1, 2), want_read)
        same = torch.equal(memory, kept) and after.dtype == torch.float32
        yield f"{rule.name} memory T={tokens}", relative_error(after, want_memory) if same else float("nan")
    with poisoned():
        parts = intra_chunks(k, v, decay / 8, beta)
    for name, got, want in zip(("w", "u", "total"), parts, reference_intra(k, v, decay / 8, beta), strict=True):
        yield f"chunks {name} T={tokens}", relative_error(got, want)
    z, norm = draw(1, tokens, heads * d), torch.rand(d, device=DEVICE)
    with poisoned():
        got = gated_norm_prompt(read, z, norm, 1e-6, "sigmoid")
    want = gated_rms_norm(read.float(), z.unflatten(-1, (heads, d)).float(), norm, 1e-6, "sigmoid").flatten(-2)
    yield f"gated norm T={tokens}", relative_error(got, want)


def attention(tokens: int, start: int) -> Iterator[Error]:
    """Norm with rotation, dense and chosen attention, the indexer with a small budget."""
    heads, kv, d, di, block, budget = 24, 2, 256, 128, 4, 20
    end, half = start + tokens, DTYPE
    angles = torch.rand(end, 32, device=DEVICE).repeat(1, 2) * 6
    tables = angles.cos().to(half), angles.sin().to(half)
    here = tables[0][start:], tables[1][start:]
    both, weight = draw(1, tokens, heads, 2 * d), torch.randn(d, device=DEVICE) / 4
    with poisoned():
        q = norm_rotate(both[..., :d], weight, here, 1e-6)
    yield f"rotated T={tokens}", relative_error(q, rotate(rms_norm(both[..., :d].float(), weight, 1e-6), *(t.float() for t in here)))
    keys, values, raw, index_q = draw(1, end + 9, kv, d), draw(1, end + 9, kv, d), draw(1, end + 9, di), draw(1, tokens, 4, di)
    weight = torch.randn(di, device=DEVICE) / 4
    with poisoned():
        pooled = block_keys(raw, end // block, weight, tables, block, 1e-6)
        scores = block_scores(index_q, pooled, start, block)
        bits = choose_blocks(scores, start, block, budget)
    mean = raw[:, : end // block * block].unflatten(1, (-1, block)).float().mean(2).to(half)
    exact = rotate(rms_norm(mean.float(), weight, 1e-6).unsqueeze(2), *(t[: end // block * block : block].float() for t in tables)).squeeze(2)
    yield f"block keys T={tokens}", relative_error(pooled, exact)
    complete = (torch.arange(start, end, device=DEVICE) + 1) // block
    ready = torch.arange(end // block, device=DEVICE) < complete[:, None]
    want_scores = torch.relu(torch.einsum("bthd,bnd->bthn", index_q.float(), pooled.float())).sum(2) * di**-0.5
    yield f"scores T={tokens}", relative_error(scores[0][ready], want_scores[0][ready])
    order = scores[0].masked_fill(~ready, -torch.inf).sort(stable=True, dim=-1, descending=True).indices[:, :budget]
    chosen = torch.zeros_like(ready).scatter(1, order, True) & ready
    words = (pad(chosen, (0, -chosen.shape[1] % 32)).unflatten(1, (-1, 32)).long() << torch.arange(32, device=DEVICE)).sum(-1)
    yield f"choice T={tokens}", 0.0 if torch.equal(words, bits[0].long() & 0xFFFFFFFF) else float("nan")
    key = torch.arange(end, device=DEVICE)
    causal = (key <= torch.arange(start, end, device=DEVICE)[:, None])[None]
    sparse = causal & (pad(chosen.repeat_interleave(block, -1), (0, end % block)) | (key >= (complete * block)[:, None]))[None]
    for name, visible, given in (("dense", causal, None), ("chosen", sparse, bits)):
        want = attend(q.float(), keys[:, :end].float(), values[:, :end].float(), visible) * torch.sigmoid(both[..., d:].float())
        with poisoned():
            got = attend_prompt(q, keys, values, both[..., d:], start, given, block)
        yield f"attention {name} T={tokens}", relative_error(got, want.flatten(2))


def experts(tokens: int) -> Iterator[Error]:
    """The router's choice and the sum of slots with the shared expert's share."""
    logits = draw(tokens, 520)
    with poisoned():
        ids, weights, share = route_prompt(logits, 512, 10, True)
    want = reference_route(logits[:, :512].float(), 10)
    same = torch.equal(logits.gather(1, ids.long()), logits.gather(1, want[0].long()))  # equal logits may change places
    yield f"route T={tokens}", relative_error(weights, want[1]) if same else float("nan")
    yield f"share T={tokens}", relative_error(share, torch.sigmoid(logits[:, 512].float()))
    y, shared = draw(tokens * 10, HIDDEN), draw(tokens, HIDDEN)
    with poisoned():
        got = sum_slots(y, 10, shared, share)
    yield f"sum T={tokens}", relative_error(got, y.float().view(tokens, 10, -1).sum(1) + share[:, None] * shared.float())


def all_checks() -> Iterator[Error]:
    """Everything, at lengths that divide by nothing and at whole tiles."""
    yield from mixer(77)
    yield from experts(77)
    for tokens, start in ((77, 0), (130, 6)):
        yield from delta(tokens, start)
    for tokens, start in ((256, 0), (77, 131)):
        yield from attention(tokens, start)
    yield from grouped()


def grouped() -> Iterator[Error]:
    """Grouped experts with narrow and wide tiles."""
    for name, lengths in (("q2_g32", (17, 150, 300)), ("w3_levels", (17, 300)), ("q2_levels", (17,)), (NIBBLES, (17, 300)), ("bf16", (150,))):
        for tokens in lengths:
            yield from check_grouped(name, tokens)
