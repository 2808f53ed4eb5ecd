"""Block types of files through the engine's GPU operations: the plain operations' values, counts and bytes, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from lab import ops_gpu
from lab.codecs import Codec, create
from lab.counters import Counters
from lab.ops import Packed, PackedExperts, PackedLinear

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
