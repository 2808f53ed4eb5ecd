"""Ctrl-C and other requests to stop, as a value to look at instead of an exception that may strike anywhere.

While a measurement runs, the stop request must end the child and still leave a complete record. So the handlers only note the signal and
wake whoever sleeps on `fd`; the runner decides where it is safe to stop.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from types import FrameType
from typing import Any, Self

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StopSignals:
    """A context in which SIGINT, SIGTERM and SIGHUP are noted in `received`. Ignored signals stay ignored (nohup)."""

    def __init__(self) -> None:
        self.received: str | None = None
        self.fd, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        # Python delivers signals to the main thread only; elsewhere (a notebook's worker thread) there is nothing to install.
        if threading.current_thread() is threading.main_thread():
            for number in _STOPPING:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        os.close(self.fd)
        os.close(self._write)

    def wait(self, seconds: float) -> bool:
        """Sleep for `seconds` or until a stop is asked for; True in the second case."""
        if self.received is None:
            select.select([self.fd], [], [], seconds)
        return self.received is not None

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signal.Signals(number).name
            os.write(self._write, b"!")
