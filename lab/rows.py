"""A row of the matrix and its entries: one expected cell, every attempt at it with its standing, and what stands where no number does.

Apart from `lab.matrix`, which fills them, so that whoever prints a row needs to know nothing of how it was made. A row shows at most one attempt; the
others stay visible beside it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from lab.cell import Cell
from lab.record import Gap, Measurement, Record, Status
from lab.standing import Kind, Standings

State = Literal["measured", "gap", "not_run"]


@dataclass(frozen=True)
class Unreadable:
    """A record file that could not be read: an attempt happened, and what it found is lost until the file is repaired."""

    cell_id: str
    path: str
    why: str


@dataclass(frozen=True)
class Row:
    """One expected cell: every attempt at it with its standing, oldest first, and its record files that cannot be read.

    `closed` is why the experiment calls the cell a dead end; empty for the others. `not_owed`: metrics that make no sense for it, each with the reason.
    """

    cell: Cell
    point: dict[str, str]
    standings: Standings
    unreadable: tuple[Unreadable, ...] = ()
    closed: str = ""
    not_owed: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def key(self) -> str:
        """The cell's hash. Its id is for people: it ends in eight digits of the hash, which two cells may share."""
        return self.cell.hash

    @cached_property
    def current(self) -> Record | None:
        """The attempt whose numbers or failure the cell shows; None where nothing counts."""
        return next(iter(self.of(Kind.CURRENT)), None)

    @property
    def superseded(self) -> tuple[Record, ...]:
        """Attempts whose place another one has, oldest first."""
        return self.of(Kind.SUPERSEDED)

    def of(self, kind: Kind) -> tuple[Record, ...]:
        """The attempts that stand so, oldest first."""
        return tuple(record for record, standing in self.standings if standing.kind is kind)

    @property
    def later(self) -> tuple[Record, ...]:
        """Superseded attempts newer than the current one, oldest first: they did not displace it, and a reader should know of them."""
        order = [record for record, _ in self.standings]
        since = order.index(self.current) if self.current is not None else len(order)
        return tuple(record for record, standing in self.standings[since:] if standing.kind is Kind.SUPERSEDED)

    @property
    def fill(self) -> str:
        """The command that measures this cell, past its dead end if it has one."""
        words = [f"{key}={value}" for key, value in self.point.items()] + (["force=true"] if self.closed else [])
        return "python -m lab run " + shlex.join(words)

    @property
    def status(self) -> Status:
        """How the cell stands, as one word."""
        if self.current is not None:
            return self.current.status
        if not self.standings:
            return Status.INFRA if self.unreadable else Status.DEAD_END if self.closed else Status.NOT_RUN
        return Status.INVALIDATED if len(self.of(Kind.INVALIDATED)) == len(self.standings) else Status.NOT_RUN

    @property
    def reason(self) -> str:
        """Why nothing counts, from the newest attempt that was not invalidated, else from the newest; for a failed cell its own reason."""
        if self.current is not None:
            return self.current.reason
        if not self.standings:
            return f"record file unreadable: {self.unreadable[-1].path}" if self.unreadable else self.closed or "never attempted"
        record, standing = next((pair for pair in reversed(self.standings) if pair[1].kind is not Kind.INVALIDATED), self.standings[-1])
        return f"attempt {record.attempt} was invalidated: {standing.reason}" if standing.kind is Kind.INVALIDATED else standing.reason

    @property
    def record_path(self) -> str:
        """Where the current attempt's record lies, from the project root; empty without one."""
        return f"runs/{self.current.cell_id}/{self.current.attempt:03d}/record.json" if self.current else ""


@dataclass(frozen=True)
class Entry:
    """One (cell, metric): either a measurement or a gap, never both."""

    row: Row
    metric: str
    measurement: Measurement | None
    gap: Gap | None

    @property
    def state(self) -> State:
        """`not_run` is a gap too: the one that only needs the command to be run."""
        if self.gap is None:
            return "measured"
        return "not_run" if self.gap.status is Status.NOT_RUN else "gap"
