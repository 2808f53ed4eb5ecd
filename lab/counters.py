"""Counts what really ran: per layer, component, operation and device, how often, on how many rows, reading how many weight bytes.

An operation counts itself at the place where it decodes its weights, so a computation routed through another operation shows up under that
operation's name, and one that bypasses the engine's operations shows up as rows missing. Counting says what was executed, not that it was right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

Key = tuple[int | None, str, str, str]
_FIELDS = ("calls", "rows", "weight_bytes", "flops")


@dataclass
class Tally:
    """Totals of one (layer, component, op, device): calls, rows of activations, weight bytes read, multiply-add operations x 2."""

    calls: int = 0
    rows: int = 0
    weight_bytes: int = 0
    flops: int = 0


@dataclass
class Recording:
    """What one run of a captured graph counts, and how often it was replayed since that was last added."""

    tallies: dict[Key, Tally]
    replays: int = 0


class Counters:
    """Tallies by (layer, component, op, device). One instance per engine; not thread-safe."""

    def __init__(self) -> None:
        self.kernels: dict[str, set[str]] = {}
        """What computed on the CPU, by "component: op on device", noted where it does: a kernel that stood ready and was not used does not appear."""
        self.on_recording: list[Callable[[bool], None]] = []
        """Called at the beginning (True) and the end (False) of a recording, by what counts on the device, where a run that warms up would count, too."""
        self.sources: list[Callable[[], dict[Key, Tally]]] = []
        """What counts elsewhere, on a device or in a native job: each returns its totals so far, and may wait for the device."""
        self._tallies: dict[Key, Tally] = {}
        self._recordings: list[Recording] = []

    @property
    def tallies(self) -> dict[Key, Tally]:
        """Totals so far, replays of captured graphs and what counts elsewhere included."""
        settled = self._settled()
        if not self.sources:
            return settled
        found = {key: Tally(**asdict(one)) for key, one in settled.items()}
        for source in self.sources:
            for key, one in source().items():
                sums = found.setdefault(key, Tally())
                for field in _FIELDS:
                    setattr(sums, field, getattr(sums, field) + getattr(one, field))
        return found

    def _settled(self) -> dict[Key, Tally]:
        """What was counted here, replays added."""
        for recording in self._recordings:
            for key, one in recording.tallies.items():
                if recording.replays:
                    sums = self._tallies.setdefault(key, Tally())
                    for field in _FIELDS:
                        setattr(sums, field, getattr(sums, field) + recording.replays * getattr(one, field))
            recording.replays = 0
        return self._tallies

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Counts what runs inside aside: it is added once for every replay of the graph captured there. A replay runs no Python that could count."""
        held, self._tallies = self._settled(), {}
        recording = Recording(self._tallies)
        for told in self.on_recording:
            told(True)
        try:
            yield recording
        finally:
            self._tallies = held
            for told in self.on_recording:
                told(False)
        self._recordings.append(recording)

    def add(self, key: Key, rows: int, weight_bytes: int, flops: int) -> None:
        """Counts one call."""
        tally = self._tallies.get(key)
        if tally is None:
            tally = self._tallies[key] = Tally()
        tally.calls += 1
        tally.rows += rows
        tally.weight_bytes += weight_bytes
        tally.flops += flops

    def as_list(self) -> list[dict[str, Any]]:
        """JSON-able rows, layers in order, the model-wide operations first."""
        order = sorted(self.tallies.items(), key=lambda kv: (-1 if kv[0][0] is None else kv[0][0], *kv[0][1:]))
        return [{"layer": k[0], "component": k[1], "op": k[2], "device": k[3], **asdict(t)} for k, t in order]

    def totals(self) -> Tally:
        """The sum over all keys."""
        tallies = self.tallies.values()
        return Tally(*(sum(getattr(t, f) for t in tallies) for f in _FIELDS))

    def rows(self, component: str) -> int:
        """Rows of activations that all operations of a component have seen."""
        return sum(tally.rows for key, tally in self.tallies.items() if key[1] == component)

    @contextmanager
    def span(self) -> Iterator[Tally]:
        """Yields a tally that holds, after the block, what ran inside it."""
        before, result = self.totals(), Tally()
        yield result
        after = self.totals()
        for field in _FIELDS:
            setattr(result, field, getattr(after, field) - getattr(before, field))
