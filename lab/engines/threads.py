"""How many threads a CPU computes with: all cores, or a half, a quarter ... of them, whichever is soonest, for prompts and for steps each on their own.

Why: every operation ends where its slowest thread does. A step of qwen3_small took 29 ms on all 16 cores of one host and 2.4 ms on the 2 cores of another,
and a multiple against such a CPU flatters whatever it is compared with (llama.cpp has -t and -tb for the same reason). `device.threads=N` fixes the number,
and nothing is tried.
What it does not prove: that another number, or the same on idle cores, would not be faster still.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from lab.cell import DeviceSpec
from lab.devices import usable_cores

LONGEST_S = 1.0
"""A call that takes longer than this is made once for a number, and is not warmed up."""
TOO_LONG_S = 15.0
"""One that takes longer than this on all cores is left to them: trying would take minutes."""
WORSE = 2.0
"""Fewer threads are tried until they take so many times as long as the best so far."""
TRIED_TOKENS = 64
"""Tokens of the prompt that is tried: ids one after another, as many as the vocabulary has. The step tried stands behind them; in llama.cpp alone."""
_RUNS = 3


class Threads:
    """The numbers in use, and what was tried: {prompts: {threads: ms}, steps: {threads: ms}}. `fixed`: nothing is to be tried."""

    def __init__(self, most: int, fixed: bool = False) -> None:
        self.prompts = self.steps = self.most = most
        self.fixed = fixed
        self.tried: dict[str, dict[str, float]] = {}

    @classmethod
    def of(cls, device: DeviceSpec) -> Threads:
        """As many as `device.threads` says, else all usable cores; fixed where it says so, where there is one core, and where a GPU computes."""
        most = device.threads or usable_cores()
        return cls(most, fixed=bool(device.threads) or most == 1 or torch.device(device.torch_device).type != "cpu")

    def use(self, tokens: int) -> None:
        """Before a forward pass over so many tokens of a sequence."""
        wanted = self.steps if tokens == 1 else self.prompts
        if wanted != torch.get_num_threads():
            torch.set_num_threads(wanted)

    def settle(self, prompt: Callable[[], object], step: Callable[[], object], use: Callable[[int], object] = torch.set_num_threads) -> None:
        """Tries both calls, which must do the same work every time; `use` sets the number for those that follow."""
        self.prompts, self.tried["prompts"] = soonest(prompt, self.most, use)
        self.steps, self.tried["steps"] = soonest(step, self.most, use)

    def facts(self) -> dict[str, Any]:
        """JSON-able: {prompts, steps, of, tried_ms}."""
        return {"prompts": self.prompts, "steps": self.steps, "of": self.most, "tried_ms": self.tried}


def soonest(call: Callable[[], object], most: int, use: Callable[[int], object]) -> tuple[int, dict[str, float]]:
    """(the number of threads with which `call` is soonest, {number: milliseconds} of those tried), from `most` downwards by halves; best of three each. `use`
    was last called with that number, or where `call` raises with `most`."""
    best, tried, count = most, dict[str, float](), most
    try:
        while count >= 1:
            use(count)
            times = [_seconds(call)]
            if times[0] <= LONGEST_S:
                times = [_seconds(call) for _ in range(_RUNS)]
            tried[str(count)] = 1e3 * min(times)
            if tried[str(count)] < tried[str(best)]:
                best = count
            if tried[str(most)] > 1e3 * TOO_LONG_S or tried[str(count)] > WORSE * tried[str(best)]:
                break
            count //= 2
    except BaseException:
        use(most)
        raise
    use(best)
    return best, tried


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
