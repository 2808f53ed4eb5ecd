"""Gated DeltaNet: linear attention with a decaying, error-correcting memory (36 of 48 layers in Flash-Next).

Per value head a memory M [dk, dv] follows  M <- a M;  d = beta (v - M^T k);  M <- M + k d^T;  o = M^T q.  `recurrent_step` does this for one token;
`chunked_scan` does the same for many with matrix products (Yang et al. 2024, arXiv 2412.06464, WY form): both are float32 and agree to rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, silu, softplus

from lab.models.binder import Binder
from lab.models.qwen4_exp.config import Qwen4ExpConfig
from lab.models.qwen4_exp.norms import gated_rms_norm, l2_normalise

CHUNK = 64
"""Tokens per chunk of the scan: transformers' value; a matter of speed and rounding only."""


class DeltaState:
    """Per layer: the last K inputs of the convolution [B, K, D], token t's at place t % K, and the memory [B, heads, dk, dv], float32.

    A ring, so that a decode step writes one place and moves nothing."""

    def __init__(self, config: Qwen4ExpConfig, batch: int, device: torch.device, dtype: torch.dtype) -> None:
        width = 2 * config.key_dim + config.value_dim
        heads = config.linear_num_value_heads
        self.conv = torch.zeros(batch, config.linear_conv_kernel, width, device=device, dtype=dtype)
        self.memory = torch.zeros(batch, heads, config.linear_key_head_dim, config.linear_value_head_dim, device=device)

    def nbytes(self) -> int:
        """Bytes a decode step reads of this state."""
        return self.conv.nbytes + self.memory.nbytes


class GatedDelta:
    """One Gated DeltaNet block: x [B, T, H] -> y [B, T, H]."""

    def __init__(self, config: Qwen4ExpConfig, bind: Binder, prefix: str) -> None:
        self.config = config
        wide, hidden, heads = 2 * config.key_dim + config.value_dim, config.hidden_size, config.linear_num_value_heads
        self.in_qkv = bind.linear(f"{prefix}.in_proj_qkv.weight", wide, hidden, "trunk")
        self.in_z = bind.linear(f"{prefix}.in_proj_z.weight", config.value_dim, hidden, "trunk")
        self.in_a = bind.linear(f"{prefix}.in_proj_a.weight", heads, hidden, "small")
        self.in_b = bind.linear(f"{prefix}.in_proj_b.weight", heads, hidden, "small")
        self.out = bind.linear(f"{prefix}.out_proj.weight", hidden, config.value_dim, "trunk")
        self.taps = bind.vector(f"{prefix}.conv1d.weight", (wide, 1, config.linear_conv_kernel))
        self.a_log = bind.vector(f"{prefix}.A_log", (heads,))
        self.dt_bias = bind.vector(f"{prefix}.dt_bias", (heads,))
        self.norm = bind.vector(f"{prefix}.norm.weight", (config.linear_value_head_dim,))

    def __call__(self, x: Tensor, state: DeltaState | None, start: int = 0) -> Tensor:
        """Advances `state` in place by x's tokens, which stand at positions start..; without a state the sequence starts and ends here."""
        c = self.config
        mixed = silu(self._convolve(self.in_qkv(x), state, start))
        q, k, v = mixed.split([c.key_dim, c.key_dim, c.value_dim], dim=-1)
        share = c.linear_num_value_heads // c.linear_num_key_heads
        # Value head j reads key head j // share.
        q = l2_normalise(q.unflatten(-1, (-1, c.linear_key_head_dim))).repeat_interleave(share, 2) * c.linear_key_head_dim**-0.5
        k = l2_normalise(k.unflatten(-1, (-1, c.linear_key_head_dim))).repeat_interleave(share, 2)
        v = v.unflatten(-1, (-1, c.linear_value_head_dim)).float()
        beta = torch.sigmoid(self.in_b(x)).float()
        log_decay = -torch.exp(self.a_log) * softplus(self.in_a(x).float() + self.dt_bias)
        q, k, v, beta, log_decay = (t.transpose(1, 2) for t in (q, k, v, beta, log_decay))
        memory = v.new_zeros(*v.shape[:2], k.shape[-1], v.shape[-1]) if state is None else state.memory
        step = recurrent_step if x.shape[1] == 1 else chunked_scan
        read, memory = step(q, k, v, beta, log_decay, memory)
        if state is not None:
            state.memory.copy_(memory)
        read = read.transpose(1, 2).to(x.dtype)
        gate = self.in_z(x).unflatten(-1, (-1, c.linear_value_head_dim))
        return self.out(gated_rms_norm(read, gate, self.norm, c.rms_norm_eps, c.linear_gate).flatten(-2))

    def _convolve(self, x: Tensor, state: DeltaState | None, start: int) -> Tensor:
        """Depthwise causal convolution over tokens, x [B, T, D]; tap K-1 is the current token."""
        taps = self.taps.squeeze(1).to(x.dtype)
        kernel, tokens = taps.shape[1], x.shape[1]
        if state is None:
            history = pad(x, (0, 0, kernel - 1, 0))
        else:
            history = torch.cat([state.conv.roll(-start % kernel, 1)[:, 1:], x], 1)  # rolled: the oldest place, of token start - kernel, comes first
            kept = min(kernel, tokens)
            for token in range(start + tokens - kept, start + tokens):
                state.conv[:, token % kernel] = x[:, token - start]
        return torch.stack([history[:, i : i + tokens] * taps[:, i] for i in range(kernel)]).sum(0)


def recurrent_step(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """One token. q, k [B, h, 1, dk]; v [B, h, 1, dv]; beta, log_decay [B, h, 1]; memory [B, h, dk, dv] -> (read [B, h, 1, dv], new memory)."""
    memory = memory * torch.exp(log_decay).unsqueeze(-1)
    error = beta.unsqueeze(-1) * (v - k @ memory)
    memory = memory + k.transpose(-1, -2) @ error
    return q @ memory, memory


def chunked_scan(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """T tokens, shapes as in `recurrent_step` with T in place of 1, all float32. Within a chunk the corrections d_i solve a unit lower triangular
    system; across chunks the memory is carried. Padded tokens have beta 0 and decay 1, so they change nothing."""
    tokens = q.shape[2]
    fill = -tokens % CHUNK
    q, k, v = (pad(t, (0, 0, 0, fill)).unflatten(2, (-1, CHUNK)) for t in (q, k, v))
    beta, log_decay = (pad(t, (0, fill)).unflatten(2, (-1, CHUNK)) for t in (beta, log_decay))
    total = log_decay.cumsum(-1)
    # decay[i, j] = product of decays over (j, i]; masked before exp because j > i would overflow.
    causal = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = (total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(~causal, -torch.inf).exp()
    k_beta = k * beta.unsqueeze(-1)
    system = (k_beta @ k.transpose(-1, -2)) * decay
    rhs = torch.cat([v * beta.unsqueeze(-1), k_beta * total.exp().unsqueeze(-1)], -1)
    fresh, seen = torch.linalg.solve_triangular(system, rhs, upper=False, unitriangular=True).split([v.shape[-1], k.shape[-1]], -1)
    within = (q @ k.transpose(-1, -2)) * decay
    q_start = q * total.exp().unsqueeze(-1)
    k_end = k * (total[..., -1:] - total).exp().unsqueeze(-1)
    chunk_decay = total[..., -1].exp()[..., None, None]
    reads = []
    for i in range(q.shape[2]):
        delta = fresh[:, :, i] - seen[:, :, i] @ memory
        reads.append(q_start[:, :, i] @ memory + within[:, :, i] @ delta)
        memory = memory * chunk_decay[:, :, i] + k_end[:, :, i].transpose(-1, -2) @ delta
    return torch.cat(reads, 2)[:, :, :tokens], memory
