"""The held-out text as token ids, cut the way every measurement uses it.

One reading of the corpus for all protocols: documents separated by lines that hold `<|endoftext|>`, encoded once, EOS tokens where the separators
are. Prompts for speed are windows of the same real text, because a router that sees constant or random tokens loads its experts differently.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from lab.artifacts import corpus_facts
from lab.errors import LabError


@dataclass(frozen=True)
class Corpus:
    """Token ids of the held-out text (int64 [N]), bytes of text behind each token id (None where ids do not spell bytes), and where it came from."""

    ids: Tensor
    token_bytes: Tensor | None
    facts: dict[str, object]

    def windows(self, context: int, stride: int, count: int) -> tuple[Tensor, Tensor]:
        """(ids [n, context], scored bool [n, context]): windows at multiples of `stride`; a token is scored in the first window that holds it and
        never at a window's first position. At most `count` windows, fewer when the text ends. Raises LabError when not even one fits."""
        if stride > context - 1:
            raise LabError(f"bench.ppl_stride={stride} must be below bench.ppl_context={context}, or tokens between windows are never scored")
        starts = torch.arange(0, max(0, len(self.ids) - context + 1), stride)[:count]
        if len(starts) == 0:
            raise LabError(f"{self.facts['name']}: {len(self.ids)} tokens are fewer than one window of bench.ppl_context={context}")
        scored = torch.zeros(len(starts), context, dtype=torch.bool)
        scored[:, context - stride :] = True
        scored[0, 1:] = True
        return self.ids[starts[:, None] + torch.arange(context)], scored

    def prompts(self, count: int, tokens: int, offset: int = 0) -> Tensor:
        """ids [count, tokens]: consecutive stretches of the text, wrapping around; `offset` prompts are skipped, so that repeats differ.
        Raises LabError when the text is shorter than one prompt."""
        if len(self.ids) <= tokens:
            raise LabError(f"{self.facts['name']}: {len(self.ids)} tokens are too few for prompts of {tokens}")
        starts = (torch.arange(count) + offset) * tokens % (len(self.ids) - tokens)
        return self.ids[starts[:, None] + torch.arange(tokens)]


def load_corpus(tokenizer: Tokenizer, text: Path) -> Corpus:
    """Encodes the held-out text with the artifact's tokenizer. Raises LabError for a missing file or an empty text."""
    facts = corpus_facts(text)
    ids = tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=False).ids
    if len(ids) < 2:
        raise LabError(f"{text}: the held-out text has {len(ids)} tokens")
    return Corpus(torch.tensor(ids), _bytes_per_token(tokenizer), {**facts, "tokens": len(ids)})


def _bytes_per_token(tokenizer: Tokenizer) -> Tensor | None:
    """UTF-8 bytes behind each id of a byte-level BPE, whose vocabulary spells one byte per character; special tokens stand for no text. None for
    other tokenizers, whose tokens do not show their bytes."""
    if "ByteLevel" not in json.dumps(json.loads(tokenizer.to_str()).get("decoder")):
        return None
    special = {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
    vocabulary = tokenizer.get_vocab()
    sizes = torch.zeros(max(vocabulary.values()) + 1, dtype=torch.int64)
    for token, index in vocabulary.items():
        if index not in special:
            sizes[index] = len(token)
    return sizes
