"""Sizes of a `qwen4_exp` checkpoint from its config.json, and what `source` means for the releases the lab knows.

Imports torch, and therefore runs in the ledger's own process only.
"""

from __future__ import annotations

from typing import Any

import torch

from lab.capacity.inventory_sizes import inventory_sizes
from lab.capacity.sizes import ModelSizes
from lab.models.qwen4_exp.config import from_dict


def qwen4_exp_sizes(data: dict[str, Any], where: str, layers: int, dtype: torch.dtype) -> ModelSizes:
    """Sizes from a parsed config.json, for the first `layers` layers and states in `dtype`. Raises LabError naming the field."""
    return inventory_sizes(from_dict(data, where).truncated(layers), dtype, _released(data))


def _released(data: dict[str, Any]) -> dict[str, tuple[str, dict[str, str]]]:
    """What `source` means beyond 16 bits: the FP8 release says so in its config.json, the experts in blocks, the table with one scale."""
    text = data.get("text_config", data)
    quantised = data.get("quantization_config") or text.get("quantization_config") or {}
    found: dict[str, tuple[str, dict[str, str]]] = {}
    if isinstance(quantised, dict) and quantised.get("quant_method") == "fp8":
        found["experts"] = ("e4m3", {"scale": "block128"})
    if text.get("ple_embedding_dtype") == "float8_e4m3fn":
        found["ple"] = ("e4m3", {"scale": "global"})
    return found
