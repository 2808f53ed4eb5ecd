"""What the layers of one engine's cold experts share: the CPU's threads, the memory that steps go through, the counts, the buffers of prompts.

Two numbers are found by measuring when the weights are there, and kept as evidence: how many threads compute a token's experts soonest, and from how many
tokens on a layer crosses the bus sooner than the CPU computes it. Rows are counted where they are computed, on the device and in the job, each for itself.
What it does not prove: that the numbers hold when others begin to use the machine.
"""

from __future__ import annotations

import time
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lab.cell import Placement
from lab.counters import Counters, Key, Tally
from lab.errors import GapError, LabError
from lab.kernels.native.cold import TOTALS, Job, Office
from lab.placement.cold_exchange import Exchange
from lab.placement.cold_link import Launch, Link
from lab.placement.pinned import PinnedMemory
from lab.placement.rooms import BUFFERS, Buffer, Kernel, Room, Streamed
from lab.placement.tiered import TieredPool
from lab.placement.tiers import Moved
from lab.record import Status

if TYPE_CHECKING:
    from lab.placement.cold import ColdExperts

PROMOTED = 2
"""Most experts that get a slot in one step and layer: two of 2 MB take 84 us of a PCIe 5 bus, about what the CPU needs for one or two experts beside it."""
MOST_TOKENS = 256
"""Most tokens of one job; more are several jobs, or stream."""
_TRIED_TOKENS = (16, 32, 64, 128, 256)
_TRIED_JOBS = 15


class ColdPool(TieredPool):
    """What the layers of one engine share (`lab.placement.tiers.Shared`): the CPU's threads, the memory that steps go through, the buffers of prompts."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        counters: Counters,
        placement: Placement,
        layers: tuple[int, ...],
        slots: int,
        top_k: int,
        pinned: PinnedMemory | None = None,
        launch: Launch | None = None,
        bell: bool = True,
    ) -> None:
        """`launch`: what puts a host function into a stream, `bell`: whether there may be one (`Link`); for tests. Raises GapError where there are no native
        kernels."""
        super().__init__(device, counters, layers, slots, top_k, pinned or PinnedMemory(device))
        self.dtype, self.placement, self._launch, self._bell = dtype, placement, launch, bell
        try:
            self.office = Office(1)
        except LabError as error:
            raise GapError(Status.UNSUPPORTED, f"cpu_cold placement computes on the CPU with native kernels: {error}") from None
        self.totals = torch.zeros(len(layers), len(TOTALS), dtype=torch.int64)
        self.cold: dict[int, ColdExperts] = {}
        """The layers' operations."""
        self.problems: list[str] = []
        self.exchange: Exchange | None = None
        self.link: Link | None = None
        self.stream_from: int | None = None
        """Tokens from which a prompt streams whole layers; found when the last layer is in (`_weigh`), None: never."""
        self.weighed: dict[str, Any] = {}
        self.threads_tried: dict[str, float] = {}
        self._before: Tensor | None = None
        counters.sources.append(self._tallies)

    def prepare(self, op: ColdExperts, whole: Kernel) -> None:
        """Takes a layer in: the first one says how large things are, after the last one is weighed what a prompt does."""
        if self.exchange is None:
            self.exchange = Exchange(self.device, self.dtype, self.pinned, MOST_TOKENS, op.hidden, self.top_k)
            self._hire(op)
            tried = torch.zeros(len(TOTALS), dtype=torch.int64)
            trial = Job(self.office, op.stacks, *self.exchange.host(0), tried)
            self.link = Link(self.office, self.device, self.pinned, trial, lambda: int(tried[0]), self._launch, self._bell)
            if self.exchange.refused:
                self.problems.append(f"steps wait for the device: {self.exchange.refused}")
                self.link.fall_back(self.exchange.refused)
            elif self.link.mode == "waiting":
                self.problems.append(f"steps wait for the device: {self.link.reason}")
            self.graph_reason = f"cold experts wait for the device: {self.link.reason}" if self.link.mode == "waiting" else None
        self.cold[op.layer] = op
        self.add(op, whole)
        if len(self.ops) == len(self.layers):
            self._weigh(op)

    def add(self, op: Streamed, whole: Kernel) -> None:
        """With buffers for prompts; no room that steps pass through, as what has no slot is computed where it lies."""
        self.ops[op.layer] = op
        if not self.buffers:
            self.buffers = [Buffer(Room.like(whole, op.count), self.stream) for _ in range(min(BUFFERS, len(self.layers)))]

    def _hire(self, op: ColdExperts) -> None:
        """As many threads as compute a token's experts soonest here. All but one of the processors (Python waits for the device by looking at it) is too many
        where two of them share a core, or where others use the machine."""
        most = torch.get_num_threads()
        for threads in sorted({max(1, most - 1), max(1, 3 * most // 4), max(1, most // 2)}):
            self.office = Office(threads)
            self.threads_tried[str(threads)] = 1e6 * median(op.random_jobs_s(1, _TRIED_JOBS))
        self.office = Office(int(min(self.threads_tried, key=lambda threads: self.threads_tried[threads])))

    def _weigh(self, op: ColdExperts) -> None:
        """From how many tokens on a layer crosses the bus in less time than the CPU needs for it: both are measured on the last layer, random tokens."""
        if self.device.type != "cuda":
            return
        stream_s = 0.0
        for _ in range(2):  # the first time, the bus may have slept
            torch.cuda.synchronize(self.device)
            started = time.perf_counter()
            self._fill(op).layer = None
            torch.cuda.synchronize(self.device)
            stream_s = time.perf_counter() - started
        self.streamed_bytes = 0
        cpu_ms: dict[str, float] = {}
        for tokens in _TRIED_TOKENS:
            cpu_ms[str(tokens)] = 1e3 * min(op.random_jobs_s(tokens, 2))
            if cpu_ms[str(tokens)] > 1e3 * stream_s:
                self.stream_from = tokens
                break
        else:
            self.stream_from = MOST_TOKENS + 1
        self.weighed = {
            "stream_from_tokens": self.stream_from,
            "layer_over_the_bus_ms": 1e3 * stream_s,
            "layer_bytes": op.host_bytes,
            "layer_on_the_cpu_ms_by_tokens": cpu_ms,
        }

    def _set_aside(self, begins: bool) -> None:
        """Neither on the device nor in the CPU's totals."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        super()._set_aside(begins)
        if begins:
            self._before = self.totals.clone()
        elif self._before is not None:
            self.totals.copy_(self._before)

    def _tallies(self) -> dict[Key, Tally]:
        """Rows of the steps so far by device: the GPU's as its own kernel counted them, the CPU's as the job did. Waits for the device."""
        found: dict[Key, Tally] = {}
        if len(self.ops) < len(self.layers):
            return found
        counts = self._counts()
        for (layer, op), row, total in zip(((layer, self.cold[layer]) for layer in self.layers), counts, self.totals.tolist(), strict=True):
            calls, _, pairs, experts, _, _ = total
            if pairs:
                self.counters.kernels.setdefault(f"experts: {op.codec} on cpu", set()).add("native job on the GPU's planes")
            for device, slots, nbytes in ((self.device.type, row[1], row[1] * op.expert_bytes), ("cpu", pairs, experts * op.cold_bytes)):
                if slots:
                    before = found.get((layer, "experts", op.codec, device), Tally())
                    found[layer, "experts", op.codec, device] = Tally(
                        calls, before.rows + 2 * slots, before.weight_bytes + nbytes, before.flops + slots * op.flops
                    )
        return found

    def moved(self) -> Moved:
        """Totals so far. Over the bus go the experts that got a slot, and each step's activations and results. Waits for the device."""
        moved = super().moved()
        sums = self.cpu()
        passed = sum(total[1] * op.token_bytes for op, total in zip(self.cold.values(), self.totals.tolist(), strict=True))
        return replace(moved, bus_bytes=moved.bus_bytes + passed, cpu_experts=sums["experts"], cpu_ns=round(1e9 * sums["seconds"]))

    def cpu(self) -> dict[str, Any]:
        """What the CPU did, by its own clock: {experts, pairs, us_per_expert, bytes_s, threads}."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        sums = dict(zip(TOTALS, self.totals.sum(0).tolist(), strict=True))
        each = next(iter(self.cold.values())).cold_bytes
        return {
            "threads": self.office.threads,
            "token_us_by_threads": self.threads_tried,
            "calls": sums["calls"],
            "pairs": sums["pairs"],
            "experts": sums["experts"],
            "seconds": sums["ns"] * 1e-9,
            "us_per_expert": sums["ns"] * 1e-3 / sums["experts"] if sums["experts"] else None,
            "bytes_per_expert": each,
            "bytes_s": each * sums["experts"] / (sums["ns"] * 1e-9) if sums["ns"] else None,
        }

    def cpu_side(self) -> dict[str, Any]:
        """{threads, token_us_by_threads, bytes_per_expert, read_bytes_s}: what a CPU time can be set against; the host memory's rate is measured now, on the
        first layer's experts, best of three."""
        told, one = self.cpu(), self.cold[self.layers[0]].source[0]
        kept = {name: told[name] for name in ("threads", "token_us_by_threads", "bytes_per_expert")}
        return {**kept, "read_bytes_s": max(self.office.read_bytes_s(one) for _ in range(3))}

    def evidence(self) -> dict[str, Any]:
        """Counts of every layer, how the two sides were joined, what the CPU did, how prompts were decided; and where counts contradict each other."""
        counts, ops, totals = self._counts(), [self.cold[layer] for layer in self.layers], self.totals.tolist()
        assert self.link is not None
        names = ("requests", "hits", "misses", "promoted")
        late = int(self.link.late)
        broken = [f"the CPU did not answer in time {late} times: those steps lack its experts"] if late else []
        broken += [f"layer {op.layer}: {problem}" for op, row, total in zip(ops, counts, totals, strict=True) if (problem := op.problem(row, total))]
        return {
            **{name: [row[column] for row in counts] for column, name in enumerate(names)},
            "computed_on_cpu": [total[2] for total in totals],
            "streamed_rows": [op.streamed_rows for op in ops],
            "expert_bytes": ops[0].expert_bytes,
            "streamed_bytes": self.streamed_bytes,
            "policy": f"least recently used; at most {PROMOTED if self.promotes else 0} promotions per layer and step",
            "joined_by": self.link.mode,
            "waits_because": self.link.reason or None,
            "did_not_work": self.link.tried,
            "cpu": {**self.cpu(), **self.cpu_side()},
            "prompts": self.weighed,
            "inconsistent": broken,
            "problems": list(self.problems),
        }

    @property
    def promotes(self) -> bool:
        """Whether missing experts get slots: only from pinned memory."""
        return self.slots > 0 and all(op.pinned for op in self.cold.values())
