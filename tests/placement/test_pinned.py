"""Host memory for the device: what is given, what is refused and said so, where random weights of the host end."""

from __future__ import annotations

import pytest
import torch

from lab.artifacts.synthetic import random_parts
from lab.codecs import create
from lab.errors import GapError
from lab.placement.pinned import PinnedMemory, reachable
from lab.record import Status

HAS_GPU = torch.cuda.is_available()


def granted(address: int, size: int) -> str | None:
    assert address % 4096 == 0 and size % 4096 == 0, "whole pages"
    return None


def test_memory_is_whole_pages_of_its_own_and_counted() -> None:
    memory = PinnedMemory(torch.device("cpu"), granted)
    first, second = memory.empty((3, 5), torch.float32, "a"), memory.empty((1000,), torch.int64, "b")
    first.fill_(1.5)
    second.fill_(-1)
    assert float(first.sum()) == 22.5 and int(second.sum()) == -1000
    assert memory.nbytes == 60 + 8000 and memory.evidence()["refused"] == []
    value = torch.arange(7)
    assert torch.equal(memory.copy(value, "c"), value)


def test_a_refusal_names_what_and_why_and_is_remembered() -> None:
    memory = PinnedMemory(torch.device("cpu"), lambda address, size: "out of memory")
    with pytest.raises(GapError, match=r"the table: 0.0 MB of pinned host memory were refused \(out of memory\)") as refused:
        memory.empty((8,), torch.float32, "the table")
    assert refused.value.status is Status.UNSUPPORTED
    assert memory.or_plain((8,), torch.float32, "the table").shape == (8,) and memory.nbytes == 0
    assert len(memory.evidence()["refused"]) == 2


def test_memory_that_does_not_exist_is_out_of_memory() -> None:
    with pytest.raises(GapError, match="the table: .* of host memory were refused") as refused:
        PinnedMemory(torch.device("cpu"), granted).or_plain((1 << 60,), torch.uint8, "the table")
    assert refused.value.status is Status.OOM


@pytest.mark.parametrize(("codec", "shape"), [("e4m3", (700, 32)), ("q2_rows", (700, 32)), ("q2_g32", (3, 64, 64))])
def test_random_weights_of_the_host_end_in_the_memory_given(codec: str, shape: tuple[int, ...]) -> None:
    here, memory = torch.device("cpu"), PinnedMemory(torch.device("cpu"), granted)
    made = create(codec, {"scale": "global"} if codec == "e4m3" else {})
    plain, held = (random_parts(made, shape, here, torch.Generator().manual_seed(3), given, "table") for given in (None, memory.empty))
    assert all(torch.equal(held[key].view(torch.uint8), part.view(torch.uint8)) for key, part in plain.items())
    assert memory.nbytes >= sum(part.nbytes for key, part in held.items() if key not in made.shared) > 0


@pytest.mark.skipif(not HAS_GPU, reason="pins memory for a GPU")
def test_a_gpu_reads_it() -> None:
    memory = PinnedMemory(torch.device("cuda"))
    held = memory.copy(torch.arange(1 << 20), "numbers")
    assert reachable(held) and held.is_pinned() and not reachable(torch.arange(4))
    assert torch.equal(held.to("cuda", non_blocking=True).cpu(), torch.arange(1 << 20))
