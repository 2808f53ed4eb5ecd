"""Bar charts: a target against its cells, and the cells a hypothesis rests on.

A bar is a measured value. A gap is an empty hatched slot with its status word, a reported claim a hollow diamond: neither has a bar, so neither can be
taken for a measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lab.matrix import Entry, Matrix
from lab.metrics import METRICS
from lab.registered import ValueCriterion
from lab.report.chart_names import chart_names
from lab.report.claims import Claims
from lab.report.drawing import AXIS, BAR, FAINT, INK, LIMIT, TITLE, axis_label, figure, slot_height, svg, wrapped
from lab.report.fillers import gap_word
from lab.report.numbers import as_registered, number, scaled
from lab.report.verdicts import TargetResult, Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_SLOTS = 30
"""Bars in one chart; of more cells than that, gaps that nobody claimed anything about are counted instead of drawn."""


@dataclass(frozen=True)
class Slot:
    """One line of a bar chart: a name, its entry, and reported values in the metric's stored unit."""

    name: str
    entry: Entry
    reported: Sequence[float] = ()


def target_chart(matrix: Matrix, result: TargetResult, claims: Claims) -> str | None:
    """The target as a line, its cells as bars or empty slots; None where nothing is measured or reported."""
    metric = result.target.metric
    if result.target.of == "roofline":
        return _share_chart(matrix, result)
    inside = {aim.entry.row.key for aim in result.aims}
    slots = [_slot_of(matrix, aim.entry, claims) for aim in result.aims]
    others = {item.ours.row.key: item.ours for item in claims.beside(metric) if item.ours is not None and not item.claim.void}
    slots += [_slot_of(matrix, entry, claims, " (not a target cell)") for key, entry in others.items() if key not in inside]
    telling = [slot for slot in slots if slot.reported or slot.entry.measurement]
    if not telling:
        return None
    hidden = len(slots) - len(telling) if len(slots) > MAX_SLOTS else 0
    title = f"{METRICS[metric].title}: target {result.target.comparison} {as_registered(metric, result.target.value)}"
    return _bars(metric, telling if hidden else slots, result.target.value, title + (f" ({hidden} more gaps not drawn)" if hidden else ""))


def _share_chart(matrix: Matrix, result: TargetResult) -> str | None:
    """The same where the target is a share of the bound: every cell of it, in percent; None where no share is recorded."""
    target = result.target
    shares = [(_name(matrix, aim.entry), aim.entry, aim.entry.measurement.roofline_pct if aim.entry.measurement else None) for aim in result.aims]
    if not any(share is not None for _, _, share in shares):
        return None
    made, axes = figure(7.6, 1.1 + slot_height(name for name, _, _ in shares) * len(shares))
    right = max(100.0, 1.15 * max(share or 0.0 for _, _, share in shares))
    for place, (_, entry, share) in enumerate(shares):
        if share is None:
            _empty(axes, place, gap_word(entry.gap) if entry.gap else "no roofline", right)
        else:
            axes.barh(place, share, height=0.55, color=BAR)
            _text(axes, share, place, f"{share:.3g} %", INK)
    axes.axvline(target.value, color=LIMIT, linewidth=1.6, zorder=3)
    axes.set_yticks(range(len(shares)), [name for name, _, _ in shares])
    axes.set_ylim(len(shares) - 0.5, -0.5)
    axes.set_xlim(0.0, right)
    axes.set_xlabel(wrapped(f"{METRICS[target.metric].title}, % of roofline", AXIS))
    title = f"{METRICS[target.metric].title}: target {target.comparison} {target.value:.10g} % of roofline"
    made.suptitle(wrapped(title, TITLE), x=0.01, ha="left", fontsize=10)
    return svg(made)


def _slot_of(matrix: Matrix, entry: Entry, claims: Claims, remark: str = "") -> Slot:
    reported = [item.claim.value for item in claims.about(entry.row, entry.metric) if not item.claim.void]
    return Slot(_name(matrix, entry, remark), entry, reported)


def steps_chart(matrix: Matrix, verdict: Verdict) -> str | None:
    """The cells of a hypothesis, with the limit where the criterion sets one; None where none is measured."""
    rule = verdict.hypothesis.criterion
    if not any(entry.measurement for entry in verdict.entries):
        return None
    base = verdict.entries[1].measurement if len(verdict.entries) > 1 and isinstance(rule, ValueCriterion) else None
    limit = None
    if isinstance(rule, ValueCriterion) and (rule.base is None or base is not None):
        limit = rule.value * (base.value if base is not None else 1.0)
    several = len({entry.metric for entry in verdict.entries}) > 1  # of one cell: two bars of one name
    slots = [Slot(_name(matrix, entry, f": {entry.metric}" if several else ""), entry) for entry in verdict.entries]
    return _bars(rule.metric, slots, limit, f"{matrix.experiment.name}, {verdict.hypothesis.id}: {verdict.word}")


def _name(matrix: Matrix, entry: Entry, remark: str = "") -> str:
    """The cell's name in charts, with its depth where cells differ in it."""
    deep = f", {entry.row.cell.layers} layers" if len({row.cell.layers for row in matrix.rows}) > 1 else ""
    return wrapped(chart_names(matrix)[entry.row.key] + deep + remark)


def _bars(metric: str, slots: Sequence[Slot], limit: float | None, title: str) -> str:
    made, axes = figure(7.6, 1.1 + slot_height(slot.name for slot in slots) * len(slots))
    measured = [slot.entry.measurement.value for slot in slots if slot.entry.measurement]
    known = [scaled(metric, value) for value in (*measured, *(value for slot in slots for value in slot.reported))]
    ends = [*known, *([scaled(metric, limit)] if limit is not None else [])]
    right = max([*ends, 0.0]) * (1.8 if any(slot.reported for slot in slots) else 1.25) or 1.0
    for place, slot in enumerate(slots):
        _slot(axes, metric, place, slot, right)
    if limit is not None:
        axes.axvline(scaled(metric, limit), color=LIMIT, linewidth=1.6, zorder=3)
    axes.set_yticks(range(len(slots)), [slot.name for slot in slots])
    axes.set_ylim(len(slots) - 0.5, -0.5)
    axes.set_xlim(min([*ends, 0.0]) * 1.1, right)
    axes.set_xlabel(axis_label(metric))
    made.suptitle(wrapped(title, TITLE), x=0.01, ha="left", fontsize=10)
    return svg(made)


def _slot(axes: Axes, metric: str, place: int, slot: Slot, right: float) -> None:
    found = slot.entry.measurement
    if found is not None:
        value = scaled(metric, found.value)
        error = scaled(metric, found.stderr) if found.stderr is not None else None
        axes.barh(place, value, xerr=error, height=0.55, color=BAR, ecolor=INK, capsize=3)
        _text(axes, value + (error or 0.0), place, number(metric, found.value), INK)
    elif slot.entry.gap is not None:
        _empty(axes, place, gap_word(slot.entry.gap), right)
    for value in slot.reported:
        axes.plot(scaled(metric, value), place, marker="D", markersize=7, markerfacecolor="white", markeredgecolor=INK, linestyle="none", zorder=4)
        _text(axes, scaled(metric, value), place, f"{scaled(metric, value):.10g} reported", INK)


def _empty(axes: Axes, place: int, word: str, right: float) -> None:
    """An empty slot with its status word."""
    axes.barh(place, right, height=0.55, facecolor="none", edgecolor="#cfcfcf", hatch="////", linewidth=0.6)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.5}
    axes.annotate(word, (right, place), xytext=(-4, 0), textcoords="offset points", va="center", ha="right", fontsize=8, color=FAINT, bbox=box)


def _text(axes: Axes, value: float, place: float, text: str, color: str) -> None:
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
    axes.annotate(text, (value, place), xytext=(7, 0), textcoords="offset points", va="center", fontsize=8, color=color, zorder=5, bbox=box)
