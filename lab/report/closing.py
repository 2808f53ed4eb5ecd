"""The closing of the books: every sum the report rests on, checked against what the report itself lists.

The matrix has closed its own two sums before; here the lists of the report must add up to them, so that a gap, a claim or a target that was dropped on
the way to the page fails the command. Closed books prove that nothing is missing, not that what is there is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lab.books import BooksError
from lab.matrix import Matrix
from lab.registered import matches
from lab.report.claims import Claims
from lab.report.gaps import GapGroup
from lab.report.language import Language
from lab.report.verdicts import TargetResult, Verdict


@dataclass(frozen=True)
class Sum:
    """A total and its parts, by the key of their words. Parts that are 0 are told only where `always` names them."""

    name: str
    total: int
    parts: Mapping[str, int]
    always: tuple[str, ...] = ()

    def text(self, lang: Language) -> str:
        """The sum in words, such as `24 expected = 4 measured + 20 gaps`. Raises BooksError if it is none."""
        if self.total != sum(self.parts.values()):
            raise BooksError(f"{self.name}: {self.total} are not {dict(self.parts)}")
        told = [name for name, count in self.parts.items() if count or name in self.always] or list(self.parts)[:1]
        return f"{lang(f'closing.{self.name}', count=self.total)} = " + " + ".join(lang(f"closing.{name}", count=self.parts[name]) for name in told)


def sums(matrix: Matrix, groups: Sequence[GapGroup], targets: Sequence[TargetResult], judged: Sequence[Verdict], claims: Claims) -> list[Sum]:
    """Every sum of the report, each side counted on its own: totals from the matrix and the file, parts from the lists that are printed."""
    totals, experiment = matrix.totals, matrix.experiment
    shown = sum(matrix.entry(row, name).measurement is not None for row in matrix.rows for name in experiment.metrics)
    outcomes = Counter(aim.outcome for result in targets for aim in result.aims)
    words = Counter(verdict.word for verdict in judged)
    beside = Counter("claim_none" if i.ours is None else "claim_measured" if i.ours.measurement else "claim_gap" for i in claims.items)
    listed = sum(group.count for group in groups)
    found = [
        Sum("expected", totals.expected, {"measured": shown, "gaps": listed}, ("measured", "gaps")),
        Sum("attempts", totals.attempts, totals.parts, ("current",)),
    ]
    if experiment.targets:
        wanted = {"reached": outcomes["REACHED"], "missed": outcomes["MISSED"], "open": outcomes["OPEN"], "closed": outcomes["CLOSED"]}
        found.append(Sum("targets", sum(matches(point, t.where) for t in experiment.targets for point in experiment.points()), wanted))
    if experiment.hypotheses:
        found.append(Sum("hypotheses", len(experiment.hypotheses), {"holds": words["HOLDS"], "fails": words["FAILS"], "undecided": words["OPEN"]}))
    if experiment.claims:
        found.append(Sum("claims", len(experiment.claims), {name: beside[name] for name in ("claim_measured", "claim_gap", "claim_none")}))
    return found
