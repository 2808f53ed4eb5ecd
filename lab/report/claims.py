"""Claims: numbers reported elsewhere, beside our cells and never inside them, under the same plausibility rules as our own.

A claim becomes an observation with the cell it names as its series and its value as both extremes, since no samples were published. A claim that
its own author voided is judged alone: it must not cast doubt on the others. A claim without a flag is not confirmed by that.
"""

from __future__ import annotations

from dataclasses import dataclass

from lab.matrix import Entry, Matrix, Row
from lab.plausibility import Flag, Observation, flags
from lab.registered import QUANTITIES, Claim, as_text, pick
from lab.report.capacity import Capacity
from lab.report.language import Language
from lab.report.tables import place


@dataclass(frozen=True)
class Reported:
    """One claim with its number, the expected cell it is about and our entry for the same quantity (None: there is none), and its flags' numbers."""

    number: str
    claim: Claim
    row: Row | None
    ours: Entry | None
    marks: tuple[str, ...]

    @property
    def figure(self) -> str:
        """The figure as it was reported, without its unit; struck through where it is void."""
        value = f"{self.claim.value:.10g}"
        return f"~~{value}~~" if self.claim.void else value

    @property
    def shown(self) -> str:
        """The figure with its flags behind it."""
        return f"{self.figure} [{', '.join(self.marks)}]" if self.marks else self.figure


@dataclass(frozen=True)
class Claims:
    """Every claim of an experiment in its order, and the flags they raised, numbered F1, F2, ... in theirs."""

    items: tuple[Reported, ...]
    flags: tuple[tuple[str, Flag], ...]

    def about(self, row: Row, metric: str) -> list[Reported]:
        """The claims that name this cell and are about the quantity shown beside `metric`."""
        return [item for item in self.items if item.row is row and QUANTITIES[item.claim.quantity].beside == metric]

    def beside(self, metric: str) -> list[Reported]:
        """The claims about the quantity shown beside `metric`, whatever they are about."""
        return [item for item in self.items if QUANTITIES[item.claim.quantity].beside == metric]


def judge_claims(matrix: Matrix, capacity: Capacity, lang: Language) -> Claims:
    """Set every claim beside our entry, and run the plausibility rules over all of them."""
    points = [row.point for row in matrix.rows]
    rows: dict[str, Row | None] = {}
    for claim in matrix.experiment.claims:
        found = pick(points, claim.where) if claim.where else None
        rows[claim.id] = matrix.rows[found] if found is not None else None
    seen = {claim.id: observe(matrix, claim, rows[claim.id], capacity, lang) for claim in matrix.experiment.claims}
    void = [claim.id for claim in matrix.experiment.claims if claim.void]
    raised = [*flags(seen[name] for name in seen if name not in void), *(flag for name in void for flag in flags([seen[name]]))]
    numbered = tuple((f"F{number}", flag) for number, flag in enumerate(raised, start=1))
    items = (_reported(matrix, f"C{number}", claim, rows[claim.id], numbered) for number, claim in enumerate(matrix.experiment.claims, start=1))
    return Claims(tuple(items), numbered)


def observe(matrix: Matrix, claim: Claim, row: Row | None, capacity: Capacity, lang: Language) -> Observation:
    """The claim as an observation. A claim that names no cell is a series of its own, told by its words."""
    shared = {key: as_text(value) for key, value in matrix.experiment.overrides.items()}
    where = {key: as_text(value) for key, value in claim.where.items()}
    own = {key: value for key, value in where.items() if key != "layers" and shared.get(key) != value}
    layers = where.get("layers", shared.get("layers")) if where else None
    bound, basis = capacity.bound(row, claim.quantity) if row else (None, "")
    return Observation(
        name=claim.id,
        series=place(own, lang) if where else lang.text(claim.what),
        layers=int(layers) if layers else None,
        quantity=claim.quantity,
        value=claim.value,
        low=claim.value,
        high=claim.value,
        bound=bound,
        basis=lang.recorded(basis),
        vocabulary=capacity.vocabulary(row.cell) if row else None,
    )


def _reported(matrix: Matrix, number: str, claim: Claim, row: Row | None, numbered: tuple[tuple[str, Flag], ...]) -> Reported:
    metric = QUANTITIES[claim.quantity].beside
    ours = matrix.entry(row, metric) if row is not None and metric is not None and metric in matrix.experiment.metrics else None
    return Reported(number, claim, row, ours, tuple(name for name, flag in numbered if claim.id in flag.names))
