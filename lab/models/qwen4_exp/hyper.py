"""Hyper-connections: the mixer that reads one input from the residual streams and says how to write the result back.

The model keeps `hc_count` residual streams instead of one and has no other layer norm. The mixer reads the *normed* streams; the block's output
is added to the *raw* ones. Source: "Gated Residual" in transformers 5.24.0 (`Qwen4ExpTextGatedResidual`), low-rank form.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from lab.models.binder import Binder
from lab.models.qwen4_exp.config import Qwen4ExpConfig
from lab.models.qwen4_exp.norms import grouped_rms_norm


class HyperMixer:
    """Reads x [B, T, H] and injection weights [B, T, C] from streams [B, T, C*H]. The final mixer (`combine=False`) has no injection."""

    def __init__(self, config: Qwen4ExpConfig, bind: Binder, prefix: str, combine: bool = True) -> None:
        self.config = config
        wide = config.streams_width
        self.norm = bind.vector(f"{prefix}.hc_norm.weight", (wide,))
        self.down = bind.linear(f"{prefix}.input_mix_weight_down.weight", config.hc_lowrank, wide, "trunk")
        self.up = bind.linear(f"{prefix}.input_mix_weight_up.weight", wide, config.hc_lowrank, "trunk")
        self.inject = bind.linear(f"{prefix}.block_inject_weight.weight", config.hc_count, wide, "small") if combine else None

    def __call__(self, streams: Tensor) -> tuple[Tensor, Tensor | None]:
        """streams [B, T, C*H] -> (x [B, T, H], injection [B, T, C] in 0..2, or None for the final mixer)."""
        count = self.config.hc_count
        normed = grouped_rms_norm(streams, self.norm, count, self.config.rms_norm_eps)
        amount = torch.sigmoid(self.up(silu(self.down(normed) / count)))
        mixed = (amount * normed).unflatten(-1, (count, -1)).mean(-2)
        return mixed, None if self.inject is None else 2 * torch.sigmoid(self.inject(normed) / count)


def write_back(streams: Tensor, y: Tensor, injection: Tensor) -> Tensor:
    """Adds the block's output y [B, T, H] to every stream, weighted by injection [B, T, C]."""
    return streams + (injection.unsqueeze(-1) * y.unsqueeze(-2)).flatten(-2)
