"""Packed GGUF rows for tests: every byte takes every value, and the float16 fields hold every kind of finite scale."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from lab.codecs.gguf_types import TYPES

Bytes = npt.NDArray[np.uint8]

_HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
_NO_HALVES = ("MXFP4", "NVFP4", "IQ1_M")
_EDGES = (0.0, -0.0, 2**-24, -(2**-24), 65504.0, -65504.0, 1.0, -1.0)


def packed_rows(name: str, blocks_per_row: int = 2, seed: int = 0) -> Bytes:
    """uint8 [rows, row bytes] of 2048 blocks. Each byte column holds each of the 256 values eight times, in an order of its own; scales are finite."""
    kind, rng = TYPES[name], np.random.default_rng(seed)
    values = np.arange(2048) % 256
    blocks = np.stack([rng.permutation(values) for _ in range(kind.nbytes)], axis=1).astype(np.uint8)
    for at in _HALVES.get(name, () if name in _NO_HALVES else (0,)):
        scales = (rng.normal(size=2048) * 10.0 ** rng.integers(-4, 3, 2048)).astype(np.float16)
        scales[: len(_EDGES)] = _EDGES
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
    if name == "IQ1_M":
        blocks[:, 55] &= 0xBF  # the exponent's top bit lies here: without it the spread float16 is finite
    return blocks.reshape(-1, blocks_per_row * kind.nbytes)


def as_bits(values: torch.Tensor | npt.NDArray[np.float32]) -> Bytes:
    """float32 as bytes, so that -0 and +0 differ."""
    return np.ascontiguousarray(np.asarray(values, dtype=np.float32)).view(np.uint8)
