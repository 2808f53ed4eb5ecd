"""Offline checks of what makes nano's text: parsers, deduplication, excerpts, tokenizer and n-gram baseline.

Inputs are tiny and made here, but for the shipped tokenizer and held-out text under experiments/nano. Not covered: the downloads,
and whether the packages still hold the text that their sha256 pins.
"""

from __future__ import annotations

import json
import struct
import unicodedata
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from experiments.nano_training import corpus, extract, ngram_baseline
from experiments.nano_training import tokenizer as nano_tokenizer
from experiments.nano_training.sources import Document

NANO = Path(__file__).parents[1] / "experiments" / "nano"
HELDOUT = (NANO / "heldout.txt").read_text(encoding="utf-8")
TOKENIZER = Tokenizer.from_file(str(NANO / "tokenizer.json"))


def rdb_chunk(strings: list[tuple[int, bytes | None]], kind: int = 16, version: int = 3) -> bytes:
    """One chunk of an .rdb file as R writes it; strings are (flags, bytes), None for NA."""
    native = struct.pack(">i", 5) + b"UTF-8" if version == 3 else b""
    body = b"X\n" + struct.pack(">3i", version, 0x40201, 0x30500) + native + struct.pack(">Ii", kind, len(strings))
    for flags, raw in strings:
        body += struct.pack(">Ii", flags, -1 if raw is None else len(raw)) + (raw or b"")
    return struct.pack(">I", len(body)) + zlib.compress(body)


def test_rdb_reads_every_chunk_and_encoding() -> None:
    blob = rdb_chunk([(0x40009, b"EMMA"), (0x40009, b""), (0x8009, "café".encode())]) + rdb_chunk([(0x4009, "é".encode("latin-1")), (0x9, None)], version=2)
    assert extract.read_rdb(blob) == [["EMMA", "", "café"], ["é", ""]]


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (rdb_chunk([], kind=13), "not a character vector"),
        (b"\x00\x00\x00\x09" + rdb_chunk([])[4:], "header says 9"),
        (struct.pack(">I", 2) + zlib.compress(b"A\n"), "not an XDR"),
    ],
)
def test_rdb_refuses_what_it_does_not_know(blob: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        extract.read_rdb(blob)


def test_gutenberg_boilerplate_goes() -> None:
    text = (
        "Project Gutenberg's X\n*END*THE SMALL PRINT! FOR PUBLIC DOMAIN*\n"
        "*** START OF THIS PROJECT GUTENBERG EBOOK X ***\nACT I\n@@@@\nEnter.\n"
        "*** END OF THIS PROJECT GUTENBERG EBOOK X ***\nlicence"
    )
    assert extract.strip_gutenberg(text).strip() == "ACT I\nEnter."
    assert extract.strip_gutenberg("ACT I\nEnter.\nEnd of Project Gutenberg's X\nmore") == "ACT I\nEnter.\n"
    assert extract.strip_gutenberg("plain\ntext") == "plain\ntext"
    with pytest.raises(ValueError, match="boilerplate"):
        extract.strip_gutenberg("This Project Gutenberg file has no markers")


def test_normalise() -> None:
    assert extract.normalise("\ufeff\r\na\u0301  \r\n\n\n\n\n\nb") == "\u00e1\n\n\nb\n"


def test_bible_splits_by_book() -> None:
    printed = "\n1 Kings 1\n\n  1 Now king\nDavid was old\n\n1 Kings 2\n\n  1 And\n\nSong of Solomon 1\n\n  1 The song\n"
    books = extract.split_bible(printed)
    assert [name for name, _ in books] == ["1 Kings", "Song of Solomon"]
    assert books[0][1] == "1 Kings 1\n\n  1 Now king\nDavid was old\n\n1 Kings 2\n\n  1 And\n"
    with pytest.raises(ValueError, match="before the first heading"):
        extract.split_bible("stray\n" + printed)


def poem(line: str, title: str = "春曉") -> dict[str, object]:
    return {"title": title, "author": "孟浩然", "paragraphs": [line]}


def test_poems_with_editors_marks_go() -> None:
    clean = "春眠不覺曉，處處聞啼鳥。"
    records = [poem(clean, "春曉（題擬）"), *(poem(clean + mark) for mark in ("□", "[一作]", "（注）", "\ufffd", "1")), poem("  ")]
    (kept,) = extract.read_poems(records)
    assert kept.text == f"春曉\n孟浩然\n{clean}"
    assert kept.key == "春眠不覺曉處處聞啼鳥"


def test_dedupe_by_text_and_by_title() -> None:
    def work(title: str, text: str, source: str = "s") -> Document:
        return Document(f"{source}/{title}", "en", source, title, text=text)

    works = [work("The Tempest", "a"), work("Tempest", "b"), work("Lear", "a"), work("Lear", "c"), work("Lear", "d", "other")]
    assert [document.text for document in corpus.dedupe(works)] == ["a", "c", "d"]


def test_no_heldout_poem_in_train() -> None:
    def file(name: str, *lines: str) -> Document:
        return Document(name, "zh", "tang", name, poems=tuple(extract.read_poems([poem(line) for line in lines])))

    heldout, train = corpus.dedupe_poems([file("h", "床前明月光，")], [file("a", "床前明月光。", "春眠"), file("b", "春眠", "夜來")])
    assert [[p.key for p in d.poems] for d in heldout + train] == [["床前明月光"], ["春眠"], ["夜來"]]
    assert corpus.text_of(train[0]) == "春曉\n孟浩然\n春眠\n"
    # A variant that shares one long line goes; a short line shared by chance does not matter.
    line = "秋夜聞清梵，餘音逐海潮。"
    heldout, train = corpus.dedupe_poems([file("h", "床前", line)], [file("a", line + "春眠", "床前明"), file("b", line)])
    assert [len(d.poems) for d in heldout + train] == [2, 2, 0]


@given(st.lists(st.text("abc 春\n", max_size=60), max_size=30))
def test_excerpts_are_contiguous_and_bounded(paragraphs: list[str]) -> None:
    text = "\n\n".join(paragraphs)
    at = 0
    for piece in corpus.excerpts(text, low=50, high=100):
        assert len(piece.encode()) <= 100
        at = text.index(piece, at) + len(piece)


def test_spread_and_interleave() -> None:
    assert corpus.spread(list("abcdefghij"), 2) == ["c", "h"]
    assert corpus.spread(["long"], 3) == []
    assert corpus.interleave([["a1", "a2", "a3", "a4"], ["b1", "b2"]]) == ["a1", "b1", "a2", "a3", "b2", "a4"]


def test_shipped_heldout_text() -> None:
    pieces = HELDOUT.split(corpus.SEPARATOR)
    assert pieces.pop() == "" and len(HELDOUT.encode()) <= 400_000
    assert all(2_000 <= len(piece.encode()) <= 6_000 and "<|" not in piece for piece in pieces)
    assert unicodedata.is_normalized("NFC", HELDOUT) and "\r" not in HELDOUT
    chinese = sum(len(piece.encode()) for piece in pieces if "\u4e00" <= piece[0] <= "\u9fff")
    assert 0.25 < chinese / len(HELDOUT.encode()) < 0.35
    start = HELDOUT.encode()[:20_000].decode(errors="ignore")
    assert "Sir Walter" in start and "VIOLA" in start and "。" in start


def test_tokenizer_shape() -> None:
    assert TOKENIZER.get_vocab_size() == nano_tokenizer.VOCAB_SIZE == 2560
    assert TOKENIZER.token_to_id(nano_tokenizer.EOS) == 0
    ids = TOKENIZER.encode(HELDOUT).ids
    assert ids.count(0) == HELDOUT.count(corpus.SEPARATOR) and max(ids) < 2560
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == HELDOUT
    assert [TOKENIZER.decode([i]) for i in TOKENIZER.encode("2026").ids] == ["2", "0", "2", "6"]


# Unassigned characters are left out: NFC of those that a later Unicode assigns differs between Python and the library.
@given(st.text(st.characters(exclude_categories=("Cs", "Cn"))).filter(lambda s: nano_tokenizer.EOS not in s))
def test_tokenizer_loses_nothing_but_the_normal_form(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text).ids) == unicodedata.normalize("NFC", text)


def test_every_byte_has_a_token() -> None:
    vocabulary = TOKENIZER.get_vocab()
    assert all(symbol in vocabulary for symbol in pre_tokenizers.ByteLevel.alphabet())


def test_encode_documents_and_sample(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    rows = [{"lang": "en", "text": "one line\n" * 640}, {"lang": "zh", "text": "春眠\n"}]
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    first, second = nano_tokenizer.encode_documents(path, TOKENIZER, characters=2000)
    assert first.dtype == np.uint16 and np.count_nonzero(first == 0) == 3 and np.count_nonzero(second == 0) == 1
    text = TOKENIZER.decode(first.tolist(), skip_special_tokens=False)
    assert text.replace(f"{nano_tokenizer.EOS}\n", "") == "one line\n" * 640 + "\n"
    assert TOKENIZER.decode(second.tolist()) == "春眠\n\n\n"
    english, chinese = list(nano_tokenizer.balanced_sample(path, budget=9 * 64)), "春眠\n"
    assert english == ["one line\n" * 64, chinese]


@given(st.text(alphabet="ab\n", max_size=200), st.integers(1, 50))
def test_cutting_loses_nothing_and_cuts_at_line_ends(text: str, characters: int) -> None:
    pieces = nano_tokenizer.cut(text, characters).split(f"\n{nano_tokenizer.EOS}\n")
    assert "\n".join(pieces) == text
    assert all(len(piece) >= characters for piece in pieces[:-1])


def test_tokenizer_training_needs_enough_text() -> None:
    assert nano_tokenizer.train(["aa ab aa ab"], vocab_size=259).token_to_id(nano_tokenizer.EOS) == 0
    with pytest.raises(ValueError, match="too small"):
        nano_tokenizer.train(["aa"], vocab_size=2560)


STREAM = st.lists(st.integers(0, 6), min_size=5, max_size=80)


@given(STREAM, st.lists(st.integers(0, 6), max_size=6), st.integers(1, 5))
def test_ngram_sums_to_one_and_agrees_with_logprobs(stream: list[int], context: list[int], order: int) -> None:
    model = ngram_baseline.fit(stream, order, vocab_size=7)
    p = model.distribution(context)
    assert p.min() > 0 and p.sum() == pytest.approx(1.0, abs=1e-12)
    for i in range(7):
        assert model.logprobs([*context, i])[-1] == pytest.approx(np.log(p[i]), abs=1e-12)


def test_ngram_matches_a_hand_computed_case() -> None:
    # Ids 0 1 0 1 0 2: bigrams 01 x2, 10 x2, 02 x1. n1 = 1, n2 = 2, no n3: one discount D = n1 / (n1 + 2 n2) = 1/5.
    # Continuation counts: 0 after {1}, 1 after {0}, 2 after {0}: all 1. n1 = 3, no n2: D = 1/2; p1 = (1 - 1/2) / 3 + 1/2 * 1/4.
    model = ngram_baseline.fit([0, 1, 0, 1, 0, 2], order=2, vocab_size=4)
    seen, unseen = 1 / 6 + 1 / 8, 1 / 8
    assert model.distribution([]) == pytest.approx([seen, seen, seen, unseen])
    # Context 0: three tokens, two kinds; back-off weight 2 D / 3 = 2/15.
    assert model.distribution([0]) == pytest.approx([2 / 15 * seen, 1.8 / 3 + 2 / 15 * seen, 0.8 / 3 + 2 / 15 * seen, 2 / 15 * unseen])
    # Context 3 was never seen: the unigram alone.
    assert model.distribution([3]) == pytest.approx(model.distribution([]))
    assert model.logprobs([0, 1]) == pytest.approx(np.log([seen, 1.8 / 3 + 2 / 15 * seen]))
    # One order alone: raw counts 3, 2, 1; n1 = n2 = 1: D = 1/3.
    assert ngram_baseline.fit([0, 1, 0, 1, 0, 2], 1, 4).distribution([])[0] == pytest.approx((3 - 1 / 3) / 6 + 1 / 6 * 1 / 4)


def test_modified_discounts() -> None:
    # n1..n4 = 4, 3, 2, 1: Y = 4 / 10; D = 1 - 0.6, 2 - 0.8, 3 - 0.8.
    counts = np.array([1] * 4 + [2] * 3 + [3] * 2 + [4])
    assert ngram_baseline.discounts(counts) == pytest.approx([0.0, 0.4, 1.2, 2.2])


def test_ngram_backs_off_to_the_longest_known_context() -> None:
    model = ngram_baseline.fit([0, 1, 2, 3, 4] * 20, order=5, vocab_size=8)
    assert model.distribution([7, 7, 2, 3]) == pytest.approx(model.distribution([2, 3]))
    assert model.distribution([2, 3]).argmax() == 4
    # Ids near the limits of the packing keep apart.
    top = nano_tokenizer.VOCAB_SIZE - 1
    assert ngram_baseline.fit([top] * 9 + [0]).distribution([top] * 4).argmax() == top


@pytest.mark.parametrize(("ids", "order"), [([0, 9], 1), ([0], 2), ([0] * 9, 6)])
def test_ngram_refuses_bad_input(ids: list[int], order: int) -> None:
    with pytest.raises(ValueError):
        ngram_baseline.fit(ids, order, vocab_size=9)
    with pytest.raises(ValueError, match="outside"):
        ngram_baseline.fit([0] * 9, 1, vocab_size=9).logprobs([9])
