"""Sentences that the lab's own code writes into records, in other languages: `lang/recorded.yaml` holds English patterns and what they become.

A record keeps one text, in English. What the lab words itself, by a fixed template, can be told in the reader's language; what an engine, a driver or a person
said stays as it was recorded. A pattern that no code writes any more does no harm and no good: a test looks for each in the sources.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from string import Formatter

import yaml

FILE = Path(__file__).parent / "lang" / "recorded.yaml"


def in_words(text: str, language: str) -> str:
    """The text in `language` where a pattern fits the whole of it, the first that does; else as it was recorded."""
    for pattern, template in _patterns(language):
        if found := pattern.fullmatch(text):
            return template.format(**{name: in_words(part, language) for name, part in found.groupdict().items()})
    return text


@cache
def _patterns(language: str) -> tuple[tuple[re.Pattern[str], str], ...]:
    """What to look for, and the text with fields that takes its place. None for English."""
    entries = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return tuple((re.compile("".join(_parts(entry["en"]))), entry[language]) for entry in entries if language in entry and language != "en")


def _parts(text: str) -> Iterator[str]:
    for fixed, name, _, _ in Formatter().parse(text):
        yield re.escape(fixed)
        if name:
            yield f"(?P<{name}>.+?)"
