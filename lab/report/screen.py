"""The matrix on screen: one row per cell, its status, its headline metrics; then the totals.

Narrow enough for 80 characters. A status that fills a whole row is said once; everything else is as in the report.
"""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lab.matrix import Matrix
from lab.record import Status
from lab.registered import in_language
from lab.report.tables import label, screen_word

_SHORT = {"ppl": "PPL", "kld_mean": "KLD", "pp512_tok_s": "PP", "tg128_tok_s": "TG", "agg4_tg128_tok_s": "4-way", "resident_bytes": "MB"}
"""The columns, where the experiment has them."""


def print_matrix(matrix: Matrix, console: Console) -> None:
    """Print the table and the closed books."""
    columns = [name for name in _SHORT if name in matrix.experiment.metrics]
    title = f"{matrix.experiment.name}: {in_language(matrix.experiment.title, 'en')}"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 1))
    table.add_column("Path", overflow="fold")
    table.add_column("L", justify="right")
    table.add_column("Status", overflow="fold")
    for name in columns:
        table.add_column(_SHORT[name], justify="right", overflow="fold")
    for row in matrix.rows:
        texts = []
        for name in columns:
            entry = matrix.entry(row, name)
            if entry.gap and entry.gap.status is row.status:
                texts.append(Text("–", style="dim"))  # the status column already has the word
            else:
                texts.append(Text(screen_word(entry), style="dim" if entry.gap else ""))
        status = Text(str(row.status), style="" if row.status is Status.OK else "dim")
        table.add_row(label(matrix, row), str(row.cell.layers), status, *texts)
    console.print(table)
    t = matrix.totals
    console.print(f"{t.cells} cells: {t.expected} expected = {t.measured} measured + {t.gaps} gaps ({t.not_run} not run)", highlight=False)
    parts = " + ".join(f"{count} {name.replace('_', ' ')}" for name, count in t.parts.items() if count or name == "current")
    console.print(f"{t.attempts} attempts = {parts}", highlight=False)
    for item in matrix.unreadable:
        console.print(f"INFRA {item.path}: {item.why}", style="dim", highlight=False, markup=False)
