"""Plausibility across numbers: what no single measurement can show about itself.

The same rules run over our measured cells and over numbers reported elsewhere: more layers cannot be faster than fewer, several sequences
together cannot be slower than one alone (unless they share too few slots for experts), nothing exceeds the physical bound, a perplexity above
the vocabulary size is worse than guessing. A flag names the numbers and says what does not fit; it cannot tell which of them is wrong, and no
flag does not mean that a number is right.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

from lab.admission import MAX_ROOFLINE_PCT
from lab.metrics import WIDE
from lab.placement.checks import least_together

SENTENCES: Mapping[str, Mapping[str, str]] = {
    "depth_inversion": {
        "en": "{where}: {deep} at {deep_layers} layers is faster than {shallow} at {shallow_layers} layers; more layers are more work, so one of the two is"
        " disturbed, mislabelled or measured differently",
        "zh": "{where}：{deep_layers} 层的 {deep} 快于 {shallow_layers} 层的 {shallow}；层数越多计算越多，两者之中必有一个受到干扰、标错或测法不同",
    },
    "aggregate_below_single": {
        "en": "{where}: {count} sequences together reach {aggregate}, less than one alone at {single}; a batch cannot total less than its single stream",
        "zh": "{where}：{count} 路合计 {aggregate}，低于单路的 {single}；一批的总和不应低于单路",
    },
    "above_bound": {
        "en": "{where}: {value} is above the physical bound of {bound} ({basis})",
        "zh": "{where}：{value} 高于物理上界 {bound}（{basis}）",
    },
    "above_vocabulary": {
        "en": "{where}: a perplexity of {value} is above the vocabulary size {vocabulary}: worse than guessing",
        "zh": "{where}：困惑度 {value} 高于词表大小 {vocabulary}，比随机猜测还差",
    },
}
_TITLES = {"tg": {"en": "TG", "zh": "TG"}, "pp": {"en": "PP", "zh": "PP"}, "agg4": {"en": "4-way", "zh": "4 路"}, "ppl": {"en": "PPL", "zh": "PPL"}}
_PARTS = (("agg4_", "4-way ", "4 路 "), ("pp", "PP", "PP"), ("tg128_d", "TG at depth ", "TG，上下文 "))
"""The beginnings of the names in `lab.metrics.WIDE`, in words."""
_DEPTH = {"en": "{layers} layers", "zh": "{layers} 层"}
_JOIN = {"en": ", ", "zh": "，"}
_OTHER_CODE = {"en": "; the two ran different code of the lab", "zh": "；两者运行的实验室代码不同"}
RATES = ("pp", "tg", "agg4", *WIDE)
"""Quantities that are speeds: those of `lab.registered`, and the metrics that only some benches take, by their own names."""
_SINGLE = {"agg4": "tg", **{name: name.removeprefix("agg4_") for name in WIDE if name.startswith("agg4_tg")}}
"""What four sequences together are set against."""


@dataclass(frozen=True)
class Observation:
    """One number to be judged beside others. `series` holds all that is equal but the depth; `low` and `high` are its samples' extremes.

    `quantity` is one of `lab.registered.QUANTITIES`; `bound` the physical bound in the same unit, with what it was computed from; `code` the digest of
    the code that ran, empty where it is not known; `shares_slots`: sequences together push each other's experts out of a card that cannot hold them all.
    """

    name: str
    series: str
    layers: int | None
    quantity: str
    value: float
    low: float
    high: float
    bound: float | None = None
    basis: str = ""
    vocabulary: int | None = None
    code: str = ""
    shares_slots: bool = False


@dataclass(frozen=True)
class Flag:
    """A broken rule, the observations (by name) it casts doubt on, and what the sentence needs: quantity, series, depth (None: several), numbers.

    `other_code`: the observations come from different code, which may be what explains them.
    """

    rule: str
    names: tuple[str, ...]
    quantity: str
    series: str
    layers: int | None
    facts: tuple[tuple[str, str], ...]
    other_code: bool = False

    def sentence(self, language: str = "en") -> str:
        """What does not fit, in one sentence without a full stop."""
        where = [_title(self.quantity, language), self.series]
        where += [_DEPTH[language].format(layers=self.layers)] if self.layers is not None else []
        sentence = SENTENCES[self.rule][language].format(where=_JOIN[language].join(where), **dict(self.facts))
        return sentence + _OTHER_CODE[language] if self.other_code else sentence


def flags(observations: Iterable[Observation]) -> list[Flag]:
    """Every broken rule among the observations, in a fixed order."""
    known = list(observations)
    found = [*_depth_inversions(known), *_weak_aggregates(known)]
    for o in known:
        if o.bound is not None and o.low > o.bound * MAX_ROOFLINE_PCT / 100:
            found.append(_flag("above_bound", (o,), value=_rate(o.value), bound=_rate(o.bound), basis=o.basis))
        if o.quantity == "ppl" and o.vocabulary is not None and o.value > o.vocabulary:
            found.append(_flag("above_vocabulary", (o,), value=f"{o.value:g}", vocabulary=str(o.vocabulary)))
    return found


def _depth_inversions(known: list[Observation]) -> list[Flag]:
    """Pairs of one series where the deeper is faster beyond both samples' extremes."""
    groups: dict[tuple[str, str], list[Observation]] = defaultdict(list)
    for o in known:
        if o.layers is not None and o.quantity in RATES:
            groups[o.series, o.quantity].append(o)
    found = []
    for members in groups.values():
        for a, b in combinations(sorted(members, key=lambda o: o.layers or 0), 2):
            if a.layers != b.layers and b.low > a.high:
                facts = {"deep": _rate(b.value), "deep_layers": str(b.layers), "shallow": _rate(a.value), "shallow_layers": str(a.layers)}
                found.append(_flag("depth_inversion", (a, b), **facts))
    return found


def _title(quantity: str, language: str) -> str:
    """The quantity as people call it."""
    if quantity in _TITLES:
        return _TITLES[quantity][language]
    words, rest = "", quantity.removesuffix("_tok_s")
    for start, english, chinese in _PARTS:
        if rest.startswith(start):
            words, rest = words + (chinese if language == "zh" else english), rest.removeprefix(start)
    return words + rest


def _weak_aggregates(known: list[Observation]) -> list[Flag]:
    singles = {(o.quantity, o.series, o.layers): o for o in known if o.quantity in _SINGLE.values()}
    found = []
    for o in known:
        single = singles.get((_SINGLE.get(o.quantity, ""), o.series, o.layers))
        if single is not None and o.high < least_together(single.low, o.shares_slots):
            found.append(_flag("aggregate_below_single", (o, single), count="4", aggregate=_rate(o.value), single=_rate(single.value)))
    return found


def _flag(rule: str, about: tuple[Observation, ...], **facts: str) -> Flag:
    first = about[0]
    depth = None if rule == "depth_inversion" else first.layers
    return Flag(rule, tuple(o.name for o in about), first.quantity, first.series, depth, tuple(facts.items()), len({o.code for o in about}) > 1)


def _rate(value: float) -> str:
    return f"{value:.4g} tok/s" if value < 1e4 else f"{value:.0f} tok/s"
