"""The flag word of a VQF file, and the gate that compares its layout bits with the engine's configuration.

Why a gate that nothing relaxes: the bits say in which order the bytes lie. An engine that reads another order computes fluent nonsense; the 8B stage this
lab was asked about ended at that gate (file 0x1, engine 0x3), and the cure is to convert the file, never to skip the check. Facts: Kestrel's vqf_format.h and
vqf.c, as put down in the project's notes on VQF, sections 1.3 and 1.6.
What it does not prove: that the bits are true. `lab.artifacts.vqf_blocks` looks at the bytes.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lab.errors import ArtifactRefusedError, LabError

FILE_NAMES = ("model.vqf", "weights.vqf", "vllm.vqf")
"""Where a folder's file is looked for, in Kestrel's order."""

Q8_8X8, Q4_4X4, X8, Q4I, G256 = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 4
EMB_F16, VISION, ENCRYPTED, SIGNED, MOE = 1 << 5, 1 << 6, 1 << 7, 1 << 8, 1 << 9

LAYOUT = Q8_8X8 | Q4_4X4 | X8 | Q4I | G256
"""The bits that the gate compares."""


class Bit(NamedTuple):
    """A flag: its value, its name in the format's source, and what it says when set and when clear."""

    value: int
    name: str
    when_set: str
    when_clear: str


BITS = (
    Bit(Q8_8X8, "Q8_8X8", "8-bit matrices in 8x8 tiles", "8-bit matrices in rows or 4x4 tiles (the word does not say which)"),
    Bit(Q4_4X4, "Q4_4X4", "4-bit matrices in 4x4 tiles", "4-bit matrices in rows"),
    Bit(X8, "X8", "8x8l copies of 4-bit matrices for decoding", "no 8x8l copies"),
    Bit(Q4I, "Q8BUF_Q4", "8-bit matrices hold 4-bit codes as int8 (q4i)", "8-bit matrices hold 8-bit codes"),
    Bit(G256, "G256", "8-bit matrices have a scale per 256 weights", "8-bit matrices have a scale per 32 weights"),
    Bit(EMB_F16, "EMB_F16", "token_embed in float16", "token_embed in float32"),
    Bit(VISION, "VISION", "vision tensors present", "no vision tensors"),
    Bit(ENCRYPTED, "ENC", "encrypted", "not encrypted"),
    Bit(SIGNED, "SIGNED", "signed", "not signed"),
    Bit(MOE, "MOE", "mixture of experts", "dense"),
)
"""Every bit a file may set; only those of `LAYOUT` are compared with the engine."""


def names(flags: int) -> str:
    """The set bits as `Q8_8X8 | Q4_4X4`, or `none`."""
    return " | ".join(bit.name for bit in BITS if flags & bit.value) or "none"


@dataclass(frozen=True)
class Engine:
    """The configuration of the engine that a file is meant for; the defaults are Kestrel's own."""

    q8_8x8: bool = True
    q4_4x4: bool = True
    wmode: str = "dual"

    def layout(self, file_flags: int) -> int:
        """The layout word that this engine expects of a file.

        Two rules of Kestrel's loader: a q4i file switches the engine's q8 tiling off and bit 3 on, and bit 2 is in the mask but never set by the engine, so
        that no file with x8 copies loads.
        """
        q4i = bool(file_flags & Q4I)
        word = Q8_8X8 if self.q8_8x8 and not q4i else 0
        return word | (Q4_4X4 if self.q4_4x4 else 0) | (Q4I if q4i else 0) | (G256 if self.wmode == "g256" else 0)


class LayoutRefusedError(ArtifactRefusedError):
    """A file whose layout bits are not the engine's. The message is one line; `table` compares the words bit by bit."""

    def __init__(self, path: Path, file_flags: int, engine_flags: int, way_out: str | None = None) -> None:
        """`way_out`: what to do, where more is known of the file than its flags."""
        self.path, self.file_flags, self.engine_flags = path, file_flags & LAYOUT, engine_flags & LAYOUT
        differ = names(self.file_flags ^ self.engine_flags)
        self.way_out = way_out or f"convert the file: {convert_command(path, self.engine_flags)}"
        super().__init__(
            f"{path}: layout flags {self.file_flags:#x}, the engine is configured for {self.engine_flags:#x} ({differ} differs); nothing relaxes this check, "
            f"{self.way_out}"
        )

    def __reduce__(self) -> tuple[type[LayoutRefusedError], tuple[Path, int, int, str]]:
        """An exception is copied between processes by its arguments, which here are not the message."""
        return type(self), (self.path, self.file_flags, self.engine_flags, self.way_out)

    @property
    def lines(self) -> list[str]:
        """`table`, for whoever prints a refusal."""
        return self.table().splitlines()

    def table(self) -> str:
        """Both words, then one line per layout bit: what the file says, what the engine expects, and whether they agree."""
        words = {"file": self.file_flags, "engine": self.engine_flags}
        lines = [f"layout of {self.path}", *(f"{who:<6} {word:#04x}  {names(word)}" for who, word in words.items())]
        for place, bit in enumerate(bit for bit in BITS if bit.value & LAYOUT):
            ours, theirs = (bit.when_set if word & bit.value else bit.when_clear for word in words.values())
            same = (self.file_flags ^ self.engine_flags) & bit.value == 0
            verdict = f"same: {ours}" if same else f"DIFFERS: the file says {ours}; the engine expects {theirs}"
            lines.append(f"  bit {place}  {bit.name:<8}  {verdict}")
        return "\n".join(lines)


def convert_command(path: Path, layout: int, more: str = "") -> str:
    """The command that lays the file at `path` out anew as OUT; `more` are further words of it."""
    name = f"./{path}" if str(path).startswith("-") else str(path)
    return f"python -m lab convert {shlex.quote(name)} OUT --to vqf --layout {layout:#x}{more}"


def check_layout(path: Path, file_flags: int, engine: Engine, way_out: Callable[[int], str] | None = None) -> None:
    """Raises LayoutRefusedError unless the file's layout bits are exactly the engine's; `way_out` says for the engine's word what to do."""
    expected = engine.layout(file_flags)
    if (file_flags ^ expected) & LAYOUT:
        raise LayoutRefusedError(path, file_flags, expected, None if way_out is None else way_out(expected))


def check_possible(where: object, flags: int) -> None:
    """Raises LabError for a word that contradicts itself or has bits that the format does not define."""
    unknown = flags & ~sum(bit.value for bit in BITS)
    if unknown:
        raise LabError(f"{where}: flags {flags:#x} have unknown bits {unknown:#x}; written by a newer converter, or damaged")
    if flags & Q4I and flags & (Q8_8X8 | G256):
        raise LabError(f"{where}: flags {flags:#x} set {names(flags & (Q4I | Q8_8X8 | G256))} together; q4i matrices are never tiled and have a scale per 32")


def parse_layout(text: str) -> int:
    """A layout word as given on a command line, `0x3` or `3`. Raises LabError for anything but bits 0 to 4."""
    try:
        word = int(text, 0)
    except ValueError:
        raise LabError(f"--layout {text!r}: not a number; for example 0x3") from None
    if word & ~LAYOUT or word < 0:
        raise LabError(f"--layout {text}: only bits 0 to 4 are layout bits, so at most {LAYOUT:#x}")
    check_possible(f"--layout {text}", word)
    return word
