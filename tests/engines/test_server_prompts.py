"""Prompts: about 512 tokens long, new from their first letter on, and made of the text."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from lab.engines.server.prompts import PromptMaker, held_out_text
from lab.errors import LabError
from tests.engines.helpers import words
from tests.runner_helpers import ROOT

NANO = ROOT / "experiments" / "nano"


def test_with_a_tokenizer_lengths_are_near_exact() -> None:
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    maker = PromptMaker(held_out_text(NANO / "heldout.txt"), 512, lambda text: len(tokenizer.encode(text)))
    lengths = [len(tokenizer.encode(maker.fresh())) for _ in range(80)]
    assert all(abs(n - 512) <= 5 for n in lengths), lengths


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(600, 3000))
def test_prompts_begin_anew_go_on_in_the_text_and_take_over_the_servers_ratio(seed: int, count: int) -> None:
    text = words(count, seed)
    maker = PromptMaker(text, 512, salt=random.Random(seed))
    first = maker.fresh()
    maker.learn(first, len(first.split()))
    prompts = [first, *(maker.fresh() for _ in range(5))]
    assert len({prompt[:6] for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        head, body = prompt.split(". ", 1)
        assert len(head.split()) == 6
        assert set(body.split()[:-1]) <= {*text.split(), text.split()[-1] + text.split()[0]} | {word[k:] for word in text.split() for k in range(6)}
    assert all(abs(len(prompt.split()) - 512) <= 25 for prompt in prompts[1:])
    bodies = [prompt.split(". ", 1)[1][:60] for prompt in prompts]
    assert bodies[0] != bodies[1]


def test_two_processes_begin_their_prompts_differently() -> None:
    first, second = (PromptMaker(words(1000), 512).fresh() for _ in range(2))
    assert first[:12] != second[:12]
    assert first[60:400] == second[60:400]


def test_a_text_too_short_or_unreadable_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"model\.corpus: 5 characters are too few"):
        PromptMaker("short", 512)
    with pytest.raises(LabError, match=r"model\.corpus\) cannot be read"):
        held_out_text(tmp_path / "none.txt")
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(LabError, match="cannot be read"):
        held_out_text(binary)


def test_separators_of_documents_are_no_text() -> None:
    assert "endoftext" not in PromptMaker(f"{words(600)}\n<|endoftext|>\n{words(600, 1)}", 512).body
