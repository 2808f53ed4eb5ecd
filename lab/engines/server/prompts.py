"""Fresh prompts of about 512 tokens: real text behind a salt that no earlier request began with.

A server that keeps prompts in a cache answers a repeated beginning without computing it, so every prompt begins with random letters, anew in each
process. The body is the cell's held-out text, stretch after stretch, since routers and expert caches see text and not noise. Lengths are cut by counting
tokens where someone can (the server, or the model's tokenizer files), else by characters; what the server counts in an answer is what a rate uses.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable
from pathlib import Path

from lab.errors import LabError

SALT_WORDS = 6
_FIRST_RATIO = 4.0
"""Characters per token before any token was counted."""
_MOST_RATIO = 16
_BY_RATIO, _TRIES = 4, 18
_CLOSE = 2
"""Tokens by which a counted prompt may miss its length."""
_SEPARATOR = "<|endoftext|>"


class PromptMaker:
    """Makes prompts of `tokens` tokens from `text`. `count` tells the tokens of a text, where anyone can; `salt` is random unless a test fixes it."""

    def __init__(self, text: str, tokens: int, count: Callable[[str], int] | None = None, salt: random.Random | None = None) -> None:
        self.body = " ".join(part.strip() for part in text.split(_SEPARATOR)).strip()
        self.tokens, self.count = tokens, count
        self.salt = salt or random.SystemRandom()
        self.characters_per_token = _FIRST_RATIO
        self.position = 0
        if len(self.body) < tokens:
            raise LabError(f"model.corpus: {len(self.body)} characters are too few for prompts of {tokens} tokens")

    def fresh(self) -> str:
        """The next prompt."""
        head = " ".join("".join(self.salt.choices(string.ascii_lowercase, k=6)) for _ in range(SALT_WORDS)) + ". "
        text = head + self._stretch(self.tokens * _MOST_RATIO)
        characters = self._length(text)
        self.position += characters - len(head)
        return text[:characters]

    def learn(self, prompt: str, counted: int) -> None:
        """Takes over a count of a prompt's tokens: the ratio for the next one."""
        self.characters_per_token = len(prompt) / counted

    def _length(self, text: str) -> int:
        """Characters of `text` to keep. Counts narrow the guess, by the ratio first and then by halves, for text whose ratio changes within."""
        low, high = 0, len(text)
        guess = min(high, round(self.tokens * self.characters_per_token))
        for step in range(_TRIES if self.count else 0):
            assert self.count
            counted = self.count(text[:guess])
            self.learn(text[:guess], counted)
            if abs(counted - self.tokens) <= _CLOSE:
                break
            low, high = (guess, high) if counted < self.tokens else (low, guess)
            by_ratio = round(self.tokens * self.characters_per_token)
            guess = by_ratio if step < _BY_RATIO and low < by_ratio < high else (low + high) // 2
        return guess

    def _stretch(self, characters: int) -> str:
        """Text from the current position on, around the end if need be."""
        start = self.position % len(self.body)
        return (self.body[start:] + " " + self.body * (characters // len(self.body) + 1))[:characters]


def held_out_text(file: Path) -> str:
    """The cell's text. Raises LabError when it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"{file}: the held-out text (model.corpus) cannot be read: {error}") from None
