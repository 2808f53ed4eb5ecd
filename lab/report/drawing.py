"""What all charts share: an empty figure, the colours, the names on the axes, and SVG text that is the same from run to run.

Charts carry names, numbers and units only, in letters that every font has, so that one file serves both languages; the caption is in the text. No text is
wider than a part of the figure, so that names leave room for the axes, and the page takes in whatever stands beside them. Figures are built without pyplot: no
display and no global state is involved.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lab.metrics import METRICS
from lab.report.numbers import unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

INK, FAINT, BAR, LIMIT = "#222222", "#8a8a8a", "#0072b2", "#d55e00"
COLORS = ("#222222", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f5fa8", "#8a6d3b")
MARKERS = "osD^vPX*h"
"""Okabe and Ito's palette, told apart by most colour-blind readers; the markers tell the series apart without colour."""


NAME, TITLE, AXIS = 44, 92, 52
"""Most characters on one line: of a cell's name, of a title over the figure, of an axis' name."""
_LINE = 0.16
"""Inches that one more line of a name takes."""


def wrapped(text: str, most: int = NAME) -> str:
    """The text on lines of at most so many characters; a longer word is cut."""
    return "\n".join(textwrap.wrap(text, most, break_on_hyphens=False)) or text


def lines_of(names: Iterable[str]) -> int:
    """Lines that all names together take."""
    return sum(name.count("\n") + 1 for name in names)


def slot_height(names: Iterable[str]) -> float:
    """Inches for one bar among bars of these names."""
    return max(0.36, _LINE * max((name.count("\n") + 1 for name in names), default=1) + 0.08)


def legend_height(names: Iterable[str]) -> float:
    """Inches that a legend of these names in one column takes."""
    return _LINE * lines_of(names) + 0.3


def figure(width: float, height: float) -> tuple[Figure, Axes]:
    """An empty figure, sizes in inches."""
    from matplotlib.figure import Figure  # slow to import, and most commands draw nothing

    made = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    axes = made.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=9, color=FAINT)
    return made, axes


def svg(made: Figure) -> str:
    """The figure as SVG, its page as large as everything on it; a fixed salt and no date keep the bytes the same."""
    import matplotlib as mpl

    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "lab", "svg.fonttype": "path"}):
        made.savefig(buffer, format="svg", metadata={"Date": None}, bbox_inches="tight", pad_inches=0.08)
    return buffer.getvalue()


def axis_label(metric: str) -> str:
    """The metric's name and printed unit, on as many lines as it takes."""
    return wrapped(METRICS[metric].title + (f", {unit(metric)}" if unit(metric) else ""), AXIS)


def legend_beside(axes: Axes) -> None:
    """The legend to the right of the axes, where it covers no value."""
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))


def legend_below(axes: Axes) -> None:
    """A long legend under the axes, in two columns."""
    axes.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2)


def plain_log(axis: Axis) -> None:
    """Plain numbers on a logarithmic axis, also between powers of ten where it is short."""
    from matplotlib.ticker import LogFormatter

    axis.set_major_formatter(LogFormatter())
    axis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))


def style(index: int) -> tuple[str, str]:
    """Colour and marker of the n-th series; the pairs repeat only after all combinations."""
    return COLORS[index % len(COLORS)], MARKERS[(index + index // len(COLORS)) % len(MARKERS)]
