"""A model in GGUF: one file, the shards of llama-gguf-split, or several files named together, read as one set of tensors.

Why as a set: releases split a model by size and keep the n-gram table in a shard of its own, and users merge them; a tensor is found by name in
whichever file holds it, at that file's own offset. (A reader that expected the table at a shard's offset once read it wrongly from a merged file,
and the model said "!" for ever.) A missing, foreign or doubled shard is refused by name.
What it does not prove: that the shards come from one quantisation run; only their own numbering and counts are compared.
"""

from __future__ import annotations

import re
from pathlib import Path

from lab.artifacts.gguf_cursor import Bytes, Value, quoted
from lab.artifacts.gguf_file import GgufFile, GgufTensor
from lab.errors import LabError

_SHARD = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


class Gguf:
    """Files that together hold a model. `metadata` is the first file's; `tensors` by name over all files."""

    def __init__(self, files: list[GgufFile]) -> None:
        """Raises LabError where a tensor is in two files."""
        self.files = files
        self.metadata: dict[str, Value] = files[0].metadata
        self._holder: dict[str, GgufFile] = {}
        for file in files:
            for name in file.tensors:
                if name in self._holder:
                    raise LabError(f"{file.path}: tensor {quoted(name)} is in {self._holder[name].path.name} too; these files do not belong together")
                self._holder[name] = file
        self.tensors: dict[str, GgufTensor] = {name: file.tensors[name] for name, file in self._holder.items()}

    def raw(self, name: str) -> Bytes:
        """As `GgufFile.raw`, from the file that holds the tensor."""
        file = self._holder.get(name)
        if file is None:
            raise LabError(f"{', '.join(file.path.name for file in self.files)}: no tensor {quoted(name)}")
        return file.raw(name)


def open_gguf(path: Path, *more: Path) -> Gguf:
    """The model that `path` belongs to: a whole file, or any shard of a split, whose others lie beside it. With `more`, exactly these files.

    Raises LabError for a file that is missing or broken, and for shards that do not belong together.
    """
    if more:
        return Gguf([GgufFile(each) for each in (path, *more)])
    file = GgufFile(path)
    named = _SHARD.fullmatch(path.name)
    stem, number, named_count = (named["stem"], int(named["number"]), int(named["count"])) if named else (path.stem, 1, 1)
    count = _split(file, "count") or 1  # llama-gguf-split --merge leaves a 0
    if count != named_count or not 1 <= number <= count:
        raise LabError(f"{path}: the header counts {count} shards, the name says {number} of {named_count}; name shards as in model-00001-of-00003.gguf")
    if count == 1:
        return Gguf([file])
    siblings = [path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    missing = [each.name for each in siblings if not each.is_file()]
    if missing:
        raise LabError(f"{path}: {len(missing)} of {count} shards are missing, first {missing[0]}; fetch them into the same folder")
    return _checked([file if each == path else GgufFile(each) for each in siblings])


def _checked(shards: list[GgufFile]) -> Gguf:
    """Shards in order whose headers agree with their names and with the count of tensors."""
    for number, shard in enumerate(shards):
        found = _split(shard, "no"), _split(shard, "count")
        if found != (number, len(shards)):
            raise LabError(
                f"{shard.path}: the header says shard {found[0]} of {found[1]} (from 0), the name {number} of {len(shards)}; a renamed or foreign file"
            )
    joined = Gguf(shards)
    expected = _split(shards[0], "tensors.count")
    if expected not in (None, len(joined.tensors)):
        raise LabError(f"{shards[0].path}: the shards hold {len(joined.tensors)} tensors, the first header counts {expected}; fetch the shards again")
    return joined


def _split(file: GgufFile, key: str) -> int | None:
    """A `split.` number of the header, or None where it has none. Raises LabError for anything but an integer."""
    value = file.metadata.get(f"split.{key}")
    if value is not None and not isinstance(value, int):
        raise LabError(f"{file.path}: split.{key} is no integer; damaged")
    return value
