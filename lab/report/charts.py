"""The report's charts as SVG files beside it: targets, hypotheses, perplexity and TG by depth, quality against bytes.

Only measured values are drawn as such; a gap is drawn as a gap, a claim hollow, and a chart without any value or claim is not made. The files carry
no date and no random ids, so the same records give the same bytes under the same matplotlib. A chart shows the tables' numbers again and proves
nothing more.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from lab.errors import LabError
from lab.experiment import Experiment
from lab.matrix import Matrix
from lab.report.bars import steps_chart, target_chart
from lab.report.capacity import Capacity
from lab.report.claims import Claims
from lab.report.depth_charts import ppl_by_depth, tg_by_depth
from lab.report.quality_chart import quality_by_bytes
from lab.report.verdicts import TargetResult, Verdict

_FIXED = ("ppl_by_depth", "tg_by_depth", "quality_by_bytes")


def draw(matrix: Matrix, judged: Sequence[Verdict], targets: Sequence[TargetResult], claims: Claims, capacity: Capacity) -> dict[str, str]:
    """Chart name to SVG text, for every chart that has something to show. Raises LabError for a hypothesis named like another chart."""
    made = {"ppl_by_depth": ppl_by_depth(matrix), "tg_by_depth": tg_by_depth(matrix, claims, capacity), "quality_by_bytes": quality_by_bytes(matrix)}
    made |= {f"target_{number}": target_chart(matrix, result, claims) for number, result in enumerate(targets, start=1)}
    for verdict in judged:
        if verdict.hypothesis.id in made:
            raise LabError(f"{matrix.experiment.source}: hypotheses: the id '{verdict.hypothesis.id}' is the name of a chart; choose another")
        made[verdict.hypothesis.id] = steps_chart(matrix, verdict)
    return {name: drawing for name, drawing in made.items() if drawing is not None}


def file_name(experiment: str, chart: str) -> str:
    """The file a chart is kept in."""
    return f"{experiment}_{chart}.svg"


def owned(experiment: Experiment, folder: Path) -> list[Path]:
    """Chart files of this experiment in `folder`, drawn now or by an earlier report."""
    names = "|".join(re.escape(name) for name in (*_FIXED, *(h.id for h in experiment.hypotheses)))
    mine = re.compile(rf"{re.escape(experiment.name)}_({names}|target_\d+)\.svg")
    return sorted(path for path in folder.glob("*.svg") if mine.fullmatch(path.name))
