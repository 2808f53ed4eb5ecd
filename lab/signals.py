"""Ctrl-C and other requests to stop: as a value to look at instead of an exception that may strike anywhere, or all of them as one exception.

While a measurement runs, the stop request must end the child and still leave a complete record. So the handlers only note the signal and
wake whoever sleeps on `fd`; the runner decides where it is safe to stop. Work whose `with` blocks take away what they made is left by an exception.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, Self

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def leaving_by(error: Callable[[int], BaseException]) -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP raise `error` of their number in the block, which is so left in order; from then on further ones change nothing. Ignored
    signals stay ignored (nohup), and elsewhere than in the main thread nothing is installed."""
    before: dict[signal.Signals, Any] = {}

    def leave(number: int, _frame: FrameType | None) -> NoReturn:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise error(number)

    if threading.current_thread() is threading.main_thread():
        before = {each: handler for each in _STOPPING if (handler := signal.getsignal(each)) is not signal.SIG_IGN}
        for each in before:
            signal.signal(each, leave)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


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
