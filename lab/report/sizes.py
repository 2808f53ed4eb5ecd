"""Speeds by prompt and context, shares of components, and what tiers of experts did: the tables of an experiment at a model's true size.

One table per depth of the model and per number of sequences, each rate with its share of the bound, so that a reader sees along a line what a longer prompt
or a deeper context costs. Shares come from the details of one measurement per cell. Nothing here computes: what a record lacks is a dash or a status.
"""

from __future__ import annotations

from collections.abc import Mapping

from lab.cell import DECODE_DEPTHS, PREFILL_SIZES
from lab.matrix import Matrix, Row
from lab.metrics import METRICS, WIDE, decode_metric, prefill_metric
from lab.report.language import Language
from lab.report.markup import Table, escape
from lab.report.numbers import roofline, short, significant, unit
from lab.report.tables import by_depth, label, named

LANES = (1, 4)
TIER = tuple(name for name, metric in METRICS.items() if metric.protocol == "tier@1")
"""Metrics of experts kept in part; the hit rate, whose details have the curve, comes first."""
OWN_TABLES = frozenset({*WIDE, *TIER, "decode_experts_share", "prefill_experts_share"})
"""Metrics that have their tables here and no column in the short ones."""
_SHARES = (("decode_experts_share", "sizes.decode_shares"), ("prefill_experts_share", "sizes.prefill_shares"))
_MOST_COLUMNS = 9
"""Components with a column of their own, the largest first; what is left is one column."""


def size_tables(matrix: Matrix, references: Mapping[str, str], lang: Language) -> list[Table]:
    """One table per depth and number of sequences; none where the experiment owes no rate of another size."""
    if not set(WIDE) & set(matrix.experiment.metrics):
        return []
    found = [_rates(matrix, layers, rows, lanes, references, lang) for layers, rows in by_depth(matrix) for lanes in LANES]
    return [table for table in found if table.rows]


def _rates(matrix: Matrix, layers: int, rows: list[Row], lanes: int, references: Mapping[str, str], lang: Language) -> Table:
    names = [prefill_metric(lanes, size) for size in PREFILL_SIZES] + [decode_metric(lanes, depth) for depth in DECODE_DEPTHS]
    heads = [f"PP {size}" for size in PREFILL_SIZES] + [f"TG @ {depth}" for depth in DECODE_DEPTHS]
    kept = [(name, head) for name, head in zip(names, heads, strict=True) if name in matrix.experiment.metrics]
    lines = []
    for row in rows:
        entries = [matrix.entry(row, name) for name, _ in kept]
        if any(entry.measurement for entry in entries):
            shown = [short(e) + (f" ({roofline(e.measurement)})" if e.measurement and e.measurement.roofline_pct is not None else "") for e in entries]
            lines.append([escape(label(matrix, row)), references.get(row.key, "–"), *shown])
    title = lang("sizes.one" if lanes == 1 else "sizes.four", layers=layers)
    return Table(title, [lang("column.path"), lang("column.record"), *(head for _, head in kept)], lines, words=2)


def tier_tables(matrix: Matrix, lang: Language) -> list[Table]:
    """What experts kept in part found and moved, cell by cell; and the share of a text's requests that so many slots would have served."""
    names = [name for name in matrix.experiment.metrics if name in TIER]
    told = [row for row in matrix.rows if any(matrix.entry(row, name).measurement for name in names)]
    lines = [[escape(named(matrix, row, lang)), *(short(matrix.entry(row, name)) for name in names)] for row in told]
    tables = [Table(lang("sizes.tiers"), [lang("column.path"), *(title(name, lang) for name in names)], lines)]
    curves = [(row, found.details.get("hit_curve")) for row in told if (found := matrix.entry(row, names[0]).measurement) is not None]
    known = [(row, curve["slots"]) for row, curve in curves if curve]
    slots = sorted({int(number) for _, curve in known for number in curve})
    rows = [[escape(named(matrix, row, lang)), *(_percent(curve[str(n)]) if str(n) in curve else "–" for n in slots)] for row, curve in known]
    tables.append(Table(lang("sizes.hit_curve"), [lang("column.path"), *(str(number) for number in slots)], rows))
    return [table for table in tables if table.rows]


def share_tables(matrix: Matrix, lang: Language) -> list[Table]:
    """Decoding, then prefill: every cell whose shares were taken, components across, in % and with what a pass takes on the device."""
    return [table for name, title in _SHARES if name in matrix.experiment.metrics and (table := _shares(matrix, name, lang(title), lang)).rows]


def _shares(matrix: Matrix, name: str, title: str, lang: Language) -> Table:
    told = [(row, found.details) for row in matrix.rows if (found := matrix.entry(row, name).measurement) is not None]
    sums: dict[str, float] = {}
    for _, details in told:
        for component, share in details["share_by_component"].items():
            sums[component] = sums.get(component, 0.0) + share
    columns = [component for component in sorted(sums, key=lambda component: -sums[component]) if component != "other"][:_MOST_COLUMNS]
    lines = []
    for row, details in told:
        shares = details["share_by_component"]
        rest = sum(share for component, share in shares.items() if component not in columns)
        total = sum(details["us_per_pass"].values())
        launches = sum(details["launches_per_pass"].values())
        cells = [_percent(shares[component]) if component in shares else "–" for component in columns]
        lines.append([escape(named(matrix, row, lang)), *cells, _percent(rest), f"{total:.0f}", f"{launches:.0f}"])
    names = [lang.texts.get(f"component.{component}", component) for component in columns]
    return Table(title, [lang("column.path"), *names, lang("component.other"), lang("sizes.total_us"), lang("sizes.launches")], lines)


def title(metric: str, lang: Language) -> str:
    """The metric's name with its unit."""
    return lang.metric(metric) + (f", {unit(metric, lang)}" if unit(metric) else "")


def _percent(share: float) -> str:
    return f"{significant(100 * share, 2)} %"
