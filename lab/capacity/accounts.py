"""A reported sum of sizes against the model's own: which of its terms follow from weights and bits, and which do not.

Each term names the parts it may cover and the bits per weight that would give it; the bytes are then counted and compared as printed, in the account's
unit. A derived term shows that the reading is consistent, not that its author meant it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lab.capacity.ledger import ACCOUNT_PARTS, NoLedger
from lab.capacity.service import ledgers
from lab.compose import compose_cells
from lab.errors import LabError
from lab.project import Project
from lab.registered import Account, AccountTerm

Word = Literal["derived", "close", "not derivable"]
UNITS = {"GB": 10**9, "GiB": 1 << 30}
CLOSE = 0.01
"""Relative difference up to which a term is called close."""


@dataclass(frozen=True)
class DerivedTerm:
    """A term, or with `is_total` the account's total, and what its parts give. `largest_part` is the part of most weights, `bits_needed` what each of its
    weights would have to take for the term to be as reported, the other parts as stated."""

    label: str | dict[str, str]
    is_total: bool
    reported: float
    unit: str
    derived_bytes: float | None
    word: Word
    difference: float | None = None
    largest_part: str | None = None
    bits_stated: float | None = None
    bits_needed: float | None = None

    @property
    def gb(self) -> float | None:
        """The derived size in 10^9 bytes."""
        return None if self.derived_bytes is None else self.derived_bytes / UNITS["GB"]

    @property
    def gib(self) -> float | None:
        """The derived size in 2^30 bytes."""
        return None if self.derived_bytes is None else self.derived_bytes / UNITS["GiB"]

    def sentence(self) -> str:
        """The finding in words, without a full stop."""
        if self.gb is None or self.gib is None or self.difference is None:
            return f"{self.reported:g} {self.unit}: not derivable, no parts are named"
        sizes = f"{self.gib:.2f} GiB = {self.gb:.2f} GB"
        if self.word == "derived":
            return f"{self.reported:g} {self.unit}: derived, {sizes}"
        if self.word == "close":
            return f"{self.reported:g} {self.unit}: close, {sizes}, {self.difference:+.2f} {self.unit}"
        remains = f"{self.reported:g} {self.unit}: not derivable, the parts give {sizes}, {self.difference:+.2f} {self.unit}"
        if self.bits_needed is None:
            return remains
        return f"{remains}; {self.largest_part} would have to take {self.bits_needed:.2f} bits per weight instead of {self.bits_stated:g}"


Derivation = list[DerivedTerm]
"""The terms of an account in its order, its total last."""


def derive(project: Project, account: Account) -> Derivation:
    """Every term of the account, then its total. Raises LabError for an unknown model or part, or where the model's sizes are not known."""
    cell = compose_cells([f"model={account.model}", "path=reference", f"layers={account.layers}", "device=cpu"], project)[0]
    ledger = ledgers(project, [cell])[cell.hash]
    if isinstance(ledger, NoLedger):
        raise LabError(f"account {account.id}: {ledger.reason}")
    weights = ledger.weights()
    terms = [_term(account, term, weights) for term in account.terms]
    known = [t.derived_bytes for t in terms if t.derived_bytes is not None]
    total = sum(known) if len(known) == len(terms) else None
    return [*terms, _compared("total", True, account.total, account.unit, total)]


def _term(account: Account, term: AccountTerm, weights: Mapping[str, int]) -> DerivedTerm:
    for part in term.parts:
        if part not in ACCOUNT_PARTS:
            raise LabError(f"account {account.id}: no part {part!r}; choose from: {', '.join(ACCOUNT_PARTS)}")
    sizes = {part: weights.get(part, 0) * bits / 8 for part, bits in term.parts.items()}
    label = term.label if isinstance(term.label, str) else dict(term.label)
    if not any(sizes.values()):
        return _compared(label, False, term.reported, account.unit, None)
    largest = max(sizes, key=lambda part: weights.get(part, 0))
    rest = sum(sizes.values()) - sizes[largest]
    needed = 8 * (term.reported * UNITS[account.unit] - rest) / weights[largest]
    return _compared(label, False, term.reported, account.unit, sum(sizes.values()), largest, term.parts[largest], needed)


def _compared(
    label: str | dict[str, str],
    is_total: bool,
    reported: float,
    unit: str,
    size: float | None,
    largest: str | None = None,
    stated: float | None = None,
    needed: float | None = None,
) -> DerivedTerm:
    if size is None:
        return DerivedTerm(label, is_total, reported, unit, None, "not derivable")
    value = size / UNITS[unit]
    # The file holds numbers, not digits: 8 and 8.0 both count as printed without decimals.
    decimals = len(f"{reported:.10g}".partition(".")[2])
    word: Word = "derived" if round(value, decimals) == reported else "close" if abs(value - reported) <= CLOSE * abs(reported) else "not derivable"
    return DerivedTerm(label, is_total, reported, unit, size, word, value - reported, largest, stated, needed)
