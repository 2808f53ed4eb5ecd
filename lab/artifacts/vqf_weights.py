"""The tensors of a VQF file by Hugging Face name, each in the codec and the bytes of the file.

Why shapes come from the header: the directory's rows and cols are the converter's own words. Experts of a mixture share one matrix per layer: expert e owns
rows e*width.. of gate and up and COLUMNS e*width.. of down, which blocks and tiles of 32 columns allow to be cut out without copying.
What it does not prove: which layout 8-bit matrices are in where flag bit 0 is clear. The word is the same for plain rows and 4x4 tiles, so the caller must
say it (`q8_layout`); the blocks themselves are asked whether they agree (`lab.artifacts.vqf_blocks`).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from lab.artifacts.gguf_cursor import quoted
from lab.artifacts.vqf_blocks import FITS, candidates, sampled_bands, shares
from lab.artifacts.vqf_file import Bytes, Progress, VqfFile
from lab.artifacts.vqf_flags import G256, Q4_4X4, Q4I, Q8_8X8
from lab.artifacts.vqf_plan import matrix_shape
from lab.artifacts.weights import Stored
from lab.codecs.vqf import PART, VqfCodec, vqf_codec
from lab.codecs.vqf_tiles import BLOCK
from lab.errors import LabError

Q8_LAYOUTS = ("rows", "4x4")
"""What 8-bit matrices may be in where flag bit 0 is clear."""

_LAYER = re.compile(r"layers\.(\d{1,6})\.(.+)")
_MATRICES = {
    "self_attn.q_proj.weight": "q",
    "self_attn.k_proj.weight": "k",
    "self_attn.v_proj.weight": "v",
    "self_attn.o_proj.weight": "o",
    "mlp.gate_proj.weight": "gate",
    "mlp.up_proj.weight": "up",
    "mlp.down_proj.weight": "down",
}
_VECTORS = {
    "input_layernorm.weight": "attn_norm",
    "post_attention_layernorm.weight": "ffn_norm",
    "self_attn.q_norm.weight": "q_norm",
    "self_attn.k_norm.weight": "k_norm",
}
_ROUTER, _EXPERTS = "mlp.gate.weight", "mlp.experts"


class VqfWeights:
    """`lab.artifacts.weights.Weights` over a file. `used` is the set that is read: q8 where the file has it, else q4."""

    def __init__(self, file: VqfFile, use: str | None = None, q8_layout: str | None = None) -> None:
        """`use`: q8 or q4 of a file with both. `q8_layout`: rows or 4x4, for a file with bit 0 clear. Raises LabError where they do not fit the file."""
        self.file, self.where = file, str(file.path)
        self.mixture = bool(file.header.arch.n_experts)
        self.used = use or file.sets[0]
        if self.used not in file.sets:
            raise LabError(f"{self.where}: no {self.used} matrices; the file has {' and '.join(file.sets)}")
        self.ambiguous = self.used == "q8" and not file.header.flags & (Q8_8X8 | Q4I)
        if q8_layout is not None and (q8_layout not in Q8_LAYOUTS or not self.ambiguous):
            raise LabError(f"{self.where}: --q8-layout {q8_layout}: only for 8-bit matrices with flag bit 0 clear, and one of {', '.join(Q8_LAYOUTS)}")
        self._q8_layout = q8_layout

    def plain_type(self) -> str:
        """The type that the used set's blocks have, apart from tiles."""
        flags = self.file.header.flags
        return "Q4_0" if self.used == "q4" else "Q4I" if flags & Q4I else "G256" if flags & G256 else "Q8_0"

    def codec(self) -> VqfCodec:
        """How the used set lies in the file. Raises LabError where the flags do not say and nobody did."""
        flags, plain = self.file.header.flags, self.plain_type()
        if self.used == "q4":
            return vqf_codec(plain, "4X4" if flags & Q4_4X4 else "")
        if self.ambiguous and self._q8_layout is None:
            fit = ", ".join(name for name, share in self.block_shares().items() if share >= FITS) or "none"
            raise LabError(
                f"{self.where}: ambiguous: flag bit 0 is clear, so 8-bit matrices are plain rows or 4x4 tiles; say --q8-layout rows or --q8-layout 4x4 "
                f"(rules that blocks obey fit: {fit})"
            )
        tile = "8X8" if flags & Q8_8X8 else "4X4" if self._q8_layout == "4x4" else ""
        return vqf_codec(plain, tile)

    def block_shares(self, layer: int = 0) -> dict[str, float]:
        """Codec name -> share of sampled blocks of this layer's q matrix that look as this codec's blocks do; empty where its rows are no multiple of 8."""
        rows, cols = matrix_shape(self.file.header.arch, "q")
        plain = self.plain_type()
        if rows % 8 or (plain == "G256" and cols % 256):
            return {}
        return shares(sampled_bands(_tensor(self.file.layer(f"{self.used}_q", layer)), rows), candidates(plain), cols)

    def check_blocks(self) -> None:
        """Raises LabError where blocks of the first or last layer fit another layout and not the one that flags or caller say."""
        said = self.codec().name
        for layer in {0, self.file.header.arch.n_layers - 1}:
            found = self.block_shares(layer)
            better = [name for name, share in found.items() if share >= FITS]
            if better and said not in better:
                raise LabError(
                    f"{self.where}: {self.used}_q of layer {layer} is said to be {said}, which {found.get(said, 0):.0%} of its blocks fit, but all look like "
                    f"{' or '.join(better)}; the flags are wrong, convert from the original weights"
                )

    def check(self, progress: Progress | None = None) -> None:
        """Reads the whole file: its checksum, and then the blocks, which in a damaged file would blame the flags. Raises LabError."""
        self.file.check_sum(progress)
        self.check_blocks()

    def __contains__(self, name: str) -> bool:
        if name in ("embed_tokens.weight", "lm_head.weight", "norm.weight"):
            return True
        layer, rest = self._split(name)
        if layer is None or not 0 <= layer < self.file.header.arch.n_layers:
            return False
        per_layer = {*_VECTORS, *_MATRICES} if not self.mixture else {*_VECTORS, _ROUTER, _EXPERTS, *(n for n in _MATRICES if n.startswith("self_attn."))}
        return rest in per_layer

    def matrix(self, name: str) -> Sequence[Stored]:
        """The matrix as one row block. Views of the mapped file."""
        arch = self.file.header.arch
        self._need(name)
        layer, rest = self._split(name)
        if name == "embed_tokens.weight":
            planned = self.file.shape("token_embed")
            raw = self.file.raw("token_embed")
            return [_stored(vqf_codec("F16" if planned.qtype == 5 else "F32"), raw, arch.vocab_size, arch.dim)]
        if rest == _ROUTER and layer is not None:
            return [_stored(vqf_codec("F32"), self.file.layer("moe_router", layer), arch.n_experts, arch.dim)]
        if name == "lm_head.weight":
            return [self.stored(self.file.raw(f"{self.used}_lm"), "lm")]
        if rest in _MATRICES and layer is not None:
            return [self.stored(self.file.layer(f"{self.used}_{_MATRICES[rest]}", layer), _MATRICES[rest])]
        raise LabError(f"{self.where}: {name} is no matrix")

    def stored(self, raw: Bytes, kind: str) -> Stored:
        """One matrix of the used set from its bytes; `kind` as in `vqf_plan.KINDS`. Raises LabError where its layout is not known, or is a mixture."""
        codec, (rows, cols) = self.codec(), matrix_shape(self.file.header.arch, kind)
        if codec.plain == "G256" and cols % 256:  # its groups run across rows then; the frames are those of Q8_0 all the same
            codec = vqf_codec("Q8_0", codec.name.partition("_")[2])
        if codec.tile is not None and rows % codec.tile.rows:
            size = "vocab_size" if kind == "lm" else f"rows of {kind},"
            raise LabError(
                f"{self.where}: {self.used}_{kind}: {size} {rows} is no multiple of {codec.tile.rows}, so its converter left {codec.tile.name} and plain rows "
                "mixed; convert the model with a padded vocabulary or without tiles"
            )
        return _stored(codec, raw, rows, cols)

    def column_order(self, name: str) -> Tensor | None:
        """None: the columns are in the model's order."""
        self._need(name)
        return None

    def vector(self, name: str) -> Tensor:
        """float32, a copy. The norms of the qwen3 family have no folded 1."""
        self._need(name)
        layer, rest = self._split(name)
        if name != "norm.weight" and rest not in _VECTORS:
            raise LabError(f"{self.where}: {name} is no vector")
        raw = self.file.raw("final_norm") if layer is None else self.file.layer(_VECTORS[rest], layer)
        return _tensor(raw).clone().view(torch.float32)

    def integers(self, name: str) -> Tensor:
        """Raises LabError: the format has none."""
        raise LabError(f"{self.where}: no integers {quoted(name)}; the format has none")

    def experts(self, prefix: str, count: int) -> tuple[Sequence[Stored], Sequence[Stored]]:
        """([gate, up], [down]) as stacks of views. Raises LabError where blocks or tiles go across the border of two experts."""
        self._need(prefix)
        arch, (layer, rest) = self.file.header.arch, self._split(prefix)
        if rest != _EXPERTS or layer is None or count != arch.n_experts:
            raise LabError(f"{self.where}: {prefix}: {count} experts asked for; the file has {arch.n_experts}")
        width = arch.moe_ffn
        tall = [self.stored(self.file.layer(f"{self.used}_{kind}", layer), kind) for kind in ("gate", "up")]
        wide = self.stored(self.file.layer(f"{self.used}_down", layer), "down")
        step = tall[0].codec.tile.rows if isinstance(tall[0].codec, VqfCodec) and tall[0].codec.tile else 1
        if width % BLOCK or width % step:
            raise LabError(f"{self.where}: moe_ffn {width} is no multiple of {BLOCK} columns and {step} rows; blocks go across the border of two experts")
        return [_split_rows(one, count) for one in tall], [_split_columns(wide, count)]

    def table_shards(self, prefix: str) -> int:
        """Raises LabError: the format has no table."""
        raise LabError(f"{self.where}: no table {quoted(prefix)}; the format has none")

    def table_shard(self, prefix: str, index: int) -> Stored:
        """Raises LabError: the format has no table."""
        raise LabError(f"{self.where}: no table {quoted(prefix)}, shard {index}; the format has none")

    def _split(self, name: str) -> tuple[int | None, str]:
        found = _LAYER.fullmatch(name)
        return (int(found[1]), found[2]) if found else (None, name)

    def _need(self, name: str) -> None:
        if name not in self:
            raise LabError(f"{self.where}: no tensor for {quoted(name)}; the file holds {self.file.header.arch.n_layers} layers of the qwen3 family")


def _tensor(raw: Bytes) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # nothing writes into it
        return torch.from_numpy(raw)


def _stored(codec: VqfCodec, raw: Bytes, rows: int, cols: int) -> Stored:
    flat = _tensor(raw)
    if codec.tile is None:
        return Stored(codec, {PART: flat.view(rows, -1)}, (rows, cols))
    return Stored(codec, {PART: flat.view(rows // codec.tile.rows, cols // BLOCK, -1)}, (rows, cols))


def _split_rows(stack: Stored, count: int) -> Stored:
    rows, cols = stack.shape
    part = stack.parts[PART]
    return Stored(stack.codec, {PART: part.unflatten(0, (count, part.shape[0] // count))}, (count, rows // count, cols))


def _split_columns(stack: Stored, count: int) -> Stored:
    """[rows, count * cols] as [count, rows, cols]; both plain rows and tiles have their column blocks on dim 1."""
    rows, cols = stack.shape
    part = stack.parts[PART]
    return Stored(stack.codec, {PART: part.unflatten(1, (count, part.shape[1] // count)).transpose(0, 1)}, (count, rows, cols // count))
