"""What a child process tells its parent: events as JSON lines, collected into one outcome.

The child is not trusted to be well-formed: a line that cannot be read becomes the outcome's `problem` and never an exception, so that even
a broken worker leaves a record. Phases are passed on at once, for the progress display. Whether the numbers may be believed is not
decided here but in `lab.admission`.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ValidationError

from lab.record import Measurement, WorkerResult

_LIMIT = 64 << 20
"""Bytes of one event; a longer line is no event."""

OnPhase = Callable[[str, str, float], None]
Ended = Literal["exit", "timeout", "interrupted"]


@dataclass
class Outcome:
    """How the child ended and what it had said until then. `problem` says why there is no valid result."""

    ended: Ended = "exit"
    exit_code: int | None = None
    stop_signal: str | None = None
    result: WorkerResult | None = None
    problem: str = "the worker ended without a result"
    metrics: dict[str, Measurement] = field(default_factory=dict)
    phases: list[dict[str, Any]] = field(default_factory=list)
    log_tail: list[str] = field(default_factory=list)
    log_error: str | None = None
    elapsed_s: float = 0.0

    @property
    def killed_by(self) -> str | None:
        """Name of the signal that ended the child, e.g. SIGKILL."""
        code = self.exit_code
        if code is None or code >= 0:
            return None
        try:
            return signal.Signals(-code).name
        except ValueError:
            return f"signal {-code}"


class EventReader:
    """Feeds bytes from the child's event pipe into an outcome."""

    def __init__(self, outcome: Outcome, on_phase: OnPhase) -> None:
        self.outcome, self.on_phase = outcome, on_phase
        self.started = time.monotonic()
        self.pending = bytearray()

    def feed(self, chunk: bytes) -> None:
        """Take in what the pipe held; complete lines are acted on at once."""
        *lines, rest = (self.pending + chunk).split(b"\n")
        self.pending = bytearray(rest)
        for line in lines:
            self._take(bytes(line))
        if len(self.pending) > _LIMIT:
            self.pending.clear()
            self.outcome.problem = "the worker sent an endless event"

    def _take(self, line: bytes) -> None:
        outcome = self.outcome
        try:
            event = json.loads(line)
            kind = event["event"]
            if kind == "phase":
                at_s = round(time.monotonic() - self.started, 3)
                outcome.phases.append({"name": str(event["name"]), "detail": str(event.get("detail", "")), "at_s": at_s})
                self.on_phase(str(event["name"]), str(event.get("detail", "")), at_s)
            elif kind == "metric":
                outcome.metrics[str(event["name"])] = Measurement.model_validate(event["measurement"])
            elif kind == "result":
                # Validated from JSON text, as it was sent: tuples and enums have no other form there.
                outcome.result = WorkerResult.model_validate_json(json.dumps(event["result"]))
        except ValidationError as error:
            first = error.errors()[0]
            outcome.problem = f"the worker sent an invalid event: {'.'.join(map(str, first['loc']))}: {first['msg']}"
        except (ValueError, KeyError, TypeError) as error:
            outcome.problem = f"the worker sent an unreadable event ({type(error).__name__}: {line[:80].decode(errors='replace')})"
