"""An n-gram model over nano's token ids: `python -m experiments.nano_training.ngram_baseline --corpus .cache/nano_corpus`.

What: interpolated modified Kneser-Ney (Chen and Goodman 1999, "An empirical study of smoothing techniques for language modeling",
section 3) up to order 5, in numpy. Why: it is the strongest thing that only counts, so it is the bar that a trained network must
clear on the same ids and text. Not proved: that it is the best n-gram model (no pruning, caching or tuned discounts), nor anything
about text unlike the corpus.

The stream of ids is one sequence: n-grams cross `EOS` and document ends, in training and in scoring alike.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from experiments.nano_training.tokenizer import EOS, VOCAB_SIZE

BITS = 12
"""Bits per id in a packed n-gram: 2560 < 2^12, so five ids fit an int64 (60 bits), the oldest id highest."""
MAX_ORDER = 5

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Level:
    """One order of the model: sorted packed n-grams with their discounted share of the context, and the contexts' back-off weights."""

    grams: Ints
    share: Floats
    contexts: Ints
    backoff: Floats


def pack(ids: npt.ArrayLike, order: int) -> Ints:
    """Return the packed n-grams of a sequence, by position of their last id; empty where it is shorter than `order`."""
    stream = np.asarray(ids, dtype=np.int64)
    count = max(len(stream) - order + 1, 0)
    packed = np.zeros(count, dtype=np.int64)
    for i in range(order):
        packed = (packed << BITS) | stream[i : i + count]
    return packed


def discounts(counts: Ints) -> Floats:
    """Return the discounts [0, D1, D2, D3+] from the counts of counts (Chen and Goodman's estimates).

    Toy data lack some count of counts; then one absolute discount n1 / (n1 + 2 n2) serves for all, 0.5 where there is no n1 or it
    would be 1 (which would leave nothing for what was seen).
    """
    n1, n2, n3, n4 = (float(np.count_nonzero(counts == i)) for i in range(1, 5))
    if min(n1, n2, n3, n4) > 0:
        y = n1 / (n1 + 2 * n2)
        estimates = [0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3]
        # Never zero: a context without a discount would give what it has not seen probability 0.
        return np.minimum(np.maximum(estimates, [0.0, 0.05, 0.05, 0.05]), [0.0, 1.0, 2.0, 3.0])
    single = n1 / (n1 + 2 * n2) if n1 and n2 else 0.5
    return np.array([0.0, single, single, single])


def _level(grams: Ints, counts: Ints) -> Level:
    """Build one order from sorted distinct n-grams and their (raw or continuation) counts."""
    taken = discounts(counts)[np.minimum(counts, 3)]
    # Sorted n-grams have sorted contexts, so each context is one run.
    contexts, start = np.unique(grams >> BITS, return_index=True)
    total = np.add.reduceat(counts, start)
    lengths = np.diff(start, append=len(grams))
    return Level(
        grams=grams,
        share=(counts - taken) / np.repeat(total, lengths),
        contexts=contexts,
        backoff=np.add.reduceat(taken, start) / total,
    )


def _find(sorted_keys: Ints, queries: Ints) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """Index of each query in `sorted_keys` (0 where absent) and whether it is there."""
    at = np.minimum(np.searchsorted(sorted_keys, queries), len(sorted_keys) - 1)
    hit = sorted_keys[at] == queries
    return np.where(hit, at, 0), hit


@dataclass(frozen=True)
class NgramModel:
    """A fitted model: `levels[k]` holds order k + 1; below order 1 stands the uniform distribution over `vocab_size` ids."""

    levels: tuple[Level, ...]
    vocab_size: int

    @property
    def order(self) -> int:
        """The length of the longest n-gram."""
        return len(self.levels)

    def logprobs(self, ids: npt.ArrayLike) -> Floats:
        """Return ln p of each id given those before it in `ids`, in nats.

        The first id is scored without a context, the second with one id, and so on: no token is skipped.
        Raises ValueError on ids outside the vocabulary.
        """
        stream = np.asarray(ids, dtype=np.int64)
        if len(stream) and not 0 <= stream.min() <= stream.max() < self.vocab_size:
            raise ValueError(f"ids outside 0..{self.vocab_size - 1}")
        p = np.full(len(stream), 1.0 / self.vocab_size)
        for k, level in enumerate(self.levels, start=1):
            if len(stream) < k:
                break
            p[k - 1 :] = self._interpolate(level, pack(stream, k), p[k - 1 :])
        logs: Floats = np.log(p)
        return logs

    def distribution(self, context: Sequence[int]) -> Floats:
        """Return p(id | context) for all ids of the vocabulary; at most the last `order` - 1 ids of the context count."""
        context = list(context)[max(len(context) - self.order + 1, 0) :]
        ids = np.arange(self.vocab_size, dtype=np.int64)
        p = np.full(self.vocab_size, 1.0 / self.vocab_size)
        for k, level in enumerate(self.levels[: len(context) + 1], start=1):
            history = pack(context[len(context) - k + 1 :], k - 1)[0] if k > 1 else np.int64(0)
            p = self._interpolate(level, (history << BITS) | ids, p)
        return p

    @staticmethod
    def _interpolate(level: Level, grams: Ints, lower: Floats) -> Floats:
        context_at, known = _find(level.contexts, grams >> BITS)
        gram_at, seen = _find(level.grams, grams)
        share = np.where(seen, level.share[gram_at], 0.0)
        # A context never seen says nothing: the lower order stands alone.
        return np.where(known, share + level.backoff[context_at] * lower, lower)


def fit(train_ids: npt.ArrayLike, order: int = MAX_ORDER, vocab_size: int = VOCAB_SIZE) -> NgramModel:
    """Fit the model: raw counts at the highest order, continuation counts (distinct ids to the left) below.

    Raises ValueError on an order outside 1..5, on ids outside the vocabulary, or on fewer than `order` ids.
    """
    stream = np.asarray(train_ids, dtype=np.int64)
    if not 1 <= order <= MAX_ORDER or vocab_size > 1 << BITS:
        raise ValueError(f"order {order} or vocabulary {vocab_size} does not fit {MAX_ORDER} x {BITS} bits")
    if len(stream) < order or not 0 <= stream.min() <= stream.max() < vocab_size:
        raise ValueError(f"need at least {order} ids in 0..{vocab_size - 1}")
    grams, counts = np.unique(pack(stream, order), return_counts=True)
    levels = [_level(grams, counts)]
    for k in range(order - 1, 0, -1):
        # The suffixes of the distinct (k + 1)-grams, counted: in how many contexts each k-gram continues.
        grams, counts = np.unique(grams & ((1 << (BITS * k)) - 1), return_counts=True)
        levels.append(_level(grams, counts))
    return NgramModel(tuple(reversed(levels)), vocab_size)


def score(model: NgramModel, ids: npt.ArrayLike, text_bytes: int) -> dict[str, float]:
    """Return perplexity per token and bits per byte of `ids`, all tokens scored (EOS too), over `text_bytes` bytes of text."""
    nats = -model.logprobs(ids)
    return {"ppl": math.exp(nats.mean()), "bits_per_byte": float(nats.sum()) / math.log(2) / text_bytes}


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: fit orders 1 to 5 on the training ids, score heldout.txt, print and write JSON."""
    parser = argparse.ArgumentParser(description="Score heldout.txt with n-gram models of orders 1 to 5.")
    parser.add_argument("--corpus", type=Path, required=True, help="folder with train.u16.npy")
    parser.add_argument("--nano", type=Path, default=Path("experiments/nano"), help="folder with tokenizer.json and heldout.txt")
    parser.add_argument("--out", type=Path, help="JSON to write (default: ngram_baseline.json in --nano)")
    args = parser.parse_args(argv)
    text = (args.nano / "heldout.txt").read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(args.nano / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    train_ids = np.load(args.corpus / "train.u16.npy")
    # The separator is a token, not text: its 13 characters do not count as bytes that the model had to predict.
    text_bytes = len(text.replace(EOS, "").encode())
    result: dict[str, Any] = {
        "model": "interpolated modified Kneser-Ney",
        "train_tokens": len(train_ids),
        "heldout_tokens": len(ids),
        "heldout_bytes": text_bytes,
        "scoring": "one stream, every token including the first and each <|endoftext|>; bytes without the separators' characters",
        "orders": {},
    }
    for order in range(1, MAX_ORDER + 1):
        result["orders"][str(order)] = score(fit(train_ids, order), ids, text_bytes)
        print(order, json.dumps(result["orders"][str(order)]), flush=True)
    out = args.out or args.nano / "ngram_baseline.json"
    out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
