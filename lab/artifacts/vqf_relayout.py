"""Lays an existing VQF file out anew for another engine: 0x1 becomes 0x3 and so on, block by block and without requantising anything.

Why this and not an edited flag word: the bits say where bytes lie, so the bytes have to move. Tiles only permute blocks (and flip fixed bits), which is undone
and compared for every matrix, so that no weight changes or it is refused. Before that, checksum and blocks must confirm what the old flags say; a 0x1 file
comes from a converter that nobody has. Everything else, a vision tower too, is copied as it is; x8 copies, which load nowhere, are left out.
What it does not prove: that the old file held good weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from lab.artifacts.inspection import load_tokenizer
from lab.artifacts.vqf_arch import check_beside, header_fields
from lab.artifacts.vqf_beside import check_tokenizer, config_beside, planned_beside
from lab.artifacts.vqf_blocks import FITS
from lab.artifacts.vqf_file import Progress, VqfFile
from lab.artifacts.vqf_flags import G256, LAYOUT, Q4I, X8, check_possible, convert_command
from lab.artifacts.vqf_geometry import check_geometry, codecs_of
from lab.artifacts.vqf_header import TRAILER_BYTES
from lab.artifacts.vqf_plan import KINDS
from lab.artifacts.vqf_sink import VqfSink, check_place, writing
from lab.artifacts.vqf_weights import VqfWeights
from lab.codecs.vqf import PART, VqfCodec
from lab.errors import LabError, flat

_PIECE = 1 << 24
_PIECE_ROWS = 4096  # moved at a time; whole tiles of every layout
_TOLD = {"vqf:Q8_0": "rows", "vqf:G256": "rows", "vqf:Q8_0_4X4": "4x4", "vqf:G256_4X4": "4x4"}


@dataclass(frozen=True)
class Relaid:
    """A file laid out anew. `moved` names the tensors whose bytes changed place, `dropped` those left out; what moved was compared. `absent` names the
    small files that the model needs and that lie beside neither the old file nor the new one."""

    path: Path
    nbytes: int
    from_layout: int
    to_layout: int
    moved: tuple[str, ...]
    dropped: tuple[str, ...]
    absent: tuple[str, ...] = ()


def relayout(source: VqfFile, path: Path, layout: int, q8_layout: str | None = None, progress: Progress | None = None, force: bool = False) -> Relaid:
    """Writes `source` to `path` with the layout bits `layout`. `q8_layout`: as in VqfWeights, for a source with flag bit 0 clear.

    Raises LabError where that needs requantising, the source is damaged or its blocks contradict its flags, what lies beside it is another model's, or the
    disk fails.
    """
    header = source.header
    flags = (header.flags & ~LAYOUT) | layout
    tensors = [planned for name, planned in source.planned.items() if not name.startswith("x8_")]
    _check_layout(source, layout)
    target = codecs_of(flags, source.sets)
    check_geometry(header.arch, target, str(source.path))
    if q8_layout is not None and "q8" not in source.sets:
        raise LabError(f"{source.path}: --q8-layout {q8_layout}: the file has no 8-bit matrices; leave it out")
    old = {name: VqfWeights(source, name, q8_layout if name == "q8" else None) for name in source.sets}
    before = {name: weights.codec() for name, weights in old.items()}
    check_place(path, tensors, force)
    beside = _carried(source, path, force)
    absent = tuple(name for name in ("tokenizer.json", "config.json") if not any(each.with_name(name).is_file() for each in (source.path, path)))
    source.check_sum(progress)
    for weights in old.values():
        weights.check_blocks()
    moved = []
    with writing(path, header.arch, flags, tensors, progress, force, beside) as sink:
        for planned in tensors:
            prefix, _, kind = planned.name.partition("_")
            if prefix not in old or kind not in KINDS or before[prefix].tile == target[prefix].tile:
                _copy(source, sink, planned.name)
            else:
                moved.append(planned.name)
                _move(source, sink, planned.name, old[prefix], target[prefix])
    dropped = tuple(sorted(source.entries.keys() - {planned.name for planned in tensors}))
    return Relaid(path, sink.file_len + TRAILER_BYTES, header.flags & LAYOUT, layout, tuple(moved), dropped, absent)


def way_out(source: VqfFile, layout: int) -> str:
    """What helps a file whose layout is refused by an engine that expects `layout`: a command that works on this file, or why there is none."""
    try:
        check_geometry(source.header.arch, codecs_of((source.header.flags & ~LAYOUT) | layout, source.sets), str(source.path))
        told = _told_by_blocks(source)
    except LabError as error:
        return f"and the file cannot be laid out as {layout:#x} ({flat(error)}); convert the original weights for this engine"
    if told is None:
        return f"and its 8-bit blocks do not tell rows from 4x4 tiles; convert it to --layout {layout:#x} with the --q8-layout it was written in, rows or 4x4"
    lost = ""
    if source.header.flags & G256 and not layout & G256:
        lost = " (the lab's engine runs with wmode dual and has no key for g256; scales and codes stay as they are, in frames of Q8_0)"
    return f"convert the file{lost}: {convert_command(source.path, layout, told and f' --q8-layout {told}')}"


def _told_by_blocks(source: VqfFile) -> str | None:
    """What --q8-layout has to say: nothing where the flags say it, and None where neither they nor the blocks do. Raises LabError where flags and blocks
    contradict each other, or rows and tiles are mixed."""
    told = ""
    for name in source.sets:
        weights = VqfWeights(source, name)
        if weights.ambiguous:
            fit = [codec for codec, share in weights.block_shares().items() if share >= FITS]
            words = [_TOLD[codec] for codec in fit if codec in _TOLD]
            if fit and not words:
                raise LabError(f"flag bit 0 is clear, but 8-bit blocks look like {' or '.join(fit)}: the flags are wrong")
            if len(words) != 1:
                return None
            told, weights = words[0], VqfWeights(source, name, words[0])
        for kind in KINDS:
            weights.stored(source.raw(f"{name}_{kind}") if kind == "lm" else source.layer(f"{name}_{kind}", 0), kind)
    return told


def _carried(source: VqfFile, path: Path, force: bool) -> dict[Path, str]:
    """What has to be written beside the new file: the source's own small files. Raises LabError where they are not this model's."""
    if path.parent.resolve() == source.path.parent.resolve():
        return {}
    arch, place = source.header.arch, source.path.with_name("tokenizer.json")
    config = config_beside(source.path)
    check_beside(source.path, header_fields(arch), config)
    text = None
    if place.is_file():
        check_tokenizer(load_tokenizer(place.parent), place, arch.vocab_size, arch.eos_id)
        text = place.read_text(encoding="utf-8")
    return planned_beside(path, config, text, force)


def _check_layout(source: VqfFile, layout: int) -> None:
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
