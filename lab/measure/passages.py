"""The fixed passages of a stage and their likelihood, protocol `nll@1`: four stretches of the held-out text, each as two prefilled turns and a reference.

Why beside perplexity: the tokens are scored through the state that decoding uses - a first turn, a second that reads the first one's cache, then the
reference fed token by token - so a wrong cache shows here and not in whole windows. Rule: Kestrel's CORPUS_NLL_MEAN (m13253246268-ship-it/kestrel-llm,
VLLM_STREAM_NLL): total over total tokens, not the mean of the passages' means. Kestrel's own four passages and chat template are not used. Some 250 tokens:
a check against regressions and between devices, not a score of quality.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lab.engines.local import LocalEngine
from lab.errors import LabError
from lab.measure.scoring import chosen, mean_and_stderr
from lab.measure.text import Corpus
from lab.metrics import METRICS
from lab.record import Measurement

FIRST_TURN, SECOND_TURN = 62, 18
"""Tokens prefilled before the reference, the first as many as Kestrel's contexts have (about 62)."""
REFERENCES = (96, 72, 48, 40)
"""Scored tokens of each passage. They differ, as Kestrel's do, so that weighting by tokens is not the mean of means."""


def spaced(corpus: Corpus, count: int, tokens: int) -> tuple[Tensor, list[int]]:
    """(ids int64 [count, tokens], where each starts): stretches around the middles of `count` equal parts of the text; they may cross the end of a document.
    Raises LabError when the text is shorter than one of them."""
    room = len(corpus.ids) - tokens
    if room < 0:
        raise LabError(f"{corpus.facts['name']}: {len(corpus.ids)} tokens are too few for passages of {tokens}; use a longer model.corpus")
    starts = [room * (2 * i + 1) // (2 * count) for i in range(count)]
    return torch.stack([corpus.ids[start : start + tokens] for start in starts]), starts


def passages(corpus: Corpus) -> tuple[list[Tensor], list[int]]:
    """(ids of each passage, int64 [FIRST_TURN + SECOND_TURN + its reference], where each starts in the text)."""
    rows, starts = spaced(corpus, len(REFERENCES), FIRST_TURN + SECOND_TURN + max(REFERENCES))
    return [row[: FIRST_TURN + SECOND_TURN + length] for row, length in zip(rows, REFERENCES, strict=True)], starts


@torch.no_grad()
def reference_nll(engine: LocalEngine, ids: Tensor) -> Tensor:
    """Negative log-likelihood in nat of each reference token of one passage, float64 [reference], on the CPU. The head's product is in float32, as in
    `LocalEngine.scores`; logits are normalised in float64."""
    before = FIRST_TURN + SECOND_TURN
    state = engine.new_state(1, len(ids) - 1)
    turns = [ids[:FIRST_TURN], ids[FIRST_TURN:before], *ids[before:-1].split(1)]
    last = [engine.model.hidden(turn[None].to(engine.device), state)[0, -1:] for turn in turns]
    logits = engine.model.head(torch.cat(last[1:]).float())
    return chosen(logits.double().log_softmax(-1), ids[before:].to(logits.device)).cpu()


def passages_nll(engine: LocalEngine, corpus: Corpus) -> list[list[float]]:
    """The likelihoods of every passage, in order. Raises ValueError when one is not finite, LabError for too short a text."""
    found = [reference_nll(engine, ids) for ids in passages(corpus)[0]]
    for index, nll in enumerate(found):
        if not bool(torch.isfinite(nll).all()):
            raise ValueError(f"negative log-likelihood of passage {index + 1} is not finite")
    return [nll.tolist() for nll in found]


def nll_metric(nll: Sequence[Sequence[float]], corpus: Corpus) -> Measurement:
    """corpus_nll_mean of `passages_nll`, with the passages that it was measured on."""
    values = torch.tensor([v for passage in nll for v in passage], dtype=torch.float64)
    index = torch.tensor([i for i, passage in enumerate(nll) for _ in passage])
    mean, stderr = mean_and_stderr(values, index)
    rows, starts = passages(corpus)
    listed = [
        {"start": start, "tokens": len(ids), "scored": len(part), "ids_sha256": ids_sha256(ids), "nll_mean_nat": sum(part) / len(part)}
        for ids, start, part in zip(rows, starts, nll, strict=True)
    ]
    details: dict[str, Any] = {
        "definition": "sum of -ln p over all reference tokens / their number; two turns prefilled one after the other, then the reference fed token by token",
        "first_turn_tokens": FIRST_TURN,
        "second_turn_tokens": SECOND_TURN,
        "scored_tokens": len(values),
        "passages": listed,
        "mean_of_means_nat": sum(sum(part) / len(part) for part in nll) / len(nll),
        "template": "none: plain text of the corpus, no special tokens added",
        "corpus": corpus.facts,
        "stderr_method": "over passages",
    }
    known = METRICS["corpus_nll_mean"]
    return Measurement(value=mean, unit=known.unit, protocol=known.protocol, stderr=stderr, details=details)


def ids_sha256(ids: Tensor) -> str:
    """Digest of token ids alone (int64, little endian); times and addresses never enter it."""
    return hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest()
