"""How a kernel is compared with its plain-torch reference: random canonical weights, poisoned outputs, one relative error per case.

Why in the package: the CPU tests (interpreter, small sizes) and the benchmark (GPU, true sizes) must ask the same questions. The truth is always the
codec's own decode in float32. What it does not prove: anything for inputs far from the drawn ones (normal activations, scales near trained ones).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lab.codecs import Codec, Parts, create
from lab.codecs.gguf import PART
from lab.kernels.experts import LowBitExperts, reference_experts
from lab.kernels.experts_bf16 import Bf16Experts
from lab.kernels.planes import NIBBLES, repack
from lab.kernels.router import reference_route, route
from lab.kernels.table import Table, reference_table
from lab.kernels.trunk import Int8Linear, reference_linear

Error = tuple[str, float]
"""(case, |kernel - reference| / |reference|); NaN where anything was not written or is not a number."""


@contextmanager
def poisoned() -> Iterator[None]:
    """Within, new floating tensors start as NaN and integer ones as -77, so that an element a kernel does not write shows."""
    real = torch.empty

    def empty(*size: Any, **options: Any) -> Tensor:
        out = real(*size, **options)
        return out.fill_(float("nan") if out.is_floating_point() else -77)

    with mock.patch.object(torch, "empty", empty):
        yield


def relative_error(got: Tensor, want: Tensor) -> float:
    """|got - want| / |want| in float64."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def random_ids(tokens: int, experts: int, k: int, device: str) -> Tensor:
    """k different experts per token, int32 [tokens, k]."""
    return torch.rand(tokens, experts, device=device).topk(k, dim=-1).indices.to(torch.int32)


def random_parts(codec: Codec, shape: tuple[int, ...], device: str) -> Parts:
    """Canonical parts of random codes, with scales that give weights near 0.02. What the codec decodes from them is the truth."""
    *lead, rows, cols = shape

    def scales(width: int) -> Tensor:
        return torch.rand(*lead, rows, width, device=device) + 0.5

    def factor(exponent: int) -> Tensor:
        return torch.full((*lead, 1), 2.0**exponent, device=device)

    if codec.name == "int8_g128":
        codes = torch.randint(-127, 128, shape, dtype=torch.int8, device=device)
        return {"weight": codes, "scale": (scales(-(-cols // 128)) / 3000).to(torch.bfloat16)}
    if codec.name == NIBBLES:
        blocks = torch.randint(0, 256, (*lead, rows, cols // 32, 18), dtype=torch.uint8, device=device)
        signed = scales(cols // 32) / 200 * torch.randn(*lead, rows, cols // 32, device=device).sign()
        blocks[..., :2] = signed.to(torch.float16).unsqueeze(-1).view(torch.uint8)
        return {PART: blocks.flatten(-2)}
    bits = 3 if codec.name == "w3_levels" else 2
    codes = torch.randint(0, 256, (*lead, rows, cols * bits // 8), dtype=torch.uint8, device=device)
    if codec.name == "w3_levels":
        return {"codes": codes, "scale": scales(cols // 64).to(torch.float8_e4m3fn), "factor": factor(-8)}
    if codec.name == "q2_levels":
        return {"codes": codes, "scale": scales(1) / 200}
    if codec.options["scale_dtype"] == "e4m3":
        return {"codes": codes, "scale": scales(cols // 32).to(torch.float8_e4m3fn), "factor": factor(-6)}
    return {"codes": codes, "scale": (scales(cols // 32) / 50).to(torch.float16 if codec.options["scale_dtype"] == "float16" else torch.bfloat16)}


def check_linear(rows: int, cols: int, tokens: int, dtype: torch.dtype, device: str) -> Iterator[Error]:
    """int8_g128 [rows, cols] by every way that takes so many tokens."""
    codec = create("int8_g128")
    parts = random_parts(codec, (rows, cols), device)
    kernel, x = Int8Linear(repack(codec, parts, cols)), torch.randn(tokens, cols, device=device).to(dtype)
    want = reference_linear(x, codec.decode(parts, cols))
    with poisoned():
        for way in [kernel.__call__, *([kernel.inner] if tokens <= 8 else []), kernel.tiled, kernel.decoded]:
            yield f"int8 {way.__name__} {rows}x{cols} M={tokens}", relative_error(way(x), want)


def check_experts(codec: Codec, experts: int, hidden: int, width: int, tokens: int, k: int, dtype: torch.dtype, device: str) -> Iterator[Error]:
    """Routed experts of one codec (a low-bit one, or bf16); the first token has one slot without an expert."""
    shapes = (experts, 2 * width, hidden), (experts, hidden, width)
    ids, weights = random_ids(tokens, experts, k, device), torch.rand(tokens, k, device=device)
    ids[0, k // 2] = -1
    x = torch.randn(tokens, hidden, device=device).to(dtype)
    kernel: Bf16Experts | LowBitExperts
    if codec.name == "bf16":
        gate_up, down = ((torch.randn(shape, device=device) / 50).to(torch.bfloat16) for shape in shapes)
        kernel, decoded = Bf16Experts(gate_up, down), (gate_up.float(), down.float())
    else:
        first, second = (random_parts(codec, shape, device) for shape in shapes)
        kernel = LowBitExperts(repack(codec, first, hidden, halves=2), repack(codec, second, width))
        decoded = codec.decode(first, hidden), codec.decode(second, width)
    want = reference_experts(x, ids, weights, *decoded)
    with poisoned():
        yield f"experts {codec.name} {codec.options} {hidden}/{width} M={tokens}", relative_error(kernel(x, ids, weights), want)


def check_router(experts: int, k: int, tokens: int, device: str) -> Iterator[Error]:
    """Ids must be equal; the error is the weights'."""
    logits = torch.randn(tokens, experts, device=device)
    for normalise in (True, False):
        want = reference_route(logits, k, normalise)
        with poisoned():
            got = route(logits, k, normalise)
        yield f"router {experts} top-{k} normalise={normalise}", relative_error(got[1], want[1]) if torch.equal(got[0], want[0]) else float("nan")


def check_table(codec: Codec, rows: int, cols: int, device: str) -> Iterator[Error]:
    """Rows by number, the first and the last among them."""
    parts = codec.encode(torch.randn(rows, cols, device=device))
    ids = torch.cat([torch.randint(0, rows, (14,), device=device), torch.tensor([0, rows - 1], device=device)]).view(2, 8)
    with poisoned():
        got = Table(codec, parts, cols)(ids)
    yield f"table {codec.name} {cols}", relative_error(got, reference_table(codec, parts, cols, ids))
