"""What an experiment registers beside its cells: targets, criteria, reported claims, dead ends, facts and capacity accounts.

Each is data with its source, fixed before the first run. A reported claim is somebody else's number: it stands in a report beside our cells and
never inside them, and it passes the same plausibility rules. Texts may be given in one language or as {en: ..., zh: ...}.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator

from lab.metrics import METRICS

LANGUAGES = ("en", "zh")
_VALUE = re.compile(r"[A-Za-z0-9_.:/+-]+")
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


def _plain(value: Any) -> Any:
    """A value that can stand in one override: no list, no blank, and no comma (it would be a sweep, so more than one cell)."""
    if not isinstance(value, str | int | float) or not _VALUE.fullmatch(as_text(value)):
        raise ValueError(f"{value!r} is not a plain override value (letters, digits and _.:/+- only)")
    return value


def as_text(value: str | int | float | bool) -> str:
    """The value as it is written on a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _both_languages(value: str | dict[str, str]) -> str | dict[str, str]:
    if isinstance(value, str):
        if not value.strip():
            raise ValueError("a text must not be empty")
    elif sorted(value) != sorted(LANGUAGES) or not all(text.strip() for text in value.values()):
        raise ValueError(f"a text in several languages needs exactly {' and '.join(LANGUAGES)}")
    return value


def _day(value: Any) -> date:
    """A day as YAML gives it: a text, or a date where it stood without quotes."""
    try:
        return value if type(value) is date else date.fromisoformat(value if _DAY.fullmatch(value) else "")
    except (TypeError, ValueError):
        raise ValueError(f"{str(value)!r} is not a day; write it as YYYY-MM-DD") from None


Plain = Annotated[str | int | float | bool, PlainValidator(_plain)]
Overrides = dict[str, Plain]
Text = Annotated[str | dict[str, str], AfterValidator(_both_languages)]
"""One text for every language, or one for each."""
Day = Annotated[date, PlainValidator(_day)]
Comparison = Literal[">=", "<=", ">", "<"]


def in_language(text: str | Mapping[str, str], language: str) -> str:
    """The text in `language`; a text given once serves every language."""
    return text if isinstance(text, str) else text[language]


@dataclass(frozen=True)
class Quantity:
    """A kind of number that others report. `beside` is our metric it is shown next to: related, but by whatever protocol they used."""

    name: str
    unit: str
    title: str
    beside: str | None = None


QUANTITIES: dict[str, Quantity] = {
    q.name: q
    for q in (
        Quantity("tg", "tok/s", "TG", "tg128_tok_s"),
        Quantity("pp", "tok/s", "PP", "pp512_tok_s"),
        Quantity("agg4", "tok/s", "4-way", "agg4_tg128_tok_s"),
        Quantity("ppl", "ppl", "PPL", "ppl"),
        Quantity("weight_cosine", "cosine", "Cosine of expert weights", "expert_cosine"),
        Quantity("expert_us", "us", "CPU time per expert"),
        Quantity("bytes", "GB", "Size"),
        Quantity("prefill_multiple", "x", "Prefill, GPU over CPU", "prefill_multiple"),
        Quantity("decode_multiple", "x", "Decode, GPU over CPU", "decode_multiple"),
        Quantity("end_to_end_multiple", "x", "End to end, GPU over CPU", "end_to_end_multiple"),
        Quantity("gemm_share", "fraction", "Share of time in matrix products", "gemm_share"),
        Quantity("budget", "MB", "Budget"),
        Quantity("slots", "slots", "Slots"),
        Quantity("ratio", "x", "Ratio"),
    )
}
"""What a reported claim can be about."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Target(_Strict):
    """A value to reach. `where` picks the cells it applies to by their overrides; empty means all. `source` says who set it.

    `quantifier`: `any` is reached by one cell that reaches it, `all` only by every one. Cells that a dead end closes are asked only where one was forced.
    `of`: `roofline` sets it for the share of the physical bound that was recorded with the value, in %.
    """

    metric: str
    comparison: Comparison
    value: float
    unit: str
    source: Text
    where: Overrides = Field(default_factory=dict)
    quantifier: Literal["any", "all"] = "all"
    of: Literal["value", "roofline"] = "value"


class OrderCriterion(_Strict):
    """Holds when `metric` rises strictly along the paths of `order`, all at the same number of layers."""

    order: tuple[str, ...] = Field(min_length=2)
    metric: str
    layers: int = Field(ge=1)


class ValueCriterion(_Strict):
    """Holds when `metric` of the one cell picked by `where` compares with `value`, or with `value` times that metric of the cell `against`, or times
    `against_metric` of the same cell."""

    metric: str
    where: Overrides
    comparison: Comparison
    value: float
    unit: str
    against: Overrides | None = None
    against_metric: str | None = None

    @property
    def base(self) -> tuple[Overrides, str] | None:
        """(cell, metric) that the value is a multiple of; None where it stands alone."""
        if self.against_metric is not None:
            return self.where, self.against_metric
        return None if self.against is None else (self.against, self.metric)


class Hypothesis(_Strict):
    """A claim with the criterion that decides it, both fixed before the first run. `id` also names its chart.

    `since`: the day it was registered, where that was later than the experiment; reports set it against the first record of its cells.
    """

    id: str = Field(pattern=r"^[A-Za-z0-9_-]+$")
    statement: Text
    criterion: OrderCriterion | ValueCriterion
    source: Text | None = None
    since: Day | None = None


class Question(_Strict):
    """What the experiment wants to learn, where no single criterion decides it."""

    id: str = Field(min_length=1)
    statement: Text


class Claim(_Strict):
    """A number reported elsewhere. `where` names the cell it is about by overrides, `what` says it in words, `unknown` what is not told of its measuring.

    `void` is the reason why even its author does not stand by it.
    """

    id: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    what: Text
    quantity: str
    value: float
    unit: str
    source: Text
    unknown: Text
    where: Overrides = Field(default_factory=dict)
    void: Text | None = None


class DeadEnd(_Strict):
    """A way that was tried and closed. Cells that match `where` are not measured unless forced; without `where` it is only told."""

    id: str = Field(pattern=r"^[A-Za-z0-9_-]+$")
    what: Text
    evidence: Text
    since: str = Field(min_length=1)
    reopen: Text
    source: Text
    where: Overrides = Field(default_factory=dict)


class NotOwed(_Strict):
    """Metrics that make no sense for the cells of `where`, and why: they are gaps that no command can fill."""

    where: Overrides = Field(min_length=1)
    metrics: tuple[str, ...] = Field(min_length=1)
    reason: str = Field(min_length=1)


SECTIONS = (
    "verdicts", "results", "targets", "measured", "hypotheses", "gaps", "dead_ends", "claims", "facts", "capacity", "findings", "boundaries", "provenance",
    "closing",
)  # fmt: skip
"""Sections of a report in the lab's own order; `facts` and `capacity` stand inside `claims` unless a chapter names them."""


def _known_sections(value: dict[str, Any]) -> dict[str, Any]:
    if unknown := sorted(value.keys() - set(SECTIONS)):
        raise ValueError(f"no section {unknown[0]}; choose from: {', '.join(SECTIONS)}")
    return value


class Chapter(_Strict):
    """A part of a report that follows somebody's order: its title and its sections, each under a title of its own or, with null, the usual one. The title of a
    chapter with one section is that section's."""

    title: Text
    sections: Annotated[dict[str, Text | None], Field(min_length=1), AfterValidator(_known_sections)]


class ModelFact(_Strict):
    """A fact of the stage that is no measurement: a size, a flag word, a setting; as text, with its source."""

    name: Text
    value: Text
    source: Text


class AccountTerm(_Strict):
    """One term of a reported capacity account: `parts` name the components it may cover, with the bits per weight that would give it."""

    label: Text
    reported: float
    parts: dict[str, float] = Field(default_factory=dict)


class Account(_Strict):
    """A sum of sizes as reported, to be derived from the model's geometry: terms, the claimed total, and the budget it was set against."""

    id: str = Field(pattern=r"^[A-Za-z0-9_-]+$")
    statement: Text
    source: Text
    model: str
    layers: int = Field(ge=1)
    unit: Literal["GB", "GiB"]
    terms: tuple[AccountTerm, ...] = Field(min_length=1)
    total: float
    budget: float | None = None
    remark: Text | None = None


def matches(point: Mapping[str, str], where: Mapping[str, str | int | float | bool]) -> bool:
    """True when the cell's overrides agree with every key of `where`."""
    return all(point.get(key) == as_text(value) for key, value in where.items())


def pick(points: Sequence[Mapping[str, str]], where: Mapping[str, str | int | float | bool]) -> int | None:
    """The position of the one point that `where` names, or None: the match with the fewest keys of its own, where only one has so few.

    A point that differs from a plain one by an extra override then does not stand in the plain one's way.
    """
    found = sorted((len(point), index) for index, point in enumerate(points) if matches(point, where))
    if not found or (len(found) > 1 and found[0][0] == found[1][0]):
        return None
    return found[0][1]


assert all(q.beside is None or q.beside in METRICS for q in QUANTITIES.values())
