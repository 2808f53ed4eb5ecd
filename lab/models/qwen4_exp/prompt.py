"""The forward pass over many tokens on a GPU with 16-bit activations: the plain code's weights, state and order of operations, through fused kernels.

Why apart: lab.models.qwen4_exp's own code is the reference and runs everywhere; at 4,096 tokens it is 13,000 launches of which most move the residual streams
once more. Here a layer is about 40. Where a path's codec has no kernel the plain operation is called.
Both must agree to rounding, which tests ask on small models and the benchmark on the GPU. What it does not prove: equality of the indexer's choice
where two blocks score within rounding of each other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, pad, silu

from lab.errors import LabError
from lab.kernels.attention_prefill import attend_prompt, norm_rotate
from lab.kernels.delta_prefill import convolve_prompt, gated_norm_prompt, gates_prompt
from lab.kernels.experts import LowBitExperts
from lab.kernels.experts_prefill import FEW_TOKENS, slot_outputs
from lab.kernels.indexer_prefill import MOST_BLOCKS, block_keys, block_scores, choose_blocks
from lab.kernels.mixer_prefill import mix_prompt, norm_prompt, silu_prompt
from lab.kernels.moe_prefill import route_prompt, sum_slots
from lab.kernels.ngram_prefill import inject_prompt
from lab.kernels.trunk_prefill import decode_into
from lab.models.qwen4_exp.delta import DeltaState, GatedDelta
from lab.models.qwen4_exp.delta_rule import DeltaRule
from lab.models.qwen4_exp.hyper import HyperMixer
from lab.models.qwen4_exp.model import ModelState, Qwen4Exp
from lab.models.qwen4_exp.moe import SparseMoe
from lab.models.qwen4_exp.ngram import NGramInjection, PleState, ngram_row_ids
from lab.models.qwen4_exp.sparse_attention import AttentionState, SparseAttention, rotary_tables
from lab.models.qwen4_exp.step_parts import Small
from lab.ops import PackedLinear
from lab.ops_gpu import KernelExperts, KernelLinear

_ALIGNED = 8  # 16-bit rows of a product whose outputs start at multiples of 16 bytes


class Dense:
    """A matrix that a kernel wants in 16 bits: decoded per call, so that it is resident in its own codec only."""

    def __init__(self, op: Any, name: str) -> None:
        """Raises LabError where it is neither int8 in planes nor one block of a codec."""
        if not isinstance(op, KernelLinear) and not (isinstance(op, PackedLinear) and len(op.blocks) == 1 and op.order is None):
            raise LabError(f"prompt pass: {name} is {type(op).__name__} in several blocks or another column order")
        self.op = op
        self.rows, self.cols = op.packed.shape if isinstance(op, KernelLinear) else op.blocks[0].shape

    def count(self, tokens: int) -> None:
        """Counts one product with `tokens` rows."""
        if isinstance(self.op, KernelLinear):
            self.op.count(tokens)
        else:
            self.op.blocks[0].count(tokens, 2 * tokens * self.rows * self.cols)

    def weight(self, dtype: torch.dtype, below: Tensor | None = None) -> Tensor:
        """[rows, cols], and under it the rows of `below`."""
        if not isinstance(self.op, KernelLinear):
            block = self.op.blocks[0]
            found: Tensor = block.decode(block.parts, dtype)
            return found if below is None else torch.cat([found, below])
        extra = 0 if below is None else len(below)
        out = torch.empty(self.rows + extra, self.cols, dtype=dtype, device=self.op.int8.planes.words.device)
        decode_into(self.op.int8.planes, out)
        if below is not None:
            out[self.rows :] = below
        return out


class PromptMixer:
    """streams [T, C, H] and what is pending -> (x [T, H], injection logits [T, C])."""

    def __init__(self, mixer: HyperMixer, dtype: torch.dtype) -> None:
        self.config, self.norm = mixer.config, mixer.norm
        self.down, self.up = Dense(mixer.down, "a mixer's narrow projection"), Dense(mixer.up, "a mixer's wide projection")
        self.small = None if mixer.inject is None else Small(dtype, mixer.inject)
        # Padded, so that the product's rows stay aligned.
        self.below = None if self.small is None else pad(self.small.weight, (0, 0, 0, -(self.down.rows + self.config.hc_count) % _ALIGNED))

    def __call__(self, streams: Tensor, y: Tensor | None, given: Tensor | None) -> tuple[Tensor, Tensor]:
        c, dtype = self.config, streams.dtype
        normed = norm_prompt(streams, y, given, self.norm, c.rms_norm_eps)
        self.down.count(len(streams))
        self.up.count(len(streams))
        if self.small is not None:
            self.small.count(len(streams))
        inner = linear(normed.flatten(1), self.down.weight(dtype, self.below))
        x = mix_prompt(silu_prompt(inner, self.down.rows, c.hc_count), self.up.weight(dtype), normed)
        return x, inner[:, self.down.rows : self.down.rows + c.hc_count]


class PromptDelta:
    """x [B, T, H] -> y [B, T, H], advancing the layer's state."""

    def __init__(self, block: GatedDelta, dtype: torch.dtype, rule: DeltaRule) -> None:
        c = self.config = block.config
        d = c.linear_key_head_dim
        if d != c.linear_value_head_dim or d & (d - 1):
            raise LabError(f"prompt pass: heads of {d} and {c.linear_value_head_dim} are not one power of two")
        self.block, self.rule = block, rule
        self.gates = Small(dtype, block.in_a, block.in_b)
        self.taps = block.taps.squeeze(1).to(dtype).float().T.contiguous()

    def __call__(self, x: Tensor, state: DeltaState | None, start: int) -> Tensor:
        c, block = self.config, self.block
        batch, tokens, _ = x.shape
        kernel, wide = self.taps.shape
        qkv, z = block.in_qkv(x), block.in_z(x)
        self.gates.count(batch * tokens)
        decay, beta = gates_prompt(linear(x, self.gates.weight), block.a_log, block.dt_bias)
        if state is None or start == 0:
            past = torch.zeros(batch, kernel - 1, wide, dtype=x.dtype, device=x.device)
        else:  # rolled: the oldest place, of token start - kernel, comes first
            past = state.conv.roll(-start % kernel, 1)[:, 1:].contiguous()
        q, k, v = convolve_prompt(qkv, past, self.taps, None if state is None else state.conv, start, c.key_dim, c.linear_key_head_dim)
        read, memory = self.rule(q, k, v, decay, beta, None if state is None else state.memory)
        if state is not None:
            state.memory.copy_(memory)
        return block.out(gated_norm_prompt(read, z, block.norm, c.rms_norm_eps, c.linear_gate))


class PromptAttention:
    """x [B, T, H] -> y [B, T, H], extending the layer's cache."""

    def __init__(self, block: SparseAttention, dtype: torch.dtype) -> None:
        c = self.config = block.config
        if any(n & (n - 1) for n in (c.head_dim, c.indexer_head_dim, c.indexer_heads, c.indexer_block)):
            raise LabError("prompt pass: an attention head, the indexer's heads or its blocks are no powers of two")
        self.block, self.index = block, Small(dtype, block.indexer.project)

    def __call__(self, x: Tensor, state: AttentionState | None, start: int, tables: tuple[Tensor, Tensor]) -> Tensor:
        """tables: cos and sin [start + T, rotary] of all positions so far."""
        c, block = self.config, self.block
        batch, tokens, _ = x.shape
        end = start + tokens
        state = state or AttentionState(c, batch, tokens, x.device, x.dtype)
        q, gate = block.q(x).unflatten(-1, (c.num_heads, 2 * c.head_dim)).chunk(2, -1)
        here = tables[0][start:end], tables[1][start:end]
        query = norm_rotate(q, block.q_norm, here, c.rms_norm_eps)
        norm_rotate(block.k(x).unflatten(-1, (c.num_kv_heads, c.head_dim)), block.k_norm, here, c.rms_norm_eps, state.keys[:, start:end])
        state.values[:, start:end] = block.v(x).unflatten(-1, (c.num_kv_heads, c.head_dim))
        self.index.count(batch * tokens)
        index = linear(x, self.index.weight)
        state.index_keys[:, start:end] = index[..., -c.indexer_head_dim :]
        bits = None
        if end // c.indexer_block > c.indexer_budget // c.indexer_block:  # else every complete block is chosen, which is dense attention
            bits = self._chosen(index, state, start, end, tables, here)
        return block.o(attend_prompt(query, state.keys, state.values, gate, start, bits, c.indexer_block))

    def _chosen(self, index: Tensor, state: AttentionState, start: int, end: int, tables: tuple[Tensor, Tensor], here: tuple[Tensor, Tensor]) -> Tensor:
        """A bit per block and query."""
        c, indexer = self.config, self.block.indexer
        q = norm_rotate(index[..., : -c.indexer_head_dim].unflatten(-1, (c.indexer_heads, -1)), indexer.q_norm, here, c.rms_norm_eps)
        keys = block_keys(state.index_keys, end // c.indexer_block, indexer.k_norm, tables, c.indexer_block, c.rms_norm_eps)
        return choose_blocks(block_scores(q, keys, start, c.indexer_block), start, c.indexer_block, c.indexer_budget // c.indexer_block)


class PromptMoe:
    """x [T, H] -> routed and shared experts [T, H]."""

    def __init__(self, block: SparseMoe, dtype: torch.dtype) -> None:
        self.config, self.block = block.config, block
        self.router = Small(dtype, block.gate, block.shared_gate)
        rows = len(self.router.weight)
        self.weight = pad(self.router.weight, (0, 0, 0, -rows % _ALIGNED))
        self.router.weight = self.weight[:rows]  # held once

    def __call__(self, x: Tensor) -> Tensor:
        c, block, experts = self.config, self.block, self.block.experts  # asked for at every call: a measurement may stand in for them
        self.router.count(len(x))
        ids, weights, share = route_prompt(linear(x, self.weight), c.num_experts, c.experts_per_token, c.norm_topk_prob)
        shared = block.shared_down(silu(block.shared[0](x)) * block.shared[1](x))
        if isinstance(experts, KernelExperts) and isinstance(experts.slots, LowBitExperts) and len(x) > FEW_TOKENS:
            experts.count(ids.numel())
            return sum_slots(slot_outputs(experts.slots, x, ids, weights), c.experts_per_token, shared, share)
        return sum_slots(experts(x, ids.long(), weights.to(x.dtype)).contiguous(), 1, shared, share)


class PromptNGram:
    """Adds the n-gram module's output to streams [B * T, C, H], advancing its state."""

    def __init__(self, module: NGramInjection, dtype: torch.dtype) -> None:
        self.config, self.module = module.config, module
        self.taps = module.taps.squeeze(1).to(dtype).float().T.contiguous()

    def __call__(self, streams: Tensor, ids: Tensor, state: PleState | None) -> None:
        c, module = self.config, self.module
        batch, tokens = ids.shape
        reach, kept = c.ngram_size - 1, (len(self.taps) - 1) * c.ngram_size
        history = pad(ids, (reach, 0), value=c.eos_token_id) if state is None else torch.cat([state.tokens, ids], 1)
        embedded = module.table(ngram_row_ids(history, c, module.multipliers, module.sizes, module.offsets)).flatten(-2).flatten(0, 1)
        past = torch.zeros(batch, kept, c.streams_width, dtype=streams.dtype, device=streams.device) if state is None else state.conv
        key, value = module.key(embedded), module.value(embedded)
        normed = inject_prompt(streams, key, value, module.norms, self.taps, past, tokens, c.ngram_size, c.rms_norm_eps).view(batch, tokens, -1)
        if state is not None:
            state.tokens.copy_(history[:, -reach:])
            state.conv.copy_(normed[:, -kept:] if tokens >= kept else torch.cat([state.conv[:, tokens - kept :], normed], 1))


class PromptPass:
    """A model's forward pass over prompts: (ids int64 [B, T], state or None) -> final hidden states [B, T, H], advancing the state."""

    def __init__(self, model: Qwen4Exp, device: torch.device, dtype: torch.dtype) -> None:
        """Raises LabError with the reason where a part of this model has no such pass."""
        if dtype.itemsize != 2:
            raise LabError(f"prompt pass: kernels take 16-bit activations, not {str(dtype).removeprefix('torch.')}")
        self.model, self.config, self.device, self.dtype = model, model.config, device, dtype
        c = self.config
        if c.hc_count & (c.hc_count - 1):
            raise LabError(f"prompt pass: {c.hc_count} residual streams are no power of two")
        self.rule = DeltaRule(device)
        self.mixers = [(PromptMixer(layer.attn_mixer, dtype), PromptMixer(layer.mlp_mixer, dtype)) for layer in model.layers]
        self.last = PromptMixer(model.mixer, dtype)
        self.blocks: list[PromptAttention | PromptDelta] = []
        for layer in model.layers:
            assert layer.attention is not None or layer.delta is not None
            self.blocks.append(PromptAttention(layer.attention, dtype) if layer.attention is not None else PromptDelta(layer.delta, dtype, self.rule))  # type: ignore[arg-type]
        ples = [layer.ple for layer in model.layers if layer.ple is not None]
        self.ngram = PromptNGram(ples[0], dtype) if ples else None
        self.moes = [PromptMoe(layer.moe, dtype) for layer in model.layers]

    def fits(self, ids: Tensor, state: ModelState | None) -> bool:
        """Whether this pass can serve the call: the indexer's choice holds all blocks of a context at once."""
        end = ids.shape[1] + (0 if state is None else state.length)
        return end // self.config.indexer_block <= MOST_BLOCKS or not any(self.config.is_sparse)

    def evidence(self) -> dict[str, str]:
        """What runs where there is a choice."""
        return {"delta_rule": self.rule.name}

    def __call__(self, ids: Tensor, state: ModelState | None) -> Tensor:
        c = self.config
        batch, tokens = ids.shape
        start = 0 if state is None else state.length
        tables = rotary_tables(c, torch.arange(start + tokens, device=self.device), self.dtype) if any(c.is_sparse) else None
        y: Tensor = self.model.embed(ids).flatten(0, 1).contiguous()
        streams = torch.empty(batch * tokens, c.hc_count, c.hidden_size, dtype=self.dtype, device=self.device)
        given: Tensor | None = None
        pending: Tensor | None = y
        for index, layer in enumerate(self.model.layers):
            before, after = self.mixers[index]
            if layer.ple is not None:
                assert self.ngram is not None
                norm_prompt(streams, pending, given, before.norm, c.rms_norm_eps)  # writes back what is pending
                self.ngram(streams, ids, None if state is None else state.ple)
                pending, given = None, None
            x, given = before(streams, pending, given)
            own: Any = None if state is None else state.layers[index]
            block, x = self.blocks[index], x.view(batch, tokens, -1)
            if isinstance(block, PromptAttention):
                assert tables is not None
                pending = block(x, own, start, tables).flatten(0, 1)
            else:
                pending = block(x, own, start).flatten(0, 1)
            x, given = after(streams, pending, given)
            pending = self.moes[index](x)
        if state is not None:
            state.length += tokens
        return self.last(streams, pending, given)[0].view(batch, tokens, -1)
