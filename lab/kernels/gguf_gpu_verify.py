"""How the GGUF GPU kernels are compared with the codecs: random bytes with plain scales, poisoned outputs, one relative error per case.

Why in the package: tests (interpreter, small sizes) and the benchmark (GPU, true sizes) must ask the same questions. The truth is the codec's own decode,
multiplied in float64. What it does not prove: anything about scales far from ordinary ones; bit-equality of transcoding is tested apart, on all bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from lab.codecs.gguf import _FLOATS, GGUF_CODECS, PART
from lab.kernels.gguf_gpu import transcode
from lab.kernels.gguf_gpu_product import dequantise, expert_slots, product, reference_product, reference_slots
from lab.kernels.gguf_gpu_types import SPECS
from lab.kernels.verify import Error, relative_error


def random_blocks(name: str, shape: tuple[int, ...], device: str) -> Tensor:
    """Blocks uint8 [.., rows, row bytes] of a type for weights [.., rows, cols]: codes and small scales at random, large scales of either sign near 1/50."""
    codec = GGUF_CODECS[f"gguf:{name}"]()
    row_bytes = codec.row_bytes(shape[-1])
    if name in _FLOATS:
        return (torch.randn(shape, device=device) / 50).to(_FLOATS[name]).view(torch.uint8).view(*shape[:-1], row_bytes)
    blocks = torch.randint(0, 256, (prod(shape[:-1]) * row_bytes // codec.kind.nbytes, codec.kind.nbytes), dtype=torch.uint8, device=device)
    scale = ((torch.rand(len(blocks), 2, device=device) + 0.5) / 50 * torch.randn(len(blocks), 2, device=device).sign()).to(torch.float16).view(torch.uint8)
    if name == "MXFP4":
        blocks[:, 0] = 118 + blocks[:, 0] % 5
    elif name == "IQ1_M":
        blocks[:, 49:56:2] = (blocks[:, 49:56:2] & 15) | torch.stack((scale[:, 0] << 4, scale[:, 0] & 240, scale[:, 1] << 4, scale[:, 1] & 240), dim=1)
    elif name != "NVFP4":
        spec = SPECS[name]
        for number, at in enumerate(spec.supers or ((0, 2) if spec.offset else (0,))):
            blocks[:, at : at + 2] = scale[:, 2 * number : 2 * number + 2]
    return blocks.view(*shape[:-1], row_bytes)


def _poison(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def check_product(name: str, rows: int, cols: int, tokens: int, kind: torch.dtype, device: str) -> Iterator[Error]:
    """`product` of `tokens` activations of dtype `kind` into float32."""
    codec = GGUF_CODECS[f"gguf:{name}"]()
    parts = {PART: random_blocks(name, (rows, cols), device)}
    blocks, weight = transcode(codec, parts, cols), codec.decode(parts, cols)
    x = torch.randn(tokens, cols, device=device).to(kind)
    want = reference_product(weight, x)
    case = f"{name} {rows}x{cols} n={tokens} {kind}"
    yield f"{case} product", relative_error(product(blocks, x, _poison((tokens, rows), torch.float32, device)), want)


def check_slots(name: str, experts: int, rows: int, cols: int, ids: Tensor, kind: torch.dtype, device: str) -> Iterator[Error]:
    """`expert_slots` into float32; the error is infinite where a slot of id -1 is not exactly zero."""
    codec = GGUF_CODECS[f"gguf:{name}"]()
    parts = {PART: random_blocks(name, (experts, rows, cols), device)}
    blocks, weight = transcode(codec, parts, cols), codec.decode(parts, cols)
    x = torch.randn(len(ids), cols, device=device).to(kind)
    got = expert_slots(blocks, ids, x, _poison((len(ids), rows), torch.float32, device))
    empty = bool((got[ids < 0] == 0).all())
    yield f"{name} {experts}x{rows}x{cols} slots={len(ids)} {kind}", relative_error(got, reference_slots(weight, ids, x)) if empty else float("inf")


def check_dequantise(name: str, shape: tuple[int, ...], kind: torch.dtype, device: str) -> Iterator[Error]:
    """`dequantise` against the codec's values rounded to `kind`. A fused multiply-add may round the last float32 bit otherwise."""
    codec = GGUF_CODECS[f"gguf:{name}"]()
    parts = {PART: random_blocks(name, shape, device)}
    blocks, weight = transcode(codec, parts, shape[-1]), codec.decode(parts, shape[-1])
    yield f"{name} {list(shape)} dequantise {kind}", relative_error(dequantise(blocks, kind, _poison(shape, kind, device)), weight.to(kind))
