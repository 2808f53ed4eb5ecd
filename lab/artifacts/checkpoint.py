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

    def expert_stacks(self, prefix: str, count: int) -> tuple[tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]:
        """((gate_up [E, 2 width, hidden], block scales or None), (down [E, hidden, width], scales or None)). Gate rows come first; block scales
        are kept only where the gate/up border falls on a block border, else LabError (a merged block would need requantising)."""
        if self.is_fused(prefix):
            return (self.get(f"{prefix}.gate_up_proj"), None), (self.get(f"{prefix}.down_proj"), None)

        def stack(kind: str, suffix: str) -> Tensor:
            return torch.stack([self.get(f"{prefix}.{e}.{kind}_proj.{suffix}") for e in range(count)])

        gate, up, down = (stack(kind, "weight") for kind in ("gate", "up", "down"))
        joined = torch.cat([gate.view(torch.uint8), up.view(torch.uint8)], 1).view(gate.dtype) if gate.dtype.itemsize == 1 else torch.cat([gate, up], 1)
        if f"{prefix}.0.gate_proj.weight_scale_inv" not in self:
            return (joined, None), (down, None)
        if gate.shape[1] % 128:
            raise LabError(f"{prefix}: expert width {gate.shape[1]} is no multiple of the 128-row scale blocks; block scales cannot be joined")
        scales = [stack(kind, "weight_scale_inv") for kind in ("gate", "up", "down")]
        return (joined, torch.cat(scales[:2], 1)), (down, scales[2])

    def table(self, prefix: str) -> tuple[Tensor, Tensor | None]:
        """(the n-gram table [rows, width], its global scale [1] or None), shards joined in numeric order."""
        scale = self.get(f"{prefix}.weight_scale") if f"{prefix}.weight_scale" in self else None
        if f"{prefix}.weight" in self:
            return self.get(f"{prefix}.weight"), scale
        parts = [self.get(name) for name in self.shards(prefix)]
        if parts[0].dtype.itemsize == 1:
            return torch.cat([p.view(torch.uint8) for p in parts]).view(parts[0].dtype), scale
        return torch.cat(parts), scale

    def shards(self, prefix: str) -> list[str]:
        """Names of the table's shards, in order. Raises LabError when there is none or one is missing."""
        pattern = re.compile(re.escape(prefix) + r"\.shard_(\d+)\.weight$")
        found = sorted((int(m[1]), name) for name in self._where if (m := pattern.match(name)))
        if not found or [i for i, _ in found] != list(range(len(found))):
            raise LabError(f"{self.folder}: {prefix}: table shards {[i for i, _ in found][:5]}... are not 0..n-1")
        return [name for _, name in found]


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
        except (ValueError, KeyError, TypeError, AttributeError) as error:
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
