"""The report's charts: a quality ladder per hypothesis, and perplexity by depth, as SVG files beside it.

Only measured values are drawn; a gap is drawn as its status word on an empty place, and a chart without any value is not made. The files
carry no date and no random ids, so the same records give the same bytes under the same matplotlib. A chart shows the table's numbers again
and proves nothing more.
"""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import TYPE_CHECKING

from lab.matrix import Matrix
from lab.metrics import METRICS
from lab.report.numbers import number, scaled, unit
from lab.report.tables import label
from lab.report.verdicts import Verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK, _FAINT = "#222222", "#8a8a8a"
_COLORS = ("#222222", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f5fa8", "#8a6d3b")
_MARKERS = "osD^vPX*h"


def draw(matrix: Matrix, verdicts: list[Verdict]) -> dict[str, str]:
    """File name to SVG text, for every chart that has a value to show."""
    charts: dict[str, str] = {}
    for verdict in verdicts:
        metric = verdict.hypothesis.criterion.metric
        if any(matrix.entry(row, metric).measurement for row in verdict.steps):
            charts[f"{matrix.experiment.name}_{verdict.hypothesis.id}.svg"] = _ladder(matrix, verdict)
    measured = {e.row.cell.layers for e in matrix.entries.values() if e.metric == "ppl" and e.measurement}
    if len(measured) > 1:
        charts[f"{matrix.experiment.name}_ppl_by_depth.svg"] = _ppl_by_depth(matrix)
    return charts


def owned(matrix: Matrix, folder: Path) -> list[Path]:
    """Chart files of this experiment in `folder`, drawn now or by an earlier report."""
    names = [*(h.id for h in matrix.experiment.hypotheses), "ppl_by_depth"]
    return [path for name in names if (path := folder / f"{matrix.experiment.name}_{name}.svg").exists()]


def _ladder(matrix: Matrix, verdict: Verdict) -> str:
    rule = verdict.hypothesis.criterion
    figure, axes = _figure(7.0, 1.1 + 0.45 * len(verdict.steps))
    for place, row in enumerate(verdict.steps):
        entry = matrix.entry(row, rule.metric)
        if entry.measurement is None:
            word = str(entry.gap.status) if entry.gap else ""
            axes.annotate(word, (0.0, place), xytext=(5, 0), textcoords="offset points", va="center", color=_FAINT, style="italic")
            continue
        value = scaled(rule.metric, entry.measurement.value)
        error = scaled(rule.metric, entry.measurement.stderr) if entry.measurement.stderr is not None else None
        axes.barh(place, value, xerr=error, height=0.55, color="#0072b2", ecolor=_INK, capsize=3)
        text = number(rule.metric, entry.measurement.value)
        axes.annotate(text, (value + (error or 0.0), place), xytext=(5, 0), textcoords="offset points", va="center", color=_INK)
    axes.set_yticks(range(len(verdict.steps)), [row.cell.path.name for row in verdict.steps])
    axes.set_ylim(len(verdict.steps) - 0.5, -0.5)
    axes.set_xlim(left=0.0)
    axes.margins(x=0.18)
    axes.set_xlabel(_axis_label(rule.metric))
    axes.set_title(f"{matrix.experiment.name}, {rule.layers} layers: {verdict.word}", loc="left", fontsize=10)
    return _svg(figure)


def _ppl_by_depth(matrix: Matrix) -> str:
    lines: dict[str, list[tuple[int, float, float]]] = {}
    for row in matrix.rows:
        found = matrix.entry(row, "ppl").measurement
        point = (found.value, found.stderr or 0.0) if found else (math.nan, math.nan)  # NaN breaks the line: no value is drawn across a gap
        lines.setdefault(label(matrix, row), []).append((row.cell.layers, *point))
    lines = {name: points for name, points in lines.items() if not all(math.isnan(value) for _, value, _ in points)}
    figure, axes = _figure(7.0, 3.8)
    for index, (name, points) in enumerate(lines.items()):
        depths, values, errors = zip(*sorted(points), strict=True)
        color, marker = _COLORS[index % len(_COLORS)], _MARKERS[index % len(_MARKERS)]
        axes.errorbar(depths, values, yerr=errors, label=name, color=color, marker=marker, markersize=5, linewidth=1.4, capsize=3)
    every = [value for points in lines.values() for _, value, _ in points if not math.isnan(value)]
    if max(every) > 10 * min(every):
        axes.set_yscale("log")
    axes.set_xticks(sorted({row.cell.layers for row in matrix.rows}))
    axes.set_xlabel("Layers kept")
    axes.set_ylabel(_axis_label("ppl"))
    axes.set_title(f"{matrix.experiment.name}: perplexity by depth, ± standard error", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return _svg(figure)


def _axis_label(metric: str) -> str:
    return METRICS[metric].title + (f", {unit(metric)}" if unit(metric) else "")


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty figure in inches. Built without pyplot, so that no display and no global state is involved."""
    from matplotlib.figure import Figure  # slow to import, and most commands draw nothing

    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    axes = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=9, color=_FAINT)
    return figure, axes


def _svg(figure: Figure) -> str:
    """The figure as SVG; a fixed salt and no date keep the bytes the same from run to run."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "lab", "svg.fonttype": "path"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
