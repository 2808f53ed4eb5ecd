"""The header of a VQF file: 448 bytes, in two forms, parsed with every number checked and written in the newer form.

Why both forms: files made before mixtures of experts were known lack four numbers, so that all that follows lies 16 bytes earlier; the version does not
tell. As Kestrel's loader does, each place is tried for the two offsets and exactly one must make sense. Facts: vqf_format.h (both revisions), as put down in
the project's notes on VQF, section 1.2; little endian, C's natural alignment.
What it does not prove: that sizes belong to the weights. The directory is compared with them in `lab.artifacts.vqf_plan`.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lab.artifacts.vqf_flags import ENCRYPTED, MOE, SIGNED, check_possible
from lab.errors import LabError

HEADER_BYTES = 448
"""Where the directory begins, whichever form the header has."""
ENTRY_BYTES = 64
ALIGNMENT = 64
"""Of the data, of every tensor and of the end of the data."""
TRAILER_BYTES = 8
"""FNV-1a 64 after the data of a plain file."""
MAGIC = 0x57465146
"""On disk b"FQFW"."""
DENSE, MIXTURE = 2, 3
"""Versions. Version 1 had no signature block and is not read by its own engine either."""

_MOST_ENTRIES = 1024  # the converter writes at most 96
_MOST_SIZE = 1 << 31
_ARCH, _ARCH_OLD = struct.Struct("<8I2f19I8i4I4I"), struct.Struct("<8I2f19I8i4I")
_ARCH_AT = 16
_LISTS = {"vis_ds_idx": 4, "mrope_sections": 4}


@dataclass(frozen=True)
class Arch:
    """The model's numbers, in the order of the file. `ffn_dim` of a mixture is n_experts * moe_ffn."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn_dim: int
    vocab_size: int
    max_seq_len: int
    rope_theta: float
    norm_eps: float
    bos_id: int = 0
    eos_id: int = 0
    has_q_norm: int = 1
    has_mrope: int = 0
    head_dim_full: int = 0
    kv_lora_rank: int = 0
    has_vision: int = 0
    vis_depth: int = 0
    vis_hidden: int = 0
    vis_heads: int = 0
    vis_ffn: int = 0
    vis_patch: int = 0
    vis_temporal: int = 0
    vis_merge: int = 0
    vis_out_dim: int = 0
    vis_in_chan: int = 0
    vis_max_pos: int = 0
    vis_ds_count: int = 0
    mrope_n_sec: int = 0
    vis_ds_idx: tuple[int, ...] = (0, 0, 0, 0)
    mrope_sections: tuple[int, ...] = (0, 0, 0, 0)
    vision_start_id: int = 0
    vision_end_id: int = 0
    image_token_id: int = 0
    video_token_id: int = 0
    n_experts: int = 0
    moe_ffn: int = 0
    top_k: int = 0
    shared_experts: int = 0

    def packed(self) -> bytes:
        """The block of 180 bytes with the mixture's 16 behind it."""
        values: list[Any] = []
        for field in fields(self):
            value = getattr(self, field.name)
            values += value if field.name in _LISTS else [value]
        return _ARCH.pack(*values)


@dataclass(frozen=True)
class Header:
    """`flags` are those of `lab.artifacts.vqf_flags`; offsets in bytes from the start of the file; `legacy` is the form without the mixture's numbers."""

    version: int
    flags: int
    n_tensors: int
    arch: Arch
    data_offset: int
    file_len: int
    legacy: bool = False

    def packed(self) -> bytes:
        """448 bytes in the newer form, without signature."""
        head = struct.pack("<4I", MAGIC, self.version, self.flags, self.n_tensors) + self.arch.packed()
        return (head + bytes(200 - len(head)) + struct.pack("<2Q", self.data_offset, self.file_len)).ljust(HEADER_BYTES, b"\0")


def read_header(path: Path, data: bytes, size: int) -> Header:
    """The header from the file's first bytes; `size` is the file's. Raises LabError in one line: path and what is wrong."""
    if size < HEADER_BYTES + ENTRY_BYTES or len(data) < HEADER_BYTES:
        raise LabError(f"{path}: {size} bytes are fewer than a header and one tensor ({HEADER_BYTES + ENTRY_BYTES}); truncated or not a VQF file")
    magic, version, flags, count = struct.unpack_from("<4I", data)
    if magic != MAGIC:
        raise LabError(f"{path}: not a VQF file: it begins with {data[:4]!r}, not b'FQFW'")
    if version not in (DENSE, MIXTURE):
        raise LabError(f"{path}: VQF version {version} is not read, only {DENSE} (dense) and {MIXTURE} (mixture of experts)")
    check_possible(path, flags)
    for bit, word in ((ENCRYPTED, "encrypted"), (SIGNED, "signed")):
        if flags & bit:
            raise LabError(f"{path}: the file is {word}, which the lab does not read; export it again without, or convert from the original weights")
    if not 1 <= count <= _MOST_ENTRIES:
        raise LabError(f"{path}: the header counts {count} tensors; expected 1 to {_MOST_ENTRIES} (its converter writes at most 96)")
    legacy, data_offset, file_len = _form(path, data, size, HEADER_BYTES + ENTRY_BYTES * count)
    arch = _arch(data, legacy)
    _check_arch(path, arch, version, flags, legacy)
    return Header(version, flags, count, arch, data_offset, file_len, legacy)


def _form(path: Path, data: bytes, size: int, directory_end: int) -> tuple[bool, int, int]:
    """(legacy, data_offset, file_len). A form holds when its data begin aligned behind the directory, and its length and the trailer make up the file."""
    found = []
    for legacy, at in ((False, 200), (True, 184)):
        begin, end = struct.unpack_from("<2Q", data, at)
        if begin % ALIGNMENT == 0 and directory_end <= begin <= end:
            found.append((legacy, begin, end))
    whole = [form for form in found if form[2] % ALIGNMENT == 0 and form[2] + TRAILER_BYTES == size]
    if len(whole) == 1:
        return whole[0]
    if len(found) == 1:
        expected = found[0][2] + TRAILER_BYTES
        left = expected - size
        how = (
            f"{left} byte{'s are' if left > 1 else ' is'} missing; truncated"
            if left > 0
            else f"{-left} bytes too many, or an end of the data that is no multiple of {ALIGNMENT}"
        )
        raise LabError(f"{path}: the header says {expected} bytes, the file has {size}: {how}")
    why = "neither form of the header" if not found else "both forms of the header"
    raise LabError(f"{path}: header layout undetermined: {why} (offsets at bytes 200 and 184) could be meant; damaged, or another format")


def _arch(data: bytes, legacy: bool) -> Arch:
    values: list[Any] = list((_ARCH_OLD if legacy else _ARCH).unpack_from(data, _ARCH_AT))
    named: dict[str, Any] = {}
    for field in fields(Arch):
        if not values:
            break  # the older form ends before the mixture's numbers
        count = _LISTS.get(field.name, 1)
        named[field.name] = tuple(values[:count]) if field.name in _LISTS else values[0]
        del values[:count]
    return Arch(**named)


def _check_arch(path: Path, arch: Arch, version: int, flags: int, legacy: bool) -> None:
    for name in ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size", "max_seq_len"):
        value = getattr(arch, name)
        if not 1 <= value < _MOST_SIZE:
            raise LabError(f"{path}: header field {name} is {value}; expected 1 to {_MOST_SIZE - 1}")
    for name in ("rope_theta", "norm_eps"):
        if not (math.isfinite(getattr(arch, name)) and getattr(arch, name) > 0):
            raise LabError(f"{path}: header field {name} is {getattr(arch, name)}; expected a positive number")
    if arch.n_heads % arch.n_kv_heads:
        raise LabError(f"{path}: header field n_kv_heads is {arch.n_kv_heads}, which does not divide n_heads {arch.n_heads}")
    mixture = bool(flags & MOE)
    if mixture != (version == MIXTURE) or (mixture and legacy):
        how = f"the MOE flag {'set' if mixture else 'clear'}{' in the older header' if legacy else ''}"
        raise LabError(f"{path}: version {version} with {how}: they contradict each other")
    if not mixture and arch.n_experts:
        raise LabError(f"{path}: header field n_experts is {arch.n_experts} with the MOE flag clear: they contradict each other")
    if mixture and (arch.n_experts * arch.moe_ffn != arch.ffn_dim or not 1 <= arch.top_k <= arch.n_experts):
        raise LabError(
            f"{path}: {arch.n_experts} experts of width {arch.moe_ffn}, {arch.top_k} chosen, and ffn_dim {arch.ffn_dim}: ffn_dim must be their product "
            "and top_k between 1 and their number"
        )
    if mixture and arch.shared_experts:
        raise LabError(f"{path}: header field shared_experts is {arch.shared_experts}; the format has no tensors for them")
