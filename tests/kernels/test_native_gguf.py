"""Native kernels on every GGUF type: decoding is bit-equal to the codec (which is tested against ggml's own), products equal float64 ones."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from lab.codecs import create
from lab.codecs.gguf import GGUF_CODECS, PART, parts_of
from lab.codecs.gguf_types import TYPES
from lab.errors import LabError
from lab.kernels import native
from tests.codecs.gguf_blocks import as_bits, packed_rows

pytest.importorskip("gguf")
if native.unavailable():
    pytest.skip(str(native.unavailable()), allow_module_level=True)

FLOATS = ("F32", "F16", "BF16")
NAMES = [codec.kind.name for codec in GGUF_CODECS.values()]
BLOCKED = [name for name in NAMES if name not in FLOATS]
TOLERANCE = 1e-5  # of a vector's norm; the sums are float32


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """One thread unless a test says otherwise: two that wait for each other are slow where other work has the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def every_code(name: str) -> tuple[Tensor, int]:
    """Packed rows whose bytes take every value, and their columns; the floats take every 16-bit pattern, NaN and infinities too."""
    if name in FLOATS:
        bits = torch.arange(1 << 16, dtype=torch.int32)
        packed = (bits << 16).view(torch.uint8) if name == "F32" else bits.to(torch.int16).view(torch.uint8)
        return packed.view(128, -1), 512
    return torch.from_numpy(packed_rows(name)), 2 * TYPES[name].block


def sane(name: str, rows: int, cols: int, seed: int) -> Tensor:
    """Random blocks whose scales are moderate, so that float32 sums neither overflow nor cancel to nothing."""
    generator = torch.Generator().manual_seed(seed)
    if name in FLOATS:
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
        return torch.randn(rows, cols, generator=generator).to(dtype).view(torch.uint8)
    kind = TYPES[name]
    pool = torch.from_numpy(packed_rows(name, blocks_per_row=1, seed=seed))
    if name == "MXFP4":
        pool[:, 0] = pool[:, 0] % 16 + 119
    size = create(f"gguf:{name}").decode({PART: pool}, kind.block).abs().amax(1)
    pool = pool[(size > 1e-3) & (size < 1e4)]
    chosen = torch.randint(len(pool), (rows * cols // kind.block,), generator=generator)
    return pool[chosen].view(rows, -1)


def relative_error(found: Tensor, packed: Tensor, name: str, x: Tensor) -> float:
    exact = x.double() @ create(f"gguf:{name}").decode({PART: packed}, x.shape[1]).double().T
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("name", NAMES)
def test_decoding_is_bit_equal_on_every_code(name: str) -> None:
    packed, cols = every_code(name)
    expected = create(f"gguf:{name}").decode({PART: packed}, cols)
    out = torch.full_like(expected, 12345.0)
    assert native.decode(f"gguf:{name}", packed, cols, out=out) is out
    numbers = ~expected.isnan()
    assert torch.equal(out.isnan(), expected.isnan())
    assert np.array_equal(as_bits(out[numbers]), as_bits(expected[numbers]))
    brain = native.decode(f"gguf:{name}", packed, cols, dtype=torch.bfloat16)
    assert np.array_equal(brain.view(torch.int16)[numbers].numpy(), expected.to(torch.bfloat16).view(torch.int16)[numbers].numpy())
    assert torch.equal(brain.isnan(), expected.isnan())


@pytest.mark.parametrize("n", [1, 3, 8, 16])
@pytest.mark.parametrize("name", NAMES)
def test_products_are_those_of_the_decoded_weights(name: str, n: int) -> None:
    """1, 3 and 257 rows: below, at and beside the tiles; 640 columns where blocks allow, 1280 or more than one piece where they do not."""
    cols = 640 if 640 % TYPES[name].block == 0 else 1280
    for rows in (1, 3, 257):
        packed = sane(name, rows, cols, seed=n)
        x = torch.randn(n, cols, generator=torch.Generator().manual_seed(rows))
        found = native.product(f"gguf:{name}", packed, x)
        assert found.shape == (n, rows)
        assert relative_error(found, packed, name, x) < TOLERANCE


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("cols", [1, 7, 16, 17, 1023, 1025])
def test_rows_of_floats_may_end_anywhere(name: str, cols: int) -> None:
    packed = sane(name, 5, cols, seed=cols)
    expected = create(f"gguf:{name}").decode({PART: packed}, cols)
    fenced = torch.full((5 * cols + 32,), 7.0)
    native.decode(f"gguf:{name}", packed, cols, out=fenced[16 : 16 + 5 * cols].view(5, cols))
    assert torch.equal(fenced[16:-16].view(5, cols), expected)
    assert (fenced[:16] == 7).all() and (fenced[-16:] == 7).all()
    x = torch.randn(2, cols)
    assert relative_error(native.product(f"gguf:{name}", packed, x), packed, name, x) < TOLERANCE


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "F16"])
def test_a_vector_gives_the_same_bits_alone_in_company_and_on_any_number_of_threads(name: str) -> None:
    cols = 2560
    packed = sane(name, 131, cols, seed=3)
    weight, x = native.prepare(f"gguf:{name}", packed, cols), torch.randn(131, cols)  # two passes of 64 vectors and a rest
    alone, together, decoded = torch.cat([weight(row[None]) for row in x]), weight(x), weight.decode()
    assert torch.equal(alone, together)
    torch.set_num_threads(2)
    assert torch.equal(weight(x), together) and torch.equal(weight(x[:1]), together[:1]) and torch.equal(weight.decode(), decoded)


def test_bytes_at_odd_addresses_and_strides_are_read_in_place() -> None:
    packed = sane("Q4_1", 9, 640, seed=1)
    x = torch.randn(2, 640)
    expected = native.product("gguf:Q4_1", packed, x)
    wide = torch.full((9, packed.shape[1] + 13), 255, dtype=torch.uint8)
    wide[:, 5:-8] = packed
    assert torch.equal(native.product("gguf:Q4_1", wide[:, 5:-8], x), expected)
    assert torch.equal(native.product("gguf:Q4_1", wide[::2, 5:-8], x), expected[:, ::2])
    assert torch.equal(native.product("gguf:Q4_1", packed.T.contiguous().T, x), expected)  # bytes of a row far apart: copied
    assert torch.equal(native.product("gguf:Q4_1", packed, x.T.contiguous().T), expected)
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"\xff" * 3 + packed.numpy().tobytes())
        file.flush()
        mapped = np.memmap(file.name, dtype=np.uint8, mode="r", offset=3, shape=tuple(packed.shape))
        parts = parts_of(mapped)
        assert torch.equal(native.product("gguf:Q4_1", parts, x), expected)
        assert torch.equal(native.decode("gguf:Q4_1", parts, 640), create("gguf:Q4_1").decode({PART: packed}, 640))
        del parts, mapped


@pytest.mark.parametrize("rows", [1, 6, 64])
@pytest.mark.parametrize("name", BLOCKED)
def test_slots_are_multiplied_by_their_own_experts(name: str, rows: int) -> None:
    cols = 2 * TYPES[name].block
    packed = sane(name, 5 * rows, cols, seed=rows).view(5, rows, -1)
    slots, x = torch.tensor([4, 0, 3, 3, 1]), torch.randn(5, cols)
    stack = native.prepare(f"gguf:{name}", packed, cols)
    found = stack.expert_products(slots, x)
    single = torch.cat([native.product(f"gguf:{name}", packed[slot], row[None]) for slot, row in zip(slots, x, strict=True)])
    assert torch.equal(found, single)
    torch.set_num_threads(2)
    assert torch.equal(stack.expert_products(slots, x), found)
    torch.set_num_threads(1)
    assert torch.equal(native.expert_products(f"gguf:{name}", packed[1:4], slots[2:4] - 1, x[2:4]), found[2:4])  # a stack inside a stack


def test_stacks_of_any_depth_are_decoded() -> None:
    packed = sane("Q5_0", 2 * 3 * 4, 64, seed=2).view(2, 3, 4, -1)
    expected = create("gguf:Q5_0").decode({PART: packed}, 64)
    assert torch.equal(native.decode("gguf:Q5_0", packed, 64), expected)
    assert torch.equal(native.decode("gguf:Q5_0", packed[:, 1:], 64), expected[:, 1:])
    assert native.decode("gguf:Q5_0", packed[:0], 64).shape == (0, 3, 4, 64)


def test_nothing_to_multiply_gives_nothing() -> None:
    packed = sane("Q8_0", 4, 64, seed=0)
    assert native.product("gguf:Q8_0", packed, torch.empty(0, 64)).shape == (0, 4)
    assert native.product("gguf:Q8_0", packed[:0], torch.ones(3, 64)).shape == (3, 0)
    stack = packed.view(2, 2, -1)
    assert native.expert_products("gguf:Q8_0", stack, torch.empty(0, dtype=torch.int64), torch.empty(0, 64)).shape == (0, 2)


@pytest.mark.parametrize("bad", [[0, 2], [-1, 0], [1, 2**40]])
def test_an_expert_that_is_not_there_is_refused(bad: list[int]) -> None:
    stack = sane("Q4_0", 6, 32, seed=0).view(2, 3, -1)
    with pytest.raises(LabError, match=r"^native product: slot \d asks for expert -?\d+; there are 0\.\.1$"):
        native.expert_products("gguf:Q4_0", stack, torch.tensor(bad), torch.ones(2, 32))


def test_inputs_that_do_not_fit_are_refused_in_one_line() -> None:
    packed = sane("Q4_0", 6, 64, seed=0)
    weight = native.prepare("gguf:Q4_0", packed, 64)
    stack = native.prepare("gguf:Q4_0", packed.view(2, 3, -1), 64)
    refused = [
        lambda: native.prepare("gguf:Q4_0", packed[:, :-1], 64),
        lambda: native.prepare("gguf:Q4_0", packed, 96),
        lambda: native.prepare("gguf:Q4_0", packed, 63),
        lambda: native.prepare("gguf:Q4_0", packed, 0),
        lambda: native.prepare("gguf:Q4_0", packed[0], 64),
        lambda: native.prepare("gguf:Q4_0", packed.to(torch.int8), 64),
        lambda: native.prepare("gguf:Q4_0", packed.to("meta"), 64),
        lambda: native.prepare("gguf:Q4_0", {"wrong": packed}, 64),
        lambda: native.prepare("e4m3", packed, 64),
        lambda: native.prepare("gguf:Q9_9", packed, 64),
        lambda: weight(torch.ones(1, 63)),
        lambda: weight(torch.ones(64)),
        lambda: weight(torch.ones(1, 64, dtype=torch.float64)),
        lambda: weight(torch.ones(1, 64, device="meta")),
        lambda: weight.expert_products(torch.zeros(1, dtype=torch.int64), torch.ones(1, 64)),
        lambda: stack(torch.ones(1, 64)),
        lambda: stack.expert_products(torch.zeros(2, dtype=torch.int64), torch.ones(1, 64)),
        lambda: stack.expert_products(torch.zeros(1, dtype=torch.int32), torch.ones(1, 64)),
        lambda: weight.decode(torch.float16),
        lambda: weight.decode(out=torch.empty(6, 63)),
        lambda: weight.decode(out=torch.empty(64, 6).T),
        lambda: weight.decode(torch.bfloat16, out=torch.empty(6, 64)),
    ]
    for call in refused:
        with pytest.raises(LabError) as told:
            call()
        assert "\n" not in str(told.value)


def test_what_is_supported_follows_the_blocks() -> None:
    assert all(native.supports(name) for name in GGUF_CODECS)
    assert native.supports("gguf:Q4_K", 512) and not native.supports("gguf:Q4_K", 640) and native.supports("gguf:F16", 7)
    assert not native.supports("gguf:Q4_0", 0) and not native.supports("e4m3")
