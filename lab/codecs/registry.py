"""The codecs by name. A new codec is one new file and one new line here.

Why it is apart from the package's `__init__`: the codec files import from `base` only, so no import goes round in a circle.
The block types of GGUF files are codecs too, named `gguf:TYPE`; they are listed in their own file, since what they are is fixed outside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lab.codecs.base import Codec
from lab.codecs.e4m3 import E4M3
from lab.codecs.gguf import GGUF_CODECS
from lab.codecs.plain import Bf16, Int8G128
from lab.codecs.q2 import Q2G32, Q2Levels, Q2Rows
from lab.codecs.vqf import VQF_CODECS
from lab.codecs.w3 import W3Levels
from lab.errors import LabError

KNOWN: dict[str, type[Codec]] = {codec.name: codec for codec in (Bf16, E4M3, Int8G128, W3Levels, Q2Levels, Q2G32, Q2Rows)}


_FILE_TYPES: dict[str, Mapping[str, type[Codec]]] = {"gguf": GGUF_CODECS, "vqf": VQF_CODECS}
"""Block types of files, by family: what they are is fixed outside."""


def create(name: str, options: Mapping[str, Any] | None = None) -> Codec:
    """The codec `name` with `options` over its defaults. Raises LabError on an unknown name, option or value."""
    found = KNOWN.get(name) or GGUF_CODECS.get(name) or VQF_CODECS.get(name)
    if found is None:
        family, colon, _ = name.partition(":")
        types = _FILE_TYPES.get(family) if colon else None
        kinds = ", ".join(KNOWN) if types is None else f"{family}:TYPE with TYPE one of {', '.join(known.partition(':')[2] for known in types)}"
        raise LabError(f"codec {name!r} is unknown; known: {kinds}")
    return found(**dict(options or {}))
