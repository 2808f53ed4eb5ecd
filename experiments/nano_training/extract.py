"""Pure parsers from package file formats to plain text: no network, no file system.

What: R's lazy-load `.rdb` chunks, Project Gutenberg boilerplate, the pretty-printed output of Debian's `bible`,
and the JSON poems of `chinese-poetry`. Why: each package wraps public-domain text in its own container, and a
parser that fails loudly is safer than one that lets licence boilerplate or editors' marks into training text.
Not proved: that a text is a faithful edition of the work, nor that the poems' attributions are right.
"""

from __future__ import annotations

import re
import struct
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_STRSXP, _CHARSXP = 16, 9
_LATIN1 = 1 << 14  # general-purpose bit 2 of the CHARSXP flags (R internals, "Serialization Formats")

_GUTENBERG_START = re.compile(r"^\*+ ?START OF (THE|THIS) PROJECT GUTENBERG.*$|^\*END\*? ?THE SMALL PRINT.*$", re.I | re.M)
_GUTENBERG_END = re.compile(
    r"^\*+ ?END OF (THE|THIS) PROJECT GUTENBERG.*$|^\s*End of (the |this )?Project Gutenberg.*$|^\s*<<THIS ELECTRONIC VERSION.*$",
    re.I | re.M,
)

_BIBLE_HEADING = re.compile(r"^((?:[1-3] )?[A-Z][A-Za-z]+(?: [A-Za-z]+)*) (\d+)$")

_HAN = re.compile(r"[\u3007\u3400-\u9fff\U00020000-\U0003ffff]")
_VERSE_OK = re.compile(r"[\u3007\u3400-\u9fff\U00020000-\U0003ffff，。？！；：、「」『』《》·]+")
_TITLE_OK = re.compile(r"[\u3007\u3400-\u9fff\U00020000-\U0003ffff，。？！；：、「」『』《》· ]+")
_NOTE = re.compile(r"（[^（）]*）|\([^()]*\)")


def normalise(text: str) -> str:
    """Return `text` in NFC with `\\n` line ends, no BOM, no trailing blanks, at most two blank lines, and one final newline."""
    text = unicodedata.normalize("NFC", text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n"))
    text = "\n".join(line.rstrip() for line in text.split("\n"))
    return re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"


def strip_gutenberg(text: str) -> str:
    """Cut Project Gutenberg's header and licence, where present, and lines of `@` left by its editors.

    Texts without markers come back unchanged but for such lines. The name `Project Gutenberg` is a trademark whose licence
    binds copies that carry it, so nothing may remain: raises ValueError if it does.
    """
    # The last start marker and the first end marker after it: old files repeat the small print.
    for match in list(_GUTENBERG_START.finditer(text))[-1:]:
        text = text[match.end() :]
    end = _GUTENBERG_END.search(text)
    if end:
        text = text[: end.start()]
    text = "\n".join(line for line in text.split("\n") if not re.fullmatch(r"\s*@+\s*", line))
    if "project gutenberg" in text.lower():
        raise ValueError("Project Gutenberg boilerplate left in the text")
    return text


def read_rdb(blob: bytes) -> list[list[str]]:
    """Return the character vectors in an R lazy-load database (`.rdb`), in file order.

    A chunk is a 4-byte big-endian uncompressed size, then a zlib stream that holds one XDR-serialised object
    (R Internals, section "Serialization Formats"). Missing strings (NA) become empty ones. Raises ValueError where a chunk
    holds anything but a plain character vector.
    """
    vectors, at = [], 0
    while at < len(blob):
        (size,) = struct.unpack_from(">I", blob, at)
        stream = zlib.decompressobj()
        data = stream.decompress(blob[at + 4 :])
        if len(data) != size or not stream.eof:
            raise ValueError(f"chunk at byte {at}: {len(data)} bytes, header says {size}")
        vectors.append(_read_character_vector(data))
        at = len(blob) - len(stream.unused_data)
    return vectors


def _read_character_vector(data: bytes) -> list[str]:
    if data[:2] != b"X\n":
        raise ValueError("not an XDR serialisation")
    version, _, _ = struct.unpack_from(">3i", data, 2)
    at = 14
    if version == 3:  # version 3 adds the native encoding's name
        at += 4 + struct.unpack_from(">i", data, at)[0]
    flags, count = struct.unpack_from(">Ii", data, at)
    at += 8
    if flags & 0xFF != _STRSXP:
        raise ValueError(f"object of type {flags & 0xFF}, not a character vector")
    strings = []
    for _ in range(count):
        flags, length = struct.unpack_from(">Ii", data, at)
        at += 8
        if flags & 0xFF != _CHARSXP:
            raise ValueError(f"element of type {flags & 0xFF}, not a string")
        raw = data[at : at + max(length, 0)]
        strings.append(raw.decode("latin-1" if flags & _LATIN1 else "utf-8"))
        at += len(raw)
    return strings


def split_bible(printed: str) -> list[tuple[str, str]]:
    """Split the pretty-printed output of `bible` into (book name, text), in canonical order.

    A heading line is a book and a chapter number alone on a line after a blank one; the King James text itself holds no digits.
    Raises ValueError where text comes before the first heading.
    """
    books: dict[str, list[str]] = {}
    current: list[str] | None = None
    for line in printed.split("\n"):
        heading = _BIBLE_HEADING.match(line)
        if heading:
            current = books.setdefault(heading[1], [])
        if current is None:
            if line.strip():
                raise ValueError(f"text before the first heading: {line[:60]!r}")
            continue
        current.append(line)
    return [(name, normalise("\n".join(lines))) for name, lines in books.items()]


@dataclass(frozen=True)
class Poem:
    """One Chinese poem: heading (title or tune), author, and lines of verse."""

    heading: str
    author: str
    lines: tuple[str, ...]

    @property
    def key(self) -> str:
        """The Han characters of the verse alone: equal keys mean the same poem whatever its title and punctuation."""
        return "".join(_HAN.findall("".join(self.lines)))

    @property
    def line_keys(self) -> tuple[str, ...]:
        """The Han characters of each line that has at least ten: shorter lines recur in unrelated poems."""
        return tuple(key for key in ("".join(_HAN.findall(line)) for line in self.lines) if len(key) >= 10)

    @property
    def text(self) -> str:
        """Heading, author and verse, one to a line."""
        return "\n".join([self.heading, self.author, *self.lines])


def read_poems(records: Sequence[dict[str, Any]]) -> Iterator[Poem]:
    """Yield the clean poems of one `chinese-poetry` JSON file (`paragraphs`, `author`, `title` or `rhythmic`).

    Dropped: poems with lacunae, variant readings, editors' notes or stray characters in the verse (marks such as □ [ ] （ 〖),
    since a model would learn the apparatus; and empty ones. Notes in parentheses are cut from headings.
    """
    for record in records:
        lines = tuple(unicodedata.normalize("NFC", line.strip()) for line in record["paragraphs"] if line.strip())
        heading = _NOTE.sub("", unicodedata.normalize("NFC", record.get("title") or record.get("rhythmic") or "")).strip()
        author = unicodedata.normalize("NFC", record["author"].strip())
        if lines and all(map(_VERSE_OK.fullmatch, lines)) and _TITLE_OK.fullmatch(heading) and _TITLE_OK.fullmatch(author):
            yield Poem(heading, author, lines)
