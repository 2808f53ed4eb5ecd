"""The report as one self-contained HTML file: the same Markdown, set by markdown-it, with its style and charts inside.

No script and no outside request: the page reads the same from a mail attachment or on paper. Tables and charts wider than the screen scroll in a box of
their own; on paper they break across pages instead. The text is the Markdown's, and says nothing more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markdown_it import MarkdownIt
from markdown_it.token import Token

from lab.report.markup import anchor

TEMPLATES = Path(__file__).parent / "templates"
_NUMBERED = re.compile(r"\d+\.\d+ ")
"""How the heading of a section inside a chapter begins."""


def page(markdown: str, charts: Mapping[str, str], html_lang: str) -> str:
    """A whole HTML document. `charts` are the SVG texts by the file name that the Markdown's images give."""
    reader = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])
    tokens = reader.parse(re.sub(r"<!--.*?-->", "", markdown, flags=re.DOTALL))
    headings = _number_headings(tokens)
    body = reader.renderer.render(_boxed(tokens, charts), reader.options, {})
    environment = Environment(loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    style = (TEMPLATES / "page.css").read_text(encoding="utf-8")
    title = next((text for level, text, _ in headings if level == 1), "")
    contents = [(text, name) for level, text, name in headings if level == 2 or (level == 3 and _NUMBERED.match(text))]
    return environment.get_template("page.html.j2").render(lang=html_lang, title=escape(title), style=style, contents=contents, body=body)


def _number_headings(tokens: Sequence[Token]) -> list[tuple[int, str, str]]:
    """Give every heading an id that no other has; returns (level, text, id) of each."""
    found: list[tuple[int, str, str]] = []
    taken: dict[str, int] = {}
    for opening, inline in pairwise(tokens):
        if opening.type == "heading_open":
            text = "".join(child.content for child in inline.children or [])
            name = anchor(text)
            taken[name] = taken.get(name, 0) + 1
            unique = name if taken[name] == 1 else f"{name}-{taken[name] - 1}"
            opening.attrSet("id", unique)
            found.append((int(opening.tag[1]), text, unique))
    return found


def _boxed(tokens: Sequence[Token], charts: Mapping[str, str]) -> list[Token]:
    """Tables in a scrolling box; a paragraph that is one image becomes its chart, drawn inline."""
    made: list[Token] = []
    position = 0
    while position < len(tokens):
        token = tokens[position]
        image = _only_image(tokens, position)
        if image is not None and str(image.attrGet("src")) in charts:
            made.append(_block(_figure(str(image.attrGet("src")), image.content, charts)))
            position += 3
            continue
        if token.type == "table_open":
            made.append(_block('<div class="wide" role="region" tabindex="0">\n'))
        made.append(token)
        if token.type == "table_close":
            made.append(_block("</div>\n"))
        position += 1
    return made


def _only_image(tokens: Sequence[Token], position: int) -> Token | None:
    if tokens[position].type != "paragraph_open":
        return None
    children = tokens[position + 1].children or []
    return children[0] if len(children) == 1 and children[0].type == "image" else None


def _block(text: str) -> Token:
    return Token("html_block", "", 0, content=text)


def _figure(name: str, caption: str, charts: Mapping[str, str]) -> str:
    """The chart without its XML prologue. Ids get the chart's name: matplotlib gives every file the same ones, and a page may hold each only once."""
    drawing = charts[name][charts[name].index("<svg") :]
    prefix = re.sub(r"[^A-Za-z0-9_-]", "_", name.removesuffix(".svg"))
    drawing = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", drawing)
    return f'<figure class="wide" role="img" aria-label="{escape(caption)}" tabindex="0">\n{drawing}\n<figcaption>{escape(caption)}</figcaption>\n</figure>\n'
