"""The block types a GGUF file can name: id, weights per block, bytes per block. One table for reader, codecs and byte counts.

Source: `enum ggml_type` and the block structs of ggml (ggml.h, ggml-common.h, snapshot of August 2026); a test compares what the `gguf` package
knows too. Q8_1 and Q8_K are not here: they hold activations and are in no file. Two layouts share id 42: upstream's Q2_0 (64 weights in 18 bytes)
and that of some forks, called Q2_0_G128 here (128 weights in 34 bytes); the table lists both, and a file decides by its own byte counts
(`lab.artifacts.gguf_layout`).
What it does not prove: that a file's tensor holds what its id says.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GgufType:
    """One block type: `nbytes` bytes hold `block` weights, and a row is a whole number of blocks."""

    name: str
    id: int
    block: int
    nbytes: int

    def row_bytes(self, cols: int) -> int:
        """Bytes of a row of `cols` weights, which must be whole blocks (`fits`)."""
        return cols // self.block * self.nbytes

    def fits(self, cols: int) -> bool:
        """Whether a row of `cols` weights is a whole number of blocks."""
        return cols > 0 and cols % self.block == 0


_ALL = (
    GgufType("F32", 0, 1, 4),
    GgufType("F16", 1, 1, 2),
    GgufType("Q4_0", 2, 32, 18),
    GgufType("Q4_1", 3, 32, 20),
    GgufType("Q5_0", 6, 32, 22),
    GgufType("Q5_1", 7, 32, 24),
    GgufType("Q8_0", 8, 32, 34),
    GgufType("Q2_K", 10, 256, 84),
    GgufType("Q3_K", 11, 256, 110),
    GgufType("Q4_K", 12, 256, 144),
    GgufType("Q5_K", 13, 256, 176),
    GgufType("Q6_K", 14, 256, 210),
    GgufType("IQ2_XXS", 16, 256, 66),
    GgufType("IQ2_XS", 17, 256, 74),
    GgufType("IQ3_XXS", 18, 256, 98),
    GgufType("IQ1_S", 19, 256, 50),
    GgufType("IQ4_NL", 20, 32, 18),
    GgufType("IQ3_S", 21, 256, 110),
    GgufType("IQ2_S", 22, 256, 82),
    GgufType("IQ4_XS", 23, 256, 136),
    GgufType("I8", 24, 1, 1),
    GgufType("I16", 25, 1, 2),
    GgufType("I32", 26, 1, 4),
    GgufType("I64", 27, 1, 8),
    GgufType("F64", 28, 1, 8),
    GgufType("IQ1_M", 29, 256, 56),
    GgufType("BF16", 30, 1, 2),
    GgufType("TQ1_0", 34, 256, 54),
    GgufType("TQ2_0", 35, 256, 66),
    GgufType("MXFP4", 39, 32, 17),
    GgufType("NVFP4", 40, 64, 36),
    GgufType("Q1_0", 41, 128, 18),
    GgufType("Q2_0", 42, 64, 18),
    GgufType("Q2_0_G128", 42, 128, 34),
)

TYPES: dict[str, GgufType] = {kind.name: kind for kind in _ALL}
"""Every type by name, in the order of ids."""

REMOVED_IDS = frozenset({4, 5, 31, 32, 33, 36, 37, 38})
"""Ids that ggml once used (Q4_2, Q4_3, the interleaved Q4_0 and IQ4_NL) and reads no more."""


def candidates(type_id: int) -> tuple[GgufType, ...]:
    """The types that use this id: none, one, or several that only a file's byte counts tell apart."""
    return tuple(kind for kind in _ALL if kind.id == type_id)
