"""Type plans: which block type each matrix of a GGUF file gets, as a YAML file of rules. The first rule that matches decides.

Why a file: which tensor has how many bits is the recipe of a quantisation; it is named in the result and can be read without code. A row that is no
whole number of blocks is an error or falls back to the type that the rule names, never to one that nobody chose.
What a plan does not decide: vectors, convolution taps and norms, which llama.cpp needs as F32.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from lab.codecs.gguf_encode import ENCODERS
from lab.codecs.gguf_types import TYPES, GgufType
from lab.errors import LabError, flat

_KEYS = frozenset({"name", "title", "rules", "default"})
_RULE_KEYS = frozenset({"tensors", "layers", "type", "fallback"})


@dataclass(frozen=True)
class Rule:
    """Tensors whose whole name matches, in these layers (None: wherever), get `type`, or `fallback` where rows are no whole blocks of `type`."""

    tensors: re.Pattern[str]
    layers: frozenset[int] | None
    type: GgufType
    fallback: GgufType | None

    def matches(self, name: str, layer: int | None) -> bool:
        """Whether this rule is about the tensor; `layer` is None outside the layers."""
        return self.tensors.fullmatch(name) is not None and (self.layers is None or layer in self.layers)


@dataclass(frozen=True)
class TypePlan:
    """A plan; the last rule is its default and matches everything."""

    name: str
    title: str
    where: str
    rules: tuple[Rule, ...]

    def choose(self, name: str, layer: int | None, cols: int) -> GgufType:
        """The type of a matrix with rows of `cols` weights. Raises LabError where it does not fit and the rule has no fallback."""
        rule = self.rules[self._first(name, layer)]
        if rule.type.fits(cols):
            return rule.type
        if rule.fallback is None:
            raise LabError(f"{self.where}: tensor {name}: rows of {cols} weights are no whole blocks of {rule.type.block} ({rule.type.name}); name a fallback")
        if not rule.fallback.fits(cols):
            raise LabError(f"{self.where}: tensor {name}: rows of {cols} weights fit neither {rule.type.name} nor its fallback {rule.fallback.name}")
        return rule.fallback

    def idle(self, tensors: Iterable[tuple[str, int | None]]) -> list[int]:
        """Positions of rules that decide about none of these (name, layer): mistyped, hidden by an earlier one, or for a deeper model."""
        used = {self._first(name, layer) for name, layer in tensors}
        return [i for i in range(len(self.rules) - 1) if i not in used]

    def _first(self, name: str, layer: int | None) -> int:
        return next(i for i, rule in enumerate(self.rules) if rule.matches(name, layer))


def find_plan(word: str, folder: Path) -> Path:
    """The file of a plan: `word` itself where it ends in .yaml, else of that name in `folder`. Raises LabError listing what is there."""
    path = Path(word) if word.endswith((".yaml", ".yml")) else folder / f"{word}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(each.stem for each in folder.glob("*.yaml"))) or "none"
        raise LabError(f"--types {word}: no such file {path}; plans in {folder.name}: {known}")
    return path


def read_plan(path: Path) -> TypePlan:
    """Raises LabError in one line naming file and key."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise LabError(f"{path}: cannot be read as YAML ({flat(error)})") from None
    if not isinstance(data, dict):
        raise LabError(f"{path}: expected name, title, rules and default")
    _known(path, "", data, _KEYS)
    for key in ("name", "title"):
        if not isinstance(data.get(key), str) or not data[key].strip():
            raise LabError(f"{path}: {key}: missing or no text")
    rules = data.get("rules") or []
    if not isinstance(rules, list):
        raise LabError(f"{path}: rules: expected a list")
    parsed = [_rule(path, f"rules[{i}].", rule) for i, rule in enumerate(rules)]
    if not isinstance(data.get("default"), dict):
        raise LabError(f"{path}: default: missing; say what tensors without a rule get, as in default: {{type: Q8_0, fallback: F16}}")
    if {"tensors", "layers"} & set(data["default"]):
        raise LabError(f"{path}: default: has only type and fallback")
    parsed.append(_rule(path, "default.", {"tensors": ".*", **data["default"]}))
    return TypePlan(data["name"], data["title"].strip(), str(path), tuple(parsed))


def _known(path: Path, where: str, data: Mapping[Any, Any], keys: frozenset[str]) -> None:
    if unknown := sorted(str(key) for key in data if key not in keys):
        raise LabError(f"{path}: {where}{unknown[0]}: unknown key; known: {', '.join(sorted(keys))}")


def _rule(path: Path, where: str, data: Any) -> Rule:
    if not isinstance(data, dict):
        raise LabError(f"{path}: {where.rstrip('.')}: expected tensors and type")
    _known(path, where, data, _RULE_KEYS)
    pattern = data.get("tensors")
    if not isinstance(pattern, str):
        raise LabError(f"{path}: {where}tensors: expected a regular expression on GGUF tensor names")
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise LabError(f"{path}: {where}tensors: {pattern!r} is no regular expression ({error})") from None
    fallback = None if data.get("fallback") is None else _type(path, f"{where}fallback", data["fallback"])
    return Rule(compiled, _layers(path, f"{where}layers", data.get("layers")), _type(path, f"{where}type", data.get("type")), fallback)


def _type(path: Path, where: str, word: Any) -> GgufType:
    if not isinstance(word, str) or word not in ENCODERS:
        why = "is only read, not written" if isinstance(word, str) and word in TYPES else "is no type"
        raise LabError(f"{path}: {where}: {word!r} {why}; types to write: {', '.join(ENCODERS)}")
    return TYPES[word]


def _layers(path: Path, where: str, text: Any) -> frozenset[int] | None:
    """Numbers and spans from 0, as in "0-3,5"."""
    if text is None:
        return None
    found: set[int] = set()
    for part in str(text).split(","):
        span = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        if span is None or int(span[1]) > int(span[2] or span[1]):
            raise LabError(f'{path}: {where}: {text!r} is no list of layers; write them as in "0-3,5"')
        found.update(range(int(span[1]), int(span[2] or span[1]) + 1))
    return frozenset(found)
