"""What one forward pass reads and computes, and the rates it cannot exceed.

Source of the formulas: the roofline for decoding and prefill of mixture-of-experts models, t >= max(bytes / bandwidth, operations / rate), with B tokens
expected to use u(B) = E (1 - (1 - k/E)^B) of E experts under uniform routing. Bus and device work are taken as wholly overlapped. Launches, attention and
the recurrent state's arithmetic are left out, so the bounds are generous. Under tiering they assume hits in proportion to the slots: a cache on real text
may hit more often, so there they are estimates.
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


def forward(
    tensors: Sequence[Stored], sizes: ModelSizes, tier: Tier | None, strips: Strips | None, one_memory: bool, tokens: int, head_rows: int, state_bytes: int
) -> Traffic:
    """One pass over `tokens` tokens, of which `head_rows` reach the head; `state_bytes` are read beside the weights."""
    total = Traffic(device=float(state_bytes))
    for one in tensors:
        if strips is not None and has_strip(one.weight):
            _read_strip(total, one, sizes, strips, tokens)
        else:
            _read(total, one, sizes, tier, tokens)
        total.flops += 2 * _products(one, sizes, tokens, head_rows)
    if one_memory:
        total = Traffic(device=total.device + total.bus + total.host, flops=total.flops)
    return total


def _read(total: Traffic, one: Stored, sizes: ModelSizes, tier: Tier | None, tokens: int) -> None:
    weight = one.weight
    if weight.kind == "experts":
        used = one.expert_bytes(expected_experts(weight.shape[0], sizes.experts_per_token, tokens))
        missed = 0.0 if tier is None else used * (1 - tier.share(weight.layer))
        if one.placement == "cpu_cold":
            total.device += used - missed
            total.host += missed
        else:
            _add(total, one.placement, used)
            total.bus += missed
    elif weight.kind == "table" and one.placement == "host":
        total.bus += one.row_bytes(tokens * sizes.table_rows)
    elif weight.kind in ("table", "embedding"):
        total.device += one.row_bytes(tokens * (sizes.table_rows if weight.kind == "table" else 1))
    else:
        _add(total, one.placement, one.nbytes())


def _read_strip(total: Traffic, one: Stored, sizes: ModelSizes, strips: Strips, tokens: int) -> None:
    """The entry is read where it lies, of stacked experts those in use; a missing one is moved whole before."""
    weight = one.weight
    used = expected_experts(weight.shape[0], sizes.experts_per_token, tokens) / weight.shape[0] if weight.kind == "experts" else 1.0
    total.device += used * strip_bytes(weight)
    if (weight.layer, weight.name) in strips.missing:
        total.bus += strip_bytes(weight)


def _add(total: Traffic, placement: str, size: float) -> None:
    """Weights that lie on the host are computed there."""
    if placement == "host":
        total.host += size
    else:
        total.device += size


def _products(one: Stored, sizes: ModelSizes, tokens: int, head_rows: int) -> float:
    """Weights multiplied, over all tokens."""
    weight = one.weight
    if weight.kind == "experts":
        return tokens * weight.count * sizes.experts_per_token / weight.shape[0]
    if weight.kind != "matrix":
        return 0.0
    return weight.count * (head_rows if weight.component == "head" else tokens)


def expected_experts(count: int, per_token: int, tokens: int) -> float:
    """Different experts of `count` that `tokens` tokens use, each choosing `per_token` at random; exact for one token."""
    return float(per_token) if tokens == 1 else count * (1 - (1 - per_token / count) ** tokens)


def bound_tok_s(work: Traffic, device: DeviceSpec, tokens: int, with_flops: bool) -> float | None:
    """The most tokens per second, or None where a figure that the work needs is missing; the CPU's own reads have none for any device."""
    needed = [(work.device, device.read_bytes_s), (work.bus, device.bus_bytes_s), (work.host, None)]
    if with_flops:
        needed.append((work.flops, device.flops_s))
    slowest = 0.0
    for amount, rate in needed:
        if amount and rate is None:
            return None
        slowest = max(slowest, amount / rate if rate else 0.0)
    return tokens / slowest
