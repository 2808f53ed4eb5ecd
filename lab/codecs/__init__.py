"""Weight codecs: `create(name, options)` gives one, `KNOWN` lists them. One codec family per file.

Why a table and not discovery: the known codecs are a closed list that a config error can print.
GGUF block types are created by the same call as `gguf:TYPE`; `KNOWN` does not list them.
"""

from __future__ import annotations

from lab.codecs.base import Codec, Parts, parts_nbytes
from lab.codecs.quality import EncodingCheck, checksum, cosine, relative_mse, verify_encoding
from lab.codecs.registry import KNOWN, create

__all__ = ["KNOWN", "Codec", "EncodingCheck", "Parts", "checksum", "cosine", "create", "parts_nbytes", "relative_mse", "verify_encoding"]
