"""The delta rule over many tokens: fla-core's chunked Triton kernels where they are installed and there is a GPU, else the plain scan.

Why fla-core (extra `[gpu]`): its kernels hold a chunk's running memory on chip, which in torch is a loop of small products over 4,096 / 64 chunks. The
chunks' own systems are solved by lab.kernels.delta_intra, and by fla-core, too, where its inner functions are not where 0.6 has them. Keys and queries come
normed; fla scales queries by d^-1/2, takes decays as logarithms and gives the final memory in float32, as lab.models.qwen4_exp.delta does.
What it does not prove: more digits than 16-bit products with float32 sums have.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lab.kernels.delta_intra import intra_chunks
from lab.models.qwen4_exp.delta import chunked_scan

CONFIGS = Path(__file__).parents[2] / "kernels" / "fla_configs"
"""Launch shapes measured on an H200, in fla-core's own files: without them its first call tries dozens for a minute."""


def missing(device: torch.device) -> str | None:
    """Why fla-core cannot run here, or None."""
    if device.type != "cuda":
        return f"fla-core needs a GPU, not {device.type}"
    return None if find_spec("fla") is not None else "fla-core is not installed; pip install 'migration-lab[gpu]'"


class DeltaRule:
    """(q, k, v, decay, beta, memory or None) -> (read, new memory). `name`: what runs, and why not fla-core where it does not."""

    def __init__(self, device: torch.device, whole: bool = False) -> None:
        """`whole`: fla-core's own kernel for the chunks, too."""
        reason = missing(device)
        self._rule: Any = None
        self._parts: Any = None
        if reason is not None:
            self.name = f"plain scan ({reason})"
            return
        if "fla" not in sys.modules:  # it reads these once, when it is imported
            os.environ.setdefault("FLA_CONFIG_DIR", str(CONFIGS))
            os.environ.setdefault("FLA_CACHE_MODE", "default")
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        self._rule, self.name = chunk_gated_delta_rule, f"fla-core {version('fla-core')}"
        if not whole:
            try:
                from fla.ops.common.chunk_delta_h import chunk_gated_delta_rule_fwd_h
                from fla.ops.common.chunk_o import chunk_fwd_o
            except ImportError:  # these are not what it promises to keep
                return
            self._parts = chunk_gated_delta_rule_fwd_h, chunk_fwd_o
            self.name += ", chunks inverted by lab.kernels.delta_intra"

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        """q, k [B, T, key heads, d] of length 1, v [B, T, heads, d], decay (log) and beta float32 [B, T, heads], memory float32 [B, heads, d, d] or None
        -> read [B, T, heads, d] in v's dtype, memory float32."""
        if self._parts is not None and v.shape[3] >= 16:
            w, u, total = intra_chunks(k, v, decay, beta)
            states, fresh, after = self._parts[0](k=k, w=w, u=u, g=total, initial_state=memory, output_final_state=True)
            return self._parts[1](q=q, k=k, v=fresh, h=states, g=total, scale=q.shape[3] ** -0.5), after
        if self._rule is not None:
            read, after = self._rule(q, k, v, decay, beta, initial_state=memory, output_final_state=True)
            return read, after
        share = v.shape[2] // q.shape[2]
        queries, keys = (t.float().repeat_interleave(share, 2).transpose(1, 2) for t in (q, k))
        values, betas, decays = (t.float().transpose(1, 2) for t in (v, beta, decay))
        if memory is None:
            memory = torch.zeros(v.shape[0], v.shape[2], q.shape[3], v.shape[3], device=v.device)
        read, after = chunked_scan(queries * q.shape[3] ** -0.5, keys, values, betas, decays, memory)
        return read.transpose(1, 2).to(v.dtype).contiguous(), after
