"""One engine's experts kept in part on the device: which layers are whole, how many slots the others have, what was moved, what must be shown for it.

The rule of `lab.capacity.tiers` decides who stays, so that a plan and a run speak of the same experts. Here nothing is computed: each layer's operation comes
from the placement's own module. What it does not prove: that hits and misses are counted right; `lab.placement.checks` compares them with the rows computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from lab.capacity.tiers import kept_experts
from lab.cell import Placement
from lab.counters import Counters
from lab.errors import GapError
from lab.models import ModelConfig, inventory
from lab.ops import Packed
from lab.ops_gpu import unavailable
from lab.placement.kinds import too_few_slots
from lab.placement.pinned import PinnedMemory
from lab.record import Status


@dataclass(frozen=True)
class Held:
    """Weights of one operation at one place: bytes resident and weights they stand for. `component`: `experts`, or `staging` for what only passes through."""

    codec: str
    device: str
    nbytes: int
    weights: int
    component: str = "experts"


@dataclass(frozen=True)
class Moved:
    """Totals since the engine was made, of steps through the cache: (token, expert) pairs asked for, of them found on the device and not, bytes brought over
    the bus for those; and apart from them the bytes of whole layers streamed for prompts. `cpu_experts`: experts that the CPU computed with (one that serves
    several tokens of a step counts once), and `cpu_ns` the nanoseconds that it took."""

    requests: int = 0
    hits: int = 0
    misses: int = 0
    bus_bytes: int = 0
    streamed_bytes: int = 0
    cpu_experts: int = 0
    cpu_ns: int = 0

    def __sub__(self, before: Moved) -> Moved:
        return Moved(*(getattr(self, name) - getattr(before, name) for name in self.__dataclass_fields__))

    def __add__(self, other: Moved) -> Moved:
        return Moved(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


class TierExperts(Protocol):
    """A layer's experts behind a placement."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [T, hidden], ids [T, k], weights [T, k] -> [T, hidden]: any number of tokens, called operation by operation."""

    def step(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The same inside a decode step of fixed shapes: ids int32, weights float32, nothing read back to the host where the step is captured."""

    def held(self) -> list[Held]:
        """What of it lies where."""


class Shared(Protocol):
    """What all layers of one engine share."""

    graph_reason: str | None
    """Why a decode step cannot be captured, or None."""
    prompt_reason: str | None
    """Why a prompt cannot be captured, or None."""

    def moved(self) -> Moved:
        """Totals so far. Waits for the device."""

    def settle(self) -> None:
        """Forgets what an interrupted pass had under way."""

    def held(self) -> list[Held]:
        """Memory that belongs to no layer."""

    def evidence(self) -> dict[str, Any]:
        """JSON-able: {requests, hits, misses, bus_bytes, streamed_rows (each a list with one entry per layer of the tier, in order), problems (list of
        sentences: what was asked for and did not happen), ...}."""


class Tiers:
    """See the module. `layers`: those whose experts are kept in part, in order; `slots`: of how many of their experts each has on the device."""

    def __init__(
        self,
        kind: str,
        placement: Placement,
        config: ModelConfig,
        device: torch.device,
        dtype: torch.dtype,
        counters: Counters,
        pinned: PinnedMemory | None = None,
    ) -> None:
        """`pinned`: the engine's host memory that the device reads. Raises GapError (UNSUPPORTED) where this machine or so few slots cannot serve."""
        self.kind, self.device, self.dtype, self.counters, self.placement = kind, device, dtype, counters, placement
        self.pinned = pinned or PinnedMemory(device)
        model = inventory(config)
        expert_layers = [layer for layer in model.component_layers().get("experts", []) if layer is not None]
        self.count = next((count for count, _, _ in model.expert_stacks.values()), 0)
        self.top_k = config.experts_per_token
        whole, self.slots = kept_experts(placement, self.count, expert_layers)
        self.layers = tuple(layer for layer in expert_layers if layer not in whole)
        self.total_layers = len(expert_layers)
        if self.layers and (reason := unavailable(device, dtype)):
            raise GapError(Status.UNSUPPORTED, f"{kind} placement: {reason}")
        self.shared: Any = None
        self._ops: dict[int, TierExperts] = {}
        if self.layers:
            self.refuse(1)
            self.shared = self._make_shared()

    def _make_shared(self) -> Any:
        if self.kind == "cpu_cold":
            from lab.placement.cold import ColdPool

            return ColdPool(self.device, self.dtype, self.counters, self.placement, self.layers, self.slots, self.top_k, self.pinned)
        from lab.placement.tiered import TieredPool

        return TieredPool(self.device, self.counters, self.layers, self.slots, self.top_k, self.pinned)

    def refuse(self, batch: int) -> None:
        """Raises GapError where a step of `batch` sequences may ask for more experts than there are slots."""
        if self.layers and (why := too_few_slots(self.kind, self.slots, self.count, self.top_k, batch)):
            raise GapError(Status.UNSUPPORTED, why)

    def settle(self) -> None:
        """After a pass that did not reach its end: forgets what it had under way."""
        if self.shared is not None:
            self.shared.settle()

    def serves(self, layer: int | None) -> bool:
        """Whether this layer's experts are kept in part."""
        return layer in self.layers

    def experts(self, gate_up: Packed, down: Packed, layer: int) -> TierExperts:
        """The operation of one layer, which takes over both stacks (their parts are freed). Raises GapError where it cannot be made."""
        made: TierExperts
        if self.kind == "cpu_cold":
            from lab.placement.cold import ColdExperts

            made = ColdExperts(gate_up, down, layer, self.device, self.dtype, self.counters, self.placement, self.shared)
        else:
            from lab.placement.tiered import TieredExperts

            made = TieredExperts(gate_up, down, layer, self.shared)
        self._ops[layer] = made
        return made

    @property
    def graph_reason(self) -> str | None:
        """Why a decode step cannot be captured, or None."""
        return None if self.shared is None else self.shared.graph_reason

    @property
    def prompt_reason(self) -> str | None:
        """Why a prompt cannot be captured, or None."""
        return None if self.shared is None else self.shared.prompt_reason

    def moved(self) -> Moved:
        """Totals so far. Waits for the device."""
        return Moved() if self.shared is None else self.shared.moved()

    def held(self) -> list[Held]:
        """What lies where."""
        return [] if self.shared is None else [*self.shared.held(), *(held for op in self._ops.values() for held in op.held())]

    def evidence(self) -> dict[str, Any]:
        """{kind, slots, layers, total_layers, count, per_token} and what the placement tells itself."""
        told = {} if self.shared is None else self.shared.evidence()
        return {
            "kind": self.kind,
            "slots": self.slots,
            "layers": list(self.layers),
            "total_layers": self.total_layers,
            "count": self.count,
            "per_token": self.top_k,
            **told,
        }
