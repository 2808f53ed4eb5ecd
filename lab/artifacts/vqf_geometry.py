"""Which codec each set of matrices has under a flag word, and whether a model's sizes come out in whole blocks and tiles of it.

Why asked before anything is written: Kestrel's converter leaves a mixture of tiles and rows where a size does not fit, and no flag tells.
What it does not prove: anything about a file's bytes; `lab.artifacts.vqf_blocks` looks at them.
"""

from __future__ import annotations

from collections.abc import Sequence

from lab.artifacts.vqf_flags import G256, Q4_4X4, Q4I, Q8_8X8
from lab.artifacts.vqf_header import Arch
from lab.artifacts.vqf_plan import KINDS, matrix_shape
from lab.codecs.vqf import VqfCodec, vqf_codec
from lab.errors import LabError


def codecs_of(flags: int, sets: Sequence[str]) -> dict[str, VqfCodec]:
    """Set -> codec of its matrices in a file with these flags. 8-bit matrices with bit 0 clear are plain rows here."""
    eight = "Q4I" if flags & Q4I else "G256" if flags & G256 else "Q8_0"
    both = {"q8": (eight, "8X8" if flags & Q8_8X8 else ""), "q4": ("Q4_0", "4X4" if flags & Q4_4X4 else "")}
    return {name: vqf_codec(*both[name]) for name in sets}


_FIELDS = {"o": "num_attention_heads * head_dim", "down": "intermediate_size"}
"""Field of config.json that gives a matrix its columns, where that is not hidden_size."""


def check_geometry(arch: Arch, codecs: dict[str, VqfCodec], where: str) -> None:
    """Raises LabError where a matrix does not come out in whole blocks and tiles; Kestrel's converter would leave a mixture of tiles and rows."""
    for prefix, codec in codecs.items():
        step = codec.tile.rows if codec.tile is not None else 1
        for kind in KINDS:
            rows, cols = matrix_shape(arch, kind)
            tensor = f"{where}: {prefix}_{kind} [{rows}, {cols}]"
            if rows % step:
                size = "vocab_size" if kind == "lm" else "its rows"
                raise LabError(f"{tensor}: {size} {rows} is no multiple of {step} ({codec.name}); clear the tile bit with --layout")
            _check_cols(tensor, codec, cols, _FIELDS.get(kind, "hidden_size"))
        if arch.n_experts:
            _check_cols(f"{where}: {prefix}_down of an expert [{arch.dim}, {arch.moe_ffn}]", codec, arch.moe_ffn, "moe_intermediate_size")
            if arch.moe_ffn % step:
                raise LabError(
                    f"{where}: {prefix}_gate: experts of width {arch.moe_ffn} are no whole tiles of {step} rows ({codec.name}); clear its bit with --layout"
                )


def _check_cols(tensor: str, codec: VqfCodec, cols: int, field: str) -> None:
    if cols % codec.col_multiple:
        fix = "choose another --wmode" if codec.col_multiple > codec.block else "no VQF file can hold it"
        raise LabError(f"{tensor}: {field} {cols} is no multiple of the {codec.col_multiple} weights of {codec.name}; {fix}")
