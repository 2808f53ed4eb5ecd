"""Model architectures of the local engine, by their name in `conf/model`."""

from __future__ import annotations

from lab.models.inventory import InventoryBinder
from lab.models.qwen4_exp.config import Qwen4ExpConfig
from lab.models.qwen4_exp.model import Qwen4Exp

ARCHITECTURES = ("qwen4_exp",)


def inventory(config: Qwen4ExpConfig) -> InventoryBinder:
    """What a model of these sizes asks for, without making a tensor."""
    binder = InventoryBinder()
    Qwen4Exp(config, binder)
    return binder
