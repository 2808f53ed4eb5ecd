"""Block types of files through the engine's GPU operations: the plain operations' values, counts and bytes, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from lab import ops_gpu
from lab.codecs import Codec, create
from lab.counters import Counters
from lab.models.qwen4_exp.step_parts import Small
from lab.ops import Packed, PackedExperts, PackedLinear
from lab.ops_gpu_blocks import join

CPU = torch.device("cpu")


def packed(codec: Codec, counters: Counters, *shape: int, first: bool = True, component: str = "trunk", seed: int = 0) -> Packed:
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.05
    return Packed(codec, codec.encode(weight), shape, 0, component, counters, first)


@pytest.mark.parametrize("names", [("gguf:Q4_1",), ("gguf:Q8_0", "gguf:IQ4_NL"), ("vqf:Q4_0",), ("vqf:Q8_0",)])
@pytest.mark.parametrize("rows", [1, 3, 20])
def test_a_matrix_in_row_blocks_multiplies_as_its_reference(names: tuple[str, ...], rows: int) -> None:
    plain_counts, counts = Counters(), Counters()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))

    def made(counters: Counters) -> PackedLinear:
        return PackedLinear(*(packed(create(name), counters, 24, 64, first=i == 0, seed=i) for i, name in enumerate(names)), order=order)

    x = torch.randn(2, rows, 64, generator=torch.Generator().manual_seed(2))
    expected = made(plain_counts)(x)
    found, reason = ops_gpu.linear(made(counts), torch.float32)
    assert reason is None and not isinstance(found, PackedLinear)
    torch.testing.assert_close(found(x), expected, rtol=1e-4, atol=1e-5)
    assert {key: tally.rows for key, tally in counts.tallies.items()} == {key: tally.rows for key, tally in plain_counts.tallies.items()}


@pytest.mark.parametrize("name", ["gguf:Q4_K", "vqf:Q4_0"])
def test_matrices_of_one_input_are_one_product_from_the_same_memory(name: str) -> None:
    counts = Counters()
    alone = [ops_gpu.linear(PackedLinear(packed(create(name), counts, rows, 256, seed=rows)), torch.float32)[0] for rows in (16, 8)]
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(2))
    expected = torch.cat([op(x) for op in alone], -1)
    before = sum(block.matrix.nbytes() for op in alone for block in op.blocks)
    joined = join(alone)
    assert joined is not None and joined.matrix.nbytes() == before
    rows = counts.rows("trunk")
    torch.testing.assert_close(joined(x), expected, rtol=1e-6, atol=1e-6)
    assert counts.rows("trunk") == rows + 2 * len(x)
    torch.testing.assert_close(torch.cat([op(x) for op in alone], -1), expected, rtol=0, atol=0)
    assert alone[0].blocks[0].matrix.blocks.words.data_ptr() == joined.matrix.blocks.words.data_ptr(), "no weight is held twice"
    odd = ops_gpu.linear(PackedLinear(packed(create(name), counts, 12, 256)), torch.float32)[0]
    other = ops_gpu.linear(PackedLinear(packed(create("gguf:Q8_0"), counts, 8, 256)), torch.float32)[0]
    assert join([alone[0], odd]) is None and join([alone[0], other]) is None and join(alone[:1]) is None


@pytest.mark.parametrize("ordered", [False, True])
def test_a_small_matrix_of_a_step_may_be_blocks_of_a_file(ordered: bool) -> None:
    counts = Counters()
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1)) if ordered else None
    op = ops_gpu.linear(
        PackedLinear(*(packed(create(n), counts, 8, 64, first=n == "gguf:F32") for n in ("gguf:F32", "gguf:Q8_0")), order=order), torch.float32
    )[0]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2))
    expected, before = op(x), counts.rows("trunk")
    small = Small(torch.float32, op)
    torch.testing.assert_close(x @ small.weight.T, expected, rtol=1e-4, atol=1e-5)
    small.count(3)
    assert counts.rows("trunk") == before + 3


def test_experts_of_mixed_types_compute_as_their_reference() -> None:
    plain_counts, counts = Counters(), Counters()

    def made(counters: Counters) -> PackedExperts:
        gate, up = (packed(create(name), counters, 5, 32, 64, first=i == 0, component="experts", seed=i) for i, name in enumerate(("gguf:Q4_0", "gguf:IQ4_NL")))
        return PackedExperts([gate, up], packed(create("gguf:Q2_0"), counters, 5, 64, 64, component="experts", seed=3))

    def narrow(counters: Counters) -> PackedExperts:
        gate_up = packed(create("vqf:Q4_0"), counters, 5, 64, 64, component="experts")
        return PackedExperts([gate_up], packed(create("vqf:Q8_0"), counters, 5, 64, 32, component="experts", seed=4))

    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(5))
    ids = torch.tensor([[0, 4], [3, 0], [1, 2], [4, 1]])
    weights = torch.rand(4, 2, generator=torch.Generator().manual_seed(6))
    expected = narrow(plain_counts)(x, ids, weights)
    found, reason = ops_gpu.experts(narrow(counts), torch.float32)
    assert reason is None and not isinstance(found, PackedExperts)
    torch.testing.assert_close(found(x, ids, weights), expected, rtol=1e-4, atol=1e-5)
    assert {key: tally.rows for key, tally in counts.tallies.items()} == {key: tally.rows for key, tally in plain_counts.tallies.items()}
    apart, reason = ops_gpu.experts(made(Counters()), torch.float32)
    assert reason is None and not isinstance(apart, PackedExperts)


def test_bytes_held_are_those_of_the_transcoded_form() -> None:
    weight = packed(create("gguf:Q6_K"), Counters(), 16, 256)
    filed = weight.nbytes()
    found, _ = ops_gpu.linear(PackedLinear(weight), torch.float32)
    assert weight.nbytes() == found.blocks[0].matrix.nbytes() > filed and weight.parts == {}
