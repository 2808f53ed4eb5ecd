"""What the sizes alone say: the physical bound of each cell, what it would hold where, and the reported sums derived again.

Everything here is computed from a model's geometry and the codecs' byte counts (`lab.capacity`) before anything loads. A bound serves to judge a
number, never to fill a gap; a cell without a ledger has a reason instead.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from lab.cell import Cell
from lab.compose import sizes_file
from lab.errors import LabError
from lab.matrix import Matrix, Row
from lab.registered import Account
from lab.report.language import Language
from lab.report.markup import Table, escape
from lab.report.numbers import significant
from lab.report.tables import label, named

if TYPE_CHECKING:
    from lab.capacity import DerivedTerm, Ledger
    from lab.project import Project

_BOUND = {"tg": "tg_bound_tok_s", "pp": "pp_bound_tok_s", "agg4": "agg4_bound_tok_s"}


@dataclass(frozen=True)
class Capacity:
    """Ledgers, reasons for their absence and whether a cell fits its device, by cell hash; vocabulary sizes by model; each account's derived terms."""

    ledgers: Mapping[str, Ledger] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    fits: Mapping[str, bool | None] = field(default_factory=dict)
    vocabularies: Mapping[str, int] = field(default_factory=dict)
    accounts: tuple[tuple[Account, list[DerivedTerm]], ...] = ()

    def bound(self, row: Row, quantity: str) -> tuple[float | None, str]:
        """The physical bound of a rate of the row's cell in tok/s, and what it was computed from; None where there is no figure."""
        ledger = self.ledgers.get(row.key)
        if ledger is None or quantity not in _BOUND:
            return None, ""
        return getattr(ledger, _BOUND[quantity]), ledger.basis

    def vocabulary(self, cell: Cell) -> int | None:
        """The vocabulary size of the cell's model, where its sizes are known."""
        return self.vocabularies.get(cell.model.name)


NO_CAPACITY = Capacity()


@dataclass(frozen=True)
class AccountTable:
    """One account with its terms as a table."""

    account: Account
    table: Table


def load_capacity(project: Project, matrix: Matrix) -> Capacity:
    """The ledgers of every expected cell and the derivation of every account. Raises LabError where a model's sizes are wrong or missing."""
    from lab.capacity import Ledger, derive, judge, ledgers

    cells = [row.cell for row in matrix.rows]
    found = ledgers(project, cells)
    known = {key: ledger for key, ledger in found.items() if isinstance(ledger, Ledger)}
    models = {cell.model.name: cell for cell in cells}
    return Capacity(
        ledgers=known,
        absent={key: ledger.reason for key, ledger in found.items() if not isinstance(ledger, Ledger)},
        fits={row.key: judge(known[row.key], row.cell.device.memory_bytes, None).fits for row in matrix.rows if row.key in known},
        vocabularies={name: size for name, cell in models.items() if (size := _vocabulary(project, cell)) is not None},
        accounts=tuple((account, derive(project, account)) for account in matrix.experiment.accounts),
    )


def _vocabulary(project: Project, cell: Cell) -> int | None:
    """`vocab_size` of the file that holds the model's sizes."""
    file = sizes_file(project, cell.model.artifact, cell.model.geometry, cell.model.source)
    if file is None:
        return None
    if file.suffix in (".gguf", ".vqf"):
        return _vocabulary_of_file(file, cell.model.arch)
    data = json.loads(file.read_text(encoding="utf-8"))
    size = data.get("vocab_size", data.get("text_config", {}).get("vocab_size"))
    return size if isinstance(size, int) else None


def _vocabulary_of_file(file: Path, arch: str) -> int | None:
    """That of weights in one file; None where the file is refused, which is not the report's to say."""
    from lab.artifacts import open_artifact

    try:
        return open_artifact(file, arch).config().vocab_size
    except LabError:
        return None


def capacity_table(matrix: Matrix, capacity: Capacity, lang: Language) -> Table:
    """What each cell would hold and at most reach, and below it the cells of which no ledger could be made."""
    rows, absent = [], defaultdict(list)
    for row in matrix.rows:
        ledger = capacity.ledgers.get(row.key)
        if ledger is None:
            if row.key in capacity.absent:
                absent[capacity.absent[row.key]].append(named(matrix, row, lang))
            continue
        sizes = [significant(size / 1e9) for size in (ledger.device_bytes, ledger.host_bytes)]
        bounds = ["–" if bound is None else significant(bound) for bound in (ledger.tg_bound_tok_s, ledger.pp_bound_tok_s)]
        fits = {True: "fits", False: "too_large", None: "unknown"}[capacity.fits.get(row.key)]
        rows.append([escape(label(matrix, row)), str(row.cell.layers), *sizes, lang(f"capacity.{fits}"), *bounds])
    header = [lang(f"column.{name}") for name in ("path", "layers", "on_device", "on_host", "fits", "tg_bound", "pp_bound")]
    telling = [at for at in range(len(header)) if at < 4 or any(row[at] not in {"–", lang("capacity.unknown")} for row in rows)]
    bases = dict.fromkeys(ledger.basis for ledger in capacity.ledgers.values()) if len(telling) > 4 else {}
    notes = [lang("capacity.basis", basis=escape(lang.recorded(basis))) for basis in bases]
    notes += [line for row in matrix.rows if row.key in capacity.ledgers for line in _residency(matrix, row, capacity.ledgers[row.key], lang)]
    assumed = defaultdict(list)
    for row in matrix.rows:
        if row.key in capacity.ledgers and (types := capacity.ledgers[row.key].assumed):
            assumed[", ".join(types)].append(named(matrix, row, lang))
    notes += [lang("capacity.assumed", types=escape(types), cells=escape(lang.clauses(cells))) for types, cells in assumed.items()]
    notes += [lang("claims.capacity_note", reason=escape(lang.recorded(reason)), cells=escape(lang.clauses(cells))) for reason, cells in absent.items()]
    return Table("", [header[at] for at in telling], [[row[at] for at in telling] for row in rows], words=1, notes=notes)


def _residency(matrix: Matrix, row: Row, ledger: Ledger, lang: Language) -> list[str]:
    """How many of a place's weights its budget is predicted to keep."""
    return [
        lang(
            "capacity.degrades" if kept.degrades else "capacity.residency",
            cell=escape(named(matrix, row, lang)),
            where=lang.field(kept.where),
            what=lang.field(kept.what),
            kept=kept.kept,
            total=kept.total,
            limit=escape(lang.recorded(kept.limit)),
        )
        for kept in ledger.residency
    ]


def account_tables(capacity: Capacity, lang: Language) -> list[AccountTable]:
    """Each account: its terms as reported, as derived, and what that comes to."""
    tables = []
    for account, terms in capacity.accounts:
        rows = [[_label(term, lang), f"{term.reported:.10g}", _derived(term), _finding(term, lang)] for term in terms]
        header = [lang("column.term"), lang("column.reported_size", unit=account.unit), lang("column.derived_size", unit=account.unit)]
        tables.append(AccountTable(account, Table("", [*header, lang("column.derived_word")], rows)))
    return tables


def _label(term: DerivedTerm, lang: Language) -> str:
    return f"**{lang('claims.account_total')}**" if term.is_total else escape(lang.text(term.label))


def _derived(term: DerivedTerm) -> str:
    size = term.gib if term.unit == "GiB" else term.gb
    return "–" if size is None else f"{size:.2f}"


def _finding(term: DerivedTerm, lang: Language) -> str:
    """The word of the derivation, and for a term that does not follow what its largest part would have to take."""
    word = lang(f"capacity.{term.word.replace(' ', '_')}")
    if term.word != "not derivable" or term.bits_needed is None:
        return word
    needed = lang("capacity.bits", part=term.largest_part, needed=f"{term.bits_needed:.2f}", stated=f"{term.bits_stated:g}")
    return f"{word}{lang('clause_separator')}{needed}"
