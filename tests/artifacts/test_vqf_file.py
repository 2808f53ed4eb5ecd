"""Directories and data: offsets, overlaps, types, lengths against geometry, missing tensors and checksums, each refused by name; traps of the format."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lab.artifacts.vqf_file import VqfFile
from lab.artifacts.vqf_fnv import fnv1a, in_numpy
from lab.errors import LabError
from tests.artifacts.vqf_files import LAYERS, Spec, dual, fnv, one_thread, q4, random_weights, spec  # noqa: F401

BASE = q4()


def entry_of(content: bytes, name: str) -> int:
    return content.index(name.encode() + b"\0", 448)


def with_entry(name: str, at: int, form: str, *values: int, base: Spec = BASE) -> bytes:
    content = base.content()
    start = entry_of(content, name) + at
    new = struct.pack("<" + form, *values)
    return content[:start] + new + content[start + len(new) :]


def offset_of(name: str) -> int:
    content = BASE.content()
    return int(struct.unpack_from("<Q", content, entry_of(content, name) + 48)[0])


END = len(BASE.content()) - 8

REFUSED = [
    (with_entry("q4_k", 48, "Q", offset_of("q4_k") + 32), "tensor 'q4_k' begins at byte .*, no multiple of 64"),
    (with_entry("q4_k", 48, "Q", 2**63), "tensor 'q4_k' ends at byte 9223372036854.*, behind the end of the data"),
    (with_entry("q4_lm", 48, "Q", END), "tensor 'q4_lm' ends at byte"),
    (with_entry("q4_lm", 56, "Q", 2**64 - 1), "tensor 'q4_lm' ends at byte"),
    (with_entry("q4_lm", 56, "Q", 0), "tensor 'q4_lm' has no bytes"),
    (with_entry("q4_k", 48, "Q", 448), "tensor 'q4_k' begins at byte 448, before the data at 4096"),
    (with_entry("q4_k", 48, "Q", offset_of("q4_q") + 64), "tensors 'q4_q' and 'q4_k' overlap at byte"),
    (with_entry("q4_v", 48, "Q", offset_of("q4_k")), "tensors 'q4_[kv]' and 'q4_[kv]' overlap"),
    (with_entry("q4_k", 32, "I", 6), "tensor 'q4_k' has qtype 6; known: 1 F32, 2 Q8_0, 3 Q4_0, 4 Q4_8X8L, 5 F16"),
    (with_entry("q4_k", 32, "I", 2), "tensor 'q4_k' has qtype 2, expected 3"),
    (with_entry("token_embed", 32, "I", 1), "tensor 'token_embed' has qtype 1, expected 5"),
    (with_entry("q4_k", 56, "Q", 64), r"tensor 'q4_k' has 64 bytes, the header's sizes \[3, 64, 96\] make 10368"),
    (with_entry("q4_k", 0, "4s", b"q4_q"), "tensor 'q4_q' is in the directory twice"),
    (with_entry("q4_k", 0, "4s", b"q\n_k"), "entry 7 of the directory has the name"),
    (with_entry("q4_k", 0, "4s", b"\0\0\0\0"), "entry 7 of the directory has the name"),
    (with_entry("q4_k", 0, "8s", b"q4_k\0xyz"), "expected printable ASCII and zeros behind it"),
    (with_entry("q4_k", 0, "4s", b"\xff4_k"), "entry 7 of the directory has the name"),
    (BASE.without("q4_up", "k_norm").content(), "2 tensors are missing, first k_norm"),
    (BASE.without("token_embed").content(), "1 tensor is missing, first token_embed"),
    (BASE.without(*(f"q4_{k}" for k in ("q", "k", "v", "o", "gate", "up", "down", "lm"))).content(), "neither q8_ nor q4_ matrices"),
    (dual().without("q8_down").content(), "1 tensor is missing, first q8_down"),
    (spec(random_weights(mixture=True), [("q4", "Q4_0", "4X4")], mixture=True).without("moe_router").content(), "1 tensor is missing, first moe_router"),
    (replace(BASE, words={**BASE.words, 16: 100}).content(), r"tensor 'token_embed' has .* bytes, the header's sizes"),
    (replace(BASE, words={**BASE.words, 20: 4}).content(), r"tensor 'attn_norm' has 1152 bytes, the header's sizes \[4, 96\] make 1536"),
    (replace(BASE, words={**BASE.words, 36: 2**31 - 1}).content(), "tensor q4_down: rows of 2147483647 weights are no whole blocks of 32|'q4_gate' has"),
    (replace(BASE, flags=0x3).content(), "tensor 'token_embed' has qtype 5, expected 1"),
]


@pytest.mark.parametrize(("content", "message"), REFUSED, ids=[f"{i}-{m[:40]}" for i, (_, m) in enumerate(REFUSED)])
def test_lies_are_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.vqf"
    path.write_bytes(content)
    with pytest.raises(LabError, match=message) as caught:
        VqfFile(path)
    assert str(caught.value).startswith(f"{path}: ") and len(str(caught.value).splitlines()) == 1 and len(str(caught.value)) < len(str(path)) + 300


def test_rows_and_cols_of_the_directory_mean_nothing(tmp_path: Path) -> None:
    """The files of these tests have 0, 7 and 2**32 - 1 there; Kestrel writes L*Q x dim for o, whose stored matrix is [dim, Q]."""
    file = VqfFile(BASE.write(tmp_path / "m.vqf"))
    assert file.planned["q4_o"].shape == (LAYERS, 96, 128) and file.entries["q4_o"].rows == 0 and file.entries["attn_norm"].cols == 2**32 - 1
    assert len(file.layer("q4_o", 2)) == 96 * 128 // 32 * 18
    with pytest.raises(LabError, match="tensor 'q4_o': no layer 3, the file has 3"):
        file.layer("q4_o", 3)
    with pytest.raises(LabError, match="no tensor 'q8_o'"):
        file.raw("q8_o")


def test_layers_lie_one_after_the_other(tmp_path: Path) -> None:
    file = VqfFile(BASE.write(tmp_path / "m.vqf"))
    data = {name: content for name, _, _, _, content in BASE.tensors}
    assert b"".join(file.layer("q4_down", i).tobytes() for i in range(LAYERS)) == data["q4_down"] == file.raw("q4_down").tobytes()
    assert not file.raw("q4_down").flags.writeable


def test_unknown_tensors_are_named_and_left_alone(tmp_path: Path) -> None:
    file = VqfFile(replace(BASE, tensors=[*BASE.tensors, ("q9_new", 3, 1, 1, b"x" * 70)]).write(tmp_path / "m.vqf"))
    assert file.unknown == ("q9_new",) and file.raw("q9_new").tobytes() == b"x" * 70
    with pytest.raises(LabError, match="its shape is not known"):
        file.shape("q9_new")


@pytest.mark.parametrize("where", ["directory", "first", "pad", "last", "trailer"])
def test_damage_is_found_by_the_checksum(tmp_path: Path, where: str) -> None:
    content = bytearray(BASE.content())
    norms = offset_of("final_norm")
    at = {"directory": entry_of(bytes(content), "q4_k") + 36, "first": 4096, "pad": norms - 64 + 63, "last": END - 1, "trailer": END + 3}[where]
    content[at] ^= 0x10
    path = tmp_path / "m.vqf"
    path.write_bytes(content)
    with pytest.raises(LabError, match=r"checksum \(FNV-1a\) is 0x[0-9a-f]{16}, the file says 0x[0-9a-f]{16}; damaged"):
        VqfFile(path).check_sum()


def test_header_fields_and_head_pad_are_not_covered(tmp_path: Path) -> None:
    """Kestrel's own tool edits max_seq_len (byte 44) in place."""
    content = bytearray(BASE.content())
    content[44:48] = struct.pack("<I", 4096)
    content[4095] = 1
    (tmp_path / "m.vqf").write_bytes(content)
    file = VqfFile(tmp_path / "m.vqf")
    assert file.check_sum() and file.header.arch.max_seq_len == 4096


def test_a_file_without_a_checksum_says_so(tmp_path: Path) -> None:
    assert VqfFile(replace(BASE, summed=False).write(tmp_path / "m.vqf")).check_sum() is False


def test_progress_counts_the_data(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    VqfFile(BASE.write(tmp_path / "m.vqf")).check_sum(lambda *step: seen.append(step))
    assert seen[-1][0] == seen[-1][1] == END - 4096


def test_a_file_can_be_read_again_after_its_pages_were_let_go(tmp_path: Path) -> None:
    file = VqfFile(BASE.write(tmp_path / "m.vqf"))
    before = file.raw("q4_q").tobytes()
    for start, stop in ((0, file.size), (4095, 4097), (file.size - 1, file.size), (9, 9)):
        file.forget(start, stop)
    assert file.raw("q4_q").tobytes() == before and file.check_sum()


@pytest.mark.parametrize("fnv1a", [fnv1a, in_numpy], ids=["native where it is there", "in NumPy"])
def test_fnv_equals_its_definition_and_the_published_values(fnv1a: Callable[..., int]) -> None:
    for text, expected in ((b"", 0xCBF29CE484222325), (b"a", 0xAF63DC4C8601EC8C), (b"foobar", 0x85944171F73967E8)):  # draft-eastlake-fnv, test vectors
        assert fnv1a(np.frombuffer(text, np.uint8)) == expected
    chance = random.Random(5)
    for size in (1, 2, 7, 255, 65535, 65536, 65537, 150_001):
        data = chance.randbytes(size)
        array = np.frombuffer(data, np.uint8)
        cut = chance.randrange(size + 1)
        assert fnv1a(array) == fnv(data) == fnv1a(array[cut:], fnv1a(array[:cut]))
    assert fnv1a(np.full(70_000, 255, np.uint8)) == fnv(b"\xff" * 70_000) and fnv1a(np.zeros(70_000, np.uint8)) == fnv(bytes(70_000))
