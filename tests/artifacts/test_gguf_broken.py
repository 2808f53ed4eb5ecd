"""Every way a GGUF file can be broken ends in one line that names the file and the fault, and broken shards are refused as a set."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from lab.artifacts.gguf import open_gguf
from lab.codecs.gguf_types import REMOVED_IDS, TYPES
from lab.errors import LabError
from tests.artifacts.gguf_files import TABLE, Spec, Tensor, kv, model, split, text, write_split


def _refused(path: Path, match: str) -> None:
    with pytest.raises(LabError, match=match) as caught:
        open_gguf(path)
    line = str(caught.value)
    assert line.startswith(str(path.parent)) and len(line.splitlines()) == 1 and len(line) < len(str(path)) + 400


def _values(*values: bytes) -> Spec:
    return Spec(model(), list(values))


def _one(**changes: object) -> Spec:
    """A file of one Q8_0 tensor [4, 64] with fields changed."""
    return Spec([Tensor(**({"name": "w", "type": "Q8_0", "shape": (4, 64)} | changes))])  # type: ignore[arg-type]


BROKEN: dict[str, tuple[Spec, str]] = {
    "magic": (Spec(model(), magic=b"GGJT"), "not a GGUF file"),
    "version 1": (Spec(model(), version=1), "version 1 is not read"),
    "version 4": (Spec(model(), version=4), "version 4 is not read"),
    "big endian": (Spec(model(), version=3 << 24), "big-endian"),
    "tensor count": (Spec(model(), counts=(2**60, None)), "number of tensors is 1152921504606846976"),
    "value count": (Spec(model(), counts=(None, 2**63)), "number of metadata values is 9223372036854775808"),
    "one tensor too many": (Spec(model(), counts=(6, None)), "a tensor name at byte .* has 0 characters"),
    "string length": (_values(text("k") + struct.pack("<IQ", 8, 2**62)), "'k' at byte .* needs 4611686018427387904 bytes"),
    "key length": (_values(struct.pack("<Q", 2**64 - 1)), "metadata key at byte .* needs"),
    "empty key": (_values(kv("", "u8", 1)), "metadata key at byte .* has 0 characters"),
    "key not text": (_values(text(b"\xff\xfe") + struct.pack("<IB", 0, 1)), "not UTF-8"),
    "array length": (_values(text("k") + struct.pack("<IIQ", 9, 4, 2**62)), "'k' at byte .* needs"),
    "string array length": (_values(text("k") + struct.pack("<IIQ", 9, 8, 2**61)), "length of 'k' is"),
    "array of arrays": (_values(text("k") + struct.pack("<IIQ", 9, 9, 1)), "array of arrays"),
    "value type": (_values(text("k") + struct.pack("<I", 13)), "value type 13"),
    "element type": (_values(text("k") + struct.pack("<IIQ", 9, 99, 1)), "value type 99"),
    "bool": (_values(text("k") + struct.pack("<IB", 7, 2)), "bool with a byte"),
    "double key": (_values(kv("k", "u8", 1), kv("k", "u8", 1)), "'k' is there twice"),
    "newline in a key": (_values(kv("a\nb", "u8", 1), kv("a\nb", "u8", 1)), r"'a\\nb' is there twice"),
    "alignment 0": (_values(kv("general.alignment", "u32", 0)), "general.alignment is 0"),
    "alignment 48": (_values(kv("general.alignment", "u32", 48)), "general.alignment is 48"),
    "alignment text": (_values(kv("general.alignment", "str", "x" * 500)), "general.alignment is a str"),
    "alignment array": (_values(kv("general.alignment", "[u64]", [1] * 99)), "general.alignment is a ndarray"),
    "alignment not kept": (_values(kv("general.alignment", "u32", 4096)), "begins at offset 416, no multiple of the file's alignment of 4096"),
    "no dimensions": (_one(shape=(), data=b"1234"), "has 0 dimensions"),
    "five dimensions": (_one(shape=(1, 1, 1, 1, 32)), "has 5 dimensions"),
    "empty dimension": (_one(shape=(0, 64), data=b"1"), "sizes must be positive"),
    "huge shape": (_one(shape=(2**63, 2**63, 2**63, 64), data=b"1"), "truncated"),
    "row not whole blocks": (_one(shape=(4, 48), data=bytes(204)), "rows of 48 weights are no whole blocks of 32"),
    "K row of 640": (_one(type="Q4_K", shape=(2, 640), data=bytes(720)), "rows of 640 weights are no whole blocks of 256"),
    "unaligned offset": (_one(offset=8), "no multiple of the file's alignment"),
    "offset outside": (_one(offset=1 << 20), "would begin at byte"),
    "offset overflow": (_one(offset=2**64 - 32), "would begin at byte"),
    "gap before": (_one(offset=32, data=bytes(272 + 32)), "first tensor begins 32 bytes after"),
    "tail": (_one(data=bytes(272 + 64)), "takes 272 bytes as Q8_0, but the end of the file is 352 bytes away"),
    "double tensor": (Spec([Tensor("w", "F32", (8,)), Tensor("w", "F32", (8,))]), "'w' is there twice"),
    "overlap": (Spec([Tensor("a", "F32", (32,)), Tensor("b", "F32", (32,), offset=64)]), "overlaps 'b', which begins 64 bytes later"),
    "same place": (Spec([Tensor("a", "F32", (32,)), Tensor("b", "F32", (32,), offset=0)]), "overlaps '[ab]'"),
    "gap": (Spec([Tensor("a", "F32", (8,), data=bytes(64)), Tensor("b", "F32", (8,), offset=64)]), "'b' is 64 bytes away"),
    "smaller type than written": (Spec([Tensor("a", "Q8_0", (64, 64), type_id=2), *model()]), "id 2 means another type to its writer"),
    "larger type than written": (Spec([Tensor("a", "Q4_0", (64, 64), type_id=8), *model()]), "as Q8_0 and overlaps"),
    "id 42 of neither layout": (Spec([Tensor("a", "Q4_0", (64, 640), type_id=42), *model()[:2]]), "'a' has type id 42.* 40960 weights in 23040 bytes until"),
    "id 42 of both layouts": (Spec([Tensor("a", "Q2_0", (64, 640)), Tensor("b", "Q2_0_G128", (64, 640))]), "type id 42"),
    "id 42 too small to tell": (Spec([Tensor("a", "Q2_0", (1, 128)), Tensor("n", "F32", (8,))]), "not guessed"),
    "no data": (Spec([]), "follow a header without tensors"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_files_are_refused(tmp_path: Path, fault: str) -> None:
    spec, match = BROKEN[fault]
    path = spec.write(tmp_path / "m.gguf")
    if fault == "no data":
        path.write_bytes(path.read_bytes() + b"more")
    _refused(path, match)


@pytest.mark.parametrize("type_id", [*sorted(REMOVED_IDS), 43, 48, 97, 2**32 - 1])
def test_unknown_type_ids_are_refused(tmp_path: Path, type_id: int) -> None:
    assert type_id not in {kind.id for kind in TYPES.values()}
    _refused(_one(type_id=type_id).write(tmp_path / "m.gguf"), f"'w' has type id {type_id}, which")


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    spec = Spec(model())
    content, padding = spec.content(), len(spec.padded(TABLE.data)) - len(TABLE.data)
    for length in [*range(0, len(spec.header()) + 40), *range(len(spec.header()) + 40, len(content) - padding, 97), len(content) - padding - 1]:
        (tmp_path / "m.gguf").write_bytes(content[:length])
        _refused(tmp_path / "m.gguf", "m.gguf: ")


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    _refused(tmp_path / "absent.gguf", "cannot be read")
    _refused(tmp_path, "cannot be read")
    (tmp_path / "empty.gguf").touch()
    _refused(tmp_path / "empty.gguf", "empty file")


def _shards(tmp_path: Path, **lies: int) -> list[Path]:
    tensors = model()
    return write_split(tmp_path, split([tensors[:2], tensors[2:4], [TABLE]], **lies))


def _missing(folder: Path) -> Path:
    paths = _shards(folder)
    paths[2].unlink()
    return paths[0]


def _swapped(folder: Path) -> Path:
    paths = _shards(folder)
    first, last = paths[0].read_bytes(), paths[2].read_bytes()
    paths[0].write_bytes(last)
    paths[2].write_bytes(first)
    return paths[1]


def _renamed(folder: Path) -> Path:
    return _shards(folder)[0].rename(folder / "model.gguf")


def _doubled(folder: Path) -> Path:
    return write_split(folder, split([model()[:2], model()[:1]]))[0]


def _text_number(folder: Path) -> Path:
    return Spec(model(), [kv("split.count", "[u64]", [3, 3])]).write(folder / "model-00001-of-00003.gguf")


def _named_only(folder: Path) -> Path:
    return Spec(model()).write(folder / "model-00001-of-00002.gguf")


SETS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "missing": (_missing, "1 of 3 shards are missing, first model-00003-of-00003.gguf"),
    "swapped": (_swapped, "00001-of-00003.gguf: the header says shard 2 of 3"),
    "renamed": (_renamed, "counts 3 shards, the name says 1 of 1"),
    "tensor in two shards": (_doubled, "'token_embd.weight' is in model-00001-of-00002.gguf too"),
    "number is an array": (_text_number, "split.count is no integer"),
    "named but not split": (_named_only, "counts 1 shards, the name says 1 of 2"),
    "count of tensors": (lambda folder: _shards(folder, total=7)[0], "hold 5 tensors, the first header counts 7"),
    "count of shards": (lambda folder: _shards(folder, count=2)[1], "shard 0 of 2"),
}


@pytest.mark.parametrize("fault", SETS)
def test_shards_that_do_not_belong_together_are_refused(tmp_path: Path, fault: str) -> None:
    make, match = SETS[fault]
    _refused(make(tmp_path), match)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.gguf")
    _refused(tmp_path / "m.gguf", r"m\.gguf: cannot be read \(no regular file\)")
