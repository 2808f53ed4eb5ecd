"""Train nano's tokenizer and encode its corpus: `python -m experiments.nano_training.tokenizer --corpus .cache/nano_corpus
--out experiments/nano`.

What: a byte-level BPE of 2560 ids with Qwen's way of pre-splitting (single digits, letters with their marks) and NFC, written as
Hugging Face's `tokenizer.json`, and the corpus as uint16 ids. Why 2560: embeddings of a model this small would otherwise outweigh
its layers; all 256 bytes are in the alphabet, so any text can be encoded, most Chinese characters as two or three tokens.
Not proved: that these merges suit text other than English classics and classical Chinese.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCAB_SIZE = 2560
EOS = "<|endoftext|>"
"""The only special token; it gets id 0."""

PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Qwen's pre-split: contractions, words with marks and at most one leading character, single digits, punctuation, blanks."""


def train(texts: Iterator[str] | Sequence[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """Train a byte-level BPE on `texts`, with exactly `vocab_size` ids (`EOS`, the 256 bytes, then merges).

    Raises ValueError where the texts are too small for that many merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            # The split above is the only one; ByteLevel only maps bytes to printable characters.
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"{tokenizer.get_vocab_size()} ids, wanted {vocab_size}: the sample is too small")
    return tokenizer


def read_documents(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the documents of a JSON-lines file that `corpus` wrote."""
    with open(path, encoding="utf-8") as stream:
        yield from map(json.loads, stream)


def balanced_sample(path: Path, budget: int = 4_000_000) -> Iterator[str]:
    """Yield text from a corpus file with about `budget` UTF-8 bytes per language, spread over all documents.

    A language with more text gives an equal share of each document's lines, so that merges are not decided by its size alone.
    """
    documents = [(document["lang"], document["text"]) for document in read_documents(path)]
    for lang in sorted({lang for lang, _ in documents}):
        texts = [text for other, text in documents if other == lang]
        share = min(1.0, budget / sum(len(text.encode()) for text in texts))
        for text in texts:
            lines = text.splitlines(keepends=True)
            # Blocks of 64 lines, so that sentences across line ends stay whole; a block is taken where the share crosses an integer.
            for block in range(0, len(lines), 64):
                number = block // 64
                if int((number + 1) * share) > int(number * share):
                    yield "".join(lines[block : block + 64])


PIECE_CHARACTERS = 4000
"""Training works are cut into excerpts of about this size, separated as in heldout.txt; whole works would show the model almost no EOS."""


def cut(text: str, characters: int) -> str:
    """`text` with a separator line after the first line end past every `characters` characters."""
    pieces, start = [], 0
    while len(text) - start > characters and (end := text.find("\n", start + characters)) != -1:
        pieces.append(text[start:end])
        start = end + 1
    return f"\n{EOS}\n".join([*pieces, text[start:]])


def encode_documents(path: Path, tokenizer: Tokenizer, characters: int = PIECE_CHARACTERS) -> list[npt.NDArray[np.uint16]]:
    """Ids of each document of a JSON-lines file in order, cut into excerpts, each document ended by a separator as well."""
    return [np.array(tokenizer.encode(cut(d["text"], characters) + f"\n{EOS}\n", add_special_tokens=False).ids, dtype=np.uint16) for d in read_documents(path)]


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: train, write tokenizer.json and the encoded corpus, and print bytes per token by language."""
    parser = argparse.ArgumentParser(description="Train nano's tokenizer and encode its corpus.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder that `corpus` wrote")
    parser.add_argument("--out", type=Path, required=True, help="folder for tokenizer.json")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train(balanced_sample(args.corpus / "train.jsonl"))
    tokenizer.save(str(args.out / "tokenizer.json"))
    print(f"vocabulary {tokenizer.get_vocab_size()}, {EOS} = {tokenizer.token_to_id(EOS)}")
    for name in ("train", "heldout"):
        encoded = encode_documents(args.corpus / f"{name}.jsonl", tokenizer)
        np.save(args.corpus / f"{name}.u16.npy", np.concatenate(encoded))
        counts: dict[str, list[int]] = {}
        for document, ids in zip(read_documents(args.corpus / f"{name}.jsonl"), encoded, strict=True):
            total = counts.setdefault(document["lang"], [0, 0, 0])
            for i, amount in enumerate((1, len(document["text"].encode()), len(ids))):
                total[i] += amount
        for lang, (documents, size, tokens) in sorted(counts.items()):
            print(f"{name} {lang}: {documents} documents, {size} B, {tokens} tokens, {size / tokens:.3f} B/token")


if __name__ == "__main__":
    main()
