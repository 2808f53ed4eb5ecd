"""What one forward pass reads and computes: at the least, from which bounds follow, and when requests are spread evenly, from which estimates follow.

Source of the formulas: the roofline for decoding and prefill of mixture-of-experts models, t >= max(bytes / bandwidth, operations / rate). Spread evenly, B
tokens use u(B) = E (1 - (1 - k/E)^B) of E experts, and hit a cache in proportion to its slots. Real text repeats itself: its tokens share experts and hit
more often, so no number may be judged by that. At the least, all tokens ask for the same k experts and rows, and every expert that has a slot is in it. Bus
and device work are taken as wholly overlapped; launches, attention and the recurrent state's arithmetic are left out, which only makes bounds more generous.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lab.capacity.ledger import Reads
from lab.capacity.sizes import ModelSizes
from lab.capacity.storage import Stored
from lab.capacity.tiers import Strips, Tier, has_strip, strip_bytes
from lab.cell import DeviceSpec


@dataclass
class Traffic:
    """Bytes of one forward pass over `tokens` tokens, by where they move, and its multiply-add operations x 2 in matrix products."""

    device: float = 0.0
    bus: float = 0.0
    host: float = 0.0
    flops: float = 0.0

    def reads(self) -> Reads:
        """As part of a ledger."""
        return Reads(device_bytes=self.device, bus_bytes=self.bus, host_bytes=self.host)


@dataclass(frozen=True)
class Pass:
    """One pass over `tokens` tokens, of which `head_rows` reach the head; `state_bytes` are read beside the weights. `least`: counted at the least."""

    tokens: int
    head_rows: int
    state_bytes: int
    least: bool = False

    @property
    def different(self) -> int:
        """Tokens that ask for experts and rows of their own."""
        return 1 if self.least else self.tokens


def forward(tensors: Sequence[Stored], sizes: ModelSizes, tier: Tier | None, strips: Strips | None, one_memory: bool, work: Pass) -> Traffic:
    """What the pass `work` moves and computes."""
    total = Traffic(device=float(work.state_bytes))
    for one in tensors:
        if strips is not None and has_strip(one.weight):
            _read_strip(total, one, sizes, strips, work)
        else:
            _read(total, one, sizes, tier, work)
        total.flops += 2 * _products(one, sizes, work)
    if one_memory:
        total = Traffic(device=total.device + total.bus + total.host, flops=total.flops)
    return total


def _read(total: Traffic, one: Stored, sizes: ModelSizes, tier: Tier | None, work: Pass) -> None:
    weight = one.weight
    if weight.kind == "experts":
        number = expected_experts(weight.shape[0], sizes.experts_per_token, work.different)
        used = one.expert_bytes(number)
        missed = 0.0 if tier is None else one.expert_bytes(tier.least_missed(weight.layer, number) if work.least else tier.missed(weight.layer, number))
        if one.placement == "cpu_cold":
            total.device += used - missed
            total.host += missed
        else:
            _add(total, one.placement, used)
            total.bus += missed
    elif weight.kind == "table" and one.placement == "host":
        total.bus += one.row_bytes(work.different * sizes.table_rows)
    elif weight.kind in ("table", "embedding"):
        total.device += one.row_bytes(work.different * (sizes.table_rows if weight.kind == "table" else 1))
    else:
        _add(total, one.placement, one.nbytes())


def _read_strip(total: Traffic, one: Stored, sizes: ModelSizes, strips: Strips, work: Pass) -> None:
    """The entry is read where it lies, of stacked experts those in use; a missing one is moved whole before."""
    weight = one.weight
    used = expected_experts(weight.shape[0], sizes.experts_per_token, work.different) / weight.shape[0] if weight.kind == "experts" else 1.0
    total.device += used * strip_bytes(weight)
    if (weight.layer, weight.name) in strips.missing:
        total.bus += strip_bytes(weight)


def _add(total: Traffic, placement: str, size: float) -> None:
    """Weights that lie on the host are computed there."""
    if placement == "host":
        total.host += size
    else:
        total.device += size


def _products(one: Stored, sizes: ModelSizes, work: Pass) -> float:
    """Weights multiplied, over all tokens, however alike they are."""
    weight = one.weight
    if weight.kind == "experts":
        return work.tokens * weight.count * sizes.experts_per_token / weight.shape[0]
    if weight.kind != "matrix":
        return 0.0
    return weight.count * (work.head_rows if weight.component == "head" else work.tokens)


def expected_experts(count: int, per_token: int, tokens: int) -> float:
    """Different experts of `count` that `tokens` tokens use, each choosing `per_token` at random; exact for one token."""
    return float(per_token) if tokens == 1 else count * (1 - (1 - per_token / count) ** tokens)


def rate_tok_s(work: Traffic, device: DeviceSpec, tokens: int, with_flops: bool) -> float | None:
    """The most tokens per second with this work, or None where a figure that it needs is missing; the CPU's own reads have none for any device."""
    needed = [(work.device, device.read_bytes_s), (work.bus, device.bus_bytes_s), (work.host, None)]
    if with_flops:
        needed.append((work.flops, device.flops_s))
    slowest = 0.0
    for amount, rate in needed:
        if amount and rate is None:
            return None
        slowest = max(slowest, amount / rate if rate else 0.0)
    return tokens / slowest
