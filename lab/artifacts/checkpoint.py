"""A Hugging Face safetensors checkpoint of `qwen4_exp`, read tensor by tensor.

Knows both released layouts: routed experts fused in bf16, or one matrix per expert in e4m3 with 128x128 block scales; the n-gram table as shards in
bf16, or in e4m3 with one global scale. Tensors come out as stored; nothing is dequantised here. The file's own header is checked against its size,
so a truncated download is refused by name before anything is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lab.errors import LabError

_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
_NOT_TEXT = ("mtp.", "model.visual.", "visual.")


class Checkpoint:
    """Tensors by name without the `model.` or `model.language_model.` prefix. Opens each file once, reads lazily."""

    def __init__(self, folder: Path) -> None:
        """Raises LabError naming the file that is missing, truncated or not safetensors."""
        self.folder = folder
        self.files = _weight_files(folder)
        self._open = {}
        self._where: dict[str, tuple[Path, str]] = {}
        for path in self.files:
            handle = self._open[path] = _opened(path)
            for stored in handle.keys():  # noqa: SIM118 - safe_open is no mapping
                if not stored.startswith(_NOT_TEXT):
                    self._where[_plain(stored)] = (path, stored)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def names(self) -> Iterator[str]:
        """All text-model tensor names, without prefix."""
        return iter(self._where)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape from the header. Raises LabError for a missing tensor."""
        path, stored = self._locate(name)
        return tuple(self._open[path].get_slice(stored).get_shape())

    def dtype(self, name: str) -> str:
        """Dtype from the header, in the file format's words: BF16, F8_E4M3, I64, ... Raises LabError for a missing tensor."""
        path, stored = self._locate(name)
        return str(self._open[path].get_slice(stored).get_dtype())

    def get(self, name: str) -> Tensor:
        """The tensor as stored, on the CPU. Raises LabError naming tensor and file."""
        path, stored = self._locate(name)
        try:
            tensor: Tensor = self._open[path].get_tensor(stored)
        except (SafetensorError, OSError) as error:
            raise LabError(f"{path}: tensor {stored} cannot be read ({error})") from None
        return tensor

    def _locate(self, name: str) -> tuple[Path, str]:
        if name not in self._where:
            raise LabError(f"{self.folder}: tensor {name} is missing from the checkpoint")
        return self._where[name]

    def is_fused(self, prefix: str) -> bool:
        """Whether the experts below `prefix` are stored as two stacks rather than one matrix per expert."""
        return f"{prefix}.gate_up_proj" in self

    def expert_stack(self, prefix: str, count: int, kind: str) -> tuple[Tensor, Tensor | None]:
        """(`gate_up` [E, 2 width, hidden] with gate rows first, or `down` [E, hidden, width]; its 128x128 block scales or None). Raises LabError where
        the gate/up border does not fall on a block border: a merged block would need requantising."""
        if self.is_fused(prefix):
            return self.get(f"{prefix}.{kind}_proj"), None
        names = ("gate", "up") if kind == "gate_up" else (kind,)
        weights = [_joined([self.get(f"{prefix}.{e}.{name}_proj.weight") for name in names]) for e in range(count)]
        if f"{prefix}.0.{names[0]}_proj.weight_scale_inv" not in self:
            return _stacked(weights), None
        if len(names) > 1 and weights[0].shape[0] % (128 * len(names)):
            width = weights[0].shape[0] // len(names)
            raise LabError(f"{prefix}: expert width {width} is no multiple of the 128-row scale blocks; block scales cannot be joined")
        scales = [_joined([self.get(f"{prefix}.{e}.{name}_proj.weight_scale_inv") for name in names]) for e in range(count)]
        return _stacked(weights), _stacked(scales)

    def table(self, prefix: str) -> tuple[list[str], Tensor | None]:
        """(names of the tensors whose rows, joined in this order, are the n-gram table; its global scale [1] or None)."""
        scale = self.get(f"{prefix}.weight_scale") if f"{prefix}.weight_scale" in self else None
        return ([f"{prefix}.weight"] if f"{prefix}.weight" in self else self.shards(prefix)), scale

    def shards(self, prefix: str) -> list[str]:
        """Names of the table's shards, in order. Raises LabError when there is none or one is missing."""
        pattern = re.compile(re.escape(prefix) + r"\.shard_(\d+)\.weight$")
        found = sorted((int(m[1]), name) for name in self._where if (m := pattern.match(name)))
        if not found or [i for i, _ in found] != list(range(len(found))):
            raise LabError(f"{self.folder}: {prefix}: table shards {[i for i, _ in found][:5]}... are not 0..n-1")
        return [name for _, name in found]


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenated rows; 8-bit floats travel as bytes, since not every backend can join them."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([p.view(torch.uint8) for p in parts]).view(parts[0].dtype) if parts[0].dtype.itemsize == 1 else torch.cat(parts)


def _stacked(parts: list[Tensor]) -> Tensor:
    return torch.stack([p.view(torch.uint8) for p in parts]).view(parts[0].dtype) if parts[0].dtype.itemsize == 1 else torch.stack(parts)


def _plain(stored: str) -> str:
    for prefix in _PREFIXES:
        if stored.startswith(prefix):
            return stored.removeprefix(prefix)
    return stored


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise LabError(f"{index}: not a safetensors index ({error})") from None
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob("*.safetensors"))
    missing = [f for f in files if not f.is_file()]
    if missing or not files:
        raise LabError(f"{missing[0] if missing else folder / 'model.safetensors'}: no such file; the artifact folder needs its safetensors weights")
    return files


def _opened(path: Path):  # type: ignore[no-untyped-def]
    """An open file handle of the safetensors library (which exports no type for it)."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise LabError(f"{path}: truncated or not a safetensors file ({error}); {path.stat().st_size} bytes on disk") from None
