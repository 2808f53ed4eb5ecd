"""Charts keep their names on the page and their axes open, however long a cell's name is, and call two cells by two names.

Positions are read from the SVG. Whether a chart is easy to read, a person has to see.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

import lab.report.bars
import lab.report.depth_charts
import lab.report.quality_chart
from lab.matrix import Matrix, build_matrix
from lab.report.chart_names import chart_names
from lab.report.tables import label
from tests.matrix_helpers import SMALL, cell, complete, compose, measured, record, small
from tests.report.support import first_gpu_records, stage
from tests.report.test_files import charts_of

_NUMBER = r"(-?\d+(?:\.\d+)?)"
_BOX = re.compile(rf'viewBox="0 0 {_NUMBER} {_NUMBER}"')
_PLACED = re.compile(rf'<g id="text_\d+">.*?translate\({_NUMBER} {_NUMBER}\)', re.DOTALL)
_AXES = re.compile(rf'<g id="patch_2">\s*<path d="M {_NUMBER} {_NUMBER} \s*L {_NUMBER} {_NUMBER}')


def page_of(svg: str) -> tuple[float, float]:
    """Width and height, in points."""
    box = _BOX.search(svg)
    assert box
    return float(box[1]), float(box[2])


def check(name: str, svg: str) -> None:
    """Every text begins on the page, and the axes have a third of its width at least."""
    width, height = page_of(svg)
    placed = [(float(x), float(y)) for x, y in _PLACED.findall(svg)]
    assert len(placed) > 3
    outside = [(x, y) for x, y in placed if not (0 <= x <= width and 0 <= y <= height)]
    assert not outside, f"{name}: {outside} outside {width} x {height}"
    axes = _AXES.search(svg)
    assert axes and abs(float(axes[3]) - float(axes[1])) > width / 3, f"{name}: the axes have no room"


@pytest.fixture(scope="module")
def kestrel() -> Matrix:
    return stage("kestrel_small", first_gpu_records())


def test_the_charts_of_a_stage_with_long_names_stay_on_the_page(kestrel: Matrix) -> None:
    drawn = charts_of(kestrel)
    assert len(drawn) == 8
    for name, svg in drawn.items():
        check(name, svg)


@pytest.mark.parametrize("name", ["flash_next_r9700", "flash_next_h200"])
def test_the_charts_of_the_stages_stay_on_the_page(name: str) -> None:
    for chart, svg in charts_of(stage(name)).items():
        check(chart, svg)


def test_a_name_of_any_length_leaves_the_axes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 letters without a blank, in every kind of chart."""
    for module in (lab.report.bars, lab.report.depth_charts, lab.report.quality_chart):
        monkeypatch.setattr(module, "chart_names", lambda matrix: {row.key: row.cell.path.name + "x" * 200 for row in matrix.rows})
    text = SMALL.replace("expert_cosine]", "expert_cosine, resident_bytes, tg128_tok_s]")
    text += "targets:\n  - {metric: pp512_tok_s, comparison: '>=', value: 90, unit: tok/s, source: the post, where: {layers: 6}}\n"
    records = []
    for size, (path, layers) in enumerate((path, layers) for path in ("reference", "fine", "coarse") for layers in (3, 6)):
        held = {"tg128_tok_s": measured("tg128_tok_s", 40.0 - layers), "resident_bytes": measured("resident_bytes", 1e6 * (1 + size))}
        records.append(record(cell(path, layers), {**complete(cell(path, layers), 0.1 * size).metrics, **held}))
    drawn = charts_of(build_matrix(small(tmp_path, text), records, compose))
    assert set(drawn) == {"ppl_by_depth", "tg_by_depth", "quality_by_bytes", "target_1", "ladder"}
    for name, svg in drawn.items():
        check(name, svg)


def test_charts_leave_out_what_says_nothing_and_keep_cells_apart(kestrel: Matrix) -> None:
    assert list(chart_names(kestrel).values()) == [
        "h200 qwen3_small-q4.vqf",
        "h200 qwen3_small-q8.vqf",
        "h200 qwen3_small-q8.vqf host_budget_mb=8 slots=64 device_budget_mb=8",
        "cpu qwen3_small-q4.vqf",
        "cpu qwen3_small-q8.vqf",
    ]
    flash = stage("flash_next_h200")
    names = chart_names(flash)
    assert len(set(names.values())) == len({label(flash, row) for row in flash.rows})


def test_where_short_names_would_be_one_the_full_ones_stand(kestrel: Matrix) -> None:
    """The same file name in two folders."""
    same = [replace(row, point={**row.point, "artifact": f"models/{at}/weights.vqf"}) for at, row in enumerate(kestrel.rows)]
    names = chart_names(replace(kestrel, rows=tuple(same)))
    assert next(iter(names.values())) == "kestrel_vqf device=h200 artifact=models/0/weights.vqf" and len(set(names.values())) == len(same)
