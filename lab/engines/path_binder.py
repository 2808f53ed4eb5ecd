"""Gives a model its weights from an artifact, encoded as a path says, one tensor at a time.

Each component (experts, trunk, ple, head) is encoded with its codec and placed; everything else, and what the path leaves as `source`, keeps the file's own
encoding, packed as it is. Every encoding is decoded again on a sample and compared with its source before it is accepted: a decode that drops a scale is
caught here, not in a perplexity of 142.6. What is resident where, and how close the codes are to the source, is kept as evidence.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import reduce
from math import prod
from typing import Any

import torch
from torch import Tensor

from lab import ops_gpu
from lab.artifacts import Stored, Weights
from lab.cell import ComponentPlan
from lab.codecs import Codec, Parts, checksum, cosine, create, parts_nbytes, verify_encoding
from lab.codecs.vqf import in_rows
from lab.counters import Counters
from lab.engines.strip_limits import COMPONENTS as STRIPPED
from lab.engines.strips import STRIP, Strip, StripCache, StripExperts, StripLinear
from lab.errors import LabError
from lab.models.binder import Experts, Linear, Table
from lab.ops import Packed, PackedExperts, PackedLinear, PackedTable
from lab.placement.pinned import PinnedMemory, reachable
from lab.placement.tiers import Tiers

SOURCE = ComponentPlan(codec="source")


class PathBinder:
    """Binder over an artifact's weights. `residency` and `quality` fill while the model is built."""

    def __init__(
        self,
        weights: Weights,
        plan: dict[str, ComponentPlan],
        device: torch.device,
        dtype: torch.dtype,
        counters: Counters,
        strips: StripCache | None = None,
        tiers: Tiers | None = None,
        disable: str | None = None,
        pinned: PinnedMemory | None = None,
    ) -> None:
        """`strips`: where the layers' matrices of a VQF file are kept, under budgets; `tiers`: what serves experts that are not all on the device;
        `disable`: `kernels` keeps every operation with the reference, and the evidence says so; `pinned`: memory for what a GPU reads from the host.
        Raises LabError for a placement this engine has no code for."""
        self.weights, self.plan, self.device, self.dtype, self.counters = weights, plan, device, dtype, counters
        self.strips, self.tiers, self.disable, self.pinned = strips, tiers, disable, pinned or PinnedMemory(device)
        self.layer: int | None = None
        self.codecs = {name: create(p.codec, p.options) for name, p in plan.items() if p.codec != "source"}
        for name, component in plan.items():
            tiered = name == "experts" and tiers is not None and component.placement == tiers.kind
            if component.placement != "device" and (name, component.placement) != ("ple", "host") and not tiered:
                known = "device or host" if name == "ple" else "device only"
                raise LabError(f"path.components.{name}.placement={component.placement}: the local engine places {name} on {known}")
        self.residency: dict[tuple[str, str, str], dict[str, int]] = defaultdict(lambda: {"bytes": 0, "tensors": 0, "weights": 0})
        self.quality: dict[str, list[tuple[float, int, int]]] = defaultdict(list)
        """Of each encoded tensor, by component: weight cosine to its source, weights, checksum of codes and scales."""
        self.source_codecs: dict[str, set[str]] = defaultdict(set)
        self.kernels: dict[str, str] = {}
        self.fallbacks: dict[tuple[str, str, str], int] = defaultdict(int)
        """Operations that have a kernel and stayed with the reference on a GPU, by (component, codec, reason)."""
        self._computed: dict[str, set[str]] = defaultdict(set)
        self._embedded: dict[str, list[tuple[Codec, Parts, tuple[int, ...]]]] = {}

    def at_layer(self, layer: int | None) -> None:
        """Tags the following requests; tensors of earlier layers are already encoded and freed."""
        self.layer = layer

    def linear(self, name: str, out_features: int, in_features: int, component: str) -> Linear:
        """The matrix as a packed linear map. One that is the token embedding, too, is held once."""
        order = self.weights.column_order(name)
        if name in self._embedded and component not in self.codecs:
            placed = [self._packed_parts(component, *one, i == 0, nbytes=0) for i, one in enumerate(self._embedded[name])]
            self.source_codecs[component] |= {codec.name for codec, _, _ in self._embedded[name]}
            found = self._fast(ops_gpu.linear, PackedLinear(*placed, order=None if order is None else order.to(self.device)))
            if not isinstance(found, PackedLinear):  # the kernel has its own copy: now it is held twice
                for (codec, parts, _), packed in zip(self._embedded[name], placed, strict=True):
                    self.residency[(component, codec.name, packed.device.type)]["bytes"] += parts_nbytes(parts)
            return found
        blocks = self.weights.matrix(name)
        if self.strips is not None and self.layer is not None and component in STRIPPED:
            return StripLinear(self._strip(self.strips, component, blocks[0]))
        if component in self.codecs:
            whole = [_whole(blocks, order)] if order is not None or len(blocks) > 1 else blocks
            return self._fast(ops_gpu.linear, PackedLinear(*self._packed(component, whole, name)))
        return self._fast(ops_gpu.linear, PackedLinear(*self._packed(component, blocks, name), order=None if order is None else order.to(self.device)))

    def vector(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Float32 on the compute device."""
        value = self.weights.vector(name).to(self.device, torch.float32)
        self._note("vectors", "float32", self.device, value.nbytes, value.numel())
        return value

    def integers(self, name: str, default: list[int]) -> Tensor:
        """The file's int64 constant."""
        return self.weights.integers(name).to(self.device)

    def experts(self, prefix: str, count: int, width: int, hidden: int) -> Experts:
        """Both stacks, encoded one after the other."""
        gate_up, down = self.weights.experts(prefix, count)
        if self.strips is not None:
            first, *others = (self._strip(self.strips, "experts", stack, i == 0) for i, stack in enumerate(gate_up))
            return StripExperts([first, *others], self._strip(self.strips, "experts", down[0]))
        if "experts" in self.codecs and len(gate_up) > 1:
            gate_up = [_whole(gate_up, None)]
        if self.tiers is not None and self.layer is not None and self.tiers.serves(self.layer):
            return self.tiers.experts(self._unplaced(gate_up, f"{prefix}.gate_up"), self._unplaced(down, f"{prefix}.down"), self.layer)
        packed = PackedExperts(self._packed("experts", gate_up, f"{prefix}.gate_up"), *self._packed("experts", down, f"{prefix}.down"))
        return self._fast(ops_gpu.experts, packed)

    def _unplaced(self, blocks: Sequence[Stored], name: str) -> Packed:
        """A stack on the compute device, encoded and checked, that a tier is about to take: where it ends is the tier's to say."""
        if len(blocks) > 1:
            raise LabError(f"{self.weights.where}: {name} is in {len(blocks)} pieces; experts kept in part must be one stack, so give a codec")
        return Packed(*self._encoded("experts", blocks[0], name), blocks[0].shape, self.layer, "experts", self.counters)

    def table(self, prefix: str, rows: int, width: int) -> Table:
        """The n-gram table, encoded shard by shard into its final place: at 51 GB there is no room for a second copy. Only a codec with one scale for
        the whole table, on a table stored in another, needs all of it at once."""
        shards = self.weights.table_shards(prefix)
        first = self.weights.table_shard(prefix, 0)
        wanted = self.codecs.get("ple")
        if shards > 1 and wanted is not None and wanted.shared and not first.codec.shared:
            first, shards = _whole([self.weights.table_shard(prefix, index) for index in range(shards)], None), 1
        codec, parts = self._encoded("ple", first, prefix)
        if shards > 1:
            parts = self._assembled(rows, parts, codec, prefix, shards)
        elif self._on_host("ple") and self.device.type != "cpu":
            parts = {key: part if key in codec.shared else self._pinned(part, prefix) for key, part in parts.items()}
        return self._fast(ops_gpu.table, PackedTable(self._packed_parts("ple", codec, parts, (rows, width)), self.dtype, self.device))

    def embedding(self, name: str, rows: int, width: int) -> Table:
        """Token embedding rows in the file's own encoding."""
        blocks = self.weights.matrix(name)
        if len(blocks) > 1:
            raise LabError(f"{self.weights.where}: {name} is in {len(blocks)} pieces; an embedding must be one tensor")
        self._embedded[name] = [(*self._encoded("embed", blocks[0], name), blocks[0].shape)]
        return PackedTable(self._packed_parts("embed", *self._embedded[name][0]), self.dtype, self.device)

    def _assembled(self, rows: int, first: Parts, codec: Codec, prefix: str, shards: int) -> Parts:
        """All shards' parts in one allocation; parts that rows share are the first shard's."""
        whole = {k: p if k in codec.shared else self._room("ple", (rows, *p.shape[1:]), p.dtype, prefix) for k, p in first.items()}
        start, parts = 0, first
        for index in range(shards):
            if index:
                found, parts = self._encoded("ple", self.weights.table_shard(prefix, index), f"{prefix}, shard {index}")
                if found.name != codec.name:
                    raise LabError(f"{self.weights.where}: {prefix}: shard {index} is {found.name}, the first {codec.name}; a table must be of one kind")
            for key in parts.keys() - codec.shared:
                whole[key][start : start + len(parts[key])] = parts[key]
            start += next(len(p) for k, p in parts.items() if k not in codec.shared)
        return whole

    def _room(self, component: str, shape: tuple[int, ...], dtype: torch.dtype, name: str) -> Tensor:
        """Uninitialised memory where the component stays; host memory that a GPU reads is pinned where the driver allows it."""
        return self.pinned.or_plain(shape, dtype, name) if self._on_host(component) else torch.empty(shape, dtype=dtype, device=self.device)

    def _pinned(self, part: Tensor, name: str) -> Tensor:
        """`part` where the device can read it, if the driver allows that."""
        return part if reachable(part) else self.pinned.or_plain(tuple(part.shape), part.dtype, name).copy_(part)

    def _on_host(self, component: str) -> bool:
        return self.plan.get(component, SOURCE).placement == "host"

    def _fast(self, swap: Callable[[Any, torch.dtype], tuple[Any, str | None]], op: Any) -> Any:
        """The operation through a kernel where `swap` finds one; what computes with each codec, and why not a kernel, is kept as evidence."""
        if self.device.type == "cpu":
            return op
        stacks = [*op.blocks] if isinstance(op, PackedLinear) else [*op.gate_up, op.down] if isinstance(op, PackedExperts) else [op.weight]
        before = [packed.nbytes() for packed in stacks]
        found, reason = (op, ops_gpu.DISABLED) if self.disable == "kernels" else swap(op, self.dtype)
        if found is op and reason is not None and ops_gpu.has_kernel(op):
            self.fallbacks[stacks[0].key[1], stacks[0].codec.name, reason] += 1
        for packed, held in zip(stacks, before, strict=True):
            # A kernel may hold a weight in more bytes than the file.
            self.residency[(packed.key[1], packed.codec.name, packed.device.type)]["bytes"] += packed.nbytes() - held
            names = self._computed[f"{packed.codec.name} on {packed.device.type}"]
            names.add("triton" if found is not op else f"torch ({reason})")
            self.kernels[f"{packed.codec.name} on {packed.device.type}"] = ", ".join(sorted(names))
        return found

    def _strip(self, strips: StripCache, component: str, stored: Stored, first: bool = True) -> Strip:
        self.source_codecs[component].add(STRIP.name)
        if self.device.type != "cpu":
            self.kernels[f"{STRIP.name} on {self.device.type}"] = "torch (strips have no kernel)"
        return strips.add(stored, self.layer, component, first)

    def _packed(self, component: str, blocks: Sequence[Stored], name: str) -> list[Packed]:
        return [self._packed_parts(component, *self._encoded(component, block, name), block.shape, i == 0) for i, block in enumerate(blocks)]

    def _encoded(self, component: str, stored: Stored, name: str) -> tuple[Codec, Parts]:
        """A stored block in the component's codec, on its device, checked against its source."""
        device = self._device(component)
        codec, parts = in_rows(stored.codec, stored.parts)
        self.source_codecs[component].add(codec.name)
        if (wanted := self.codecs.get(component)) is not None and not _same(wanted, codec):
            # What ends on the host is encoded on the device, too: a CPU takes minutes for it.
            source = (parts["weight"] if codec.name == "bf16" else codec.decode(parts, stored.shape[-1])).to(self.device)
            codec, parts = wanted, wanted.encode(source)
            verify_encoding(codec, parts, source).require(name)
            self.quality[component].append((_cosine(codec, parts, source), source.numel(), checksum(parts)))
        return codec, {key: part.to(device) for key, part in parts.items()}

    def _packed_parts(self, component: str, codec: Codec, parts: Parts, shape: tuple[int, ...], first: bool = True, nbytes: int | None = None) -> Packed:
        """The operation's weight, noted as resident; `nbytes` 0 for one that another component holds already."""
        packed = Packed(codec, parts, shape, self.layer, component, self.counters, first)
        self._note(component, codec.name, packed.device, packed.nbytes() if nbytes is None else nbytes, prod(shape))
        return packed

    def _device(self, component: str) -> torch.device:
        return torch.device("cpu") if self._on_host(component) else self.device

    def _note(self, component: str, codec: str, device: torch.device, nbytes: int, weights: int) -> None:
        _increase(self.residency[(component, codec, device.type)], nbytes, weights)

    def resident(self) -> list[dict[str, Any]]:
        """[{component, codec, device, bytes, tensors, weights}]; of strips those that are held now, of experts kept in part every place."""
        found = {key: dict(entry) for key, entry in self.residency.items()}
        for component, device, strip in self.strips.resident() if self.strips is not None else ():
            entry = found.setdefault((component, STRIP.name, device.type), {"bytes": 0, "tensors": 0, "weights": 0})
            _increase(entry, strip.nbytes, prod(strip.source.shape))
        for held in self.tiers.held() if self.tiers is not None else ():
            entry = found.setdefault((held.component, held.codec, held.device), {"bytes": 0, "tensors": 0, "weights": 0})
            _increase(entry, held.nbytes, held.weights)
        return [{"component": c, "codec": k, "device": d, **entry} for (c, k, d), entry in sorted(found.items())]

    def fallbacks_as_list(self) -> list[dict[str, Any]]:
        """[{component, codec, reason, fault, operations}]: `fault` where no limit of the kernel is the reason."""
        return [
            {"component": component, "codec": codec, "reason": reason, "fault": reason in ops_gpu.FAULTS, "operations": count}
            for (component, codec, reason), count in sorted(self.fallbacks.items())
        ]

    def encodings(self) -> dict[str, dict[str, Any]]:
        """Per encoded component: weight cosine to the source, averaged by weights, the worst tensor's, and a checksum (hex) of all codes and scales: the same
        on every device, or the records say by which component they differ."""
        return {
            component: {
                "mean": sum(c * n for c, n, _ in found) / sum(n for _, n, _ in found),
                "min": min(c for c, _, _ in found),
                "tensors": len(found),
                "checksum": f"{reduce(lambda whole, one: (whole * 31 + one) % 2**64, (one for _, _, one in found)):016x}",
            }
            for component, found in self.quality.items()
        }


def _increase(entry: dict[str, int], nbytes: int, weights: int) -> None:
    """One tensor more."""
    entry["bytes"] += nbytes
    entry["tensors"] += 1
    entry["weights"] += weights


def _whole(blocks: Sequence[Stored], order: Tensor | None) -> Stored:
    """Row blocks decoded to one float32 matrix (or stack), columns in the model's order; kept as a codec of plain numbers that is only read from."""
    decoded = [block.codec.decode(block.parts, block.shape[-1]) for block in blocks]
    whole = decoded[0] if len(decoded) == 1 else torch.cat(decoded, -2)
    if order is not None:
        whole = torch.empty_like(whole).index_copy_(-1, order, whole)
    plain = create("gguf:F32")
    return Stored(plain, plain.encode(whole), tuple(whole.shape))


def _cosine(codec: Codec, parts: Parts, source: Tensor) -> float:
    """Weight cosine; a stack's matrices are decoded one at a time, because all experts of a large layer in float32 would not fit beside it."""
    if source.ndim == 2:
        return cosine(codec.decode(parts, source.shape[-1]), source)
    found = [cosine(codec.decode(codec.select(parts, i), source.shape[-1]), matrix) for i, matrix in enumerate(source)]
    return sum(found) / len(found)


def _same(wanted: Codec, source: Codec) -> bool:
    """Whether the file already holds what the path asks for, so that requantising would only add error."""
    return wanted.name == source.name and wanted.options == source.options
