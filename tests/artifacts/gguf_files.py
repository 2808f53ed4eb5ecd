"""GGUF files written byte by byte, so that any field can lie; and a small whole model to break.

Why not the `gguf` package's writer: it writes only files that are right. A test compares the two on a right one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from lab.codecs.gguf_types import TYPES

_VALUE_TYPES = {"u8": (0, "<B"), "u16": (2, "<H"), "i32": (5, "<i"), "u32": (4, "<I"), "f32": (6, "<f"), "bool": (7, "<?"), "u64": (10, "<Q")}


def text(value: str | bytes) -> bytes:
    """A GGUF string."""
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def kv(key: str, kind: str, value: Any) -> bytes:
    """A metadata value: `kind` is one of the scalars above, "str", or "[kind]" for an array."""
    if kind == "str":
        return text(key) + struct.pack("<I", 8) + text(value)
    if kind == "[str]":
        return text(key) + struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(text, value))
    if kind.startswith("["):
        type_id, code = _VALUE_TYPES[kind[1:-1]]
        return text(key) + struct.pack("<IIQ", 9, type_id, len(value)) + b"".join(struct.pack(code, each) for each in value)
    type_id, code = _VALUE_TYPES[kind]
    return text(key) + struct.pack("<I", type_id) + struct.pack(code, value)


@dataclass
class Tensor:
    """A line of the table with its data; `offset` and `type_id` override what is right, `shape` is in NumPy order."""

    name: str
    type: str
    shape: Sequence[int]
    data: bytes = b""
    offset: int | None = None
    type_id: int | None = None

    def __post_init__(self) -> None:
        if not self.data:
            kind = TYPES[self.type]
            size = int(np.prod(self.shape)) // kind.block * kind.nbytes
            self.data = np.random.default_rng(len(self.name)).integers(0, 256, size, dtype=np.uint8).tobytes()


@dataclass
class Spec:
    """A file to write."""

    tensors: list[Tensor]
    values: list[bytes] = field(default_factory=lambda: [kv("general.architecture", "str", "qwen4exp")])
    magic: bytes = b"GGUF"
    version: int = 3
    counts: tuple[int | None, int | None] = (None, None)
    alignment: int = 32

    def header(self) -> bytes:
        """Everything before the data, padded."""
        n_tensors, n_values = self.counts
        out = self.magic + struct.pack("<I", self.version)
        out += struct.pack("<QQ", len(self.tensors) if n_tensors is None else n_tensors, len(self.values) if n_values is None else n_values)
        out += b"".join(self.values)
        start = 0
        for tensor in self.tensors:
            offset = start if tensor.offset is None else tensor.offset
            type_id = TYPES[tensor.type].id if tensor.type_id is None else tensor.type_id
            out += text(tensor.name) + struct.pack("<I", len(tensor.shape)) + b"".join(struct.pack("<Q", n) for n in reversed(tensor.shape))
            out += struct.pack("<IQ", type_id, offset)
            start += len(self.padded(tensor.data))
        return self.padded(out)

    def padded(self, data: bytes) -> bytes:
        """With zeros up to the alignment."""
        return data + bytes(-len(data) % self.alignment)

    def content(self) -> bytes:
        """The whole file."""
        return self.header() + b"".join(self.padded(tensor.data) for tensor in self.tensors)

    def write(self, path: Path) -> Path:
        """Writes it and gives the path back."""
        path.write_bytes(self.content())
        return path


def model() -> list[Tensor]:
    """Tensors of several types and ranks; a 640-wide Q2_0 stack and the table among them."""
    return [
        Tensor("token_embd.weight", "Q8_0", (6, 64)),
        Tensor("blk.0.attn_norm.weight", "F32", (64,)),
        Tensor("blk.0.ffn_down_exps.weight", "Q2_0", (2, 3, 640)),
        Tensor("blk.0.ffn_gate_exps.weight", "IQ2_XS", (2, 4, 256)),
        TABLE,
    ]


TABLE = Tensor("per_layer_token_embd.weight", "IQ4_NL", (50, 160))


def split(tensors: Iterable[Sequence[Tensor]], **lies: Any) -> list[Spec]:
    """Shards as llama-gguf-split writes them; `lies` replaces the numbers of the first shard (count, no, total)."""
    groups = list(tensors)
    specs = []
    for number, group in enumerate(groups):
        true = {"no": number, "count": len(groups), "total": sum(map(len, groups))} | (lies if number == 0 else {})
        values = [kv("split.no", "u16", true["no"]), kv("split.count", "u16", true["count"]), kv("split.tensors.count", "i32", true["total"])]
        specs.append(Spec(list(group), [kv("general.architecture", "str", "qwen4exp"), *values] if number == 0 else values))
    return specs


def write_split(folder: Path, specs: Sequence[Spec], stem: str = "model") -> list[Path]:
    """Under the names of llama-gguf-split."""
    return [spec.write(folder / f"{stem}-{i:05d}-of-{len(specs):05d}.gguf") for i, spec in enumerate(specs, 1)]
