"""How the kernels of a chained decode step are compared with plain torch: random weights and streams, poisoned outputs, one relative error per result.

The references are written here from the definitions (lab.models.qwen4_exp), in float32 from decoded weights; tests ask at small sizes, the benchmark at true
ones. What it does not prove: anything for inputs far from the drawn ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from lab.codecs import Codec, create
from lab.kernels import mixer_step, moe_step, ngram_step, project_step
from lab.kernels.experts import reference_experts
from lab.kernels.mixer_step import Streams
from lab.kernels.planes import Planes, repack
from lab.kernels.quads import SHRINK, natural_order, quad_order
from lab.kernels.router import reference_route
from lab.kernels.verify import Error, poisoned, random_parts, relative_error

_EPS = 1e-6


@dataclass(frozen=True)
class Sizes:
    """What a check is made at; `draw` gives normal activations of its dtype."""

    batch: int
    count: int
    hidden: int
    dtype: torch.dtype
    device: str

    def draw(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, device=self.device)).to(self.dtype)

    def norm(self) -> Tensor:
        """A norm's weight over all streams."""
        return torch.randn(self.count * self.hidden, device=self.device) / 8


def int8(rows: int, cols: int, device: str) -> tuple[Planes, Tensor]:
    """A random int8_g128 matrix in planes, and decoded."""
    codec = create("int8_g128")
    parts = random_parts(codec, (rows, cols), device)
    return repack(codec, parts, cols), codec.decode(parts, cols)


def reference_streams(streams: Tensor, y: Tensor, given: Tensor) -> Tensor:
    """float32 [B, C, H]: y [B, H] written back to streams with injection logits [B, C]."""
    return streams.float() + (2 * torch.sigmoid(given / given.shape[1])).unsqueeze(-1) * y.float().unsqueeze(1)


def normed(streams: Tensor, norm: Tensor) -> Tensor:
    """float32 [B, C, H]: each stream over its rms, times 1 + w."""
    wide = streams.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + _EPS) * (1 + norm.view(streams.shape[1:]))


def _after(name: str, got: Streams, want: Tensor, norm: Tensor) -> Iterator[Error]:
    """What a write-back leaves against wanted raw streams."""
    yield f"{name}: streams", relative_error(got.raw, want)
    yield f"{name}: scaled", relative_error(natural_order(got.scaled) / SHRINK, want * (1 + norm.view(want.shape[1:])))
    yield f"{name}: squares", relative_error(got.square.sum(-1), want.square().sum(-1))


def check_mixer(sizes: Sizes, rank: int) -> Iterator[Error]:
    """Start, narrow and wide projection, and a block's output written back by the general kernel."""
    wide = sizes.count * sizes.hidden
    norm = sizes.norm()
    table, ids = sizes.draw(9, sizes.hidden), torch.randint(0, 9, (sizes.batch,), device=sizes.device)
    with poisoned():
        started = mixer_step.start(table, ids, sizes.count, norm)
    yield from _after("start", started, table[ids].float().unsqueeze(1).expand(-1, sizes.count, -1), norm)
    raw = sizes.draw(sizes.batch, sizes.count, sizes.hidden, scale=3.0)
    streams = mixer_step.streams_of(raw, norm, sizes.hidden // 8)
    (down, first), (up, second) = int8(rank, wide, sizes.device), int8(wide, rank, sizes.device)
    inject = sizes.draw(sizes.count, wide)
    by_stream = quad_order(inject.unflatten(-1, (sizes.count, -1))).flatten(-2).contiguous()
    clean = normed(raw, norm)
    want_inner = silu(clean.flatten(1) @ first.T / sizes.count)
    with poisoned():
        inner, rate, given = mixer_step.narrow(streams, down, by_stream, _EPS)
        x, quads = mixer_step.wide(streams, inner, rate, up)
    yield "narrow: inner", relative_error(natural_order(inner), want_inner)
    yield "narrow: logits", relative_error(given, clean.flatten(1) @ inject.float().T)
    amount = torch.sigmoid(want_inner @ second.T).view_as(clean)
    yield "wide", relative_error(x, (amount * clean).mean(1))
    yield "wide: quads", relative_error(natural_order(quads), x)
    y, extra = sizes.draw(sizes.batch, sizes.hidden), torch.randn(sizes.batch, sizes.hidden, device=sizes.device)
    want = reference_streams(raw, y.float() + extra, given)
    with poisoned():
        added = mixer_step.add(streams, y, extra, given, norm)
    yield from _after("add", added, want, norm)


def check_project(sizes: Sizes, rows: int, small: int, inner: int) -> Iterator[Error]:
    """A projection with small rows beside it, and one written back."""
    planes, matrix = int8(rows, sizes.hidden, sizes.device)
    x, weight = sizes.draw(sizes.batch, sizes.hidden), sizes.draw(small, sizes.hidden) / 10
    quads = quad_order(x.float()).to(torch.float16)
    with poisoned():
        got, beside = project_step.project(quads, planes, sizes.dtype, (x, weight))
        alone, _ = project_step.project(quads, planes, sizes.dtype)
    yield "project", relative_error(got, x.float() @ matrix.T)
    yield "project alone", relative_error(alone, x.float() @ matrix.T)
    yield "small rows", relative_error(beside, x.float() @ weight.float().T)
    out, second = int8(sizes.hidden, inner, sizes.device)
    read, norm = sizes.draw(sizes.batch, inner), sizes.norm()
    raw, given = sizes.draw(sizes.batch, sizes.count, sizes.hidden), torch.randn(sizes.batch, sizes.count, device=sizes.device)
    want = reference_streams(raw, read.float() @ second.T, given)
    with poisoned():
        back = project_step.project_back(quad_order(read.float()).to(torch.float16), out, mixer_step.streams_of(raw, norm), given, norm)
    yield from _after("project back", back, want, norm)


def check_moe(sizes: Sizes, codec: Codec, experts: int, width: int, k: int) -> Iterator[Error]:
    """All four launches of the experts."""
    hidden, device = sizes.hidden, sizes.device
    x, router = sizes.draw(sizes.batch, hidden), sizes.draw(experts + 1, hidden) / hidden**0.5
    quads = quad_order(x.float()).to(torch.float16)
    plain = create("int8_g128")
    gate_up = random_parts(plain, (2 * width, hidden), device)
    both = repack(plain, gate_up, hidden, halves=2)
    down, shared_down = int8(hidden, width, device)
    with poisoned():
        logits, inner = moe_step.route(x, quads, router, both)
        ids, weights, share, extra = moe_step.choose(logits, k, True, inner, down)
    yield "router", relative_error(logits, x.float() @ router.float().T)
    gate, up = (x.float() @ plain.decode(gate_up, hidden).T).chunk(2, -1)
    yield "shared inner", relative_error(natural_order(inner), silu(gate) * up)
    want_ids, want_weights = reference_route(logits[:, :experts].float(), k)
    same = torch.equal(logits.gather(1, ids.long()), logits.gather(1, want_ids.long()))  # equal logits may change places
    yield "choice", relative_error(weights, want_weights) if same else float("nan")
    want_share = torch.sigmoid(logits[:, experts:].float())
    yield "share", relative_error(share, want_share)
    want_extra = want_share * (natural_order(inner).float() @ shared_down.T)
    yield "shared", relative_error(extra, want_extra)
    first, second = random_parts(codec, (experts, 2 * width, hidden), device), random_parts(codec, (experts, hidden, width), device)
    raw, norm, given = sizes.draw(sizes.batch, sizes.count, hidden), sizes.norm(), torch.randn(sizes.batch, sizes.count, device=device)
    routed = reference_experts(x, ids, weights, codec.decode(first, hidden), codec.decode(second, width))
    want = reference_streams(raw, routed + want_extra, given)
    with poisoned():
        h = moe_step.gate_up(quads, ids, repack(codec, first, hidden, halves=2))
        got = moe_step.down_back(h, ids, weights, repack(codec, second, width), extra, mixer_step.streams_of(raw, norm), given, norm)
    yield from _after(f"experts {codec.name}", got, want, norm)


def check_inject(sizes: Sizes, kernel: int, dilation: int) -> Iterator[Error]:
    """The n-gram module after its projections, for more tokens than its history reaches back."""
    wide, reach = sizes.count * sizes.hidden, (kernel - 1) * dilation
    norms = sizes.norm(), sizes.norm(), sizes.norm()
    taps, norm = torch.randn(kernel, wide, device=sizes.device), sizes.norm()
    history = torch.zeros(sizes.batch, reach, wide, dtype=sizes.dtype, device=sizes.device)
    for _ in range(2):
        raw, mixed = sizes.draw(sizes.batch, sizes.count, sizes.hidden), sizes.draw(sizes.batch, wide + sizes.hidden)
        keys, value = mixed.split([wide, sizes.hidden], -1)
        match = (normed(keys.view_as(raw), norms[0]) * normed(raw, norms[1])).sum(-1, keepdim=True) / sizes.hidden**0.5
        gated = torch.sigmoid(match.abs().clamp_min(_EPS).sqrt() * match.sign()) * value.float().unsqueeze(1)
        moved = torch.cat([history.float(), normed(gated, norms[2]).flatten(1).unsqueeze(1)], 1)
        want = raw.float() + gated + silu((moved[:, ::dilation] * taps).sum(1)).view_as(raw)
        with poisoned():
            got = ngram_step.inject(mixed, mixer_step.streams_of(raw, norm), norms, taps, history, dilation, norm, _EPS)
        yield from _after("n-gram", got, want, norm)
        yield "n-gram: history", relative_error(history, moved[:, 1:])
