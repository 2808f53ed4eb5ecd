"""Native kernels on the lab's own codecs: bit-equal decoding under every option, products, experts, and parts that do not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lab.codecs import Codec, Parts, create
from lab.errors import LabError
from lab.kernels import native

if native.unavailable():
    pytest.skip(str(native.unavailable()), allow_module_level=True)

LEVELS = (-5.0, -1.0, 3.0, 8.0)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("bf16", {}),
    ("int8_g128", {}),
    *[("w3_levels", {"code_order": o, "code_numbering": n}) for o in ("straight", "10_10_10_2") for n in ("ascending", "sign_magnitude")],
    *[("w3_levels", {"scale_meaning": m, "matrix_factor": f}) for m in ("div8", "div64") for f in (True, False)],
    *[("q2_g32", {"scale_dtype": dtype}) for dtype in ("float16", "bfloat16", "e4m3")],
    ("q2_g32", {"levels": LEVELS}),
    *[("q2_levels", {"scale_dtype": dtype}) for dtype in ("float32", "bfloat16", "float16")],
    ("q2_levels", {"levels": LEVELS, "scale": "search"}),
    ("q2_rows", {}),
]
IDS = ["-".join([name, *map(str, options.values())]) for name, options in CASES]


def scrambled(codec: Codec, lead: tuple[int, ...], rows: int, cols: int, seed: int) -> Parts:
    """Parts whose codes are random bits, so that every code is used, with scales of an encoded random weight of mixed sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10.0 ** torch.randint(-2, 1, (*lead, rows, 1), generator=generator)
    parts = codec.encode(torch.randn(*lead, rows, cols, generator=generator) * sizes)
    for name in ("codes", "weight"):
        if name in parts and parts[name].dtype in (torch.uint8, torch.int8):
            parts[name] = torch.randint(256, parts[name].shape, generator=generator).to(torch.uint8).view(parts[name].dtype)
    return parts


def relative_error(found: Tensor, weight: Tensor, x: Tensor) -> float:
    exact = x.double() @ weight.double().T
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_decoding_is_bit_equal(name: str, options: dict[str, Any]) -> None:
    codec = create(name, options)
    assert native.supports(codec, 640)
    for lead, rows, cols in (((), 1, 64), ((), 37, 640), ((3,), 5, 1088), ((2, 2), 3, 128)):
        parts = scrambled(codec, lead, rows, cols, seed=cols)
        expected = codec.decode(parts, cols)
        found = native.decode(codec, parts, cols, out=torch.full_like(expected, float("nan")))
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
        assert torch.equal(native.decode(codec, parts, cols, dtype=torch.bfloat16), expected.to(torch.bfloat16))


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_products_are_those_of_the_decoded_weights(name: str, options: dict[str, Any], n: int) -> None:
    codec = create(name, options)
    for rows, cols in ((1, 64), (35, 640), (4, 2112)):
        parts = scrambled(codec, (), rows, cols, seed=n)
        x = torch.randn(n, cols)
        assert relative_error(native.product(codec, parts, x), codec.decode(parts, cols), x) < 1e-5


@pytest.mark.parametrize(("name", "options"), CASES, ids=IDS)
def test_slots_are_multiplied_by_their_own_experts(name: str, options: dict[str, Any]) -> None:
    codec, slots, x = create(name, options), torch.tensor([2, 0, 2, 3]), torch.randn(4, 192)
    parts = scrambled(codec, (4,), 6, 192, seed=4)
    parts = {key: part.contiguous() for key, part in parts.items()}
    found = native.expert_products(codec, parts, slots, x)
    single = [native.product(codec, codec.select(parts, int(slot)), row[None]) for slot, row in zip(slots, x, strict=True)]
    assert torch.equal(found, torch.cat(single))


def test_selected_rows_keep_what_the_matrix_shares() -> None:
    for name, options in (("w3_levels", {}), ("q2_g32", {"scale_dtype": "e4m3"})):
        codec = create(name, options)
        parts = codec.take_rows(scrambled(codec, (), 50, 128, seed=1), torch.tensor([49, 0, 7, 7]))
        assert torch.equal(native.decode(codec, parts, 128), codec.decode(parts, 128))


def test_bf16_rows_may_end_anywhere() -> None:
    weight = torch.randn(3, 21).to(torch.bfloat16)
    assert torch.equal(native.decode("bf16", {"weight": weight}, 21), weight.float())


def test_columns_that_the_kernels_cannot_take_are_refused() -> None:
    for name, cols in (("int8_g128", 100), ("q2_levels", 100), ("q2_rows", 8)):
        codec = create(name)
        parts = codec.encode(torch.randn(2, cols))
        assert not native.supports(name, cols)
        with pytest.raises(LabError, match=f"columns in multiples of 16, not {cols}; use lab.ops$"):
            native.decode(codec, parts, cols)


def test_parts_that_do_not_fit_are_refused() -> None:
    codec = create("w3_levels")
    parts = codec.encode(torch.randn(4, 128))
    wrong = {
        "scale": parts["scale"][:, :1],
        "factor": torch.ones(2),
        "codes": parts["codes"][:3],
    }
    for name, part in wrong.items():
        with pytest.raises(LabError, match="codec w3_levels: part (codes|scale|factor) must be"):
            native.prepare(codec, {**parts, name: part}, 128)
    with pytest.raises(LabError, match="part scale must be .* it is missing"):
        native.prepare(codec, {"codes": parts["codes"], "factor": parts["factor"]}, 128)
    with pytest.raises(LabError, match="part scale must be torch.bfloat16"):
        native.prepare("int8_g128", {"weight": torch.ones(2, 128, dtype=torch.int8), "scale": torch.ones(2, 1)}, 128)
