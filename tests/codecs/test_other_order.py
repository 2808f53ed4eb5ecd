"""A weight has the same bytes whichever device encoded it: encoded again where sums are added in another order and a division by a number is a product.

Why an imitation: that is what a GPU does otherwise than a CPU, and it can be had anywhere; on a GPU itself test_cuda.py asks the same.
What it does not prove: the GGUF types with a search over blocks (K, IQ), which sum floats in the order of their device.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lab.codecs import create
from tests.codecs.support import IDS, VARIANTS, gaussian, student

VQF = [(f"vqf:{name}", {}) for name in ("Q8_0", "G256", "Q4_0", "Q4I")]
SEARCHED = [("gguf:IQ4_NL", {}), ("gguf:Q2_0", {})]
ALL = [*zip(VARIANTS, IDS, strict=True), *((case, case[0]) for case in (*VQF, *SEARCHED))]


class OtherDevice(TorchDispatchMode):
    """Sums from the end and, running, in doubling steps; division by a plain number as a product with its reciprocal. `seen`: what was done otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if name == "cumsum":
            self.seen.add(name)
            return _doubling(args[0], args[1])
        if name == "sum" and len(args) > 1 and args[1]:
            self.seen.add(name)
            return func(torch.flip(args[0], args[1]), *args[1:], **kwargs)
        if name in ("div", "div_") and len(args) == 2 and isinstance(args[1], int | float):
            self.seen.add(name)
            return getattr(torch.ops.aten, name.replace("div", "mul"))(args[0], 1.0 / args[1])
        return func(*args, **kwargs)


def _doubling(values: Tensor, dim: int) -> Tensor:
    """Running sums as a GPU makes them: 2, 4, 8 ... neighbours at a time."""
    total, step = values.clone(), 1
    while step < values.shape[dim]:
        shifted = total.narrow(dim, 0, values.shape[dim] - step)
        total = torch.cat((total.narrow(dim, 0, step), total.narrow(dim, step, values.shape[dim] - step) + shifted), dim)
        step *= 2
    return total


def test_the_imitation_differs_where_floats_are_summed() -> None:
    weight = student(64, 512)
    with OtherDevice() as other:
        found = weight.cumsum(-1), weight.sum(-1), weight.abs().amax(-1) / 127
    assert other.seen == {"cumsum", "sum", "div"}
    assert not any(torch.equal(a, b) for a, b in zip(found, (weight.cumsum(-1), weight.sum(-1), weight.abs().amax(-1) / 127), strict=True))
    torch.testing.assert_close(found[0], weight.cumsum(-1))


@pytest.mark.parametrize(("name", "options"), [case for case, _ in ALL], ids=[told for _, told in ALL])
@pytest.mark.parametrize("exponent", [-4, 0, 2])
def test_the_bytes_do_not_depend_on_the_order_of_sums(name: str, options: dict[str, Any], exponent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lab.kernels.native.vqf.encode", lambda plain, rows: None)  # torch's own encoder is what a GPU runs
    codec = create(name, options)
    for weight in (student(256, 768, seed=exponent + 9, std=10.0**exponent), gaussian(2, 128, 512, std=10.0**exponent).bfloat16()):
        here = codec.encode(weight)
        with OtherDevice():
            there = codec.encode(weight)
        for key, part in here.items():
            different = int((part.view(torch.uint8) != there[key].view(torch.uint8)).sum())
            assert different == 0, f"{key}: {different} of {part.nbytes} bytes"
