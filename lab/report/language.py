"""The report's own words in one language, from `lang/<code>.yaml`: one template serves every language.

Texts are looked up by dotted key and filled in by name; a missing key or field is an error, not an empty place. Free text of an experiment
comes from its file in the same language; what a record says stays as it was recorded, but for fixed sentences of the lab's own (`lab.report.recorded`).
A catalogue cannot show that its sentences are true.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from lab.errors import LabError
from lab.likeness import Unlike
from lab.metrics import METRICS
from lab.record import Status
from lab.registered import LANGUAGES, QUANTITIES, in_language
from lab.report.outline import Heading, Part, outline
from lab.report.outline import numbers as outlined
from lab.report.recorded import in_words

FOLDER = Path(__file__).parent / "lang"


class Language:
    """One catalogue. Calling it gives the text of a key; the other methods name things that other modules define."""

    def __init__(self, code: str, texts: Mapping[str, str], numbers: Mapping[str, str] | None = None) -> None:
        """`numbers`: of a report's sections, for texts that point to one (`lab.report.outline`)."""
        self.code = code
        self.texts = texts
        self.numbers = numbers or outlined(outline(()))

    def __call__(self, key: str, /, **fields: object) -> str:
        """The text of `key` with its fields filled in. Raises KeyError for an unknown key or a missing field."""
        return self.texts[key].format(**{**self.numbers, **fields})

    def numbered(self, parts: Sequence[Part]) -> Language:
        """The same catalogue for a report of these parts."""
        return Language(self.code, self.texts, outlined(parts))

    def heading(self, heading: Heading) -> str:
        """A section's number and title."""
        return f"{heading.number} {self(f'section.{heading.section}') if heading.title is None else self.text(heading.title)}"

    def text(self, given: str | Mapping[str, str]) -> str:
        """A text of an experiment in this language."""
        return in_language(given, self.code)

    def metric(self, name: str) -> str:
        """The title of a metric; English is `lab.metrics`' own."""
        return self.texts.get(f"metrics.{name}", METRICS[name].title)

    def quantity(self, name: str) -> str:
        """The title of a reported quantity; English is `lab.registered`'s own."""
        return self.texts.get(f"quantities.{name}", QUANTITIES[name].title)

    def unit(self, name: str) -> str:
        """A unit as it is printed: one that is a word in this language, the others as they are."""
        return self.texts.get(f"unit.{name}", name)

    def field(self, name: str) -> str:
        """A field of a record or a kind of difference, where the catalogue has a word for it; else its name."""
        return self.texts.get(f"field.{name}", name)

    def difference(self, one: Unlike) -> str:
        """What two records differ in, with both sides."""
        return self.field(one.what) + one.brief.removeprefix(one.what)

    def recorded(self, text: str) -> str:
        """What the lab itself wrote into a record, in this language where it is known; anything else as it was recorded."""
        return in_words(text, self.code)

    def gloss(self, status: Status) -> str:
        """What a status means, in one sentence."""
        return self(f"status.{status}")

    def series(self, parts: Iterable[str]) -> str:
        """Several things in a row, set apart as the language does."""
        return self("separator").join(parts)

    def clauses(self, parts: Iterable[str]) -> str:
        """Longer things in a row, which may hold commas themselves."""
        return self("clause_separator").join(parts)

    def reason(self, recorded: str, own: Mapping[str, str]) -> str:
        """A gap's reason: in this language where the lab worded it itself (`own`: English sentence to this language's), else as it was recorded."""
        if recorded == "never attempted":
            return self("never_attempted")
        for english, here in own.items():
            recorded = recorded.replace(english, here)
        return self.recorded(recorded)


@cache
def load_language(code: str) -> Language:
    """The catalogue of `code`. Raises LabError for a language that has none."""
    if code not in LANGUAGES:
        raise LabError(f"lang={code}: no such report language; choose {' or '.join(f'lang={known}' for known in LANGUAGES)}")
    return Language(code, flatten(yaml.safe_load((FOLDER / f"{code}.yaml").read_text(encoding="utf-8"))))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings as dotted keys."""
    flat: dict[str, str] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = str(value)
    return flat
