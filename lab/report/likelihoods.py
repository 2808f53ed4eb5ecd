"""Token by token: how far two engines' log-likelihoods of the same tokens lie apart, on the same file.

A perplexity can agree by luck; the same tokens' likelihoods cannot. Read from the evidence that `ppl/llama-half@1` leaves in a record. What a difference
comes from is not said here: rounding, quantised activations and a wrong scale all show up, in this order of size.
"""

from __future__ import annotations

from typing import Any

from lab.matrix import Matrix, Row
from lab.report.language import Language
from lab.report.markup import Table, escape
from lab.report.measured import bases
from lab.report.numbers import significant
from lab.report.tables import named


def token_likelihoods(matrix: Matrix, lang: Language) -> Table:
    """One line per cell whose tokens its base has scored, too."""
    against, rows = bases(matrix), []
    for row in matrix.rows:
        base = against.get(row.key)
        ours, theirs = _scores(matrix, row), _scores(matrix, base)
        if ours is None or theirs is None or not _same(row, base, ours, theirs):
            continue
        gaps = [a - b for a, b in zip(ours["nll"], theirs["nll"], strict=True)]
        sizes = sorted(abs(gap) for gap in gaps)
        rows.append(
            [
                escape(named(matrix, row, lang)),
                f"{len(gaps):,}",
                significant(sum(gaps) / len(gaps)),
                significant(sum(sizes) / len(sizes)),
                significant(sizes[int(0.99 * (len(sizes) - 1))]),
                significant(sizes[-1]),
            ]
        )
    header = ["column.path", "tokens.count", "tokens.mean", "tokens.mean_size", "tokens.tail", "tokens.max"]
    return Table("", [lang(key) for key in header], rows)


def _scores(matrix: Matrix, row: Row | None) -> dict[str, Any] | None:
    """The evidence behind the cell's perplexity, or None where that is a gap: what a refused attempt left is no number either."""
    if row is None or row.current is None or ("ppl_llama_half" in matrix.experiment.metrics and matrix.entry(row, "ppl_llama_half").measurement is None):
        return None
    found = row.current.evidence.get("token_nll") if "ppl_llama_half" in row.current.metrics else None
    return found if isinstance(found, dict) and found.get("nll") else None


def _same(row: Row, base: Row | None, ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Whether both scored the same tokens of the same file by the same protocol."""
    assert row.current is not None and base is not None and base.current is not None
    files = {record.artifact.get("sha256") for record in (row.current, base.current)}
    return len(files) == 1 and all(ours.get(key) == theirs.get(key) for key in ("protocol", "ids_sha256")) and len(ours["nll"]) == len(theirs["nll"])
