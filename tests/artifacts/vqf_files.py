"""VQF files written by hand: header, directory and trailer byte by byte from the format's notes, apart from the code that is tested.

Sizes are small and odd where the format allows it. Weights are encoded with the lab's codecs (tested on their own), their places are computed here.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor

from lab.artifacts.vqf_fnv import fnv1a
from lab.codecs.vqf import PART, vqf_codec

LAYERS, DIM, HEADS, KV, HEAD_DIM, FF, VOCAB = 3, 96, 4, 2, 32, 160, 88
EXPERTS, WIDTH = 5, 32
Q, K = HEADS * HEAD_DIM, KV * HEAD_DIM


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Imported where files this small are read and written: threads would wait for each other many times longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Spec:
    """A file: `arch` overrides the header's words by byte offset (u32), `tensors` are (name, qtype, rows, cols, bytes)."""

    tensors: Sequence[tuple[str, int, int, int, bytes]]
    flags: int = 0x23
    version: int = 2
    legacy: bool = False
    words: dict[int, int] = field(default_factory=dict)
    summed: bool = True

    def data_offset(self) -> int:
        """Where the data begin."""
        return -(-(448 + 64 * len(self.tensors)) // 4096) * 4096

    def content(self) -> bytes:
        """The whole file."""
        places, at = [], self.data_offset()
        for tensor in self.tensors:
            places.append(at)
            at = -(-(at + len(tensor[4])) // 64) * 64
        out = bytearray(at)
        out[0:16] = struct.pack("<4I", 0x57465146, self.version, self.flags, len(self.tensors))
        words = {16: DIM, 20: LAYERS, 24: HEADS, 28: KV, 32: HEAD_DIM, 36: FF, 40: VOCAB, 44: 8192, 60: 2, 64: 1, 72: HEAD_DIM, **self.words}
        for offset, value in words.items():
            out[offset : offset + 4] = struct.pack("<I", value)
        out[48:56] = struct.pack("<2f", 5e6, 1e-6)
        where = 184 if self.legacy else 200
        out[where : where + 16] = struct.pack("<2Q", self.data_offset(), at)
        for number, ((name, qtype, rows, cols, data), place) in enumerate(zip(self.tensors, places, strict=True)):
            entry = 448 + 64 * number
            out[entry : entry + len(name)] = name.encode()
            out[entry + 32 : entry + 44] = struct.pack("<3I", qtype, rows, cols)
            out[entry + 48 : entry + 64] = struct.pack("<2Q", place, len(data))
            out[place : place + len(data)] = data
        covered = bytes(out[448 : 448 + 64 * len(self.tensors)]) + bytes(out[self.data_offset() :])
        # `fnv` below is the definition and slow; the lab's own is compared with it in test_vqf_file.py
        return bytes(out) + struct.pack("<Q", fnv1a(np.frombuffer(covered, np.uint8)) if self.summed else 0)

    def write(self, path: Path) -> Path:
        """The file at `path`."""
        path.write_bytes(self.content())
        return path

    def without(self, *names: str) -> Spec:
        """The same file lacking some tensors."""
        return replace(self, tensors=[t for t in self.tensors if t[0] not in names])


def fnv(data: bytes) -> int:
    """FNV-1a 64, as it is defined."""
    state = 0xCBF29CE484222325
    for byte in data:
        state = (state ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return state


def shapes(mixture: bool = False, vocab: int = VOCAB) -> dict[str, tuple[int, int]]:
    """[out, in] of the matrices."""
    ff = EXPERTS * WIDTH if mixture else FF
    return {"q": (Q, DIM), "k": (K, DIM), "v": (K, DIM), "o": (DIM, Q), "gate": (ff, DIM), "up": (ff, DIM), "down": (DIM, ff), "lm": (vocab, DIM)}


def random_weights(seed: int = 0, mixture: bool = False, vocab: int = VOCAB) -> dict[str, Tensor]:
    """Weights by tensor name without a set: q [layers, out, in], ..., lm, token_embed, norms; moe_router for a mixture."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.05

    found = {kind: normal(*(() if kind == "lm" else (LAYERS,)), *shape) for kind, shape in shapes(mixture, vocab).items()}
    found |= {"token_embed": normal(vocab, DIM), "final_norm": normal(DIM) + 1}
    found |= {name: normal(LAYERS, size) + 1 for name, size in (("attn_norm", DIM), ("ffn_norm", DIM), ("q_norm", HEAD_DIM), ("k_norm", HEAD_DIM))}
    if mixture:
        found["moe_router"] = normal(LAYERS, EXPERTS, DIM)
    return found


def encoded(weight: Tensor, plain: str, tile: str = "") -> bytes:
    """A weight's bytes in a plain type and a tile; in rows where they are no whole tiles (the converter leaves a mixture)."""
    codec = vqf_codec(plain, tile)
    if codec.tile is not None and weight.shape[-2] % codec.tile.rows:
        codec = vqf_codec(plain)
    return codec.encode(weight)[PART].numpy().tobytes()


def spec(weights: dict[str, Tensor], sets: Sequence[tuple[str, str, str]], mixture: bool = False, **options: Any) -> Spec:
    """A file of these weights; `sets` are (q8 or q4, plain type, tile). The directory's rows and cols are nonsense: nothing may depend on them."""
    tensors: list[tuple[str, int, int, int, bytes]] = [("token_embed", 5, 7, 7, encoded(weights["token_embed"], "F16"))]
    for name in ("final_norm", "attn_norm", "ffn_norm", "q_norm", "k_norm", *(["moe_router"] if mixture else [])):
        tensors.append((name, 1, 1, 0xFFFFFFFF, weights[name].numpy().tobytes()))
    for prefix, plain, tile in sets:
        for kind in ("q", "k", "v", "o", "gate", "up", "down", "lm"):
            tensors.append((f"{prefix}_{kind}", 3 if prefix == "q4" else 2, 0, 0, encoded(weights[kind], plain, tile)))
    words = dict(options.pop("words", {}))
    words[40] = weights["token_embed"].shape[0]
    if mixture:
        words |= {36: EXPERTS * WIDTH, 180: EXPERTS, 184: WIDTH, 188: 2}
        options = {"version": 3, "flags": 0x223, **options}
    return Spec(tensors, words=words, **options)


def q4(seed: int = 0, **options: Any) -> Spec:
    """A dense file as the converter makes it by default in mode q4: 0x23."""
    return spec(random_weights(seed), [("q4", "Q4_0", "4X4")], **options)


def dual(seed: int = 0, **options: Any) -> Spec:
    """q8 in 8x8 tiles and q4 in 4x4 tiles."""
    return spec(random_weights(seed), [("q8", "Q8_0", "8X8"), ("q4", "Q4_0", "4X4")], **options)


def tokenizer(size: int = VOCAB) -> Tokenizer:
    """`size` words."""
    return Tokenizer(WordLevel({f"w{i}": i for i in range(size)}, unk_token="w0"))


def put_beside(folder: Path, size: int = VOCAB, config: str | None = None) -> None:
    """tokenizer.json, and config.json where given."""
    tokenizer(size).save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "config.json").write_text(config)
