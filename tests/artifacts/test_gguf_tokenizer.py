"""Token ids equal llama.cpp's, by golden files and, where it is installed, by random text; and a header that does not hold is one line.

Why three vocabularies: nano's is a real one; one of random byte pairs moves its tokens with every border between pieces; one with gaps lacks bytes.
"""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from lab.artifacts.gguf import open_gguf
from lab.artifacts.gguf_metadata import Metadata
from lab.artifacts.gguf_tokenizer import SPLITS, read_tokenizer, tokenizer_facts
from lab.errors import LabError
from tests.artifacts.gguf_models import NANO_TOKENIZER, VOCABULARIES, Vocabulary, nano_vocabulary, write_vocabulary
from tests.artifacts.make_golden_tokens import ALIASES, GOLDEN, LlamaTokenizer, digest

HELDOUT = NANO_TOKENIZER.with_name("heldout.txt")
GOLDEN_DATA = json.loads(GOLDEN.read_text(encoding="utf-8"))
CASES = {f"{case['vocabulary']}-{case['pre']}": case for case in GOLDEN_DATA["cases"]}
SMALL = Vocabulary(["a", "b", "ab", "<|endoftext|>"], [1, 1, 1, 3], ["a b"])


@pytest.fixture(scope="module")
def header(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Metadata]:
    """The metadata of a file with a vocabulary, its pre-tokeniser replaced."""

    @cache
    def written(name: str) -> Path:
        return write_vocabulary(tmp_path_factory.mktemp("vocabulary") / f"{name}.gguf", "default", VOCABULARIES[name]())

    def with_pre(name: str, pre: str) -> Metadata:
        metadata = Metadata(open_gguf(written(name)))
        metadata.values = {**metadata.values, "tokenizer.ggml.pre": pre}
        return metadata

    return with_pre


def test_the_golden_vocabularies_are_made_again_the_same() -> None:
    assert {name: digest(make()) for name, make in VOCABULARIES.items()} == GOLDEN_DATA["vocabularies"]
    assert {case["pre"] for case in CASES.values()} | set(ALIASES) == set(SPLITS)


@pytest.mark.parametrize("case", CASES)
def test_golden_tokens(case: str, header: Callable[[str, str], Metadata]) -> None:
    golden = CASES[case]
    metadata = header(golden["vocabulary"], golden["pre"])
    tokenizer = read_tokenizer(metadata)
    found = [tokenizer.encode(text, add_special_tokens=False).ids for text in GOLDEN_DATA["texts"]]
    for text, mine, theirs in zip(GOLDEN_DATA["texts"], found, golden["ids"], strict=True):
        assert mine == theirs, text
    assert tokenizer_facts(metadata)["add_bos"] is golden["adds_bos"]


@pytest.mark.parametrize(("alias", "pre"), ALIASES.items())
def test_other_names_of_the_same_rules(alias: str, pre: str, header: Callable[[str, str], Metadata]) -> None:
    """llama.cpp was asked for both when the golden file was made."""
    golden = CASES[f"nano-{pre}"]
    tokenizer = read_tokenizer(header("nano", alias))
    assert [tokenizer.encode(text, add_special_tokens=False).ids for text in GOLDEN_DATA["texts"]] == golden["ids"]


@pytest.mark.parametrize("pre", ["default", "llama-bpe", "qwen35", "smollm"])
def test_random_text_against_llama_cpp(pre: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    path = write_vocabulary(tmp_path / "v.gguf", pre, VOCABULARIES["nano"]())
    tokenizer, theirs = read_tokenizer(Metadata(open_gguf(path))), LlamaTokenizer(path)
    draw = random.Random(20)
    pools = [*GOLDEN_DATA["texts"][:-3], "".join(chr(c) for c in range(1, 0x800))]
    for _ in range(500):
        text = "".join("".join(draw.choices(draw.choice(pools), k=draw.randint(1, 6))) for _ in range(draw.randint(1, 10)))
        if all(unicodedata.category(c) != "Cn" for c in text):  # the two libraries' Unicode tables are of different years
            assert tokenizer.encode(text, add_special_tokens=False).ids == theirs.encode(text), repr(text)


def test_the_shipped_model_s_own_tokenizer_agrees(tmp_path: Path) -> None:
    """tokenizer.json of nano composes to NFC and is otherwise what llama.cpp calls qwen35."""
    path = write_vocabulary(tmp_path / "v.gguf", "qwen35", nano_vocabulary(extra=False))
    text = unicodedata.normalize("NFC", HELDOUT.read_text(encoding="utf-8"))
    mine, theirs = read_tokenizer(Metadata(open_gguf(path))), Tokenizer.from_file(str(NANO_TOKENIZER))
    assert mine.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False).ids
    assert mine.get_vocab() == theirs.get_vocab()


def test_text_comes_back(header: Callable[[str, str], Metadata]) -> None:
    for name in ("nano", "pairs"):
        tokenizer = read_tokenizer(header(name, "qwen35"))
        for text in GOLDEN_DATA["texts"]:
            assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def test_facts(tmp_path: Path) -> None:
    lies = {"tokenizer.ggml.add_bos_token": False, "tokenizer.ggml.add_eos_token": True, "tokenizer.ggml.bos_token_id": None}
    path = write_vocabulary(tmp_path / "v.gguf", "llama-bpe", VOCABULARIES["gaps"](), **lies)
    facts = tokenizer_facts(Metadata(open_gguf(path)))
    count = len(VOCABULARIES["gaps"]().tokens)
    expected = {"model": "gpt2", "pre": "llama-bpe", "tokens": count, "add_bos": False, "add_eos": True, "bos": None, "missing_bytes": 5}
    assert {**expected, "eos": VOCABULARIES["gaps"]().tokens.index("<|endoftext|>")} == facts


def test_an_empty_token_gets_llama_cpp_s_name(tmp_path: Path) -> None:
    vocabulary = Vocabulary([*SMALL.tokens, "", ""], [*SMALL.types, 1, 1], SMALL.merges)
    tokenizer = read_tokenizer(Metadata(open_gguf(write_vocabulary(tmp_path / "v.gguf", "gpt-2", vocabulary))))
    assert tokenizer.get_vocab() == {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3, "[EMPTY_4]": 4, "[EMPTY_5]": 5}


def test_of_a_doubled_merge_the_first_counts(tmp_path: Path) -> None:
    """The pair b, c comes before a, b for llama.cpp, which keeps the first rank of a pair."""
    vocabulary = Vocabulary(["a", "b", "c", "ab", "bc", "<|endoftext|>"], [1, 1, 1, 1, 1, 3], ["b c", "a b", "b c"])
    path = write_vocabulary(tmp_path / "v.gguf", "gpt-2", vocabulary)
    assert read_tokenizer(Metadata(open_gguf(path))).encode("abc").ids == [0, 4]


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "unknown pre": ({"tokenizer.ggml.pre": "tekken"}, "tokenizer.ggml.pre is 'tekken'; known: default, gpt-2"),
    "no pre": ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is missing"),
    "pre as a number": ({"tokenizer.ggml.pre": 7}, "tokenizer.ggml.pre is 7; expected a string"),
    "another model": ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'llama'; supported: gpt2"),
    "no model": ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is missing"),
    "no tokens": ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens is missing"),
    "tokens as numbers": ({"tokenizer.ggml.tokens": [1, 2]}, "tokenizer.ggml.tokens is a list of 2; expected a list of strings"),
    "a token twice": ({"tokenizer.ggml.tokens": ["a", "b", "ab", "a"]}, "tokenizer.ggml.tokens holds 'a' twice"),
    "no types": ({"tokenizer.ggml.token_type": None}, "tokenizer.ggml.token_type is missing"),
    "too few types": ({"tokenizer.ggml.token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 entries for 4 tokens"),
    "an unknown type": ({"tokenizer.ggml.token_type": [1, 1, 9, 1]}, "tokenizer.ggml.token_type holds 9; known: 1 to 6"),
    "types as text": ({"tokenizer.ggml.token_type": ["a"]}, "tokenizer.ggml.token_type is a list of 1; expected a list of whole numbers"),
    "no merges": ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges is missing"),
    "a merge of one": ({"tokenizer.ggml.merges": ["ab"]}, "tokenizer.ggml.merges holds 'ab'; expected two tokens and one space"),
    "a merge of three": ({"tokenizer.ggml.merges": ["a b b"]}, "tokenizer.ggml.merges holds 'a b b'; expected two tokens and one space"),
    "a merge of no token": ({"tokenizer.ggml.merges": ["a c"]}, "tokenizer.ggml.merges holds 'a c', but 'c' is no token"),
    "a merge into no token": ({"tokenizer.ggml.merges": ["b a"]}, "tokenizer.ggml.merges holds 'b a', but 'ba' is no token"),
    "bos too high": ({"tokenizer.ggml.bos_token_id": 4}, "tokenizer.ggml.bos_token_id is 4; expected 0 to 3"),
    "bos as text": ({"tokenizer.ggml.bos_token_id": "a"}, "tokenizer.ggml.bos_token_id is 'a'; expected a whole number"),
    "add_bos as a number": ({"tokenizer.ggml.add_bos_token": 1}, "tokenizer.ggml.add_bos_token is 1; expected true or false"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_does_not_hold_is_one_line(lie: str, tmp_path: Path) -> None:
    values, message = LIES[lie]
    path = write_vocabulary(tmp_path / "v.gguf", "gpt-2", SMALL, **values)
    with pytest.raises(LabError) as found:
        metadata = Metadata(open_gguf(path))
        read_tokenizer(metadata)
        tokenizer_facts(metadata)
    assert str(found.value).startswith(f"{path}: {message}") and "\n" not in str(found.value)
