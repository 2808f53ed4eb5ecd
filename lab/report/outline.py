"""Which sections a report has, in which order and under which numbers: the lab's own order, or chapters that the experiment's file asks for.

Why chapters: a stage that answers a post is read beside it, so its report follows the post's own order. Whatever the file leaves out comes after them in the
lab's order: a section can be moved and renamed, and never left away. It does not check that a chapter's title says what its sections hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.registered import SECTIONS, Chapter, Text


@dataclass(frozen=True)
class Heading:
    """A section's number ("4." alone, "3.1" in a chapter of several) and its title, None for the catalogue's own."""

    section: str
    number: str
    title: Text | None


@dataclass(frozen=True)
class Part:
    """One numbered part of the report. `title`: of a chapter with several sections, whose own headings follow it."""

    number: int
    title: Text | None
    headings: tuple[Heading, ...]


WITHIN = {"facts": "claims", "capacity": "claims"}
"""Sections that stand inside another one unless a chapter names them."""


def outline(chapters: Sequence[Chapter]) -> tuple[Part, ...]:
    """Every section once: those of `chapters`, then the rest."""
    named = {section for chapter in chapters for section in chapter.sections}
    rest = [section for section in SECTIONS if section not in named and section not in WITHIN]
    parts = []
    for number, chapter in enumerate(chapters, 1):
        if len(chapter.sections) == 1:
            (section,) = chapter.sections
            parts.append(Part(number, None, (Heading(section, f"{number}.", chapter.title),)))
        else:
            headings = [Heading(section, f"{number}.{at}", title) for at, (section, title) in enumerate(chapter.sections.items(), 1)]
            parts.append(Part(number, chapter.title, tuple(headings)))
    return (*parts, *(Part(number, None, (Heading(section, f"{number}.", None),)) for number, section in enumerate(rest, len(parts) + 1)))


def numbers(parts: Sequence[Part]) -> Mapping[str, str]:
    """{section_NAME: its number}, for texts that point to a section."""
    return {f"section_{heading.section}": heading.number.rstrip(".") for part in parts for heading in part.headings}
