"""Writes any model of the qwen3 family as a VQF file: decodes what a source holds, encodes it as Kestrel's converter would, and looks at each piece again.

Why from `Weights`: safetensors, GGUF and another VQF file give the same interface, so one writer serves all. Memory holds about one layer: matrices pass
in pieces of rows, experts one at a time. The text model only; a vision tower needs Kestrel's own converter, or `lab.artifacts.vqf_relayout`, which keeps it.
What it does not prove: that Kestrel loads the file. It needs `vocab.bin` beside it, which the lab cannot make (see `lab.artifacts.vqf`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from lab.artifacts.vqf_arch import arch_of_config, fields_of_arch
from lab.artifacts.vqf_beside import planned_beside
from lab.artifacts.vqf_file import Progress
from lab.artifacts.vqf_geometry import check_geometry, codecs_of
from lab.artifacts.vqf_header import TRAILER_BYTES, Arch
from lab.artifacts.vqf_plan import WMODES, Planned, flags_of, matrix_shape, selection
from lab.artifacts.vqf_sink import VqfSink, check_place, writing
from lab.artifacts.weights import Stored, Weights
from lab.codecs import verify_encoding
from lab.codecs.vqf import PART, VqfCodec, vqf_codec
from lab.errors import LabError
from lab.models.transformer.config import TransformerConfig

_NAMES = {
    **{kind: f"self_attn.{kind}_proj.weight" for kind in ("q", "k", "v", "o")},
    **{kind: f"mlp.{kind}_proj.weight" for kind in ("gate", "up", "down")},
}
_NORMS = {
    "attn_norm": "input_layernorm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
_STEP_ROWS = 32  # pieces hold whole tiles of every layout
_PIECE = 1 << 24  # weights decoded at a time


@dataclass
class TypeSum:
    """What was written in one type; `cosine` is the least over the pieces (rows of each are compared), `lossless` whether each weight came out as it was."""

    tensors: set[str] = field(default_factory=set)
    weights: int = 0
    nbytes: int = 0
    cosine: float = 1.0
    lossless: bool = True


@dataclass
class Written:
    """A finished file: bytes and, by codec name, what is in it."""

    path: Path
    nbytes: int
    flags: int
    sums: dict[str, TypeSum]


def write_vqf(
    weights: Weights,
    config: TransformerConfig,
    tokenizer: Tokenizer | None,
    path: Path,
    wmode: str = "dual",
    layout: int | None = None,
    progress: Progress | None = None,
    force: bool = False,
    fields: Mapping[str, Any] | None = None,
    check: Callable[[], object] | None = None,
) -> Written:
    """Writes the file at `path`, and config.json and tokenizer.json beside it (None: it lies there). `layout`: bits 0 and 1, the mode's own if None.

    `fields`: the config.json behind `config`, for what only it says (see `arch_of_config`). `check` looks at the source; it may take long, and is called when
    all else has been found possible. Raises LabError naming tensor, size or file; then nothing is left.
    """
    where = weights.where
    arch = arch_of_config(config, fields or {}, where)
    flags = flags_of(wmode, layout, mixture=bool(arch.n_experts))
    sets = WMODES[wmode][0]
    codecs = codecs_of(flags, sets)
    check_geometry(arch, codecs, where)
    written = fields_of_arch(path, arch, {"norm_topk_prob": config.norm_topk_prob} if arch.n_experts else None)
    tensors = selection(arch, flags, sets)
    check_place(path, tensors, force)
    beside = planned_beside(path, written, None if tokenizer is None else tokenizer.to_str(), force)
    if check is not None:
        check()
    with writing(path, arch, flags, tensors, progress, force, beside) as sink:
        out = _Out(sink, {planned.name: planned for planned in tensors})
        _write_outside(out, weights, arch, config.tie_word_embeddings, codecs)
        for layer in range(arch.n_layers):
            _write_layer(out, weights, arch, layer, codecs)
    return Written(path, sink.file_len + TRAILER_BYTES, flags, out.sums)


class _Out:
    """Encodes pieces, compares them with their source and puts them where they belong."""

    def __init__(self, sink: VqfSink, planned: dict[str, Planned]) -> None:
        self.sink, self.planned, self.sums = sink, planned, dict[str, TypeSum]()

    def encoded(self, name: str, codec: VqfCodec, piece: Tensor) -> Tensor:
        """Parts of float32 [rows, cols], decoded again and compared. Raises LabError naming the tensor."""
        try:
            parts = codec.encode(piece)
        except LabError as error:
            raise LabError(f"tensor {name}: {error}") from None
        check = verify_encoding(codec, parts, piece)
        check.require(f"tensor {name}")
        found = self.sums.setdefault(codec.name, TypeSum())
        found.tensors.add(name)
        found.weights, found.nbytes = found.weights + piece.numel(), found.nbytes + parts[PART].numel()
        found.cosine = min(found.cosine, check.cosine)
        found.lossless = found.lossless and torch.equal(codec.decode(parts, piece.shape[1]), piece.to(torch.float32))
        return parts[PART]

    def rows(self, name: str, layer: int, codecs: dict[str, VqfCodec], pieces: Iterator[Tensor]) -> None:
        """The matrix `name` (or name with a set before it) of one layer, in pieces of whole tiles."""
        names = {f"{prefix}_{name}" if prefix else name: codec for prefix, codec in codecs.items()}
        at = {full: layer * self._step(full) for full in names}
        for piece in pieces:
            for full, codec in names.items():
                data = self.encoded(full, codec, piece)
                self.sink.put(full, at[full], data.numpy())
                at[full] += data.numel()

    def columns(self, name: str, layer: int, codecs: dict[str, VqfCodec], pieces: Sequence[int], piece: Callable[[int], Tensor]) -> None:
        """A matrix whose columns come from expert after expert: packed side by side, then put as a whole."""
        for prefix, codec in codecs.items():
            full = f"{prefix}_{name}"
            packed = [self.encoded(full, codec, piece(e)) for e in pieces]
            self.sink.put(full, layer * self._step(full), torch.cat(packed, dim=1).numpy())

    def _step(self, name: str) -> int:
        """Bytes of one layer."""
        planned = self.planned[name]
        layers = planned.shape[0] if len(planned.shape) == 3 or name in _NORMS else 1
        return planned.nbytes // layers


def _write_outside(out: _Out, weights: Weights, arch: Arch, tied: bool, codecs: dict[str, VqfCodec]) -> None:
    matrix = _Matrix(weights, "embed_tokens.weight", (arch.vocab_size, arch.dim))
    out.rows("token_embed", 0, {"": vqf_codec("F16")}, matrix.pieces())
    _put_vector(out, "final_norm", 0, weights.vector("norm.weight"), weights.where)
    if not tied:
        del matrix  # not every source is mapped: these two are the largest of a model
        matrix = _Matrix(weights, "lm_head.weight", (arch.vocab_size, arch.dim))
    out.rows("lm", 0, codecs, matrix.pieces())


def _write_layer(out: _Out, weights: Weights, arch: Arch, layer: int, codecs: dict[str, VqfCodec]) -> None:
    prefix = f"layers.{layer}"
    for name, plain in _NORMS.items():
        _put_vector(out, name, layer, weights.vector(f"{prefix}.{plain}"), weights.where)
    for kind, plain in _NAMES.items():
        if not arch.n_experts or plain.startswith("self_attn."):
            out.rows(kind, layer, codecs, _Matrix(weights, f"{prefix}.{plain}", matrix_shape(arch, kind)).pieces())
    if not arch.n_experts:
        return
    out.rows("moe_router", layer, {"": vqf_codec("F32")}, _Matrix(weights, f"{prefix}.mlp.gate.weight", (arch.n_experts, arch.dim)).pieces())
    tall, (down,) = weights.experts(f"{prefix}.mlp.experts", arch.n_experts)
    experts = range(arch.n_experts)
    for number, kind in enumerate(("gate", "up")):
        out.rows(kind, layer, codecs, (_half(tall, e, number, arch.moe_ffn) for e in experts))
    out.columns("down", layer, codecs, experts, lambda e: down.codec.decode(down.codec.select(down.parts, e), arch.moe_ffn))


def _half(blocks: Sequence[Stored], expert: int, number: int, width: int) -> Tensor:
    """gate (0) or up (1) of an expert, from two stacks or from one with gate rows first."""
    stack = blocks[number if len(blocks) == 2 else 0]
    whole = stack.codec.decode(stack.codec.select(stack.parts, expert), stack.shape[-1])
    return whole if len(blocks) == 2 else whole[number * width : (number + 1) * width]


def _put_vector(out: _Out, name: str, layer: int, vector: Tensor, where: str) -> None:
    planned = out.planned[name]
    if vector.shape != planned.shape[-1:]:
        raise LabError(f"{where}: tensor for {name} has shape {list(vector.shape)}, expected {list(planned.shape[-1:])}")
    out.rows(name, layer, {"": vqf_codec("F32")}, iter([vector.to(torch.float32)[None]]))


class _Matrix:
    """A matrix of the source as float32 rows, its row blocks joined and its columns in the model's order."""

    def __init__(self, weights: Weights, name: str, shape: tuple[int, int]) -> None:
        """Raises LabError where the source has another shape."""
        self.blocks, self.order, self.shape = weights.matrix(name), weights.column_order(name), shape
        found = (sum(block.shape[0] for block in self.blocks), self.blocks[0].shape[1])
        if found != shape:
            raise LabError(f"{weights.where}: {name} has shape {list(found)}, the model needs {list(shape)}")

    def pieces(self) -> Iterator[Tensor]:
        """float32 [n, cols], n a multiple of every tile's rows but for the last."""
        rows, cols = self.shape
        step = max(_STEP_ROWS, _PIECE // cols // _STEP_ROWS * _STEP_ROWS)
        for start in range(0, rows, step):
            yield self._decoded(start, min(start + step, rows))

    def _decoded(self, start: int, stop: int) -> Tensor:
        found, at = [], 0
        for block in self.blocks:
            first, last = max(start - at, 0), min(stop - at, block.shape[0])
            if first < last:
                parts = block.codec.take_rows(block.parts, torch.arange(first, last))
                found.append(block.codec.decode(parts, self.shape[1]))
            at += block.shape[0]
        joined = found[0] if len(found) == 1 else torch.cat(found)
        assert prod(joined.shape) == (stop - start) * self.shape[1]
        if self.order is None:
            return joined
        turned = torch.empty_like(joined)
        turned[:, self.order] = joined
        return turned
