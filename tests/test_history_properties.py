"""Random histories over two machines: attempts of every outcome, retries, copies, invalidations, exchanges in any order and doubled, new protocols.

Whatever happened, in whatever order it arrived: the matrix is the same, no headline comes from an attempt that does not count, the books close, and no
record file was ever changed or removed.
"""

from __future__ import annotations

import dataclasses
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab.exchange import take_in
from lab.experiment import Experiment
from lab.matrix import Matrix, build_matrix
from lab.metrics import METRICS
from lab.parcels import Parcel, merge, read_parcels, to_text
from lab.record import Gap, Record, Status
from lab.soundness import refusals
from lab.standing import Kind, Mark, record_id
from lab.store import RECORD, Store, marks_of
from tests.matrix_helpers import SMALL, cell, compose, measured, record, small

NAMES = ("ppl", "kld_mean", "pp512_tok_s", "expert_cosine")
CELLS = [cell(path, layers) for path in ("fine", "coarse", "foreign") for layers in (3, 6)]
PINNED = "f00d" * 16
TOTAL = 24
"""Expected entries of the small experiment."""


@dataclass(frozen=True)
class Attempt:
    """A measurement on one of two machines; `minute` is when it began, and may be the same on both."""

    machine: int
    cell: int
    minute: int
    status: Status
    values: tuple[float, ...]
    weights: str

    def record(self) -> Record:
        gaps = {name: Gap(status=self.status if self.status is not Status.OK else Status.IMPLAUSIBLE, reason="no", fill="") for name in NAMES[:1]}
        metrics = {name: measured(name, value) for name, value in zip(NAMES[1:], self.values, strict=False)} if self.status is Status.OK else {}
        rest: dict[str, Any] = {"artifact": {"sha256": self.weights}, "resume_key": f"machine {self.machine}"}
        return record(CELLS[self.cell], metrics, status=self.status, gaps=gaps, attempt=1 + self.minute, **rest)


@dataclass(frozen=True)
class Invalidate:
    """Somebody on that machine marks the attempt that is `which` among those it holds."""

    machine: int
    which: int
    reason: str


@dataclass(frozen=True)
class Copy:
    """Somebody copies an attempt's folder on that machine, with what was said about it or without."""

    machine: int
    which: int
    with_marks: bool


@dataclass(frozen=True)
class Carry:
    """One machine exports everything, the other imports it, perhaps twice."""

    machine: int
    times: int


ATTEMPTS = st.builds(
    Attempt,
    machine=st.integers(0, 1),
    cell=st.integers(0, len(CELLS) - 1),
    minute=st.integers(0, 40),
    status=st.sampled_from([Status.OK, Status.OK, Status.OK, Status.OOM, Status.TIMEOUT, Status.CRASHED, Status.PATH_NOT_EXECUTED]),
    values=st.lists(st.sampled_from([0.5, 1.0, 50.0, 90.0]), max_size=3).map(tuple),
    weights=st.sampled_from([PINNED, PINNED, PINNED, "dead" * 16]),
)
STEPS = st.one_of(
    ATTEMPTS,
    ATTEMPTS,
    st.builds(Invalidate, machine=st.integers(0, 1), which=st.integers(0, 99), reason=st.sampled_from(["busy", "wrong text"])),
    st.builds(Copy, machine=st.integers(0, 1), which=st.integers(0, 99), with_marks=st.booleans()),
    st.builds(Carry, machine=st.integers(0, 1), times=st.integers(1, 2)),
)


@dataclass
class World:
    """Two machines, each with its own runs/, and the bytes of every record file that was ever written."""

    root: Path
    written: dict[Path, bytes] = field(default_factory=dict)

    def store(self, machine: int) -> Store:
        return Store(self.root / f"machine{machine}" / "runs")

    def do(self, step: Attempt | Invalidate | Copy | Carry) -> None:
        store = self.store(step.machine)
        if isinstance(step, Attempt):
            one = step.record()
            if record_id(one) not in {record_id(held.record) for held in store.records()}:  # no two attempts agree in everything
                store.add(one.model_copy(update={"attempt": store.next_number(one.cell_id)}))
        elif isinstance(step, Invalidate):
            if held := store.records():
                target = held[step.which % len(held)]
                mark = Mark(what="invalidated", reason=step.reason, at=f"2026-08-02T00:00:{step.which % 60:02d}+00:00", by=f"user {step.machine}")
                store.mark(target.file.parent, [mark])
        elif isinstance(step, Copy):
            if held := store.records():
                target = held[step.which % len(held)]
                store.add(target.record.model_copy(update={"attempt": store.next_number(target.record.cell_id)}), target.marks if step.with_marks else ())
        else:
            parcels = self.parcels(step.machine)
            for _ in range(step.times):
                take_in(self.store(1 - step.machine), parcels)
        self.written |= {file: file.read_bytes() for machine in (0, 1) for file in self.store(machine).record_files() if file not in self.written}

    def parcels(self, machine: int) -> list[Parcel]:
        """What the machine exports, by way of a file as on a real journey."""
        file = self.root / f"from{machine}.jsonl"
        file.write_text(to_text(Parcel(one.record, one.marks) for one in self.store(machine).records()))
        return read_parcels(file)


def matrix_of(experiment: Experiment, store: Store, order: random.Random | None = None) -> Matrix:
    held = store.records()
    records = [one.record for one in held]
    if order is not None:
        records += records[::2]
        order.shuffle(records)
    return build_matrix(experiment, records, compose, marks=marks_of(held))


def essence(matrix: Matrix) -> list[Any]:
    """The matrix without attempt numbers, which every machine gives out by itself, and without copies, which do not travel."""
    entries = [(e.row.cell.id, e.metric, e.measurement, e.gap.status if e.gap else None) for e in matrix.entries.values()]
    stands = [[(record_id(r), s.kind, s.reason if s.kind is Kind.INVALIDATED else "") for r, s in row.standings] for row in matrix.rows]
    return [entries, stands, dataclasses.replace(matrix.totals, attempts=0, copies=0), [flag.sentence() for flag in matrix.flags]]


def check(matrix: Matrix, held: list[Any]) -> None:
    """What holds for every matrix."""
    totals, marked = matrix.totals, {record_id(one.record) for one in held if one.marks}
    assert totals.expected == TOTAL == totals.measured + totals.gaps
    assert totals.attempts == len(held) == sum(totals.parts.values())
    assert totals.copies == len(held) - len({record_id(one.record) for one in held})
    flagged = Counter(name for flag in matrix.flags for name in flag.names)
    for entry in matrix.entries.values():
        assert (entry.measurement is None) != (entry.gap is None)
        if entry.measurement is None:
            assert entry.gap is not None and entry.gap.reason and entry.gap.fill.startswith("python -m lab run")
            continue
        source = entry.row.current
        assert source is not None and source.status is Status.OK and record_id(source) not in marked
        assert entry.measurement == source.metrics[entry.metric]
        assert (entry.measurement.protocol, source.artifact["sha256"]) == (METRICS[entry.metric].protocol, PINNED)
        assert f"{entry.row.cell.id}/{entry.metric}" not in flagged
        assert entry.metric not in refusals(source)
    for row in matrix.rows:
        assert all((s.kind is Kind.INVALIDATED) == (record_id(r) in marked) for r, s in row.standings), "a mark on any copy, and none but a mark"
        counted = [standing.kind for _, standing in row.standings].count(Kind.CURRENT)
        valid = [r for r, s in row.standings if r.status is Status.OK and s.kind in (Kind.CURRENT, Kind.SUPERSEDED)]
        assert counted == (row.current is not None) and (row.current in valid if valid else True)


@pytest.fixture(scope="module")
def experiment(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    return small(tmp_path_factory.mktemp("experiment"), SMALL + f"weights: {{nano: {PINNED}}}\n")


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(STEPS, min_size=1, max_size=14), bumped=st.sampled_from([None, *NAMES]), order=st.randoms(use_true_random=False))
def test_any_history_in_any_order_gives_one_matrix(experiment: Experiment, steps: list[Any], bumped: str | None, order: random.Random) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        world = World(Path(folder))
        for step in steps:
            world.do(step)
        if bumped:
            patch.setitem(METRICS, bumped, dataclasses.replace(METRICS[bumped], protocol="moved/on@9"))
        for machine in (0, 1):
            check(matrix_of(experiment, world.store(machine)), world.store(machine).records())

        first, second = world.parcels(0), world.parcels(1)
        for name, arrivals in (("a", [first, second]), ("b", [second, first, first]), ("c", [merge([*second, *first])])):
            for parcels in arrivals:
                order.shuffle(parcels)
                take_in(Store(world.root / name), parcels)
        stores = [Store(world.root / name) for name in "abc"]
        take_in(world.store(0), second)
        take_in(world.store(1), first)
        found = [essence(matrix_of(experiment, store)) for store in (*stores, world.store(0), world.store(1))]
        assert all(one == found[0] for one in found[1:])
        assert essence(matrix_of(experiment, stores[0], order)) == found[0], "neither the order of reading nor doubled records matter"
        check(matrix_of(experiment, stores[0]), stores[0].records())

        assert {record_id(one.record) for one in stores[2].records()} == {one.record_id for one in (*first, *second)}
        for store in stores:
            for cell_id in {one.record.cell_id for one in store.records()}:
                assert [file.parent.name for file in store.record_files(cell_id)] == [f"{n + 1:03d}" for n in range(len(store.record_files(cell_id)))]
        assert all(file.name == RECORD and file.read_bytes() == content for file, content in world.written.items())


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(attempts=st.lists(ATTEMPTS, min_size=1, max_size=10))
def test_records_that_arrive_together_are_numbered_by_time(attempts: list[Attempt]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        parcels = merge(Parcel(one.record()) for one in attempts)
        take_in(Store(Path(folder)), parcels)
        for of in CELLS:
            starts = [one.record.started_at for one in Store(Path(folder)).read(of.id)[0]]
            assert starts == sorted(starts)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    attempts=st.lists(ATTEMPTS, min_size=1, max_size=6, unique_by=lambda one: record_id(one.record())),
    copied=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    marked=st.sets(st.integers(0, 11), max_size=3),
    order=st.randoms(use_true_random=False),
)
def test_copies_under_other_numbers_and_with_marks_of_their_own_are_one_record(
    experiment: Experiment, attempts: list[Attempt], copied: list[int], marked: set[int], order: random.Random
) -> None:
    """The matrix is that of each record once, with everything that was said about any of its copies."""
    once = [one.record().model_copy(update={"attempt": number}) for number, one in enumerate(attempts, 1)]
    copies = [once[which % len(once)].model_copy(update={"attempt": 50 + number}) for number, which in enumerate(copied)]
    every = [*once, *copies]
    lowest = {record_id(one): one.attempt for one in reversed(once)}
    marks: dict[tuple[str, int], tuple[Mark, ...]] = {}
    moved: dict[tuple[str, int], tuple[Mark, ...]] = {}
    for index in sorted(marked):
        target = every[index % len(every)]
        mark = Mark(what="invalidated", reason=f"reason {index}", at=f"2026-08-02T00:00:{index:02d}+00:00", by="somebody")
        for found, number in ((marks, target.attempt), (moved, lowest[record_id(target)])):
            found[target.cell_id, number] = (*found.get((target.cell_id, number), ()), mark)
    order.shuffle(every)
    matrix = build_matrix(experiment, every, compose, marks=marks)
    assert essence(matrix) == essence(build_matrix(experiment, once, compose, marks=moved))
    assert (matrix.totals.attempts, matrix.totals.copies) == (len(every), len(copies))
