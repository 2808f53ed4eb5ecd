"""A decode step's kernels against plain torch at Flash-Next's sizes on this GPU: what `python -m experiments.flash_next_bench checks` runs.

Random inputs, poisoned outputs, 1, 4 and 8 sequences; grouped experts at odd numbers of tokens. Each check yields (name, relative error).
What it does not prove: that a whole step is right, which its part `nano` and every cell's parity gate look at.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lab.codecs import create
from lab.kernels import chain_verify, delta_step, hyper_bf16, indexer_step
from lab.kernels.delta_step import DeltaWeights, reference_delta
from lab.kernels.experts import LowBitExperts, reference_experts
from lab.kernels.experts_bf16 import Bf16Experts
from lab.kernels.experts_prefill import grouped_experts
from lab.kernels.hyper_step import mix_streams, norm_streams, reference_mix, reference_norm
from lab.kernels.planes import repack
from lab.kernels.router import reference_route
from lab.kernels.rows_step import choose, small_product
from lab.kernels.verify import Error, poisoned, random_ids, random_parts, relative_error
from lab.models.qwen4_exp.config import from_file
from lab.models.qwen4_exp.sparse_attention import Indexer, rotary_tables

CONFIG = Path(__file__).parents[1] / "conf" / "geometry" / "flash_next.json"
DEVICE, DTYPE = "cuda", torch.bfloat16
HIDDEN, STREAMS, RANK = 2560, 4, 320


def draw(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, device=DEVICE).to(dtype)


def check_mixer(batch: int) -> Iterator[Error]:
    """Norm with write-back, and the mix, at Flash-Next's sizes."""
    streams, norm, inject = draw(batch, STREAMS, HIDDEN), torch.randn(STREAMS * HIDDEN, device=DEVICE) / 8, draw(STREAMS, STREAMS * HIDDEN)
    pending = draw(batch, HIDDEN), draw(batch, HIDDEN), torch.randn(batch, STREAMS, STREAMS, device=DEVICE)
    want = reference_norm(streams, pending, norm, inject, 1e-6)
    with poisoned():
        normed, share = norm_streams(streams, pending, norm, inject, 1e-6)
    for name, got, exact in (("streams", streams, want[0]), ("normed", normed, want[1]), ("inject", share.sum(1), want[2])):
        yield f"norm {name} B={batch}", relative_error(got, exact)
    codec, wide = create("int8_g128"), STREAMS * HIDDEN
    first, second = random_parts(codec, (RANK, wide), DEVICE), random_parts(codec, (wide, RANK), DEVICE)
    want_mix = reference_mix(normed, codec.decode(first, wide), codec.decode(second, RANK))
    with poisoned():
        yield f"mix B={batch}", relative_error(mix_streams(normed, repack(codec, first, wide), repack(codec, second, RANK)), want_mix)


def check_mixer_bf16(batch: int) -> Iterator[Error]:
    """The mixer's projections with weights as released."""
    normed = draw(batch, STREAMS, HIDDEN)
    down, up = draw(RANK, STREAMS * HIDDEN) / 100, draw(STREAMS * HIDDEN, RANK) / 18
    with poisoned():
        got = hyper_bf16.mix_streams(normed, down, up)
    yield f"mix bf16 B={batch}", relative_error(got, reference_mix(normed, down.float(), up.float()))


def check_shared_bf16(batch: int) -> Iterator[Error]:
    """The shared expert as the only one of a stack, weighted by its share."""
    gate_up, down = draw(1, 2 * 640, HIDDEN) / 50, draw(1, HIDDEN, 640) / 25
    kernel, x, share = Bf16Experts(gate_up, down), draw(batch, HIDDEN), torch.rand(batch, 1, device=DEVICE)
    ids = torch.zeros(batch, 1, dtype=torch.int32, device=DEVICE)
    with poisoned():
        got = kernel(x, ids, share)
    yield f"shared bf16 B={batch}", relative_error(got, reference_experts(x, ids, share, gate_up.float(), down.float()))


def check_delta(batch: int) -> Iterator[Error]:
    """Six tokens through one block's step."""
    heads, share, d, kernel = 48, 3, 128, 4
    wide = 2 * heads // share * d + heads * d
    a_log, bias = torch.randn(heads, device=DEVICE) / 4, torch.randn(heads, device=DEVICE) / 4
    gates, taps = draw(2 * heads, HIDDEN) / 50, draw(kernel, wide).float() / 2
    weights = DeltaWeights(gates, taps, a_log, bias, torch.rand(d, device=DEVICE) + 0.5, 1e-6, "sigmoid")
    ring, memory = torch.zeros(batch, kernel, wide, dtype=DTYPE, device=DEVICE), torch.zeros(batch, heads, d, d, device=DEVICE)
    for position in range(6):
        x, mixed = draw(batch, HIDDEN), draw(batch, wide + heads * d)
        want, new = reference_delta(x, mixed, position, ring, memory, weights)
        with poisoned():
            got = delta_step.delta_step(x, mixed, torch.tensor([position], dtype=torch.int32, device=DEVICE), ring, memory, weights)
        yield f"delta B={batch} t={position}", relative_error(got, want)
        yield f"delta memory B={batch} t={position}", relative_error(memory, new)


def check_rows(batch: int) -> Iterator[Error]:
    """Small products and the router's choice."""
    x, weight = draw(batch, HIDDEN), draw(513, HIDDEN) / 30
    with poisoned():
        logits = small_product(x, weight)
        ids, weights, share = choose(logits, 10, True)
    yield f"rows B={batch}", relative_error(logits, x.float() @ weight.float().T)
    want = reference_route(logits[:, :512].float(), 10)
    same = torch.equal(logits.gather(1, ids.long()), logits.gather(1, want[0].long()))  # equal logits may change places
    yield f"choose B={batch}", relative_error(weights, want[1]) if same else float("nan")
    yield f"share B={batch}", relative_error(share, torch.sigmoid(logits[:, 512:].float()))


def check_indexer(batch: int) -> Iterator[Error]:
    """Scores of complete blocks, and the choice that follows from them: with every block seen, and with more of them than the budget."""
    config, capacity = from_file(CONFIG), 4352
    block, d, budget = config.indexer_block, config.indexer_head_dim, config.indexer_budget // config.indexer_block
    indexer = Indexer.__new__(Indexer)  # without weights: its input is drawn
    indexer.config = config
    indexer.q_norm, indexer.k_norm = norms = draw(d, dtype=torch.float32) / 4, draw(d, dtype=torch.float32) / 4
    index, raw = draw(batch, (config.indexer_heads + 1) * d), draw(batch, capacity, d)
    tables = rotary_tables(config, torch.arange(capacity, device=DEVICE), DTYPE)
    exact = index.float(), raw.float()
    for position in (1501, 4102):
        where = torch.tensor([position], dtype=torch.int32, device=DEVICE)
        with poisoned():
            scores = indexer_step.block_scores(index, raw, where, tables, norms, config.indexer_heads, block, config.rms_norm_eps)
            got = indexer_step.choose_blocks(scores, where, block, budget)
        complete = (position + 1) // block
        want = indexer.scores_at(*exact, where.long(), (tables[0].float(), tables[1].float()))
        yield f"indexer scores B={batch} at {position}", relative_error(scores[:, :complete], want[:, :complete])
        order = scores[:, :complete].sort(stable=True, dim=-1, descending=True).indices[:, :budget]
        yield f"indexer choice B={batch} at {position}", 0.0 if torch.equal(got, torch.zeros_like(got).scatter_(1, order, 1)) else float("nan")


def check_chain(batch: int) -> Iterator[Error]:
    """Every launch of the chained step."""
    sizes = chain_verify.Sizes(batch, STREAMS, HIDDEN, DTYPE, DEVICE)
    yield from chain_verify.check_mixer(sizes, RANK)
    yield from chain_verify.check_project(sizes, 16384, 96, 6144)
    yield from chain_verify.check_moe(sizes, create("q2_g32"), 512, 640, 10)
    yield from chain_verify.check_moe(sizes, create("w3_levels"), 512, 640, 10)
    yield from chain_verify.check_moe(sizes, create("gguf:Q4_0"), 512, 640, 10)
    yield from chain_verify.check_inject(sizes, 4, 3)


def check_grouped(name: str, tokens: int) -> Iterator[Error]:
    """Grouped experts at true widths, few experts."""
    count, width, k = 12, 640, 3
    ids, weights, x = random_ids(tokens, count, k, DEVICE), torch.rand(tokens, k, device=DEVICE), draw(tokens, HIDDEN)
    ids[ids == 5] = 6
    kernel: LowBitExperts | Bf16Experts
    if name == "bf16":
        first, second = draw(count, 2 * width, HIDDEN) / 50, draw(count, HIDDEN, width) / 50
        kernel, decoded = Bf16Experts(first, second), (first.float(), second.float())
    else:
        codec = create(name)
        parts = random_parts(codec, (count, 2 * width, HIDDEN), DEVICE), random_parts(codec, (count, HIDDEN, width), DEVICE)
        kernel = LowBitExperts(repack(codec, parts[0], HIDDEN, halves=2), repack(codec, parts[1], width))
        decoded = codec.decode(parts[0], HIDDEN), codec.decode(parts[1], width)
    with poisoned():
        got = grouped_experts(kernel, x, ids, weights)
    yield f"grouped {name} T={tokens}", relative_error(got, reference_experts(x, ids, weights, *decoded))


def all_checks() -> Iterator[Error]:
    """Every check, by numbers of sequences or tokens."""
    for batch in (1, 4, 8):
        for check in (check_mixer, check_mixer_bf16, check_shared_bf16, check_delta, check_rows, check_indexer, check_chain):
            yield from check(batch)
    for name in ("q2_g32", "w3_levels", "q2_levels", "bf16"):
        for tokens in (17, 150):
            yield from check_grouped(name, tokens)
