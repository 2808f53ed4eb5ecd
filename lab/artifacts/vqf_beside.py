"""The small files that lie beside a VQF file: the model's config.json and tokenizer.json, which the file itself cannot hold.

Why refused rather than replaced: a folder of another model must not end up with this model's tokenizer. What it does not make: `vocab.bin`, which Kestrel's own
engine wants; its form is not public in the material at hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab.errors import LabError, flat
from lab.stored import write_atomic


def planned_beside(path: Path, fields: Mapping[str, Any] | None, tokenizer: str | None, force: bool = False) -> dict[Path, str]:
    """What `write_beside` has to write into the folder of `path` (made if need be), asked before the large file is written.

    Raises LabError where another content is there (without `force`).
    """
    texts = {"config.json": None if fields is None else json.dumps(fields, indent=2) + "\n", "tokenizer.json": tokenizer}
    wanted = {path.with_name(name): text for name, text in texts.items() if text is not None}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        missing = {file: text for file, text in wanted.items() if not (file.exists() and _same(file, text))}
    except OSError as error:
        raise LabError(f"{error.filename or path.parent}: cannot be written ({flat(error.strerror or error)})") from None
    for file in missing:
        if file.exists() and not force:
            raise LabError(f"{file} exists and says something else; choose another folder or say --force")
    return missing


def write_beside(texts: Mapping[Path, str]) -> None:
    """Writes each file. Raises LabError."""
    try:
        for file, text in texts.items():
            write_atomic(file, text)
    except OSError as error:
        raise LabError(f"{error.filename}: cannot be written ({flat(error.strerror or error)})") from None


def config_beside(path: Path) -> dict[str, Any] | None:
    """The parsed config.json of the file's folder, or None. Raises LabError where it is no object."""
    beside = path.with_name("config.json")
    if not beside.is_file():
        return None
    try:
        found = json.loads(beside.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise LabError(f"{beside}: not a config.json ({error})") from None
    if not isinstance(found, dict):
        raise LabError(f"{beside}: expected an object of fields")
    return found


def _same(file: Path, text: str) -> bool:
    """Whether the file says the same as JSON: a file that was written by hand may be spaced otherwise, and may say more."""
    try:
        there, ours = json.loads(file.read_text(encoding="utf-8")), json.loads(text)
    except ValueError:
        return False
    if file.name != "config.json" or not isinstance(there, dict):
        return bool(there == ours)
    inner = there.get("text_config")
    known = inner if isinstance(inner, dict) else there
    sizes = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "norm_topk_prob")
    return all(known.get(key) == ours[key] for key in sizes if key in ours)
