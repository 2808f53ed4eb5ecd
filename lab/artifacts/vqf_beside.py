"""The small files that lie beside a VQF file: the model's config.json and tokenizer.json, which the file itself cannot hold.

Why refused rather than replaced: a folder of another model must not end up with this model's tokenizer; while a model file lies there, not even --force does
it. What it does not make: `vocab.bin`, which Kestrel's own engine wants; its form is not public in the material at hand.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lab.artifacts.publish import aside_of, publish
from lab.artifacts.vqf_arch import contradiction
from lab.errors import LabError, flat

_MODELS = (".vqf", ".safetensors")
"""Files that are read together with the config.json and tokenizer.json of their folder."""


def planned_beside(path: Path, fields: Mapping[str, Any] | None, tokenizer: str | None, force: bool = False) -> dict[Path, str]:
    """What has to be written into the folder of `path`, asked before the large file is written; makes nothing.

    Raises LabError where another content is there: without `force`, or while it belongs to another model file of the folder.
    """
    texts = {"config.json": None if fields is None else json.dumps(fields, indent=2) + "\n", "tokenizer.json": tokenizer}
    wanted = {path.with_name(name): text for name, text in texts.items() if text is not None}
    missing = {file: text for file, text in wanted.items() if not (os.path.lexists(file) and _same(file, text))}
    for file in (file for file in missing if os.path.lexists(file)):
        if not file.is_file():
            raise LabError(f"{file} is no regular file; choose another folder")
        other = next((each.name for each in sorted(file.parent.iterdir()) if each.suffix in _MODELS and each.name != path.name), None)
        if other is not None:
            raise LabError(f"{file} exists and says something else; it belongs to {other}, which lies there too: choose another folder")
        if not force:
            raise LabError(f"{file} exists and says something else; choose another folder or say --force")
    return missing


@contextmanager
def published_with(aside: Path, path: Path, beside: Mapping[Path, str], force: bool) -> Iterator[None]:
    """Gives the large file `aside` its name and then the small ones theirs; the block runs when all have. Where one fails, none is left that was not there,
    and what was replaced is put back (where the file system has links).

    Raises LabError where a name is taken by now, OSError from the disk.
    """
    staged = {file: aside_of(file) for file in beside}
    made: list[Path] = []
    replaced: dict[Path, Path] = {}

    def give(source: Path, file: Path) -> None:
        if force and os.path.lexists(file):
            replaced[file] = aside_of(file, "old")
            with suppress(OSError):  # no links here
                os.link(file, replaced[file], follow_symlinks=False)
        publish(source, file, force)
        made.append(file)

    try:
        for file, text in beside.items():
            _write_new(staged[file], text)
        give(aside, path)
        for file, text in beside.items():
            try:
                give(staged[file], file)
            except LabError:
                if not _same(file, text):  # another conversion was faster; of the same model it has written the same
                    raise
        yield
    except BaseException:
        for file in made:
            if file not in replaced:
                file.unlink(missing_ok=True)
            elif os.path.lexists(replaced[file]):
                os.replace(replaced[file], file)
        raise
    finally:
        for file in (*staged.values(), *replaced.values()):
            file.unlink(missing_ok=True)


def config_beside(path: Path) -> dict[str, Any] | None:
    """The parsed config.json of the file's folder, or None. Raises LabError where it is no object."""
    beside = path.with_name("config.json")
    return parsed(beside) if beside.is_file() else None


def parsed(file: Path) -> dict[str, Any]:
    """A JSON file that holds an object. Raises LabError for anything else: another encoding, nesting without end, a pipe."""
    try:
        if not file.is_file():
            raise LabError(f"{file}: no such file" if not file.exists() else f"{file}: no regular file")
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise LabError(f"{file}: not valid JSON ({flat(error)})") from None
    if not isinstance(found, dict):
        raise LabError(f"{file}: expected an object of fields")
    return found


def check_tokenizer(tokenizer: Tokenizer, where: Path, vocab_size: int, eos_id: int) -> None:
    """Raises LabError where the tokenizer at `where` is not the model's: ids beyond its rows, or no such end token."""
    highest = max(tokenizer.get_vocab().values(), default=-1)
    if highest >= vocab_size:
        raise LabError(f"{where}: token id {highest} does not fit the model's vocabulary of {vocab_size} rows")
    if tokenizer.id_to_token(eos_id) is None:
        raise LabError(f"{where}: the header's eos_id {eos_id} is no token of this tokenizer")


def _same(file: Path, text: str) -> bool:
    """Whether the file says the same as JSON: a file that was written by hand may be spaced otherwise, and a config may say more."""
    try:
        there, ours = parsed(file), json.loads(text)
    except (LabError, RecursionError):
        return False
    if file.name == "config.json":
        return contradiction(ours, there, complete=True) is None
    return bool(there == ours)


def _write_new(file: Path, text: str) -> None:
    """A new file, on disk when this returns. Raises OSError."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as stream:
        stream.write(text.encode())
        stream.flush()
        os.fsync(stream.fileno())
