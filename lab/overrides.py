"""The command line's `key=value` words: read, checked by name, and expanded into one list per cell.

Hydra's grammar is used unchanged (quoting, `+key`, `~key`, commas, `range()`, `glob()`), but its errors are long and name things the user
never wrote, so that names are checked here first: group choices and keys, with the nearest match. Whether the values make sense
together is not decided here but by `lab.compose`.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException

from lab.errors import LabError

GROUPS = {"model": "model", "path": "paths", "device": "device", "bench": "bench"}
"""Key on the command line -> folder in conf/. Only `path` differs, because its folder is named in the plural."""


def choices(conf: Path, group: str) -> list[str]:
    """The names that `group` (a key of GROUPS) can take, sorted."""
    return sorted(p.stem for p in (conf / GROUPS[group]).glob("*.yaml"))


def nearest(word: str, known: Iterable[str]) -> str:
    """' (did you mean ...?)' with the closest names, or an empty string."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    if not close:
        last = word.rsplit(".", 1)[-1]
        close = [k for k in known if k.rsplit(".", 1)[-1] == last][:3]
    return f" (did you mean {', '.join(close)}?)" if close else ""


def parse(words: Sequence[str]) -> list[Override]:
    """The words as Hydra overrides. Raises LabError for a word that is none, a key given twice, and a hydra.* key."""
    parser = OverridesParser.create()
    found: list[Override] = []
    for word in words:
        if "=" not in word and not word.startswith("~"):
            raise LabError(f"{word!r} is not understood: write key=value (choices: python -m lab ls; all keys: python -m lab show)")
        try:
            found.extend(parser.parse_overrides([word]))
        except HydraException as error:
            raise LabError(f"cannot read {word!r}: {_first_line(error, word)}; quote values with special characters") from None
    seen: set[str] = set()
    for override in found:
        key = override.key_or_group
        if key == "hydra" or key.startswith(("hydra.", "hydra/")):
            raise LabError(f"{key}: Hydra's own settings have no effect here; only its composition is used")
        if key in seen:
            raise LabError(f"{key} is given twice; keep one of them")
        seen.add(key)
    return found


def expand(overrides: Sequence[Override], conf: Path, multirun: bool) -> list[list[Override]]:
    """One list of plain overrides per run, in the order of Hydra's sweeper: the last key varies fastest.

    Raises LabError for commas without `multirun`, and for intervals, which name no finite set of runs.
    """
    axes: list[list[Override]] = []
    for override in overrides:
        if not override.is_sweep_override():
            axes.append([override])
            continue
        key = override.get_key_element()
        if not multirun:
            raise LabError(f"{override.input_line}: several values ask for several runs; add -m (or --multirun)")
        if not override.is_discrete_sweep():
            raise LabError(f"{override.input_line}: only choices, range() and glob() can be swept")
        axes.append(parse_axis(key, _values(override, conf)))
    return [list(combination) for combination in itertools.product(*axes)]


def parse_axis(key: str, values: Sequence[str]) -> list[Override]:
    """`key` with each of `values`, as plain overrides. Raises LabError for an empty axis."""
    if not values:
        raise LabError(f"{key}: no choice matches")
    return OverridesParser.create().parse_overrides([f"{key}={value}" for value in values])


def check_groups(overrides: Sequence[Override], conf: Path) -> None:
    """Raise LabError, listing the choices, where a group is given a name it does not have."""
    for override in overrides:
        key = override.key_or_group
        if key not in GROUPS:
            continue
        if override.is_delete() or override.is_add():
            raise LabError(f"{override.input_line}: {key} is always set; write {key}=NAME")
        known = choices(conf, key) + (["auto"] if key == "device" else [])
        value = override.get_value_element_as_str()
        if value not in known:
            raise LabError(f"{key}={value}: no such {key}{nearest(value, known)}; choose one of: {', '.join(known)}")


def check_keys(overrides: Sequence[Override], known: Sequence[str]) -> None:
    """Raise LabError for a key outside `known` (dotted keys of the composed config), naming the nearest ones."""
    for override in overrides:
        key = override.key_or_group
        if key in known or key in GROUPS or override.is_add() or override.is_force_add() or _is_option(key):
            continue
        raise LabError(f"{key}: unknown key{nearest(key, known)}; python -m lab show prints all keys")


def hydra_words(overrides: Sequence[Override]) -> list[str]:
    """The overrides as Hydra must see them: `path=NAME` selects from conf/paths into the key `path`, and codec options may be new keys."""
    words = []
    for override in overrides:
        line = override.input_line or ""
        if override.key_or_group == "path":
            line = "paths@path=" + line.split("=", 1)[1]
        elif _is_option(override.key_or_group) and line[0] not in "+~":
            line = "++" + line
        words.append(line)
    return words


def is_plain_change(override: Override) -> bool:
    """Whether the override gives a new value to a key that is there: no adding, deleting or new codec option."""
    return not (override.is_add() or override.is_force_add() or override.is_delete() or override.package is not None or _is_option(override.key_or_group))


def _is_option(key: str) -> bool:
    """Whether the key is a codec option; which ones a codec has is for the codec to say."""
    return key.startswith("path.components.") and ".options." in key


def _values(override: Override, conf: Path) -> list[str]:
    sweep = override.value()
    if isinstance(sweep, Glob):
        if override.key_or_group not in GROUPS:
            raise LabError(f"{override.input_line}: glob() works for {', '.join(GROUPS)}")
        names = choices(conf, override.key_or_group)
        return [n for n in names if any(fnmatch(n, p) for p in sweep.include) and not any(fnmatch(n, p) for p in sweep.exclude)]
    return list(override.sweep_string_iterator())


def _first_line(error: Exception, word: str) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and set(line.strip()) != {"^"}]
    useful = [line for line in lines if not line.startswith(("Error parsing override", "See http"))]
    return (useful[0] if useful else "not a key=value override").replace(word, "").removesuffix(": ").strip() or "unexpected character"
