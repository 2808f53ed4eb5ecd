"""The verb `compare`: two attempts side by side, and a word only where the samples support one.

What was measured differently is not compared: another device, machine or amount of measuring refuses the whole, another protocol, unit, cache state or
text refuses the metric. Repeats are judged by `lab.stats.compare_samples`, perplexity and divergence by their standard errors, and a single value by
nothing. Both attempts are one process each: what a restart changes is not in the samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO

from rich.table import Table

from lab.console import console, number
from lab.errors import LabError
from lab.history import find_attempt
from lab.metrics import METRICS
from lab.project import Project
from lab.reconcile import reconcile
from lab.record import Measurement, Record, Status
from lab.standing import record_id
from lab.stats import ALPHA, NOT_SEPARATED, Comparison, Difference, compare_estimates, compare_samples
from lab.store import Store, Stored

_DEVICE = ("name", "torch_device", "compute_dtype", "threads")
_BENCH_IDLE = ("name", "timeout_s")
"""Fields of a bench that move no number."""
_CONDITIONS = ("cache_state", "corpus", "corpus_sha256", "context_tokens", "requested_tokens")
"""Details of a measurement that must agree."""
_NEITHER = "not judged"


@dataclass(frozen=True)
class Line:
    """One metric of both attempts: `word` says how A stands to B, `found` what it rests on, `refused` why the two are not compared."""

    metric: str
    unit: str
    a: float | None
    b: float | None
    word: str = ""
    found: Comparison | Difference | None = None
    refused: str = ""
    why: str = ""


def compare_command(project: Project, words: Sequence[str], out: TextIO) -> int:
    """The verb `compare`. Returns the exit code; raises LabError where nothing can be compared."""
    flags = [word for word in words if word.startswith("-")]
    named = [word for word in words if not word.startswith("-")]
    if len(named) != 2 or any(flag != "--json" for flag in flags):
        raise LabError("name two attempts; usage: python -m lab compare A B [--json], each CELL_ID, CELL_ID/ATTEMPT or a record file")
    reconcile(Store(project.runs))
    first, second = (_usable(project, word) for word in named)
    lines = compare_records(first.record, second.record)
    if flags:
        out.write(json.dumps(_document(first, second, lines), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    else:
        _print(first.record, second.record, lines, out)
    return 0


def _usable(project: Project, word: str) -> Stored:
    found = find_attempt(project, word)
    name = f"{word} ({_name(found.record)})" if word != _name(found.record) else word
    if found.marks:
        raise LabError(f"{name}: was invalidated ({found.marks[-1].reason}); there is nothing to compare")
    if found.record.status is not Status.OK:
        raise LabError(f"{name}: {found.record.status}: {found.record.reason}; only an OK attempt has numbers to compare")
    return found


def compare_records(a: Record, b: Record) -> list[Line]:
    """Every metric that either OK record holds, compared or refused. Raises LabError where the two cannot be set against each other at all."""
    if record_id(a) == record_id(b):
        raise LabError(f"{_name(a)}: A and B are the same attempt")
    for problem in _unlike(a, b):
        raise LabError(f"not compared: {problem}")
    names = [name for name in METRICS if name in a.metrics or name in b.metrics]
    lines = [_line(name, a, b) for name in names]
    if all(line.refused for line in lines):
        raise LabError("not compared: " + ("; ".join(f"{line.metric}: {line.refused}" for line in lines) or "neither holds a metric that the lab knows"))
    return lines


def _unlike(a: Record, b: Record) -> Iterator[str]:
    """What makes the two attempts' circumstances different, or unknown."""
    for key in _DEVICE:
        yield from _differs(f"device.{key}", a.cell["device"].get(key), b.cell["device"].get(key))
    machines = [record.provenance.get("machine") or {} for record in (a, b)]
    for record, machine in zip((a, b), machines, strict=True):
        if not machine:
            yield f"the record of {_name(record)} does not say on which machine it ran"
    for key in ("cpu", "cores", "accelerators"):
        yield from _differs(f"machine.{key}", machines[0].get(key), machines[1].get(key))
    for key in sorted((a.cell["bench"].keys() | b.cell["bench"].keys()) - set(_BENCH_IDLE)):
        yield from _differs(f"bench.{key}", a.cell["bench"].get(key), b.cell["bench"].get(key))


def _differs(what: str, a: Any, b: Any) -> Iterator[str]:
    if a != b:
        yield f"{what} differs: {_say(a)} and {_say(b)}"


def _say(value: Any) -> str:
    return "not recorded" if value is None else ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


def _line(name: str, a: Record, b: Record) -> Line:
    """One metric, compared or refused."""
    x, y, unit = a.metrics.get(name), b.metrics.get(name), METRICS[name].unit
    if x is None or y is None:
        gap = (a if x is None else b).gaps.get(name)
        reason = f"{'A' if x is None else 'B'} has a gap: {gap.status}: {gap.reason}" if gap else f"{'A' if x is None else 'B'} did not measure it"
        return Line(name, unit, x.value if x else None, y.value if y else None, refused=reason)
    sides = [{"protocol": m.protocol, "unit": m.unit} | {key: m.details.get(key) for key in _CONDITIONS} for m in (x, y)]
    problem = next((text for key in sides[0] for text in _differs(key, sides[0][key], sides[1][key])), None)
    return Line(name, x.unit, x.value, y.value, refused=problem) if problem else _judged(name, x, y)


def _judged(name: str, x: Measurement, y: Measurement) -> Line:
    better = METRICS[name].better
    if x.samples and y.samples and min(*x.samples, *y.samples) > 0:
        ranks = compare_samples(x.samples, y.samples)
        rate = x.unit == "tok/s" or ranks.word == NOT_SEPARATED
        return Line(name, x.unit, x.value, y.value, ranks.word if rate else _quality(ranks.word == "faster", better), ranks, why=ranks.why)
    if x.stderr is not None and y.stderr is not None and x.stderr + y.stderr > 0:
        found = compare_estimates(x.value, x.stderr, y.value, y.stderr)
        word = found.word if found.word == NOT_SEPARATED else _quality(found.word == "higher", better)
        return Line(name, x.unit, x.value, y.value, word, found)
    return Line(name, x.unit, x.value, y.value, _NEITHER, why="one value each, without repeats or a standard error")


def _quality(higher: bool, better: str) -> str:
    if better == "neither":
        return "higher" if higher else "lower"
    return "better" if higher == (better == "higher") else "worse"


def _name(record: Record) -> str:
    return f"{record.cell_id}/{record.attempt:03d}"


def _document(a: Stored, b: Stored, lines: list[Line]) -> dict[str, Any]:
    """The comparison as plain values; None where there is none."""
    sides = {key: {"attempt": _name(one.record), "record_id": record_id(one.record)} for key, one in (("a", a), ("b", b))}
    return {**sides, "alpha": ALPHA, "notes": list(_notes(a.record, b.record)), "metrics": [asdict(line) for line in lines]}


def _notes(a: Record, b: Record) -> Iterator[str]:
    """What differs beside what is compared on purpose, and may be behind a difference."""
    for what, x, y in (
        ("code", a.provenance.get("code_sha256"), b.provenance.get("code_sha256")),
        ("weights", a.artifact.get("sha256"), b.artifact.get("sha256")),
        ("torch", (a.provenance.get("packages") or {}).get("torch"), (b.provenance.get("packages") or {}).get("torch")),
    ):
        yield from _differs(what, _short(x), _short(y))


def _short(value: str | None) -> str | None:
    return value if value is None else value[:12]


def _print(a: Record, b: Record, lines: list[Line], out: TextIO) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 1))
    for heading, justify in (("metric", "left"), ("A", "right"), ("B", "right"), ("A to B, 95 %", "right"), ("p", "right"), ("A is", "left")):
        table.add_column(heading, justify="right" if justify == "right" else "left", overflow="fold")
    for line in lines:
        values = ["gap" if value is None else number(value) for value in (line.a, line.b)]
        title = f"{line.metric}, {line.unit}" if line.unit != line.metric else line.metric
        table.add_row(title, *values, _interval(line.found), f"{line.found.p:.2g}" if line.found else "", line.word or f"not compared: {line.refused}")
    screen = console(out)
    for side, record in (("A", a), ("B", b)):
        screen.print(f"{side}  {_name(record)}  started {record.started_at}", markup=False, soft_wrap=True)
    screen.print(table)
    for note in (*(f"{line.metric}: {line.why}" for line in lines if line.why), *_notes(a, b)):
        screen.print(f"note: {note}", markup=False, soft_wrap=True)
    rule = f"A word needs p < {ALPHA:g} and an interval without 1 (repeats: rank test) or p < {ALPHA:g} (standard errors: z test, as for independent texts)."
    screen.print(rule, markup=False, soft_wrap=True)


def _interval(found: Comparison | Difference | None) -> str:
    """The ratio, or the difference, with its interval."""
    if found is None:
        return ""
    if isinstance(found, Difference):
        return f"{found.difference:+.3g} ({found.low:+.3g} to {found.high:+.3g})"
    return f"x{found.ratio:.3f}" + (f" ({found.low:.3f} to {found.high:.3f})" if found.low is not None and found.high is not None else "")
