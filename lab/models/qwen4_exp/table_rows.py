"""A smaller n-gram table for synthetic models: the sizes of a config.json with about so many rows in all.

Why: at 16 bits the table of the large model is 102 GB, which leaves no room beside many layers on one card; a token reads a handful of its rows, so that speed
depends little on how many there are. Resident bytes do, and the record names the rows. It is never done to a real checkpoint, whose hashes fix its table.
"""

from __future__ import annotations

from typing import Any

from lab.errors import LabError
from lab.models.fields import Fields

DEFAULT_BASE = 20_000_000
"""`ngram_vocab_size_base` where a config.json does not name it."""


def with_table_rows(data: dict[str, Any], rows: int, where: str) -> dict[str, Any]:
    """`data` with a table of `rows` rows or a little more: every head's part has a prime number of rows. Raises LabError where the model has no table."""
    text = data.get("text_config", data)
    if not isinstance(text, dict) or not text.get("ple_layer_ids"):
        raise LabError(f"{where}: model.table_rows={rows}: the model has no n-gram table")
    fields = Fields(text, where)
    heads = (fields.whole("ngram_size", 3, least=2) - 1) * fields.whole("heads_per_ngram", 8)
    if rows < 2 * heads:
        raise LabError(f"model.table_rows={rows}: {heads} heads need at least {2 * heads} rows")
    own = heads * fields.whole("ngram_vocab_size_base", DEFAULT_BASE)
    if rows > own:
        raise LabError(f"model.table_rows={rows}: the model's own table has about {own} rows, and the key makes it smaller")
    changed = {**text, "ngram_vocab_size_base": rows // heads}
    return {**data, "text_config": changed} if "text_config" in data else changed
