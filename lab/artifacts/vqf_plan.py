"""Which tensors a VQF file of a model has, in the converter's order, with type, true shape and bytes: for checking a file and for laying out a new one.

Why apart from the directory: its `rows` and `cols` are the converter's own words (o has L*Q x dim there, stored is [dim, Q] a layer), kept only so that a
written directory equals the converter's byte for byte. True shapes follow from the header. Facts: vqf_convert (model_layers.c, vqf_vision.c), as put down in
the project's notes on VQF, section 1.4; the sizes of three published files come out of `size_of` to the byte.
What it does not prove: that the bytes of a tensor are good weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from lab.artifacts.gguf_cursor import quoted
from lab.artifacts.vqf_arch import arch_of_fields
from lab.artifacts.vqf_directory import F16, F32, Q4, Q4_8X8L, Q8, Entry, padded
from lab.artifacts.vqf_flags import EMB_F16, G256, MOE, Q4_4X4, Q4I, Q8_8X8, VISION, X8
from lab.artifacts.vqf_header import ALIGNMENT, ENTRY_BYTES, HEADER_BYTES, TRAILER_BYTES, Arch
from lab.codecs.vqf_tiles import BLOCK
from lab.errors import LabError

WMODES: dict[str, tuple[tuple[str, ...], int]] = {
    "dual": (("q8", "q4"), Q8_8X8 | Q4_4X4),
    "q4": (("q4",), Q8_8X8 | Q4_4X4),
    "q8": (("q8",), Q8_8X8 | Q4_4X4),
    "q4i": (("q8",), Q4_4X4 | Q4I),
    "g256": (("q8",), Q8_8X8 | Q4_4X4 | G256),
}
"""The converter's modes: the sets of matrices a file gets, and its layout bits. Bits 0 and 1 are the engine's switches and do not say which sets exist."""

KINDS = ("q", "k", "v", "o", "gate", "up", "down", "lm")
"""The matrices of a set, q8_q and so on; all but lm hold every layer."""

SETS = {"q8": Q8, "q4": Q4, "x8": Q4_8X8L}
"""Set -> qtype. x8 holds copies for decoding, without lm."""

_BYTES = {F32: (1, 4), F16: (1, 2), Q8: (BLOCK, 34), Q4: (BLOCK, 18), Q4_8X8L: (BLOCK, 18)}
"""qtype -> (weights per block, bytes per block)."""

_PAGE = 4096  # writers begin the data at a multiple of this


@dataclass(frozen=True)
class Planned:
    """A tensor that a file of this model may have: `shape` is what is stored ([layers, rows, cols] or [rows, cols]), `rows` and `cols` the directory says."""

    name: str
    qtype: int
    shape: tuple[int, ...]
    rows: int
    cols: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor. Raises LabError where its rows are no whole blocks."""
        block, size = _BYTES[self.qtype]
        if self.shape[-1] % block:
            raise LabError(f"tensor {self.name}: rows of {self.shape[-1]} weights are no whole blocks of {block}")
        return prod(self.shape[:-1]) * (self.shape[-1] // block) * size


def matrix_shape(arch: Arch, kind: str) -> tuple[int, int]:
    """[out, in] of one layer's matrix (a mixture: of all experts together, by rows of gate and up, by columns of down), or of lm."""
    queries, keys = arch.n_heads * arch.head_dim, arch.n_kv_heads * arch.head_dim
    return {
        "q": (queries, arch.dim),
        "k": (keys, arch.dim),
        "v": (keys, arch.dim),
        "o": (arch.dim, queries),
        "gate": (arch.ffn_dim, arch.dim),
        "up": (arch.ffn_dim, arch.dim),
        "down": (arch.dim, arch.ffn_dim),
        "lm": (arch.vocab_size, arch.dim),
    }[kind]


def catalogue(arch: Arch, flags: int) -> dict[str, Planned]:
    """Every tensor that a file with this header may have, in the converter's order."""
    layers, dim = arch.n_layers, arch.dim
    found = [
        Planned("token_embed", F16 if flags & EMB_F16 else F32, (arch.vocab_size, dim), arch.vocab_size, dim),
        Planned("final_norm", F32, (dim,), dim, 1),
        *(Planned(name, F32, (layers, dim), layers * dim, 1) for name in ("attn_norm", "ffn_norm")),
    ]
    if arch.has_q_norm:
        found += [Planned(name, F32, (layers, arch.head_dim), layers * arch.head_dim, 1) for name in ("q_norm", "k_norm")]
    if flags & MOE:
        found.append(Planned("moe_router", F32, (layers, arch.n_experts, dim), layers * arch.n_experts, dim))
    for prefix, qtype in SETS.items():
        found += [_matrix(arch, prefix, qtype, kind) for kind in KINDS if (prefix, kind) != ("x8", "lm")]
    if flags & VISION:  # a header with has_vision alone: the converter failed at the tower and went on without it
        found += _vision(arch)
    return {planned.name: planned for planned in found}


def _matrix(arch: Arch, prefix: str, qtype: int, kind: str) -> Planned:
    shape = matrix_shape(arch, kind)
    if kind == "lm":
        return Planned(f"{prefix}_lm", qtype, shape, *shape)
    layers, dim, queries = arch.n_layers, arch.dim, arch.n_heads * arch.head_dim
    per_layer, cols = {"q": (dim, queries), "k": (dim, shape[0]), "v": (dim, shape[0]), "o": (queries, dim)}.get(kind, shape)
    return Planned(f"{prefix}_{kind}", qtype, (layers, *shape), layers * per_layer, cols)


def _vision(arch: Arch) -> list[Planned]:
    """The vision tower. Its 8-bit matrices are never tiled; the columns of fc2 are padded to whole blocks."""
    depth, hidden, ffn = arch.vis_depth, arch.vis_hidden, arch.vis_ffn
    wide = -(-ffn // BLOCK) * BLOCK
    merged = hidden * arch.vis_merge**2
    stack, out = arch.vis_ds_count, arch.vis_out_dim
    found = [
        Planned("v_q8_qkv", Q8, (depth, 3 * hidden, hidden), depth, 3 * hidden * hidden),
        Planned("v_q8_proj", Q8, (depth, hidden, hidden), depth, hidden * hidden),
        Planned("v_q8_fc1", Q8, (depth, ffn, hidden), depth, ffn * hidden),
        Planned("v_q8_fc2", Q8, (depth, hidden, wide), depth, hidden * wide),
    ]
    one = {"patch_embed": hidden * arch.vis_in_chan * arch.vis_temporal * arch.vis_patch**2, "patch_bias": hidden, "pos_embed": arch.vis_max_pos * hidden}
    each = {"qkv_bias": 3 * hidden, "proj_bias": hidden, **{f"norm{n}_{p}": hidden for n in (1, 2) for p in "wb"}, "fc1_bias": ffn, "fc2_bias": hidden}
    merger = {"nw": hidden, "nb": hidden, "f1w": merged * merged, "f1b": merged, "f2w": merged * out, "f2b": out}
    for names, count in (
        (one, 1),
        (each, depth),
        ({f"merger_{k}": n for k, n in merger.items()}, 1),
        ({f"ds_{k}": merged if k in ("nw", "nb") else n for k, n in merger.items()}, stack),
    ):
        found += [Planned(f"v_{name}", F32, (count, size), count, size) for name, size in names.items()]
    return found


def check_entries(path: Path, arch: Arch, flags: int, entries: Sequence[Entry]) -> tuple[str, ...]:
    """The names that the format does not know. Raises LabError where a tensor contradicts the header: it has another type or length than the sizes give, is
    there although the header rules it out, or is missing although the header or its set asks for it."""
    known = catalogue(arch, flags)
    _check_said(path, arch, flags, [entry.name for entry in entries])
    for entry in entries:
        planned = known.get(entry.name)
        if planned is None:
            continue
        if entry.qtype != planned.qtype:
            raise LabError(f"{path}: tensor {quoted(entry.name)} has qtype {entry.qtype}, expected {planned.qtype}")
        try:
            expected = planned.nbytes
        except LabError as error:
            raise LabError(f"{path}: {error}") from None
        if entry.nbytes != expected:
            raise LabError(f"{path}: tensor {quoted(entry.name)} has {entry.nbytes} bytes, the header's sizes {list(planned.shape)} make {expected}")
    present = {entry.name for entry in entries}
    needed = [name for name, planned in known.items() if not name.startswith(("q8_", "q4_", "x8_")) and prod(planned.shape) > 0]
    sets = [prefix for prefix in ("q8", "q4") if any(name.startswith(f"{prefix}_") for name in present)]
    if not sets:
        raise LabError(f"{path}: neither q8_ nor q4_ matrices are in the file; damaged")
    missing = [name for name in (*needed, *(f"{prefix}_{kind}" for prefix in sets for kind in KINDS)) if name not in present]
    if missing:
        count = "1 tensor is" if len(missing) == 1 else f"{len(missing)} tensors are"
        raise LabError(f"{path}: {count} missing, first {missing[0]}; damaged, or converted with an error that was only a warning")
    return tuple(sorted(present - known.keys()))


def _check_said(path: Path, arch: Arch, flags: int, present: Sequence[str]) -> None:
    """Raises LabError where header fields and flags contradict each other, or tensors are there that they rule out."""
    if flags & VISION and not arch.has_vision:
        raise LabError(f"{path}: flag VISION is set with header field has_vision 0: they contradict each other; damaged, convert it again")
    rules: tuple[tuple[str, object, tuple[str, ...]], ...] = (
        ("header field has_q_norm is 0", arch.has_q_norm, ("q_norm", "k_norm")),
        ("flag MOE is clear", flags & MOE, ("moe_router",)),
        ("flag VISION is clear", flags & VISION, ("v_",)),
        ("flag X8 is clear", flags & X8, ("x8_",)),
    )
    for said, allowed, starts in rules:
        found = next((name for name in present if name.startswith(starts)), None)
        if found is not None and not allowed:
            raise LabError(f"{path}: tensor {quoted(found)} is in the file, but {said}: they contradict each other; damaged, convert it again")
    if flags & X8 and not any(name.startswith("x8_") for name in present):
        raise LabError(f"{path}: flag X8 is set, but no x8_ tensor is in the file: they contradict each other; damaged, convert it again")


def flags_of(wmode: str, layout: int | None = None, mixture: bool = False, vision: bool = False) -> int:
    """The flag word that the converter writes. Raises LabError for a mode that is unknown, and for a layout word the mode cannot have."""
    if wmode not in WMODES:
        raise LabError(f"--wmode {wmode}: unknown; choose from: {', '.join(WMODES)}")
    usual = WMODES[wmode][1]
    word = usual if layout is None else layout
    fixed = Q4I | G256 | (Q8_8X8 if usual & Q4I else 0)
    if word & ~(Q8_8X8 | Q4_4X4 | fixed) or (word ^ usual) & fixed:
        raise LabError(f"--layout {word:#x}: not possible with --wmode {wmode}, whose layout is {usual:#x}; only bits 0 and 1 may differ, bit 2 loads nowhere")
    return word | EMB_F16 | (MOE if mixture else 0) | (VISION if vision else 0)


def selection(arch: Arch, flags: int, sets: Sequence[str]) -> list[Planned]:
    """The tensors of a file with these sets of matrices, in order; a vision tower where the header has one."""
    return [p for name, p in catalogue(arch, flags).items() if name[:2] not in SETS or name[:2] in sets]


def placed(tensors: Sequence[Planned]) -> tuple[list[Entry], int, int]:
    """(directory, data_offset, file_len): each tensor at the next multiple of 64."""
    start = at = -(-(HEADER_BYTES + ENTRY_BYTES * len(tensors)) // _PAGE) * _PAGE
    entries = []
    for planned in tensors:
        entries.append(Entry(planned.name, planned.qtype, planned.rows, planned.cols, at, planned.nbytes))
        at = padded(at + planned.nbytes)
    assert at % ALIGNMENT == 0
    return entries, start, at


def size_of(config: Mapping[str, Any], wmode: str, vision: bool = False) -> int:
    """Bytes of the file that a model's config.json gives in this mode, without anything of the model at hand. Raises LabError naming a wrong field.

    `vision` counts the tower of its `vision_config` too.
    """
    arch = arch_of_fields(config, vision=vision)
    flags = flags_of(wmode, mixture=bool(arch.n_experts), vision=vision)
    return placed(selection(arch, flags, WMODES[wmode][0]))[2] + TRAILER_BYTES
