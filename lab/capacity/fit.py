"""What would make a cell fit: the table on the host, experts in part on the device, fewer layers, another path.

Every suggestion was recomputed as a ledger of its own before it is made, and so was the one with one slot or layer more: its number is the largest that fits,
not an estimate. That a change is worth its speed or quality is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from lab.capacity.ledger import Ledger, NoLedger
from lab.capacity.past import PastOom, estimate_with_memory
from lab.capacity.service import ledgers
from lab.capacity.verdict import Verdict, judge
from lab.cell import Cell
from lab.compose import compose_cells
from lab.errors import LabError
from lab.overrides import choices
from lab.preflight import needs_file, unsupported
from lab.project import Project


@dataclass(frozen=True)
class Suggestion:
    """Overrides that make the cell fit, what it then takes, and why it cannot run yet, if so."""

    words: tuple[str, ...]
    device_bytes: int
    host_bytes: int
    remark: str = ""


@dataclass(frozen=True)
class _Change:
    """A changed cell and the words that change it. Of the changes of one `kind`, the last that fits is the one to make."""

    kind: str
    words: tuple[str, ...]
    cell: Cell


@dataclass(frozen=True)
class Room:
    """What a change must fit: free bytes of both places (None: not known), and the failures that raise estimates."""

    device_bytes: int | None
    host_bytes: int | None
    past: tuple[PastOom, ...] = ()

    def judge(self, ledger: Ledger) -> Verdict:
        """The verdict on a ledger, its estimates raised by the failures."""
        return judge(ledger, self.device_bytes, self.host_bytes, estimate_with_memory(ledger, self.past))


def what_would_fit(project: Project, cell: Cell, device_memory: int | None, host_memory: int | None, past: Iterable[PastOom] = ()) -> list[Suggestion]:
    """Changes that fit the free bytes of both places, empty where nothing does. Host memory that is not known (None) rules nothing out; without a known
    device memory there is nothing to fit. Raises LabError."""
    room = Room(device_memory, host_memory, tuple(past))
    changes = [*_table_on_host(cell), *_fewer_layers(cell), *_other_paths(project, cell)]
    ledgers(project, [change.cell for change in (*changes, *_tiered(cell))])  # one process for all of them; what follows finds them kept
    return [*largest_tiers(project, cell, device_memory, host_memory, room.past), *_that_fit(project, changes, room)]


def largest_tiers(project: Project, cell: Cell, device_memory: int | None, host_memory: int | None, past: Iterable[PastOom] = ()) -> list[Suggestion]:
    """The most slots, and the most whole layers, of experts that can stay on the device: with the table where it is, and on the host."""
    room, probes = Room(device_memory, host_memory, tuple(past)), list(_tiered(cell))
    found = ledgers(project, [probe.cell for probe in probes])
    return _that_fit(project, [change for probe in probes for change in _around_the_largest(probe, found[probe.cell.hash], room)], room)


def _that_fit(project: Project, changes: Sequence[_Change], room: Room) -> list[Suggestion]:
    found = ledgers(project, [change.cell for change in changes])
    best: dict[str, Suggestion] = {}
    for change in changes:
        ledger = found[change.cell.hash]
        if isinstance(ledger, Ledger) and room.device_bytes is not None and room.judge(ledger).short_by_bytes == 0:
            remark = f"path {change.cell.path.name} cannot run yet" if change.cell.path.unsupported else ""
            if not remark and (form := needs_file(change.cell)):
                remark = f"with artifact=FILE.{form}"
            best[change.kind] = Suggestion(change.words, ledger.device_bytes, ledger.host_bytes, remark)
    return list(best.values())


def _placed(cell: Cell, component: str, placement: str) -> _Change:
    plan = cell.path.components[component].model_copy(update={"placement": placement})
    path = cell.path.model_copy(update={"components": {**cell.path.components, component: plan}})
    return _Change(component, (f"path.components.{component}.placement={placement}",), cell.model_copy(update={"path": path}))


def _table_on_host(cell: Cell) -> Iterator[_Change]:
    if "ple" in cell.path.components and cell.path.components["ple"].placement == "device":
        yield _placed(cell, "ple", "host")


def _fewer_layers(cell: Cell) -> Iterator[_Change]:
    for layers in range(1, cell.layers):
        yield _Change("layers", (f"layers={layers}",), cell.model_copy(update={"layers": layers}))


def _other_paths(project: Project, cell: Cell) -> Iterator[_Change]:
    for name in choices(project.conf, "path"):
        if name != cell.path.name:
            words = [f"model={cell.model.name}", f"path={name}", f"layers={cell.layers}", f"device={cell.device.name}"]
            try:
                path = compose_cells(words, project)[0].path
            except LabError:
                continue  # a path that does not go with this model or depth is no way out
            other = cell.model_copy(update={"path": path})
            if path.unsupported or needs_file(other) or not unsupported(other):  # what is missing stands beside the figures
                yield _Change(f"path {name}", (f"path={name}",), other)


def _tiered(cell: Cell) -> Iterator[_Change]:
    """The cell with tiered experts of which none stays on the device yet, and the same with the table on the host; none without experts."""
    if "experts" not in cell.path.components:
        return
    bare = cell.model_copy(update={"placement": cell.placement.model_copy(update={"slots": None, "resident_layers": None})})
    first = _Change("", (), bare) if cell.path.components["experts"].placement == "tiered" else _placed(bare, "experts", "tiered")
    yield _Change("table as it is", first.words, first.cell)
    for moved in _table_on_host(first.cell):
        yield _Change("table on the host", (*first.words, *moved.words), moved.cell)


def _around_the_largest(probe: _Change, found: Ledger | NoLedger, room: Room) -> Iterator[_Change]:
    """For slots and for whole layers: the largest number by arithmetic, and one more to show that it is the largest."""
    if isinstance(found, NoLedger) or found.experts is None or (spare := room.judge(found).device_spare_bytes) is None:
        return
    experts, raised = found.experts, estimate_with_memory(found, room.past).device
    for key, unit, least, most in (
        ("slots", experts.layers * experts.bytes_each, experts.per_token, experts.count),
        ("resident_layers", experts.count * experts.bytes_each, 1, experts.layers),
    ):
        largest = min(spare * raised.ledger_bytes // (unit * raised.bytes), most)
        for number in range(max(least, largest), min(largest + 1, most) + 1):
            placement = probe.cell.placement.model_copy(update={key: number})
            words = (*probe.words, f"placement.{key}={number}")
            yield _Change(f"{key}, {probe.kind}", words, probe.cell.model_copy(update={"placement": placement}))
