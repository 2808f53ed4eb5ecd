"""The child process of one attempt: reads the job, lets the cell's engine measure it, passes the findings on as events.

One process per attempt, so that nothing of one cell - memory, caches, a poisoned GPU - reaches the next. Which engine runs is looked up by name, and
only that engine is imported.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from importlib import import_module
from pathlib import Path

from lab.attempt import Attempt
from lab.cell import Cell

ENGINES = {
    "local": "lab.engines.local_attempt:LocalAttempt",
    "llama_cpp": "lab.engines.llama_cpp.attempt:LlamaCppAttempt",
    "transformers": "lab.engines.hf.attempt:HfAttempt",
    "server": "lab.engines.server.attempt:ServerAttempt",
}
"""Engine of a cell -> the class that measures it."""


def attempt_class(engine: str) -> type[Attempt]:
    """The class that measures cells of this engine."""
    module, name = ENGINES[engine].split(":")
    found: type[Attempt] = getattr(import_module(module), name)
    return found


def main() -> int:
    """Reads the job {cell, root, cache_dir} from standard input, writes events to the given descriptor. An unexpected error keeps its traceback."""
    parser = argparse.ArgumentParser(description="Measures one cell; started by the lab's runner.")
    parser.add_argument("--events-fd", type=int, required=True)
    args = parser.parse_args()
    job = json.load(sys.stdin)
    with open(args.events_fd, "w", encoding="utf-8") as events:
        try:
            cell = Cell.model_validate(job["cell"])
            attempt_class(cell.engine)(cell, Path(job["root"]), Path(job["cache_dir"]), events).run()
        except Exception:
            traceback.print_exc()
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
