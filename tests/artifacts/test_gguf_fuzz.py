"""Mutated headers: each opens as a file whose tensors lie inside it, or is refused in one line; nothing else may happen, and nothing large be allocated.

A few thousand here; GGUF_FUZZ=100000 in the environment runs that many. The mutations are seeded, so that a failure names a number to run again.
"""

from __future__ import annotations

import os
import random
import struct
import tracemalloc
from pathlib import Path

import pytest

from lab.artifacts.gguf_file import GgufFile
from lab.errors import LabError
from tests.artifacts.gguf_files import TABLE, Spec, kv, model, split

COUNT = int(os.environ.get("GGUF_FUZZ", "3000"))
SLICES = 4  # the runs are cut in four, so that a failure shows early
_MOST_BYTES = 1 << 20  # peak allocation while a file of about 10 kB is opened

_VALUES = [
    kv("general.architecture", "str", "qwen4exp"),
    kv("general.alignment", "u32", 32),
    kv("tokenizer.tokens", "[str]", ["a", "bc", "", "def"]),
    kv("tokenizer.scores", "[f32]", [0.5, 1.0]),
    kv("x.flag", "bool", True),
    kv("x.size", "u64", 2**33),
]
SEEDS = [Spec(model(), _VALUES), *split([model()[:-1], [TABLE]]), Spec(model()[:2], alignment=64, values=[kv("general.alignment", "u32", 64)])]
NUMBERS = [0, 1, 2, 7, 8, 9, 31, 32, 33, 42, 63, 64, 255, 256, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**60, 2**63 - 1, 2**63, 2**64 - 1]


def mutated(content: bytes, header: int, chance: random.Random) -> bytes:
    """One to three changes: a bit, a byte, a 4- or 8-byte number, bytes cut out or put in, a piece copied elsewhere, the end cut off."""
    out = bytearray(content)
    for _ in range(chance.randint(1, 3)):
        at, kind = chance.randrange(min(header, len(out) - 8)), chance.randrange(8)
        if kind == 0:
            out[at] ^= 1 << chance.randrange(8)
        elif kind == 1:
            out[at] = chance.randrange(256)
        elif kind == 2:
            out[at : at + 8] = struct.pack("<Q", chance.choice(NUMBERS))
        elif kind == 3:
            out[at : at + 4] = struct.pack("<I", chance.choice(NUMBERS) & 0xFFFFFFFF)
        elif kind == 4:
            del out[at : at + chance.randint(1, 40)]
        elif kind == 5:
            out[at:at] = chance.randbytes(chance.randint(1, 40))
        elif kind == 6:
            source, length = chance.randrange(header), chance.randint(1, 40)
            out[at : at + length] = content[source : source + length]
        else:
            del out[chance.randint(16, len(out)) :]
        if len(out) < 16:
            break
    return bytes(out)


@pytest.mark.parametrize("part", range(SLICES))
def test_mutated_headers(tmp_path: Path, part: int) -> None:
    path, opened, refused = tmp_path / "m.gguf", 0, 0
    bases = [(spec.content(), len(spec.header())) for spec in SEEDS]
    tracemalloc.start()
    try:
        for number in range(part * COUNT // SLICES, (part + 1) * COUNT // SLICES):
            chance = random.Random(number)
            content = mutated(*chance.choice(bases), chance)
            path.write_bytes(content)
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                file = GgufFile(path)
            except LabError as error:
                refused += 1
                line = str(error)
                assert line.startswith(f"{path}: ") and len(line.splitlines()) == 1 and len(line) < len(str(path)) + 600, f"mutation {number}"
            else:
                opened += 1
                assert all(t.offset + t.nbytes <= len(content) and file.raw(name).nbytes == t.nbytes for name, t in file.tensors.items()), f"mutation {number}"
            assert tracemalloc.get_traced_memory()[1] - before < _MOST_BYTES, f"mutation {number}"
    finally:
        tracemalloc.stop()
    assert refused > opened > 0  # the mutations reach both ends
