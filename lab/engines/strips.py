"""Kestrel's strip cache: the layers' matrices unpacked to int8 codes with a float32 scale for every 32 weights, as many of them as the budgets hold.

An entry is a matrix of a layer, or a layer's experts stacked. Loading walks the layers and adds entry after entry; over a limit the oldest goes. What did not
stay is built again from the file's blocks whenever it is needed (or fetched from the host, where that kept it), is used once and dropped: it pushes nothing
out. Codes and scales are the file's own, so that values do not change. Facts: Kestrel's vllm_safetensors.c, as in the project's notes on VQF, section 2.
What it does not prove: anything about Kestrel's speed; strips are multiplied in plain torch here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lab.artifacts import Stored
from lab.codecs import Codec, Parts
from lab.codecs.vqf import VqfCodec
from lab.codecs.vqf_tiles import BLOCK, SCALE_BYTES
from lab.counters import Counters
from lab.engines.strip_limits import Limit
from lab.errors import LabError
from lab.ops import Packed, PackedExperts, PackedLinear


class StripCodec(Codec):
    """Parts: codes int8 [..., rows, cols], scale float32 [..., rows, cols / 32]; a weight is their product."""

    name = "vqf:strip"
    col_multiple = BLOCK

    def encode(self, weight: Tensor) -> Parts:
        """Raises LabError: a strip is unpacked from a file's blocks (`unpacked`), never made from floats."""
        raise LabError(f"codec {self.name}: made from a VQF file's blocks only")

    def decode(self, parts: Parts, cols: int) -> Tensor:
        """As in the base; bit-equal to what the file's blocks decode to."""
        codes, scale = parts["codes"], parts["scale"]
        return (codes.unflatten(-1, (cols // BLOCK, BLOCK)).to(torch.float32) * scale.unsqueeze(-1)).flatten(-2)

    def row_bytes(self, cols: int) -> int:
        self.check_cols(cols)
        return cols + 4 * (cols // BLOCK)


STRIP = StripCodec()


def unpacked(stored: Stored) -> Parts:
    """The strip of a weight in blocks of 8 or 4 bits, tiled or not. Raises LabError for another encoding."""
    codec = stored.codec
    if not isinstance(codec, VqfCodec) or codec.block != BLOCK:
        raise LabError(f"codec {codec.name}: has no strip; only 8-bit and 4-bit matrices of a VQF file do")
    blocks = codec.plain_blocks(stored.parts).unflatten(-1, (-1, codec.block_bytes))
    scale = blocks[..., :SCALE_BYTES].contiguous().view(torch.float16).squeeze(-1).to(torch.float32)
    codes = blocks[..., SCALE_BYTES:]
    if codec.plain == "Q4_0":
        codes = torch.cat((codes & 15, codes >> 4), -1).view(torch.int8) - 8
    return {"codes": codes.contiguous().view(torch.int8).flatten(-2), "scale": scale}


class Strip:
    """One entry, held at the places in `at`; `source` are its blocks in the file. `layer`, `component`, `first`: as in `lab.ops.Packed`."""

    def __init__(self, cache: StripCache, source: Stored, layer: int | None, component: str, first: bool) -> None:
        self.cache, self.source, self.layer, self.component, self.first = cache, source, layer, component, first
        self.nbytes, self.at = STRIP.nbytes(source.shape), dict[str, Parts]()

    def stays(self) -> bool:
        """Whether it is held where it is computed from, so that nothing is fetched at a call. Settled once everything is loaded."""
        return self.cache.limits[-1].where in self.at

    def packed(self) -> Packed:
        """The weight for one call. What has to be built or moved for it is counted as read once more."""
        held, counters = self.at.get(self.cache.limits[-1].where), self.cache.counters
        parts = self.cache.fetched(self) if held is None else held
        packed = Packed(STRIP, parts, self.source.shape, self.layer, self.component, counters, self.first)
        if held is None:
            counters.add(packed.key, 0, self.nbytes, 0)
        return packed


class StripCache:
    """The entries of a model and where they are held. `rebuilt` and `moved`: how often one was built again from blocks or sent to the device, after loading."""

    def __init__(self, limits: Sequence[Limit], device: torch.device, counters: Counters) -> None:
        """`limits`: as `strip_limits` gives them, not empty."""
        self.limits, self.counters = tuple(limits), counters
        self.devices = {"host": torch.device("cpu"), "device": device}
        self.held: dict[str, deque[Strip]] = {limit.where: deque() for limit in self.limits}
        self.total = self.rebuilt = self.moved = 0

    def add(self, source: Stored, layer: int | None, component: str, first: bool = True) -> Strip:
        """The entry of a weight, held wherever it fits beside the latest others. Raises LabError for an encoding without strips."""
        strip, parts = Strip(self, source, layer, component, first), unpacked(source)
        self.total += 1
        for limit in self.limits:
            strip.at[limit.where] = self._on(limit.where, parts)
            held = self.held[limit.where]
            held.append(strip)
            while not limit.holds(len(held), sum(one.nbytes for one in held)):
                del held.popleft().at[limit.where]
        return strip

    def fetched(self, strip: Strip) -> Parts:
        """The parts of an entry that does not stay where it is computed."""
        parts = strip.at.get("host")
        if parts is None:
            parts = unpacked(strip.source)
            self.rebuilt += 1
        where = self.limits[-1].where
        self.moved += where == "device"
        return self._on(where, parts)

    def resident(self) -> list[tuple[str, torch.device, Strip]]:
        """(component, device, entry) of everything held."""
        return [(strip.component, self.devices[where], strip) for where, held in self.held.items() for strip in held]

    def evidence(self) -> dict[str, Any]:
        """{places: [{where, kept, total, bytes, limit}], rebuilt, moved}."""
        places = [
            {"where": one.where, "kept": len(held := self.held[one.where]), "total": self.total, "bytes": sum(s.nbytes for s in held), "limit": str(one)}
            for one in self.limits
        ]
        return {"places": places, "rebuilt": self.rebuilt, "moved": self.moved}

    def _on(self, where: str, parts: Parts) -> Parts:
        return {key: part.to(self.devices[where]) for key, part in parts.items()}


class StripLinear:
    """y = x W^T from an entry."""

    def __init__(self, strip: Strip) -> None:
        self.strip = strip

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out] in x's dtype."""
        return PackedLinear(self.strip.packed())(x)


class StripExperts:
    """Routed experts from entries: each stack whole, whichever of its experts are used."""

    def __init__(self, gate_up: Sequence[Strip], down: Strip) -> None:
        self.gate_up, self.down = tuple(gate_up), down

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """As `lab.ops.PackedExperts`."""
        return PackedExperts([strip.packed() for strip in self.gate_up], self.down.packed())(x, ids, weights)
