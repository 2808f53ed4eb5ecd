"""Gives a model its weights from a checkpoint, encoded as a path says, one tensor at a time.

Each component (experts, trunk, ple, head) is encoded with its codec and placed; everything else keeps its source precision on the compute device.
Every encoding is decoded again on a sample and compared with its source before it is accepted: a decode that drops a scale is caught here, not in a
perplexity of 142.6. What is resident where, and how close the codes are to the source, is kept as evidence.
"""

from __future__ import annotations

from collections import defaultdict
from math import prod
from typing import Any

import torch
from torch import Tensor

from lab.artifacts import Checkpoint
from lab.cell import ComponentPlan
from lab.codecs import Codec, Parts, cosine, create, verify_encoding
from lab.codecs.e4m3 import from_release
from lab.counters import Counters
from lab.errors import LabError
from lab.models.binder import Experts, Linear, Table
from lab.ops import Packed, PackedExperts, PackedLinear, PackedTable

SOURCE = ComponentPlan(codec="source")
_SOURCE_BITS = "bf16"
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


class PathBinder:
    """Binder over a checkpoint. `residency` and `quality` fill while the model is built."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: dict[str, ComponentPlan],
        device: torch.device,
        dtype: torch.dtype,
        counters: Counters,
    ) -> None:
        """Raises LabError for a placement this engine has no code for."""
        self.checkpoint, self.plan, self.device, self.dtype, self.counters = checkpoint, plan, device, dtype, counters
        self.layer: int | None = None
        self.codecs = {name: create(p.codec, p.options) for name, p in plan.items() if p.codec != "source"}
        for name, component in plan.items():
            if component.placement != "device" and (name, component.placement) != ("ple", "host"):
                known = "device or host" if name == "ple" else "device only"
                raise LabError(f"path.components.{name}.placement={component.placement}: the local engine places {name} on {known}")
        self.residency: dict[tuple[str, str, str], dict[str, int]] = defaultdict(lambda: {"bytes": 0, "tensors": 0, "weights": 0})
        self.quality: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self.source_codecs: dict[str, set[str]] = defaultdict(set)

    def at_layer(self, layer: int | None) -> None:
        """Tags the following requests; tensors of earlier layers are already encoded and freed."""
        self.layer = layer

    def linear(self, name: str, out_features: int, in_features: int, component: str) -> Linear:
        """The matrix as a packed linear map. Block scales beside it are honoured."""
        scale = f"{name}_scale_inv" if f"{name}_scale_inv" in self.checkpoint else None
        return PackedLinear(self._packed(component, self.checkpoint.get(name), self.checkpoint.get(scale) if scale else None, name))

    def vector(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Float32 on the compute device."""
        stored = self.checkpoint.get(name)
        if stored.dtype not in _FLOATS:
            raise LabError(f"{self.checkpoint.folder}: {name} is stored as {stored.dtype}; small parameters must be bf16, float16 or float32")
        value = stored.to(self.device, torch.float32)
        self._note("vectors", "float32", self.device, value.nbytes, value.numel())
        return value

    def integers(self, name: str, default: list[int]) -> Tensor:
        """The file's int64 constant. Raises LabError when it is stored as anything else."""
        value = self.checkpoint.get(name)
        if value.dtype != torch.int64:
            raise LabError(f"{self.checkpoint.folder}: {name} is stored as {value.dtype}; hash constants must be int64")
        return value.to(self.device)

    def experts(self, prefix: str, count: int, width: int, hidden: int) -> Experts:
        """Both stacks, encoded one after the other."""
        gate_up, down = (self._packed("experts", *self.checkpoint.expert_stack(prefix, count, kind), f"{prefix}.{kind}") for kind in ("gate_up", "down"))
        return PackedExperts(gate_up, down)

    def table(self, prefix: str, rows: int, width: int) -> Table:
        """The n-gram table, encoded shard by shard into its final place: at 51 GB there is no room for a second copy. Only a codec with one scale for
        the whole table, on a table stored in another, needs all of it at once."""
        names, scale = self.checkpoint.table(prefix)
        wanted = self.codecs.get("ple")
        if wanted is not None and wanted.shared and scale is None and len(names) > 1:
            whole = torch.cat([self.checkpoint.get(name) for name in names])
            return PackedTable(self._packed("ple", whole, None, prefix), self.dtype, self.device)
        codec, parts = self._encoded("ple", self.checkpoint.get(names[0]), scale, names[0])
        if len(names) > 1:
            parts = self._assembled(rows, parts, codec, names, scale)
        return PackedTable(self._placed("ple", codec, parts, (rows, width)), self.dtype, self.device)

    def embedding(self, name: str, rows: int, width: int) -> Table:
        """Token embedding rows in source precision."""
        return PackedTable(self._packed("embed", self.checkpoint.get(name), None, name), self.dtype, self.device)

    def _assembled(self, rows: int, first: Parts, codec: Codec, names: list[str], scale: Tensor | None) -> Parts:
        """All shards' parts in one allocation; parts that rows share are the first shard's."""
        whole = {k: p if k in codec.shared else torch.empty((rows, *p.shape[1:]), dtype=p.dtype, device=p.device) for k, p in first.items()}
        start, parts = 0, first
        for index, name in enumerate(names):
            if index:
                parts = self._encoded("ple", self.checkpoint.get(name), scale, name)[1]
            for key in parts.keys() - codec.shared:
                whole[key][start : start + len(parts[key])] = parts[key]
            start += next(len(p) for k, p in parts.items() if k not in codec.shared)
        return whole

    def _packed(self, component: str, stored: Tensor, scale: Tensor | None, name: str) -> Packed:
        return self._placed(component, *self._encoded(component, stored, scale, name), tuple(stored.shape))

    def _encoded(self, component: str, stored: Tensor, scale: Tensor | None, name: str) -> tuple[Codec, Parts]:
        """A stored tensor in the component's codec, on its device, checked against its source."""
        device = self._device(component)
        codec, parts = self._source(stored, scale, name)
        self.source_codecs[component].add(codec.name)
        if (wanted := self.codecs.get(component)) is not None and not _same(wanted, codec):
            source = (stored if scale is None else codec.decode(parts, stored.shape[-1])).to(device)
            codec, parts = wanted, wanted.encode(source)
            verify_encoding(codec, parts, source).require(name)
            self.quality[component].append((_cosine(codec, parts, source), source.numel()))
        return codec, {key: part.to(device) for key, part in parts.items()}

    def _placed(self, component: str, codec: Codec, parts: Parts, shape: tuple[int, ...]) -> Packed:
        packed = Packed(codec, parts, shape, self.layer, component, self.counters)
        self._note(component, codec.name, self._device(component), packed.nbytes(), prod(shape))
        return packed

    def _device(self, component: str) -> torch.device:
        return torch.device("cpu") if self.plan.get(component, SOURCE).placement == "host" else self.device

    def _source(self, stored: Tensor, scale: Tensor | None, name: str) -> tuple[Codec, Parts]:
        """The tensor as it is in the file: bf16, or e4m3 with its released scale."""
        if scale is not None:
            codec, parts = from_release(stored, scale)
            return codec, parts
        if stored.dtype not in _FLOATS:
            raise LabError(f"{self.checkpoint.folder}: {name} is stored as {stored.dtype} without a scale; expected bf16, or e4m3 with its scale")
        if stored.dtype != torch.bfloat16 and not torch.equal(stored.to(torch.bfloat16).to(stored.dtype), stored):
            raise LabError(f"{self.checkpoint.folder}: {name} is {stored.dtype} and does not fit bf16 exactly; the released layouts are bf16 and e4m3")
        source = create(_SOURCE_BITS)
        return source, source.encode(stored)

    def _note(self, component: str, codec: str, device: torch.device, nbytes: int, weights: int) -> None:
        entry = self.residency[(component, codec, device.type)]
        entry["bytes"] += nbytes
        entry["tensors"] += 1
        entry["weights"] += weights

    def resident(self) -> list[dict[str, Any]]:
        """[{component, codec, device, bytes, tensors, weights}]."""
        return [{"component": c, "codec": k, "device": d, **entry} for (c, k, d), entry in sorted(self.residency.items())]

    def cosines(self) -> dict[str, dict[str, float]]:
        """Per encoded component: weight cosine to the source, averaged by weights, and the worst tensor's."""
        return {
            component: {"mean": sum(c * n for c, n in found) / sum(n for _, n in found), "min": min(c for c, _ in found), "tensors": len(found)}
            for component, found in self.quality.items()
        }


def _cosine(codec: Codec, parts: Parts, source: Tensor) -> float:
    """Weight cosine; a stack's matrices are decoded one at a time, because all experts of a large layer in float32 would not fit beside it."""
    if source.ndim == 2:
        return cosine(codec.decode(parts, source.shape[-1]), source)
    found = [cosine(codec.decode(codec.select(parts, i), source.shape[-1]), matrix) for i, matrix in enumerate(source)]
    return sum(found) / len(found)


def _same(wanted: Codec, source: Codec) -> bool:
    """Whether the file already holds what the path asks for, so that requantising would only add error."""
    return wanted.name == source.name and wanted.options == source.options
