"""What every engine's attempt shares: findings grow, and are passed to the parent as events while they come.

An engine subclasses `Attempt` and implements `measure`. Nothing here knows an engine, MLflow or other cells. A finding that was passed on is not
yet a number of the record: the parent admits it or not.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from lab.cell import Cell
from lab.errors import GapError, LabError, flat
from lab.metrics import METRICS
from lab.record import Measurement, Status, WorkerResult

if TYPE_CHECKING:
    import torch


class Attempt(ABC):
    """One run of one cell. `result` grows while it runs; `events` is the pipe to the parent; `root` is the project, `cache` what can be made again."""

    def __init__(self, cell: Cell, root: Path, cache: Path, events: IO[str]) -> None:
        self.cell, self.root, self.cache, self.events = cell, root, cache, events
        self.result = WorkerResult(status=Status.OK)

    @abstractmethod
    def measure(self) -> None:
        """Measures everything into `result`. Raises GapError or LabError where the whole attempt has no number."""

    def out_of_memory(self, error: Exception) -> bool:
        """Whether the error means that memory ran out."""
        return isinstance(error, MemoryError)

    def phase(self, name: str, detail: str = "") -> None:
        """Tells the parent what begins now."""
        self._emit({"event": "phase", "name": name, "detail": detail})

    def keep(self, **found: Measurement) -> None:
        """Stores measurements and passes them on at once, so that a later crash does not hide them."""
        self.result.metrics |= found
        for name, measurement in found.items():
            self._emit({"event": "metric", "name": name, "measurement": measurement.model_dump(mode="json")})

    def gap(self, names: tuple[str, ...], status: Status, reason: str) -> None:
        """Metrics that will have no value, and why."""
        self.result.gaps |= {name: (status, reason) for name in names if name not in self.result.metrics}

    def machine(self, device: torch.device, threads: int) -> dict[str, Any] | None:
        """The machine's bounds, to be taken before a model fills the memory. Without them speeds are measured all the same, only without a roofline."""
        import torch  # which not every engine needs

        from lab.measure.machine import machine_bounds

        self.phase("machine", "bandwidth and arithmetic bounds")
        if device.type == "cuda" and not torch.cuda.is_available():  # an engine of its own may see one all the same
            self.result.notes.append("no roofline: torch sees no GPU to measure the bandwidth of")
            return None
        try:
            bounds = machine_bounds(device, getattr(torch, self.cell.device.compute_dtype), threads, self.cache)
        except GapError as error:
            self.result.notes.append(f"no roofline: {one_line(error)}")
            return None
        self.result.evidence["machine_bounds"] = bounds
        return bounds

    def run(self) -> None:
        """Measures everything and emits the result. An unexpected error leaves as it is: it keeps its traceback."""
        try:
            self.measure()
        except GapError as error:
            self.result.status, self.result.reason = error.status, one_line(error)
        except LabError as error:
            self.result.status, self.result.reason = Status.LOAD_FAILED, one_line(error)
        except Exception as error:
            if not self.out_of_memory(error):
                raise
            self.result.status, self.result.reason = Status.OOM, one_line(error)
        self._emit({"event": "result", "result": self.result.model_dump(mode="json")})

    def _emit(self, event: dict[str, Any]) -> None:
        self.events.write(json.dumps(event) + "\n")
        self.events.flush()


def one_line(error: BaseException) -> str:
    """The error's message in one line of at most 500 characters."""
    return flat(error, 500) or type(error).__name__


def valued(name: str, value: float, details: dict[str, Any]) -> Measurement:
    """A single value of a registered metric, in its unit and by its protocol."""
    known = METRICS[name]
    return Measurement(value=float(value), unit=known.unit, protocol=known.protocol, details=details)
