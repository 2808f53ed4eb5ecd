"""GGUF types on the GPU skeleton: transcoding keeps every float32 bit, and each kernel gives the codec's weights times the activations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
pytest.importorskip("gguf")

from lab.codecs import create
from lab.codecs.gguf import GGUF_CODECS, PART
from lab.errors import LabError
from lab.kernels.gguf_gpu import GpuBlocks, decode, transcode
from lab.kernels.gguf_gpu_matrix import GpuMatrix
from lab.kernels.gguf_gpu_product import dequantise, expert_slots, launch_shape, product
from lab.kernels.gguf_gpu_types import SPECS
from lab.kernels.gguf_gpu_verify import check_dequantise, check_product, check_slots, random_blocks
from lab.kernels.verify import poisoned, relative_error
from tests.codecs.gguf_blocks import as_bits, packed_rows
from tests.kernels.support import DEVICE

TYPES = [name.removeprefix("gguf:") for name in GGUF_CODECS]
FLOAT32 = 1e-5
"""|out - exact| / |exact| in float32; the interpreter gives 1e-7 to 6e-7."""
VARIED = ["Q1_0", "Q2_0", "Q4_0", "Q4_1", "Q8_0", "IQ4_NL", "NVFP4", "MXFP4", "BF16"]
"""Types that divide 640, one per kind of code and scale."""
KINDS = [torch.float32, torch.bfloat16, torch.float16]


def _cols(name: str) -> int:
    return 640 if GGUF_CODECS[f"gguf:{name}"]().kind.fits(640) else 512


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("rows", [(2048,), (37,), (2, 19), (3, 16)], ids=str)
def test_transcoding_keeps_every_bit(name: str, rows: tuple[int, ...]) -> None:
    """Every byte value in every place of a block, scales of both signs, zeros, subnormal and largest ones; rows that fill no block of eight."""
    codec = GGUF_CODECS[f"gguf:{name}"]()
    packed = torch.from_numpy(packed_rows(codec.kind.name, 1))[: int(np.prod(rows))].view(*rows, -1)
    blocks = transcode(codec, {PART: packed}, codec.kind.block)
    assert np.array_equal(as_bits(decode(blocks)), as_bits(codec.decode({PART: packed}, codec.kind.block)))
    assert blocks.shape() == (*rows, codec.kind.block) if len(rows) > 1 else blocks.shape() == (rows[0], codec.kind.block)


def test_transcoding_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.kernels.gguf_gpu._PIECE_CPU", 5000)
    monkeypatch.setattr("lab.kernels.gguf_gpu._PIECE_GPU", 5000)
    for shape in ((2, 37, 512), (3, 24, 512), (90, 512)):
        for name in ("Q4_K", "IQ2_XS", "Q8_0"):
            parts = {PART: random_blocks(name, shape, DEVICE)}
            codec = create(f"gguf:{name}")
            with poisoned():
                blocks = transcode(codec, parts, 512)
            assert torch.equal(decode(blocks), codec.decode(parts, 512))


def test_scales_that_are_no_numbers_stay_none() -> None:
    packed = torch.from_numpy(packed_rows("Q4_K", 1))[:4].clone()
    packed[0, :2], packed[1, :2], packed[2, 2:4] = (torch.tensor(half, dtype=torch.float16).view(1).view(torch.uint8) for half in (np.inf, np.nan, -np.inf))
    codec = create("gguf:Q4_K")
    want, got = codec.decode({PART: packed}, 256), decode(transcode(codec, {PART: packed}, 256))
    assert torch.equal(got.nan_to_num(7), want.nan_to_num(7)) and not bool(want[:3].isfinite().all())


@pytest.mark.parametrize("name", TYPES)
def test_product_of_every_type(name: str) -> None:
    torch.manual_seed(len(name))
    for case, error in check_product(name, 19, _cols(name), 1, torch.float32, DEVICE):
        assert error <= FLOAT32, case


@pytest.mark.parametrize("tokens", [3, 8])
@pytest.mark.parametrize(("name", "kind"), [(name, KINDS[i % 3]) for i, name in enumerate(VARIED)])
def test_product_of_several_tokens(name: str, kind: torch.dtype, tokens: int) -> None:
    torch.manual_seed(tokens)
    for case, error in check_product(name, 11, 256, tokens, kind, DEVICE):
        assert error <= FLOAT32, case


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_activations_far_from_zero_and_of_any_range(kind: torch.dtype) -> None:
    """A sum of many like terms, and one outlier: what a product that loses low bits gets wrong."""
    for name in ("Q4_0", "Q4_K", "IQ3_S"):
        parts, codec = {PART: random_blocks(name, (9, 512), DEVICE)}, create(f"gguf:{name}")
        x = torch.ones(2, 512, device=DEVICE, dtype=kind)
        x[1] = torch.randn(512, device=DEVICE).to(kind)
        x[1, 77] = 3e4
        got = product(transcode(codec, parts, 512), x, torch.full((2, 9), float("nan"), device=DEVICE))
        want = x.double() @ codec.decode(parts, 512).double().T
        for token in range(2):
            assert relative_error(got[token], want[token]) <= FLOAT32, name


@pytest.mark.parametrize("name", ["Q4_0", "Q2_0", "Q6_K", "IQ2_XS", "Q4_1", "F16"])
def test_slots(name: str) -> None:
    torch.manual_seed(1)
    ids = torch.tensor([2, -1, 0, 2, 1], device=DEVICE, dtype=torch.int32)
    for case, error in check_slots(name, 3, 13, 256, ids, torch.bfloat16 if name == "Q2_0" else torch.float32, DEVICE):
        assert error <= FLOAT32, case


@pytest.mark.parametrize("name", ["Q4_0", "F16"])
def test_empty_slots_are_zero_and_wrong_ids_are_seen(name: str) -> None:
    parts = {PART: random_blocks(name, (3, 9, 64), DEVICE)}
    blocks = transcode(create(f"gguf:{name}"), parts, 64)
    x = torch.randn(1, 64, device=DEVICE)
    got = expert_slots(blocks, torch.tensor([-1, 3, 2], device=DEVICE), x)
    assert bool((got[0] == 0).all()) and bool(got[1].isnan().all()) and bool(got[2].isfinite().all())
    alone = expert_slots(blocks, torch.tensor([2], device=DEVICE), x)
    assert torch.equal(alone[0], got[2])  # three slots shared one row of activations
    assert bool((expert_slots(blocks, torch.tensor([-1], device=DEVICE), x * float("nan")) == 0).all())


@pytest.mark.parametrize("name", TYPES)
def test_dequantise(name: str) -> None:
    limit = 0.0 if DEVICE == "cpu" else 1e-7  # a GPU may round a fused multiply-add once
    for case, error in check_dequantise(name, (11, _cols(name)), torch.float32, DEVICE):
        assert error <= limit, case
    if name in VARIED:
        for kind, most in ((torch.float16, limit * 1e3), (torch.bfloat16, 5e-3)):  # the interpreter truncates to bfloat16
            for case, error in check_dequantise(name, (2, 3, 256), kind, DEVICE):
                assert error <= most, case


def test_one_wrong_scale_is_seen() -> None:
    parts = {PART: random_blocks("Q4_0", (9, 256), DEVICE)}
    blocks, codec = transcode(create("gguf:Q4_0"), parts, 256), create("gguf:Q4_0")
    x = torch.randn(1, 256, device=DEVICE)
    want = x @ codec.decode(parts, 256).T
    assert relative_error(product(blocks, x), want) <= FLOAT32
    blocks.scale[0, 1, 3, 0] *= 1.5  # row 8, columns 96-127
    assert relative_error(product(blocks, x), want) > 100 * FLOAT32


@pytest.mark.parametrize("name", ["Q4_K", "Q5_1", "F32", "BF16"])
@pytest.mark.parametrize("tokens", [1, 8, 9])
def test_matrix_for_an_engine(name: str, tokens: int) -> None:
    torch.manual_seed(tokens)
    parts, codec = {PART: random_blocks(name, (21, 256), DEVICE)}, create(f"gguf:{name}")
    matrix = GpuMatrix.make(codec, parts, (21, 256))
    x = torch.randn(tokens, 256, device=DEVICE)
    with poisoned():
        assert relative_error(matrix.times(x), x.double() @ codec.decode(parts, 256).double().T) <= FLOAT32
    assert matrix.times(x.to(torch.bfloat16)).dtype == torch.bfloat16
    stack = GpuMatrix.make(codec, {PART: parts[PART].view(3, 7, -1)}, (3, 7, 256))
    got = stack.slots(x[:1], torch.tensor([2], device=DEVICE))
    assert relative_error(got, x[:1].double() @ codec.decode(parts, 256)[14:].double().T) <= FLOAT32


def test_bytes_are_counted() -> None:
    blocks = transcode(create("gguf:Q4_K"), {PART: random_blocks("Q4_K", (13, 512), DEVICE)}, 512)
    assert blocks.nbytes() == 16 * (512 // 2 + 2 * 16 + 2 * 2 * 2)  # codes, scale and minimum per 32, two float16 per 256, three rows padded


@pytest.mark.parametrize("words", [40, 80, 160, 320, 640, 768, 20])
def test_launch_shapes_keep_rows_within_threads(words: int) -> None:
    for tokens in (1, 2, 4, 8):
        for bits in (1, 2, 4, 8):
            tile, steps, warps = launch_shape(tokens, words, bits)
            assert tile % (32 * warps) == 0 and 1 <= steps <= 5


def test_other_launch_shapes_give_the_same() -> None:
    parts, codec = {PART: random_blocks("IQ4_XS", (9, 768), DEVICE)}, create("gguf:IQ4_XS")
    blocks, x = transcode(codec, parts, 768), torch.randn(2, 768, device=DEVICE)
    want = x.double() @ codec.decode(parts, 768).double().T
    for shape in ((32, 1, 1), (64, 2, 2), (128, 3, 4)):
        assert relative_error(product(blocks, x, shape=shape), want) <= FLOAT32, shape


def _blocks(stacked: bool = False) -> GpuBlocks:
    return transcode(create("gguf:Q4_0"), {PART: random_blocks("Q4_0", (2, 8, 64) if stacked else (8, 64), DEVICE)}, 64)


def test_wrong_inputs_are_one_line() -> None:
    x, ids = torch.zeros(2, 64, device=DEVICE), torch.zeros(3, dtype=torch.int64, device=DEVICE)
    cases = (
        (lambda: product(_blocks(), x[:, :32]), "x is torch.float32 .2, 32."),
        (lambda: product(_blocks(), x.double()), "x is torch.float64"),
        (lambda: product(_blocks(), torch.zeros(9, 64, device=DEVICE)), "not .1..8, 64."),
        (lambda: product(_blocks(stacked=True), x), "use expert_slots"),
        (lambda: product(_blocks(), x, torch.zeros(2, 9, device=DEVICE)), "not contiguous floats .2, 8."),
        (lambda: expert_slots(_blocks(stacked=True), ids, x), "does not divide 3 slots"),
        (lambda: expert_slots(_blocks(stacked=True), ids.float(), x), "not integers"),
        (lambda: dequantise(_blocks(), torch.float16, torch.zeros(8, 32, device=DEVICE)), "not contiguous .8, 64."),
        (lambda: transcode(create("int8_g128"), {}, 64), "is no GGUF type"),
        (lambda: transcode(create("gguf:Q4_0"), {PART: torch.zeros(8, 35, dtype=torch.uint8)}, 64), "has 36 bytes, not 35"),
        (lambda: GpuMatrix.make(create("gguf:Q4_0"), {PART: torch.zeros(8, 36, dtype=torch.uint8)}, (9, 64)), "not .9, 64."),
    )
    for call, message in cases:
        with pytest.raises(LabError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


def test_a_level_that_no_table_lists_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SPECS["IQ3_S"]
    monkeypatch.setitem(SPECS, "IQ3_S", type(spec)(spec.bits, spec.levels[1:], spec.group, supers=spec.supers))
    with pytest.raises(LabError, match="has a level that is not in"):
        transcode(create("gguf:IQ3_S"), {PART: random_blocks("IQ3_S", (8, 256), DEVICE)}, 256)
