"""The gates a cell passes on its way to a number, in their order, and how a record remembers them.

Order matters: a dead end stops before any file is read, a misfit before anything is loaded, and a speed is looked at only after the output
proved valid and in parity. A record lists every gate, so that a reader sees how far an attempt came and what was forced. A passed gate says
that nothing spoke against the number there, not that the number is right.
"""

from __future__ import annotations

from collections.abc import Iterable

from lab.record import GateResult, Status

GATES = ("identity", "dead_end", "artifact", "capacity", "load", "residency", "numeric", "parity", "speed", "plausibility")
"""identity: code and files are those the record names; load: code and device for the path are there, and it loaded and ran to the end; residency: where
the weights lie and which operations ran on them."""

_STOPPED_AT = {
    Status.DEAD_END: "dead_end",
    Status.ARTIFACT_REFUSED: "artifact",
    Status.OOM_PREDICTED: "capacity",
    Status.PATH_NOT_EXECUTED: "residency",
    Status.DEGRADED: "residency",
    Status.NUMERIC_INVALID: "numeric",
    Status.PARITY_FAILED: "parity",
    Status.IMPLAUSIBLE: "plausibility",
}


def gate_of(status: Status) -> str:
    """The gate at which a cell with this status stopped; whatever broke while loading or measuring stopped at `load`."""
    return _STOPPED_AT.get(status, "load")


def passed(gate: str, detail: str = "") -> GateResult:
    """The gate was passed."""
    return GateResult(gate=gate, outcome="passed", detail=detail)


def not_checked(gate: str, detail: str = "") -> GateResult:
    """The gate had nothing to judge, or nothing to judge by."""
    return GateResult(gate=gate, outcome="not_checked", detail=detail)


def forced(gate: str, detail: str) -> GateResult:
    """The gate said no, and the command went on all the same."""
    return GateResult(gate=gate, outcome="forced", detail=detail)


def complete(known: Iterable[GateResult], status: Status, reason: str, stopped_at: str = "") -> list[GateResult]:
    """Every gate once, in order: what is known of each, the one that stopped the cell (by default its status's), and what it did not reach.

    A cell that ended OK reached every gate; one of which nothing is known then was not checked.
    """
    found = {result.gate: result for result in known}
    stop = None if status is Status.OK else stopped_at or gate_of(status)
    results: list[GateResult] = []
    for gate in GATES:
        if gate == stop:
            results.append(GateResult(gate=gate, outcome="stopped", detail=f"{status}: {reason}"))
        elif stop is not None and GATES.index(gate) > GATES.index(stop):
            results.append(GateResult(gate=gate, outcome="not_reached"))
        else:
            results.append(found.get(gate) or not_checked(gate))
    return results
