"""The verb `plan`: the capacity ledger of one cell in detail, or of many in a table, as text or JSON.

Everything shown comes from `lab.capacity`; this module only asks and prints. A bound is no prediction of a speed, and a cell that fits on paper may still run
out of memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lab.capacity import Ledger, NoLedger, Residency, Suggestion
from lab.capacity.plan import Judged, Planned, plan_cells
from lab.cell import Cell
from lab.compose import plan
from lab.console import console
from lab.errors import LabError
from lab.placement.kinds import kind_of, too_few_slots, too_many_slots
from lab.preflight import unsupported
from lab.project import Project
from lab.selection import names_experiment, plan_experiment

OK, GAP = 0, 3
GIB, GB, MB = 1 << 30, 10**9, 1 << 20
_MULTIRUN = ("-m", "--multirun")
_RATES = ("TG", "4-way", "PP512")
_EVENLY = "requests spread evenly over experts and slots; real text repeats itself and may be faster"
_MOST_GIB = 1e9
"""A memory beyond this is a typing error, and would not fit a whole number of bytes."""
_MEMORY = "--memory="


def plan_command(project: Project, words: Sequence[str], out: TextIO | None) -> int:
    """Print the plan of the cells that `words` ask for on `out` (standard output by default); the exit code says whether all of them fit. Raises LabError."""
    multirun = any(word in _MULTIRUN for word in words) or names_experiment(words)
    memories = _memories([word for word in words if word.startswith(_MEMORY)])
    overrides = [word for word in words if word not in (*_MULTIRUN, "--json") and not word.startswith(_MEMORY)]
    if flags := [word for word in overrides if word.startswith("-")]:
        raise LabError(f"{flags[0]}: unknown flag of `plan` (python -m lab plan --help)")
    wanted = plan_experiment(project, overrides) if names_experiment(overrides) else plan(project, overrides, multirun)
    planned = plan_cells(project, wanted.cells, memories, suggest=not multirun)
    screen = console(out)
    if "--json" in words:
        documents = [one.document() for one in planned]
        screen.file.write(json.dumps(documents if multirun else documents[0], indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        screen.file.flush()
    elif multirun:
        print_many(screen, planned)
    else:
        print_one(screen, planned[0])
    return OK if all(one.fits for one in planned) else GAP


def _memories(words: Sequence[str]) -> list[float]:
    """The sizes of `--memory=32,104`, in GiB."""
    sizes = []
    for text in (part for word in words for part in word.removeprefix(_MEMORY).split(",")):
        try:
            size = float(text)
        except ValueError:
            size = 0.0
        if not 0 < size < _MOST_GIB:
            raise LabError(f"{_MEMORY}{text}: a size in GiB above 0 is needed, e.g. {_MEMORY}32,104")
        sizes.append(size)
    return sizes


def print_one(screen: Console, planned: Planned) -> None:
    """One cell: its lines, totals, verdicts, bounds, what would fit, and what the figures assume."""
    ledger = planned.ledger
    if isinstance(ledger, NoLedger):
        screen.print(f"{planned.cell.id}: no ledger: {escape(ledger.reason)}")
        for note in (planned.files, unsupported(planned.cell)):
            if note:
                screen.print(f"note: {escape(' '.join(note.split()))}")
        return
    screen.print(_ledger_table(planned.cell.id, ledger))
    for judged in planned.judged:
        screen.print(f"[bold]{judged.memory}[/]: {judged.verdict.sentence}")
    for one in (planned.estimates.device, planned.estimates.host) if planned.estimates else ():
        if one.reason:
            screen.print(f"estimate {one.bytes / GIB:.2f} GiB instead of {one.ledger_bytes / GIB:.2f}: {escape(one.reason)}")
    for kept in ledger.residency:
        screen.print(f"{kept.where}: {escape(_resident(kept))}")
    reads = ledger.decode_bytes_per_token
    moved = {"on the device": reads.device_bytes, "over the bus": reads.bus_bytes, "by the CPU": reads.host_bytes}
    shown = ", ".join(f"{size / GB:.3f} GB {how}" for how, size in moved.items() if size)
    screen.print(f"per decoded token: {shown}; {ledger.flops_per_token / 1e9:.2f} Gflop")
    screen.print(f"at most, in tok/s: {_rates(ledger.bounds_tok_s)} ({escape(ledger.basis)})")
    if (estimates := _rates(ledger.estimates_tok_s)) != _rates(ledger.bounds_tok_s):
        screen.print(f"estimated, in tok/s: {estimates} ({_EVENLY})")
    for judged in planned.judged:
        if judged.suggestions:
            screen.print(_ways_table(f"{judged.memory}: {'would fit' if judged.verdict.short_by_bytes else 'the largest tiers'}", judged.suggestions))
        elif judged.verdict.short_by_bytes:
            screen.print(f"{judged.memory}: no change of placement, depth or path that the lab knows would fit")
    for note in (*_refused(planned.cell, ledger), *filter(None, [planned.files]), f"workspace is {ledger.workspace.basis}", *ledger.notes):
        screen.print(f"note: {escape(note)}")


def _refused(cell: Cell, ledger: Ledger) -> Iterator[str]:
    """Why a run of this cell would be a gap whatever fits."""
    if why := unsupported(cell):
        yield f"a run would end as UNSUPPORTED: {' '.join(why.split())}"
    elif ledger.experts is not None and (cell.placement.resident_layers or 0) < cell.layers:
        kind, slots = kind_of(cell.path.components), cell.placement.slots or 0
        count = ledger.experts.count
        if why := too_few_slots(kind, slots, count, ledger.experts.per_token) or too_many_slots(kind, slots, count):
            yield f"a run would end as UNSUPPORTED: {why}"


def _resident(kept: Residency) -> str:
    """How much stays resident; for a strip cache also the slots and the budget that would hold everything."""
    size = f"{kept.needed_bytes / GIB:.2f} GiB ({kept.needed_bytes / GB:.2f} GB)" if kept.needed_bytes >= GIB else f"{kept.needed_bytes / MB:.1f} MB"
    all_of_them = f"all of them need {size}"
    if kept.what == "weights":
        all_of_them += f": {kept.total} slots and a budget of {-(-kept.needed_bytes // MB)} MB"
    status = "; a run would be DEGRADED" if kept.degrades else ""
    return f"{kept.kept} of {kept.total} {kept.what} resident ({kept.limit}){status}; {all_of_them}"


def _ledger_table(title: str, ledger: Ledger) -> Table:
    scale, unit = (GIB, "GiB") if ledger.device_bytes >= GIB else (MB, "MiB")
    table = _table(title, ("component", "codec", "placement", "where"), ("weights", unit))
    for line in ledger.lines:
        table.add_row(line.component, escape(line.codec), line.placement, line.where, f"{line.weights:,}" if line.weights else "", f"{line.bytes / scale:.2f}")
    table.add_row("state", ledger.state_basis, "", "device", "", f"{ledger.state_bytes / scale:.2f}")
    for place, size in (("device", ledger.workspace.device_bytes), ("host", ledger.workspace.host_bytes)):
        table.add_row("workspace", "estimated", "", place, "", f"{size / scale:.2f}")
    table.add_section()
    totals = [("device", ledger.device_bytes), ("host", ledger.host_bytes)]
    if ledger.one_memory:
        totals = [("one memory", ledger.device_bytes + ledger.host_bytes)]
    for place, size in totals:
        table.add_row("[bold]total[/]", "", "", place, f"{size / GB:.2f} GB", f"[bold]{size / scale:.2f}[/]")
    return table


def _ways_table(title: str, ways: Iterable[Suggestion]) -> Table:
    table = _table(title, ("change",), ("device GiB", "host GiB"))
    for way in ways:
        remark = [f"({way.remark})"] if way.remark else []
        table.add_row(escape("\n".join([*way.words, *remark])), _gib(way.device_bytes), _gib(way.host_bytes))
    return table


def print_many(screen: Console, planned: Sequence[Planned]) -> None:
    """One line per cell; cells without a ledger below, each with its reason."""
    names = list(dict.fromkeys(judged.memory for one in planned for judged in one.judged))
    several = len({(one.cell.model.name, one.cell.device.name) for one in planned}) > 1
    sizes: list[tuple[str, ...]] = []
    bounds: list[tuple[str, ...]] = []
    estimates: list[tuple[str, ...]] = []
    for one in planned:
        if isinstance(one.ledger, Ledger):
            spare = {judged.memory: _spare(judged) for judged in one.judged}
            cell = (_name(one, several), str(one.cell.layers))
            sizes.append((*cell, _gib(one.ledger.device_bytes), _gib(one.ledger.host_bytes), *(spare.get(name, "") for name in names)))
            bounds.append((*cell, *map(_rate, one.ledger.bounds_tok_s)))
            estimates.append((*cell, *map(_rate, one.ledger.estimates_tok_s)))
    if sizes:
        _print_rows(screen, "GiB on device and host; against each device memory GiB to spare (+) or short (-)", ("device", "host", *names), sizes)
        screen.print("h: host memory is short; ?: host memory is not known")
        _print_rows(screen, "at most, in tok/s, by bandwidth and arithmetic", _RATES, bounds)
    if estimates != bounds:
        _print_rows(screen, f"estimated, in tok/s: {_EVENLY}", _RATES, estimates)
    for one in planned:
        if isinstance(one.ledger, NoLedger):
            screen.print(f"{_name(one, several)}, {one.cell.layers} layers: no ledger: {escape(one.ledger.reason)}")


def _print_rows(screen: Console, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = _table(title, ("path", "layers"), columns)
    for row in rows:
        table.add_row(*row)
    screen.print(table)


def _name(one: Planned, several: bool) -> str:
    """The path, with what else tells this cell from its neighbours."""
    changed = [f"{key}={value}" for key, value in one.cell.placement.model_dump().items() if value is not None]
    return " ".join([*([one.cell.model.name] if several else []), one.cell.path.name, *changed, *([f"on {one.cell.device.name}"] if several else [])])


def _spare(judged: Judged) -> str:
    """GiB that the device has to spare or is short of; marked where the host decides, or where a memory is not known."""
    verdict = judged.verdict
    if verdict.device_spare_bytes is None:
        return "?"
    host_short = verdict.short_by_bytes > max(0, -verdict.device_spare_bytes)
    return f"{verdict.device_spare_bytes / GIB:+.1f}{' h' if host_short else ' ?' if verdict.fits is None else ''}"


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title or None, box=box.SIMPLE_HEAD, title_justify="left")
    for name in left:
        table.add_column(name, overflow="fold")
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"


def _rates(values: Iterable[float | None]) -> str:
    return ", ".join(f"{name} {_rate(value)}" for name, value in zip(_RATES, values, strict=True))


def _rate(value: float | None) -> str:
    return "no figure" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
