"""What failures teach: which place they raise, never lower, which records they are read from, and that an invalidated one is forgotten."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lab.attempt import one_line
from lab.capacity import PastOom, capacity_evidence, estimate_with_memory, judge, past_ooms, place_out_of_memory
from lab.capacity.ledger import Place
from lab.cell import Cell
from lab.child import KILLED_FOR_MEMORY
from lab.record import Record, Status
from lab.standing import Mark
from lab.store import Stored
from tests.capacity.helpers import ledger
from tests.runner_helpers import cell_of, make_project, record_of

MARK = Mark(what="invalidated", reason="a neighbour held the memory", at="2026-11-30T10:00:00+00:00", by="me")
CUDA = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 139.80 GiB of which 12.00 GiB is free."


def oom(layers: int, predicted: int, free: int, place: Place = "device") -> PastOom:
    return PastOom("nano", "expert_q2", "cpu", layers, place, predicted, free)


@given(
    st.integers(1, 10**12),
    st.integers(1, 48),
    st.lists(st.tuples(st.integers(1, 48), st.integers(1, 10**12), st.integers(0, 10**12), st.sampled_from(["device", "host"])), max_size=5),
    st.integers(0, 10**11),
)
def test_estimates_are_raised_never_lowered_and_grow_with_depth_and_failures(
    size: int, layers: int, failures: list[tuple[int, int, int, Place]], more: int
) -> None:
    past = [oom(*failure) for failure in failures]
    found = estimate_with_memory(ledger(size, 7, layers=layers), past)
    fewer, deeper = estimate_with_memory(ledger(size, 7, layers=layers), past[1:]), estimate_with_memory(ledger(size + more, 7, layers=layers + 1), past)
    assert (found.device.ledger_bytes, found.host.ledger_bytes) == (size, 7)
    for one, less, further in ((found.device, fewer.device, deeper.device), (found.host, fewer.host, deeper.host)):
        assert one.ledger_bytes <= one.bytes and bool(one.reason) is (one.bytes > one.ledger_bytes)
        assert less.bytes <= one.bytes <= further.bytes


@pytest.mark.parametrize(("place", "sizes"), [("device", {"device": 131, "host": 50}), ("host", {"device": 100, "host": 66})])
def test_only_the_place_that_ran_out_is_raised(place: Place, sizes: dict[Place, int]) -> None:
    raised = estimate_with_memory(ledger(100, 50, layers=6), [oom(6, 100, 130, place)])
    assert raised.sizes == sizes
    assert f"raised by 1.310: out of {place} memory at 6 layers" in raised.reason


def test_the_cell_that_failed_does_not_fit_the_memory_it_failed_in() -> None:
    failed = ledger(100, 50, layers=6)
    on_device, on_host = (estimate_with_memory(failed, [oom(6, *sizes)]) for sizes in ((100, 130, "device"), (50, 60, "host")))
    assert judge(failed, 130, 60).fits
    assert judge(failed, 130, 60, on_device).short_by_bytes == judge(failed, 130, 60, on_host).short_by_bytes == 1
    shared = ledger(60, 40, layers=6, one_memory=True)
    assert judge(shared, 130, None, estimate_with_memory(shared, [oom(6, 100, 130)])).fits is False


def test_failures_of_other_cells_do_not_count() -> None:
    known = oom(12, 100, 500)
    others = [replace(known, model="x"), replace(known, path="x"), replace(known, device="x"), replace(known, layers=13)]
    assert estimate_with_memory(ledger(100), others).device.bytes == 100 < estimate_with_memory(ledger(100), [*others, known]).device.bytes


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    return cell_of(make_project(tmp_path / "p"), "path=expert_q2", "layers=6")


def on_gpu(cell: Cell) -> Cell:
    return cell.model_copy(update={"device": cell.device.model_copy(update={"name": "h200", "torch_device": "cuda"})})


def failed(cell: Cell, status: Status = Status.OOM, **said: object) -> Record:
    return record_of(cell, status, evidence={"capacity": capacity_evidence(ledger(100, 40, layers=6), 130, 50) | said})


def stored(*records: Record, marks: tuple[Mark, ...] = ()) -> list[Stored]:
    return [Stored(Path("record.json"), record, marks) for record in records]


def test_a_failure_is_read_back_from_its_record(cell: Cell) -> None:
    others = [record_of(cell, Status.OOM), failed(cell, Status.TIMEOUT)]
    assert past_ooms(stored(failed(cell), *others)) == [PastOom("nano", "expert_q2", "cpu", 6, "device", 100, 130, f"{cell.id}/001")]


def test_where_it_ran_out_is_read_back_and_where_nothing_says_it_teaches_nothing(cell: Cell) -> None:
    gpu = on_gpu(cell)
    (device,), (host,) = (past_ooms(stored(failed(gpu, ran_out=place))) for place in ("device", "host"))
    assert (device.place, device.predicted_bytes, device.free_bytes) == ("device", 100, 130)
    assert (host.place, host.predicted_bytes, host.free_bytes) == ("host", 40, 50)
    assert past_ooms(stored(failed(gpu), failed(gpu, ran_out=None), failed(gpu, ran_out="elsewhere"), failed(gpu, ran_out="host", host_bytes=None))) == []


def test_a_spoilt_record_teaches_nothing(cell: Cell) -> None:
    strange = [failed(cell).model_copy(update={"cell": {}}), record_of(cell, Status.OOM, evidence={"capacity": "full"})]
    assert past_ooms(stored(*strange)) == []


def test_an_invalidated_failure_is_forgotten_and_so_are_its_copies(cell: Cell) -> None:
    record, other = failed(cell), failed(cell, host_bytes=41)
    copy = record.model_copy(update={"attempt": 2})
    assert past_ooms(stored(record, marks=(MARK,))) == []
    assert past_ooms([*stored(record), *stored(copy, marks=(MARK,))]) == []
    assert len(past_ooms([*stored(other), *stored(copy, marks=(MARK,))])) == 1


@pytest.mark.parametrize(
    ("reason", "place"),
    [
        (CUDA, "device"),
        (CUDA.replace("CUDA", "HIP"), "device"),
        (one_line(MemoryError()), "host"),
        (one_line(MemoryError("Unable to allocate 3.00 GiB for an array with shape (3,) and data type uint8")), "host"),
        (f"{KILLED_FOR_MEMORY}, in phase load", "host"),
        ("the server said 507", None),
    ],
)
def test_the_message_tells_where_memory_ran_out(reason: str, place: Place | None) -> None:
    assert place_out_of_memory(reason) == place


def test_torchs_own_message_for_main_memory_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert place_out_of_memory(one_line(caught.value)) == "host"
