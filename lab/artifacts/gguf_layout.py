"""Where the tensors of a GGUF file lie, decided from the table's offsets and the file's real length together.

A tensor's bytes must begin where those before it end, padded to the file's alignment, and nothing may be left over: ggml's own rule (gguf.cpp), and
what exposes a type id that means something else to its writer. Id 42 is two layouts in the wild; the one that accounts for the bytes of every
tensor that carries it is taken, and a file that both or neither explain is refused, because the wrong one gives fluent garbage and no error.
What it does not prove: that a type is right where another has the same bytes per weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from lab.artifacts.gguf_cursor import Cursor, quoted
from lab.codecs.gguf_types import GgufType, candidates


@dataclass(frozen=True)
class Entry:
    """A line of the tensor table: `shape` as in NumPy, `start` in bytes from the start of the data; the type is only an id yet."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int

    def nbytes(self, kind: GgufType) -> int:
        """Bytes of the tensor if it is of this type."""
        return prod(self.shape[:-1]) * kind.row_bytes(self.shape[-1])


@dataclass(frozen=True)
class _Span:
    """An entry and the bytes from its start to the next one's, or to the end of the file."""

    entry: Entry
    nbytes: int
    until: str  # the next tensor's name, quoted, or "the end of the file"
    last: bool

    def explained_by(self, kind: GgufType, alignment: int) -> bool:
        """Whether a tensor of this type fills the span, apart from padding, which a file may lack at its end."""
        if not kind.fits(self.entry.shape[-1]):
            return False
        need = self.entry.nbytes(kind)
        return need <= self.nbytes <= padded(need, alignment) if self.last else self.nbytes == padded(need, alignment)


def padded(size: int, alignment: int) -> int:
    """The least multiple of `alignment` at or above `size`."""
    return -(-size // alignment) * alignment


def resolve(cursor: Cursor, entries: Sequence[Entry], data_start: int, file_size: int, alignment: int) -> list[tuple[Entry, GgufType]]:
    """Each entry with its type, in the order of the table. Raises LabError naming the first tensor that does not add up."""
    _check_starts(cursor, entries, data_start, file_size, alignment)
    order = sorted(entries, key=lambda entry: entry.start)
    if not order and file_size > data_start:
        cursor.fail(f"{file_size - data_start} bytes follow a header without tensors; damaged")
    spans = [_Span(a, b.start - a.start, quoted(b.name), False) for a, b in pairwise(order)]
    spans += [_Span(a, file_size - data_start - a.start, "the end of the file", True) for a in order[-1:]]
    types = {type_id: _decided(cursor, type_id, spans, alignment) for type_id in {entry.type_id for entry in entries}}
    for span in spans:
        _check_span(cursor, span, types[span.entry.type_id], alignment)
    return [(entry, types[entry.type_id]) for entry in entries]


def _check_starts(cursor: Cursor, entries: Sequence[Entry], data_start: int, file_size: int, alignment: int) -> None:
    names: set[str] = set()
    for entry in entries:
        name = quoted(entry.name)
        if entry.name in names:
            cursor.fail(f"tensor {name} is there twice")
        names.add(entry.name)
        if entry.start % alignment:
            cursor.fail(f"tensor {name} begins at offset {entry.start}, no multiple of the file's alignment of {alignment}")
        if data_start + entry.start >= file_size:
            cursor.fail(f"tensor {name} would begin at byte {data_start + entry.start}, but the file has {file_size}; truncated or damaged")
    if entries and (first := min(entry.start for entry in entries)):
        cursor.fail(f"the first tensor begins {first} bytes after the start of the data; what lies before it is not explained")


def _decided(cursor: Cursor, type_id: int, spans: Sequence[_Span], alignment: int) -> GgufType:
    """The one type that an id means in this file."""
    kinds = candidates(type_id)
    if len(kinds) == 1:
        return kinds[0]
    mine = [span for span in spans if span.entry.type_id == type_id]
    fitting = [kind for kind in kinds if all(span.explained_by(kind, alignment) for span in mine)]
    if len(fitting) == 1:
        return fitting[0]
    layouts = " or ".join(f"{kind.name} ({kind.nbytes} bytes per {kind.block})" for kind in kinds)
    if fitting:
        cursor.fail(f"type id {type_id} could be {layouts}, and no tensor of this file is large enough to tell; it is not guessed")
    odd = next((span for span in mine if not any(span.explained_by(kind, alignment) for kind in kinds)), mine[0])
    weights, until = prod(odd.entry.shape), odd.until
    cursor.fail(f"tensor {quoted(odd.entry.name)} has type id {type_id}, {layouts}; its {weights} weights in {odd.nbytes} bytes until {until} do not fit")


def _check_span(cursor: Cursor, span: _Span, kind: GgufType, alignment: int) -> None:
    entry, name = span.entry, quoted(span.entry.name)
    if not kind.fits(entry.shape[-1]):
        cursor.fail(f"tensor {name}: rows of {entry.shape[-1]} weights are no whole blocks of {kind.block} ({kind.name})")
    if span.explained_by(kind, alignment):
        return
    need = f"tensor {name} {list(entry.shape)} takes {entry.nbytes(kind)} bytes as {kind.name}"
    if entry.nbytes(kind) <= span.nbytes:
        cursor.fail(f"{need}, but {span.until} is {span.nbytes} bytes away; id {entry.type_id} means another type to its writer, or the file is damaged")
    if span.last:
        cursor.fail(f"{need}, but the file ends {span.nbytes} later; truncated, or another type")
    cursor.fail(f"{need} and overlaps {span.until}, which begins {span.nbytes} bytes later")
