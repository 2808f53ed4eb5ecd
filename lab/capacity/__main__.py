"""`python -m lab.capacity`: reads a JSON list of {cell, sizes, name} on standard input, writes a JSON list of {ledger} or {reason} in the same order.

A process of its own, because codecs and forward code need torch and the lab's parent process does without it. One request may hold many cells; a cell that
cannot be accounted does not spoil the others.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lab.capacity.build import build, build_of_file
from lab.cell import Cell
from lab.errors import LabError

_UNCOUNTABLE = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a config.json that nobody foresaw can end in, torch's refusal of a shape (RuntimeError) included."""


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """{ledger} or {reason} for one cell; `sizes` is the file with the model's sizes (config.json, or the weights in one file), `name` what to call it."""
    name, sizes = question["name"], Path(question["sizes"])
    data = None
    if sizes.suffix == ".json":
        try:
            data = json.loads(sizes.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            return {"reason": f"{name}: not readable as JSON ({error})"}
    try:
        cell = Cell.model_validate(question["cell"])
        return {"ledger": (build_of_file(cell, sizes) if data is None else build(cell, data, name)).model_dump(mode="json")}
    except LabError as error:
        return {"reason": str(error)}
    except _UNCOUNTABLE as error:
        return {"reason": f"{name}: sizes that cannot be counted ({type(error).__name__}: {' '.join(str(error).split())[:200]})"}


def main() -> int:
    """Answers one request. Only bugs leave as exceptions."""
    json.dump([answer(question) for question in json.load(sys.stdin)], sys.stdout, allow_nan=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
