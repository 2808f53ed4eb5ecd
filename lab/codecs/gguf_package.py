"""What is taken from the `gguf` package: the codebooks of the IQ types, and its quantisers for writing. Imported when first needed.

Why only this: its decoder is what ours is tested against, and its reader trusts the file. The package is the `gguf` extra of the project; files
whose types need no codebook are read without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lab.errors import LabError

if TYPE_CHECKING:
    from types import ModuleType


def grid(name: str) -> Tensor:
    """The codebook of an IQ type: int8 [entries, weights per entry]. Raises LabError where the package is missing."""
    entry = getattr(_quants(f"codec gguf:{name}"), name)
    entry.init_grid()
    return torch.from_numpy(entry.grid[0, 0]).to(torch.int8)


def quantize(name: str, rows: Tensor) -> Tensor:
    """float32 [n, cols] -> uint8 [n, row bytes] on the same device, by the package's quantiser. Raises LabError where the package is missing."""
    import numpy as np

    quants = _quants(f"codec gguf:{name}: encoding")
    with np.errstate(over="ignore", invalid="ignore"):  # a scale beyond float16 becomes infinite; the caller looks for that
        packed = quants.quantize(rows.cpu().numpy(), quants.GGMLQuantizationType[name])
    return torch.from_numpy(packed.view(np.uint8)).to(rows.device)


def _quants(who: str) -> ModuleType:
    try:
        from gguf import quants
    except ImportError:
        raise LabError(f"{who} needs the gguf package: pip install 'migration-lab[gguf]'") from None
    return quants
