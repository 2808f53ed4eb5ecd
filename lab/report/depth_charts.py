"""Charts against depth: perplexity, and TG with the roofline of each path.

A gap breaks a line or stands as a cross on the axis; a reported value is hollow; the roofline is dashed. Depths are set side by side in equal
steps for TG, since 3, 6 and 24 of 48 layers would otherwise crowd into a corner. Nothing between two measured depths is claimed by a line.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from lab.matrix import Entry, Matrix
from lab.report.capacity import Capacity
from lab.report.chart_names import chart_names
from lab.report.claims import Claims
from lab.report.drawing import FAINT, axis_label, figure, legend_below, legend_beside, legend_height, plain_log, style, svg, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TG = "tg128_tok_s"


def _series(matrix: Matrix, metric: str) -> dict[str, list[Entry]]:
    """The entries of one metric by the name of their path, shallow first; names in the experiment's order."""
    lines: dict[str, list[Entry]] = defaultdict(list)
    names = chart_names(matrix)
    for row in matrix.rows:
        lines[wrapped(names[row.key])].append(matrix.entry(row, metric))
    return {name: sorted(entries, key=lambda entry: entry.row.cell.layers) for name, entries in lines.items()}


def ppl_by_depth(matrix: Matrix) -> str | None:
    """Perplexity of each path over the depths kept; None below two measured depths."""
    if "ppl" not in matrix.experiment.metrics:
        return None
    lines = {name: entries for name, entries in _series(matrix, "ppl").items() if any(entry.measurement for entry in entries)}
    if len({entry.row.cell.layers for entries in lines.values() for entry in entries if entry.measurement}) < 2:
        return None
    made, axes = figure(7.0, max(3.8, legend_height(lines)))
    every: list[float] = []
    for index, (name, entries) in enumerate(lines.items()):
        found = [entry.measurement for entry in entries]
        values = [m.value if m else math.nan for m in found]  # NaN breaks the line: no value is drawn across a gap
        errors = [(m.stderr or 0.0) if m else math.nan for m in found]
        color, marker = style(index)
        depths = [entry.row.cell.layers for entry in entries]
        axes.errorbar(depths, values, yerr=errors, label=name, color=color, marker=marker, markersize=5, linewidth=1.4, capsize=3)
        every += [m.value for m in found if m]
    if max(every) > 10 * min(every):
        axes.set_yscale("log")
        plain_log(axes.yaxis)
    axes.set_xticks(sorted({row.cell.layers for row in matrix.rows}))
    axes.set_xlabel("Layers kept")
    axes.set_ylabel(axis_label("ppl"))
    axes.set_title(f"{matrix.experiment.name}: perplexity by depth, ± standard error", loc="left", fontsize=10)
    legend_beside(axes)
    return svg(made)


def tg_by_depth(matrix: Matrix, claims: Claims, capacity: Capacity) -> str | None:
    """TG of each path over the depths kept, with its roofline; None where nothing is measured or reported."""
    if TG not in matrix.experiment.metrics:
        return None
    reported = {row.key: [i.claim.value for i in claims.about(row, TG) if not i.claim.void] for row in matrix.rows}
    if not any(matrix.entry(row, TG).measurement or reported[row.key] for row in matrix.rows):
        return None
    lines = _series(matrix, TG)
    depths = sorted({row.cell.layers for row in matrix.rows})
    made, axes = figure(8.0, 4.2 + 0.5 * legend_height([*lines, "roofline", "reported", "gap"]))
    for index, (name, entries) in enumerate(lines.items()):
        color, marker = style(index)
        shift = 0.5 * (index - (len(lines) - 1) / 2) / len(lines)  # series side by side, so that equal values do not hide each other
        spots = [depths.index(entry.row.cell.layers) + shift for entry in entries]
        bounds = [_bound(entry, capacity) for entry in entries]
        axes.plot(spots, [math.nan if b is None else b for b in bounds], color=color, linestyle="--", marker="_", linewidth=0.9, alpha=0.7)
        for spot, entry in zip(spots, entries, strict=True):
            _mark(axes, spot, entry, reported[entry.row.key], color, marker)
        axes.plot([], [], color=color, marker=marker, linestyle="none", label=name)
    axes.plot([], [], color=FAINT, linestyle="--", linewidth=0.9, label="roofline")
    axes.plot([], [], color=FAINT, marker="D", markerfacecolor="white", linestyle="none", label="reported")
    axes.plot([], [], color=FAINT, marker="x", linestyle="none", label="gap")
    axes.set_yscale("log")
    plain_log(axes.yaxis)
    axes.set_xticks(range(len(depths)), [str(depth) for depth in depths])
    axes.set_xlabel("Layers kept")
    axes.set_ylabel(axis_label(TG))
    axes.set_title(f"{matrix.experiment.name}: TG by depth", loc="left", fontsize=10)
    legend_below(axes)
    return svg(made)


def _bound(entry: Entry, capacity: Capacity) -> float | None:
    """The roofline of a cell's TG in tok/s: the machine's own where the record has it, else the one from sizes and datasheet."""
    found = entry.measurement
    if found is not None and found.roofline_pct:
        return 100.0 * found.value / found.roofline_pct
    return capacity.bound(entry.row, "tg")[0]


def _mark(axes: Axes, spot: float, entry: Entry, reported: list[float], color: str, marker: str) -> None:
    found = entry.measurement
    if found is None:
        # On the axis itself, by its own coordinates: a gap has no height.
        axes.plot(spot, 0.0, transform=axes.get_xaxis_transform(), color=color, marker="x", markersize=5, linestyle="none", clip_on=False, zorder=5)
    else:
        low, high = (found.value, found.value) if found.min is None or found.max is None else (found.min, found.max)
        reach = [[found.value - low], [high - found.value]]
        axes.errorbar(spot, found.value, yerr=reach, color=color, marker=marker, markersize=6, capsize=3, linestyle="none", zorder=4)
    for value in reported:
        axes.plot(spot, value, marker="D", markersize=6, markerfacecolor="white", markeredgecolor=color, linestyle="none", zorder=4)
