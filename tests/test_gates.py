"""The order of the gates, and that a record always tells the whole way of a cell."""

from __future__ import annotations

import pytest

from lab.gates import GATES, complete, forced, gate_of, passed
from lab.record import Status


def test_the_order_is_the_registered_one() -> None:
    assert GATES == ("identity", "dead_end", "artifact", "capacity", "load", "residency", "numeric", "parity", "speed", "plausibility")


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.OK])
def test_every_status_stops_at_one_gate_and_reaches_none_after_it(status: Status) -> None:
    results = complete([passed(gate) for gate in GATES], status, "for a reason")
    assert [r.gate for r in results] == list(GATES)
    place = GATES.index(gate_of(status))
    assert [r.outcome for r in results] == ["passed"] * place + ["stopped"] + ["not_reached"] * (len(GATES) - place - 1)
    assert results[place].detail == f"{status}: for a reason"


@pytest.mark.parametrize(
    ("status", "gate"),
    [
        (Status.DEAD_END, "dead_end"),
        (Status.ARTIFACT_REFUSED, "artifact"),
        (Status.OOM_PREDICTED, "capacity"),
        (Status.OOM, "load"),
        (Status.DEGRADED, "residency"),
        (Status.PATH_NOT_EXECUTED, "residency"),
        (Status.NUMERIC_INVALID, "numeric"),
        (Status.PARITY_FAILED, "parity"),
        (Status.IMPLAUSIBLE, "plausibility"),
    ],
)
def test_which_gate_a_status_belongs_to(status: Status, gate: str) -> None:
    assert gate_of(status) == gate


def test_a_forced_gate_stays_visible_and_an_unknown_one_is_not_called_passed() -> None:
    results = {r.gate: r for r in complete([passed("identity"), forced("dead_end", "closed")], Status.OK, "")}
    assert results["dead_end"].outcome == "forced" and results["dead_end"].detail == "closed"
    assert results["parity"].outcome == "not_checked"


def test_a_stop_can_be_placed_at_another_gate_than_its_status_says() -> None:
    results = complete([], Status.INFRA, "the code changed", "identity")
    assert [r.outcome for r in results] == ["stopped", *["not_reached"] * (len(GATES) - 1)]
