"""Lays an existing VQF file out anew for another engine: 0x1 becomes 0x3 and so on, block by block and without requantising anything.

Why this and not an edited flag word: the bits say where bytes lie, so the bytes have to move. Tiles only permute blocks (and flip fixed bits), which is undone
and compared for every matrix, so the result is lossless or it is refused. Before that, checksum and blocks must confirm what the old flags say; a 0x1 file
comes from a converter that nobody has. Everything else, a vision tower too, is copied as it is; x8 copies, which load nowhere, are left out.
What it does not prove: that the old file held good weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from lab.artifacts.vqf_beside import config_beside, planned_beside, write_beside
from lab.artifacts.vqf_file import Progress, VqfFile
from lab.artifacts.vqf_flags import G256, LAYOUT, Q4I, X8, check_possible
from lab.artifacts.vqf_header import TRAILER_BYTES
from lab.artifacts.vqf_plan import KINDS
from lab.artifacts.vqf_sink import VqfSink, writing
from lab.artifacts.vqf_weights import VqfWeights
from lab.artifacts.vqf_writer import check_geometry, codecs_of
from lab.codecs.vqf import PART, VqfCodec
from lab.errors import LabError

_PIECE = 1 << 24
_PIECE_ROWS = 4096  # moved at a time; whole tiles of every layout


@dataclass(frozen=True)
class Relaid:
    """A file laid out anew. `moved` names the tensors whose bytes changed place, `dropped` those left out. Nothing is lost: what moved was compared."""

    path: Path
    nbytes: int
    from_layout: int
    to_layout: int
    moved: tuple[str, ...]
    dropped: tuple[str, ...]


def relayout(source: VqfFile, path: Path, layout: int, q8_layout: str | None = None, progress: Progress | None = None, force: bool = False) -> Relaid:
    """Writes `source` to `path` with the layout bits `layout`. `q8_layout`: as in VqfWeights, for a source with flag bit 0 clear.

    Raises LabError where that needs requantising, the source is damaged or its blocks contradict its flags, or the disk fails.
    """
    header = source.header
    flags = (header.flags & ~LAYOUT) | layout
    _check_target(source, layout)
    target = codecs_of(flags, source.sets)
    check_geometry(header.arch, target)
    source.check_sum(progress)
    old = {name: VqfWeights(source, name, q8_layout if name == "q8" else None) for name in source.sets}
    for weights in old.values():
        weights.check_blocks()
    tensors = [planned for name, planned in source.planned.items() if not name.startswith("x8_")]
    beside = {}
    if path.parent.resolve() != source.path.parent.resolve():
        tokenizer = source.path.with_name("tokenizer.json")
        beside = planned_beside(path, config_beside(source.path), tokenizer.read_text(encoding="utf-8") if tokenizer.is_file() else None, force)
    moved = []
    with writing(path, header.arch, flags, tensors, progress, force) as sink:
        for planned in tensors:
            prefix, _, kind = planned.name.partition("_")
            if prefix not in old or kind not in KINDS or old[prefix].codec().tile == target[prefix].tile:
                _copy(source, sink, planned.name)
            else:
                moved.append(planned.name)
                _move(source, sink, planned.name, old[prefix], target[prefix])
    write_beside(beside)
    dropped = tuple(sorted(source.entries.keys() - {planned.name for planned in tensors}))
    return Relaid(path, sink.file_len + TRAILER_BYTES, header.flags & LAYOUT, layout, tuple(moved), dropped)


def _check_target(source: VqfFile, layout: int) -> None:
    flags, where = source.header.flags, source.path
    check_possible(f"--layout {layout:#x}", layout)
    if layout & X8:
        raise LabError(f"--layout {layout:#x}: bit 2 (x8 copies) is set, and no engine loads such a file")
    for bit, wmode in ((Q4I, "q4i"), (G256, "g256")):
        if layout & bit and not flags & bit:
            raise LabError(f"{where}: its matrices are not {wmode}; --layout {layout:#x} needs requantising: say --wmode {wmode} too")


def _copy(source: VqfFile, sink: VqfSink, name: str) -> None:
    raw, start = source.raw(name), source.entry(name).offset
    for at in range(0, len(raw), _PIECE):
        sink.put(name, at, raw[at : at + _PIECE])
        source.forget(start + at, start + min(at + _PIECE, len(raw)))


def _move(source: VqfFile, sink: VqfSink, name: str, old: VqfWeights, target: VqfCodec) -> None:
    """Every layer of a matrix from its old places to the new ones. Raises LabError if a piece does not come back as it was."""
    kind, at, start = name.partition("_")[2], 0, source.entry(name).offset
    for raw in [source.raw(name)] if kind == "lm" else (source.layer(name, i) for i in range(source.header.arch.n_layers)):
        stored = old.stored(raw, kind)
        before = stored.codec
        assert isinstance(before, VqfCodec)
        for piece in stored.parts[PART].split(_PIECE_ROWS // (before.tile.rows if before.tile else 1)):
            plain = before.plain_blocks({PART: piece})
            parts = target.laid_out(plain)
            if not torch.equal(target.plain_blocks(parts), plain):
                raise LabError(f"{source.path}: tensor {name} does not come back from {target.name} as it was")
            data = parts[PART].reshape(-1)
            sink.put(name, at, data.numpy())
            source.forget(start + at, start + at + data.numel())
            at += data.numel()
