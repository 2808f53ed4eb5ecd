"""Which encoding and placement each tensor of a cell has: the path's choice where it makes one, else what the engine and the files do.

Bytes are the codecs' own `nbytes`, so that a ledger and an encoded tensor agree to the byte. `source` is the precision of the release the lab knows: 16
bits, except where its config.json names an FP8 part. Imports torch through the codecs; it does not look at any weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from lab.capacity.formats import FileType, file_type, is_file_type
from lab.capacity.sizes import ModelSizes, Weight
from lab.cell import Cell, ComponentPlan
from lab.codecs import create
from lab.errors import LabError

_SOURCE = ComponentPlan(codec="source")
_VECTOR = FileType("float32", 1, 4)  # the engine keeps small parameters in float32, and so do VQF files
_VQF_UNNAMED = {"embed": "vqf:F16", "small": "vqf:F32"}  # kestrel's writer: token_embed F16, moe_router F32, never quantised


class Encoding(Protocol):
    """What a ledger needs of a codec."""

    @property
    def name(self) -> str:
        """Its name."""

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a weight of this shape. Raises LabError where it cannot hold it."""


_NOT_AT_HAND: Mapping[str, Encoding] = MappingProxyType({})


@dataclass(frozen=True)
class Stored:
    """A tensor with its encoding and placement."""

    weight: Weight
    encoding: Encoding
    placement: str

    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.encoding.nbytes(self.weight.shape)

    def row_bytes(self, rows: int) -> int:
        """Bytes of `rows` rows of a table or embedding, what all rows share once."""
        return self.encoding.nbytes((rows, *self.weight.shape[1:]))

    def expert_bytes(self, number: float) -> float:
        """Bytes of so many experts of a stack, which may be an expected number."""
        return number * self.encoding.nbytes((1, *self.weight.shape[1:]))


def stored(cell: Cell, sizes: ModelSizes, in_file: Mapping[str, Encoding] = _NOT_AT_HAND) -> list[Stored]:
    """Every tensor of the cell, as its path stores it; `in_file` says how the artifact has them, where it is at hand.

    Raises LabError, naming the component, where a codec is unknown or cannot hold a tensor."""
    vqf = is_vqf(cell)
    if vqf and cell.model.arch not in ("qwen3", "qwen3_moe"):
        raise LabError(f"path={cell.path.name}: VQF files hold models of the qwen3 family, not {cell.model.arch}")
    for component, chosen in cell.path.components.items():
        if chosen.placement in ("tiered", "cpu_cold") and component != "experts":
            raise LabError(f"path.components.{component}.placement={chosen.placement}: only experts can be kept in part; choose device or host")
    found = []
    for weight in sizes.weights:
        plan = cell.path.components.get(weight.component)
        try:
            as_filed = in_file.get(weight.name) if plan is None or plan.codec == "source" else None
            as_filed = _held_by_transformers(cell) or as_filed
            one = Stored(weight, as_filed or _encoding(plan, weight, sizes, vqf), (plan or _SOURCE).placement)
            one.nbytes()
        except LabError as error:
            raise LabError(f"path.components.{weight.component}: {error}") from None
        found.append(one)
    return found


def _held_by_transformers(cell: Cell) -> FileType | None:
    """What transformers holds every weight as: the dtype it computes in. None for other engines."""
    if cell.engine != "transformers":
        return None
    return FileType(cell.device.compute_dtype, 1, 4 if cell.device.compute_dtype == "float32" else 2)


def is_vqf(cell: Cell) -> bool:
    """Whether the weights come from a VQF file."""
    return cell.path.format == "vqf"


def _encoding(plan: ComponentPlan | None, weight: Weight, sizes: ModelSizes, vqf: bool) -> Encoding:
    if weight.kind == "vector":
        return _VECTOR
    if plan is None and vqf and weight.component in _VQF_UNNAMED:
        return file_type(_VQF_UNNAMED[weight.component], weight.shape[-1])
    codec = "source" if plan is None else plan.assumed if plan.codec == "source" and plan.assumed else plan.codec
    if plan is None or codec == "source":
        return create(*sizes.released.get(weight.component, ("bf16", {})))
    if not is_file_type(codec):
        return create(codec, plan.options)
    if weight.name.endswith("down"):
        # The down matrices' rows are the experts' width, which the 256-weight types may not divide; files give them a type of their own.
        family = codec.partition(":")[0]
        named = plan.assumed_down if plan.codec == "source" else f"{family}:{plan.options['down']}" if "down" in plan.options else ""
        codec = named or codec
    return file_type(codec, weight.shape[-1])
