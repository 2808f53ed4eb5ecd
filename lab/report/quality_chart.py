"""Quality against resident bytes, one point per cell: what a path's saving costs.

Divergence from the reference where any cell has it, else perplexity. A cell whose bytes are known but whose quality is a gap stands hollow on the axis;
one without bytes has no place in this chart and is counted in its title. Points of different depths are different models and not one curve.
"""

from __future__ import annotations

from lab.matrix import Matrix
from lab.report.chart_names import chart_names
from lab.report.drawing import COLORS, FAINT, MARKERS, axis_label, figure, legend_beside, legend_height, plain_log, svg, wrapped
from lab.report.numbers import scaled

BYTES = "resident_bytes"


def quality_by_bytes(matrix: Matrix) -> str | None:
    """The chart as SVG; None where no cell has both, or all that have both are as large."""
    metrics = matrix.experiment.metrics
    quality = next((n for n in ("kld_mean", "ppl") if n in metrics and any(matrix.entry(row, n).measurement for row in matrix.rows)), None)
    if quality is None or BYTES not in metrics:
        return None
    points = [(row, matrix.entry(row, BYTES).measurement, matrix.entry(row, quality).measurement) for row in matrix.rows]
    if len({size.value for _, size, found in points if size and found}) < 2:
        return None
    called = {key: wrapped(name) for key, name in chart_names(matrix).items()}
    names = {name: COLORS[index % len(COLORS)] for index, name in enumerate(dict.fromkeys(called[row.key] for row, size, _ in points if size))}
    depths = {depth: MARKERS[index % len(MARKERS)] for index, depth in enumerate(sorted({row.cell.layers for row, size, _ in points if size}))}
    made, axes = figure(7.4, max(4.2, legend_height([*names, *map(str, depths)])))
    for row, size, found in points:
        color, marker = names.get(called[row.key]), depths.get(row.cell.layers)
        if size is not None and found is not None:
            error = scaled(quality, found.stderr) if found.stderr is not None else None
            place = scaled(BYTES, size.value), scaled(quality, found.value)
            axes.errorbar(*place, yerr=error, color=color, marker=marker, markersize=6, capsize=2, linestyle="none")
        elif size is not None:
            spot = scaled(BYTES, size.value)
            axes.plot(spot, 0.0, transform=axes.get_xaxis_transform(), color=color, marker=marker, markerfacecolor="white", linestyle="none", clip_on=False)
    for name, color in names.items():
        axes.plot([], [], color=color, marker="s", linestyle="none", label=name)
    for depth, marker in depths.items():
        axes.plot([], [], color=FAINT, marker=marker, linestyle="none", label=f"{depth} layers")
    axes.set_xscale("log")
    plain_log(axes.xaxis)
    axes.set_xlabel(axis_label(BYTES))
    axes.set_ylabel(axis_label(quality))
    without = sum(size is None for _, size, _ in points)
    axes.set_title(f"{matrix.experiment.name}: quality against bytes" + (f" ({without} cells without bytes)" if without else ""), loc="left", fontsize=10)
    legend_beside(axes)
    return svg(made)
