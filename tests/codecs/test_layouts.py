"""Bytes packed by hand, released tensors adopted bit for bit, error bounds that follow from the format.

Why by hand: an encoder and a decoder that share a wrong layout agree with each other; these bytes were worked out from the written layout.
"""

from __future__ import annotations

import pytest
import torch

from lab.codecs import create
from lab.codecs.e4m3 import e4m3_to_float, from_release
from lab.codecs.fit import SortedGroups, nearest_codes
from lab.codecs.packing import pack2, pack3, unpack2, unpack3
from lab.codecs.plain import round_up_bf16
from lab.errors import LabError
from tests.codecs.support import gaussian, student

ASCENDING = (-8.0, -5.0, -3.0, -1.0, 1.0, 3.0, 5.0, 8.0)


def test_three_bits_straight_golden() -> None:
    # Codes 0..7 from bit 0 up: 111 110 101 100 011 010 001 000 = 0xFAC688, little-endian bytes 88 C6 FA.
    packed = pack3(torch.arange(8, dtype=torch.uint8).repeat(4), "straight")
    assert packed.tolist() == [0x88, 0xC6, 0xFA] * 4
    assert unpack3(packed, ASCENDING, "straight").tolist() == list(ASCENDING) * 4
    # Only code 10 is 7: bits 30, 31 of word 0 and bit 0 of word 1.
    codes = torch.zeros(32, dtype=torch.uint8)
    codes[10] = 7
    assert [word & 0xFFFFFFFF for word in pack3(codes, "straight").view(torch.int32).tolist()] == [0xC0000000, 1, 0]


def test_three_bits_in_tens_golden() -> None:
    codes = torch.zeros(32, dtype=torch.uint8)
    codes[0], codes[9], codes[10], codes[20] = 1, 7, 2, 3
    words = [word & 0xFFFFFFFF for word in pack3(codes, "10_10_10_2").view(torch.int32).tolist()]
    assert words == [1 | 7 << 27, 2, 3]
    codes.zero_()
    codes[30], codes[31] = 0b110, 0b101  # spare number 101110: pairs 10, 11, 10 in words 0, 1, 2
    words = [word & 0xFFFFFFFF for word in pack3(codes, "10_10_10_2").view(torch.int32).tolist()]
    assert words == [0b10 << 30, 0b11 << 30, 0b10 << 30]


@pytest.mark.parametrize("order", ["straight", "10_10_10_2"])
def test_three_bits_inverse(order: str) -> None:
    codes = torch.randint(0, 8, (5, 7, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    packed = pack3(codes, order)
    assert packed.shape == (5, 7, 36)
    assert torch.equal(unpack3(packed, tuple(map(float, range(8))), order), codes.float())


def test_two_bits_golden() -> None:
    packed = pack2(torch.tensor([0, 1, 2, 3, 3, 0, 0, 1], dtype=torch.uint8))
    assert packed.tolist() == [0b11_10_01_00, 0b01_00_00_11]
    assert unpack2(packed, (-8.0, -3.0, 3.0, 8.0)).tolist() == [-8, -3, 3, 8, 8, -8, -8, -3]


@pytest.mark.parametrize("numbering", ["ascending", "sign_magnitude"])
def test_w3_decodes_hand_packed_parts(numbering: str) -> None:
    order = ASCENDING if numbering == "ascending" else (1.0, 3.0, 5.0, 8.0, -1.0, -3.0, -5.0, -8.0)
    codes = torch.tensor([0x88, 0xC6, 0xFA] * 8, dtype=torch.uint8).view(1, 24)
    scale = torch.tensor([[0x40]], dtype=torch.uint8).view(torch.float8_e4m3fn)  # E4M3 0x40 = 2.0
    for meaning, divisor in (("direct", 1), ("div8", 8), ("div64", 64)):
        codec = create("w3_levels", {"scale_meaning": meaning, "code_numbering": numbering})
        decoded = codec.decode({"codes": codes, "scale": scale, "factor": torch.tensor([0.25])}, 64)
        assert decoded.tolist() == [[level * 2.0 * 0.25 / divisor for level in order] * 8]


def test_w3_encodes_representable_weights_exactly() -> None:
    codes = torch.randint(0, 8, (3, 4, 256), generator=torch.Generator().manual_seed(2))
    scale = torch.tensor([0.0078125, 0.0625, 0.01171875, 0.0625]).view(1, 1, 4, 1)
    weight = (torch.tensor(ASCENDING)[codes].unflatten(-1, (4, 64)) * scale).flatten(-2)
    for options in ({}, {"code_order": "10_10_10_2"}, {"scale_meaning": "div64", "matrix_factor": False}):
        codec = create("w3_levels", options)
        decoded = codec.decode(codec.encode(weight), 256)
        assert torch.equal(decoded, weight)
        assert torch.equal(decoded, decoded.to(torch.bfloat16).float())  # level * e4m3 * 2^k fits bf16


def test_w3_raw_scales_must_fit() -> None:
    for std in (1e-5, 1e5):
        with pytest.raises(LabError, match="w3_levels.*matrix_factor=true"):
            create("w3_levels", {"matrix_factor": False}).encode(gaussian(2, 64, std=std))


def test_fp16_scale_overflow_is_refused() -> None:
    with pytest.raises(LabError, match="q2_g32.*overflows float16"):
        create("q2_g32").encode(gaussian(2, 64, std=1e6))


def test_two_magnitude_search_is_exact() -> None:
    levels = (-1.510, -0.4528, 0.4528, 1.510)
    groups = student(40, 32)
    fit = SortedGroups(groups, levels)
    best = fit.error(fit.best_scale()[:, None])[:, 0]
    tried = fit.error(groups.abs().amax(-1)[:, None] * torch.linspace(0.02, 2.5, 4000))
    assert bool((best <= tried.amin(-1) * (1 + 1e-3) + 1e-6).all())
    # The prefix-sum error is the error of the codes themselves.
    scale = fit.best_scale()
    direct = torch.tensor(levels)[nearest_codes(groups, scale, levels).long()] * scale[:, None] - groups
    torch.testing.assert_close(direct.square().sum(-1) / groups.abs().amax(-1).square(), best.float(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("cols", [16, 64, 128, 200, 2560])
def test_int8_error_is_at_most_half_a_step(cols: int) -> None:
    codec, weight = create("int8_g128"), student(9, cols, std=3.0)
    parts = codec.encode(weight)
    step = parts["scale"].float().repeat_interleave(128, dim=-1)[:, :cols]
    assert parts["scale"].shape == (9, -(-cols // 128))
    assert bool(((codec.decode(parts, cols) - weight).abs() <= step * (0.5 + 1e-4)).all())


def test_bf16_scales_round_up() -> None:
    scale = torch.cat((torch.rand(1000, generator=torch.Generator().manual_seed(3)) * 1e-3, torch.tensor([0.0, 1.0, 1e-30, 3e38])))
    up = round_up_bf16(scale).float()
    assert bool((up >= scale).all()) and bool((up <= scale * (1 + 2**-7)).all())


def test_e4m3_reads_every_finite_value() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    every = every[(every & 0x7F) != 0x7F].view(torch.float8_e4m3fn)
    assert torch.equal(e4m3_to_float(every), every.to(torch.float32))
    assert e4m3_to_float(every).abs().max() == 448


def test_e4m3_error_bound() -> None:
    for options in ({}, {"scale": "block128"}):
        codec, weight = create("e4m3", options), student(200, 300)
        parts = codec.encode(weight)
        scale = parts[codec.scale_key].float()  # type: ignore[attr-defined]
        error = (codec.decode(parts, 300) - weight).abs()
        # 3 mantissa bits: half a last place is 2^-4 of the value; below 2^-6 steps are 2^-9 of the scale.
        assert bool((error <= weight.abs() / 16 + float(scale.max()) * 2**-10).all())


def test_release_block_scales_are_adopted_bit_for_bit() -> None:
    weight = torch.randint(0, 0x7F, (2, 640, 256), dtype=torch.uint8, generator=torch.Generator().manual_seed(4)).view(torch.float8_e4m3fn)
    scale = (torch.rand(2, 5, 2, generator=torch.Generator().manual_seed(5)) * 1e-3).to(torch.bfloat16)
    codec, parts = from_release(weight, scale)
    assert codec.options["scale"] == "block128"
    assert parts["weight"] is weight and parts["weight_scale_inv"] is scale
    decoded = codec.decode(parts, 256)
    assert decoded[1, 639, 200] == weight[1, 639, 200].float() * scale[1, 4, 1].float()
    assert decoded[0, 127, 128] == weight[0, 127, 128].float() * scale[0, 0, 1].float()


def test_release_table_is_adopted_bit_for_bit() -> None:
    table = gaussian(50, 160).to(torch.float8_e4m3fn)
    scale = torch.tensor([0.0123], dtype=torch.bfloat16)
    codec, parts = from_release(table, scale)
    assert codec.options["scale"] == "global" and parts["weight"] is table and parts["weight_scale"] is scale
    ids = torch.tensor([7, 49])
    assert torch.equal(codec.decode(codec.take_rows(parts, ids), 160), table.float()[ids] * scale.float())


def test_release_refusals() -> None:
    weight, scale = gaussian(256, 128).to(torch.float8_e4m3fn), torch.ones(2, 1, dtype=torch.bfloat16)
    with pytest.raises(LabError, match="float32"):
        from_release(weight, scale.float())
    with pytest.raises(LabError, match="fits neither"):
        from_release(weight, torch.ones(3, 1, dtype=torch.bfloat16))
    broken = weight.view(torch.uint8).clone()
    broken[3, 3] = 0xFF
    with pytest.raises(LabError, match="NaN"):
        from_release(broken.view(torch.float8_e4m3fn), scale)
