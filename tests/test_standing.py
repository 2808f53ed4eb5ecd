"""How attempts stand beside each other, and what a record is known by wherever it is."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.metrics import METRICS
from lab.record import Gap, Record, Status
from lab.standing import Kind, Mark, Standing, record_id, standings, with_copies
from tests.matrix_helpers import cell, complete, invalidated, measured, record

OF = cell("fine")
WEIGHTS = {"nano": "f00d" * 16}
OTHER: dict[str, Any] = {"artifact": {"sha256": "dead" * 16}}


def old(attempt: int) -> Record:
    return record(OF, {"ppl": measured("ppl", 20.0, protocol="ppl/window@0")}, attempt=attempt)


def good(attempt: int, **rest: Any) -> Record:
    return complete(OF, 0.1, attempt=attempt, **rest)


def failed(attempt: int, **rest: Any) -> Record:
    return record(OF, status=Status.CRASHED, attempt=attempt, **rest)


def kinds(*records: Record, bad: tuple[int, ...] = (), **rest: Any) -> list[tuple[int, str]]:
    marks = {(OF.id, number): (invalidated(),) for number in bad}
    return [(found.attempt, standing.text.split(":")[0]) for found, standing in standings(records, marks, **rest)]


def test_the_newest_ok_attempt_is_current_and_the_others_name_it() -> None:
    assert kinds(good(1), good(3), failed(2), failed(4)) == [
        (1, "SUPERSEDED by attempt 3"), (2, "SUPERSEDED by attempt 3"), (3, "CURRENT"), (4, "SUPERSEDED by attempt 3")
    ]  # fmt: skip


def test_without_an_ok_attempt_the_newest_failure_is_current() -> None:
    assert kinds(failed(1), failed(2)) == [(1, "SUPERSEDED by attempt 2"), (2, "CURRENT")]


def test_an_invalidated_attempt_gives_its_place_to_the_one_before() -> None:
    assert kinds(good(1), good(2), bad=(2,)) == [(1, "CURRENT"), (2, "INVALIDATED")]
    assert kinds(failed(1), good(2), bad=(2,)) == [(1, "CURRENT"), (2, "INVALIDATED")]
    assert kinds(good(1), bad=(1,)) == [(1, "INVALIDATED")]


def test_every_reason_is_told() -> None:
    marks = {(OF.id, 1): (invalidated("wrong text"), invalidated("busy"), invalidated("busy", at="2026-08-03"))}
    assert standings([good(1)], marks)[0][1] == Standing(Kind.INVALIDATED, "busy; wrong text")


def test_an_older_protocol_never_counts_and_hides_the_failures_before_it() -> None:
    assert kinds(old(1)) == [(1, "STALE_PROTOCOL")]
    assert kinds(failed(1), old(2)) == [(1, "SUPERSEDED by attempt 2"), (2, "STALE_PROTOCOL")]
    assert kinds(old(1), failed(2)) == [(1, "STALE_PROTOCOL"), (2, "CURRENT")]
    assert kinds(good(1), old(2)) == [(1, "CURRENT"), (2, "STALE_PROTOCOL")]


def test_only_the_metrics_asked_for_can_be_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    before = good(1)
    monkeypatch.setitem(METRICS, "ppl", dataclasses.replace(METRICS["ppl"], protocol="ppl/window@2"))
    assert kinds(before) == [(1, "STALE_PROTOCOL")]
    assert kinds(before, metrics=("kld_mean",)) == [(1, "CURRENT")]


def test_other_weights_than_the_pinned_ones_do_not_count() -> None:
    assert kinds(good(1), good(2, **OTHER), weights=WEIGHTS) == [(1, "CURRENT"), (2, "OTHER_WEIGHTS")]
    assert kinds(good(1, artifact={}), weights=WEIGHTS) == [(1, "OTHER_WEIGHTS")]
    assert kinds(failed(1, artifact={"path": "weights"}), weights=WEIGHTS) == [(1, "CURRENT")]
    assert kinds(good(1, **OTHER), weights={"flash_next": "f00d" * 16}) == [(1, "CURRENT")]
    (found,) = standings([good(1, **OTHER)], weights=WEIGHTS)
    assert found[1].reason == "attempt 1 ran weights of sha256 deaddeaddead; the experiment pins nano to f00df00df00d"


@given(st.permutations(range(6)))
def test_the_order_is_that_of_time_whatever_came_first_and_copies_are_one(order: list[int]) -> None:
    base = [good(1), failed(2), good(3), good(7, started_at=good(1).started_at), failed(8, started_at="yesterday"), good(9, started_at=good(3).started_at)]
    copies = [one.model_copy(update={"attempt": one.attempt + 20}) for one in base]
    shuffled = [one for index in order for one in (copies[index], base[index])]
    random.Random(order[0]).shuffle(shuffled)
    found = with_copies(shuffled)
    assert found == with_copies([*base, *copies])
    assert sorted([one.attempt for one in same] for same in found) == [[number, number + 20] for number in (1, 2, 3, 7, 8, 9)]
    assert found[0][0].attempt == 8, "an unknown time never displaces a known one"


@pytest.mark.parametrize("marked", [(2,), (5,), (2, 5), (3, 5)])
def test_a_mark_on_any_copy_is_a_mark_on_the_record(marked: tuple[int, ...]) -> None:
    one = good(1)
    same = [one.model_copy(update={"attempt": number}) for number in (5, 2, 3)]
    marks = {(OF.id, number): (invalidated(f"reason {number}", at=f"2026-08-0{number}"),) for number in marked}
    ((_, standing),) = standings(same, marks)
    assert standing == Standing(Kind.INVALIDATED, "; ".join(f"reason {number}" for number in marked))
    other = good(4, started_at=one.started_at, finished_at=one.finished_at, resume_key=one.resume_key, notes=["another of the same moment"])
    assert [s.kind for _, s in standings([*same, other], marks)].count(Kind.CURRENT) == 1, "and on no other record"


def test_a_record_is_known_by_its_content_and_not_by_its_number() -> None:
    one = good(1, evidence={"a": 1, "b": [float("nan")]})
    assert record_id(one) == record_id(one.model_copy(update={"attempt": 9}))
    assert record_id(Record.model_validate_json(one.model_dump_json())) == record_id(one)
    turned = json.loads(one.model_dump_json())
    turned = dict(reversed(turned.items())) | {"evidence": dict(reversed(turned["evidence"].items()))}
    assert record_id(Record.model_validate(turned)) == record_id(one)
    assert record_id(one) != record_id(one.model_copy(update={"notes": ["x"]}))


@given(st.sampled_from(["reason", "started_at", "finished_at", "resume_key", "cell_hash", "cell_id", "elapsed_s", "status"]))
def test_any_other_content_is_another_record(field: str) -> None:
    one = failed(1)
    values = {"elapsed_s": 31.0, "status": Status.OOM}
    assert record_id(one) != record_id(one.model_copy(update={field: values.get(field, "other")}))


def test_a_field_added_later_does_not_change_who_a_record_is() -> None:
    class Later(Record):
        mood: str = ""
        gaps: dict[str, Gap] = {}  # noqa: RUF012 - pydantic copies it

    one = good(1)
    assert record_id(Later.model_validate_json(one.model_dump_json())) == record_id(one)


@pytest.mark.parametrize("changed", [{"what": "praised"}, {"reason": " "}, {"extra": 1}])
def test_a_mark_says_what_and_why(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"what|reason|extra"):
        Mark.model_validate({**invalidated().model_dump(), **changed})
