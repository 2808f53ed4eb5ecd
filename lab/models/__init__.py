"""Model architectures of the local engine; their names in `conf/model` are `lab.compose.ARCHITECTURES`."""

from __future__ import annotations

from lab.models.inventory import InventoryBinder
from lab.models.qwen4_exp.config import Qwen4ExpConfig
from lab.models.qwen4_exp.model import Qwen4Exp


def inventory(config: Qwen4ExpConfig) -> InventoryBinder:
    """What a model of these sizes asks for, without making a tensor."""
    binder = InventoryBinder()
    Qwen4Exp(config, binder)
    return binder
