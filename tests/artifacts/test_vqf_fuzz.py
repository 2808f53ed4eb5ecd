"""Mutated headers and directories: each file opens with every tensor inside it, or is refused in one line; nothing else, and no large allocation.

A few thousand here, of files written by hand and by the writer; `python -m experiments.vqf_fuzz` runs hundreds of thousands. Mutations are numbered, so
that a failure names one to run again.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.vqf_fuzz import fuzz, mutated, small_files
from lab.artifacts.vqf_file import VqfFile
from lab.artifacts.vqf_header import HEADER_BYTES, read_header
from lab.errors import LabError
from tests.artifacts.vqf_files import one_thread, q4, random_weights, spec  # noqa: F401

REAL = q4().content()
COUNT = int(os.environ.get("VQF_FUZZ", "3000"))


@pytest.mark.parametrize("part", range(3))
def test_mutated_files(tmp_path: Path, part: int) -> None:
    bases = small_files(tmp_path)
    outcome = fuzz(bases, tmp_path, part * COUNT // 3, COUNT // 3)
    assert outcome.refused > outcome.opened > 0 and len(outcome.reasons) > 15  # the mutations reach both ends and most checks


def test_mutated_files_written_by_hand(tmp_path: Path) -> None:
    bases = [q4(legacy=True).content(), spec(random_weights(mixture=True), [("q8", "Q8_0", "8X8")], mixture=True).content()]
    outcome = fuzz(bases, tmp_path, 10**6, 200)
    assert outcome.opened + outcome.refused == 200


def test_a_mutation_is_its_number() -> None:
    base = q4().content()
    assert mutated(base, random.Random(5)) == mutated(base, random.Random(5)) != mutated(base, random.Random(6))


@settings(max_examples=300, deadline=None)
@given(data=st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES), size=st.integers(0, 2**64), keep=st.integers(0, 4))
def test_any_bytes_as_a_header_are_one_line(data: bytes, size: int, keep: int) -> None:
    """`keep` words of a real header lie before them, so that later checks are reached too."""
    data = REAL[: 4 * keep] + data[4 * keep :]
    try:
        read_header(Path("m.vqf"), data, size)
    except LabError as error:
        assert str(error).startswith("m.vqf: ") and len(str(error).splitlines()) == 1


def test_a_file_of_which_only_the_header_is_there_is_truncated(tmp_path: Path) -> None:
    content = q4().content()
    for end in (512, 1000, 4096, 4097, len(content) - 9, len(content) - 8):
        (tmp_path / "m.vqf").write_bytes(content[:end])
        with pytest.raises(LabError, match="bytes are missing; truncated"):
            VqfFile(tmp_path / "m.vqf")
