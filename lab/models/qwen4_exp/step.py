"""One decode step of `qwen4_exp` with fixed shapes: no host read, no shape that depends on the position, so that it can be captured as a graph.

The same weights and the same state as the plain forward code, which it must equal to rounding; tests compare both. Positions are a number on the device.
The kernels are those of lab.kernels; where a path's codec has none, the plain operation is called.
What it does not prove: that a step can be captured, which the engine tries and records (lab.engines.graphs).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from lab.errors import LabError
from lab.kernels import attention_step, delta_step, hyper_bf16, hyper_step, indexer_step, rows_step
from lab.kernels.backend import use_ptx
from lab.kernels.experts import LowBitExperts
from lab.kernels.hyper_step import Pending
from lab.kernels.indexer_prefill import MOST_BLOCKS
from lab.kernels.mixer_step import Streams
from lab.kernels.prefetch_step import prefetch
from lab.models.qwen4_exp.delta import DeltaState, GatedDelta
from lab.models.qwen4_exp.hyper import HyperMixer
from lab.models.qwen4_exp.injection_step import StepInjection
from lab.models.qwen4_exp.model import ModelState, Qwen4Exp
from lab.models.qwen4_exp.moe import SparseMoe
from lab.models.qwen4_exp.sparse_attention import AttentionState, RotaryTables, SparseAttention
from lab.models.qwen4_exp.step_parts import Shared, Small, Stacked, as_filed
from lab.ops_gpu import KernelExperts, KernelLinear

AHEAD_BYTES = 0
"""How much of a layer's large projections is fetched while the layer before it computes its experts; 0: nothing is fetched ahead at all. 12 MB made a step of
8 layers slower together with the second stream: 1.18 ms instead of 1.07."""
SECOND_STREAM = False
"""Whether the shared expert runs beside the router and the routed experts."""
Region = tuple[Tensor, int]
"""The first so many bytes of a tensor that will be read soon."""


def _words(*ops: Any, most: int = 1 << 30) -> list[Region]:
    """The packed weights of those operations that are in planes."""
    return [(op.int8.planes.words, most) for op in ops if isinstance(op, KernelLinear)]


class Beside:
    """Work on a second stream that begins when what was launched before it on the main one has ended. Without one it is done in line."""

    def __init__(self, device: torch.device) -> None:
        self.main: Any = None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.used = False
        self._inner: Any = None

    def __enter__(self) -> None:
        if self.stream is not None and SECOND_STREAM:
            self.main = torch.cuda.current_stream(self.stream.device)
            self.stream.wait_stream(self.main)
            self._inner = torch.cuda.stream(self.stream)
            self._inner.__enter__()
            self.used = True

    def __exit__(self, *error: object) -> None:
        if self._inner is not None:
            self._inner.__exit__(*error)
            self._inner = None

    def join(self) -> None:
        """What follows on the main stream waits for everything done here."""
        if self.used and self.stream is not None:
            torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)
            self.used = False


class StepMixer:
    """streams [B, C, H] and what is pending -> (x [B, H], injection logits [B, C, C])."""

    def __init__(self, mixer: HyperMixer, dtype: torch.dtype) -> None:
        self.config, self.norm = mixer.config, mixer.norm
        self.down: Any = mixer.down
        self.up: Any = mixer.up
        self.inject = None if mixer.inject is None else Small(dtype, mixer.inject)
        self.fused = dtype.itemsize == 2 and _mixes(mixer.down, mixer.up, self.config.hc_count)
        self.filed = as_filed(mixer.down, mixer.up) if dtype.itemsize == 2 else None

    def __call__(self, streams: Tensor, pending: Pending | None) -> tuple[Tensor, Tensor]:
        batch, count, _ = streams.shape
        if self.inject is not None:
            self.inject.count(batch)
        inject = None if self.inject is None else self.inject.weight
        normed, share = hyper_step.norm_streams(streams, pending, self.norm, inject, self.config.rms_norm_eps)
        if self.fused or self.filed is not None:
            self.down.count(batch)
            self.up.count(batch)
        if self.fused:
            return hyper_step.mix_streams(normed, self.down.int8.planes, self.up.int8.planes), share
        if self.filed is not None:
            return hyper_bf16.mix_streams(normed, *self.filed), share
        flat = normed.flatten(1)
        amount = torch.sigmoid(self.up(silu(self.down(flat) / count)))
        return (amount * flat).unflatten(-1, (count, -1)).mean(-2), share


class StepDelta:
    """x [B, H] -> y [B, H], advancing the layer's state."""

    def __init__(self, block: GatedDelta, dtype: torch.dtype) -> None:
        c = self.config = block.config
        sizes = c.linear_num_key_heads, c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim, c.linear_conv_kernel
        if reason := delta_step.refused(*sizes):
            raise LabError(reason)
        self.project, self.out = Stacked(block.in_qkv, block.in_z), block.out
        self.gates = Small(dtype, block.in_a, block.in_b)
        taps = block.taps.squeeze(1).to(dtype).float().T.contiguous()
        norm = block.norm
        self.weights = delta_step.DeltaWeights(self.gates.weight, taps, block.a_log, block.dt_bias, norm, c.rms_norm_eps, c.linear_gate)

    def __call__(self, x: Tensor, state: DeltaState, position: Tensor) -> Tensor:
        mixed = self.project(x)
        self.gates.count(len(x))
        return self.out(delta_step.delta_step(x, mixed, position, state.conv, state.memory, self.weights))


class StepAttention:
    """x [B, H] -> y [B, H], adding to the layer's cache."""

    def __init__(self, block: SparseAttention, dtype: torch.dtype) -> None:
        c = self.config = block.config
        if reason := attention_step.refused(c.num_heads, c.num_kv_heads, c.head_dim, c.indexer_head_dim):
            raise LabError(reason)
        self.block = block
        self.project, self.out = Stacked(block.q, block.k, block.v), block.o
        self.index = Small(dtype, block.indexer.project)

    def __call__(self, x: Tensor, state: AttentionState, position: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        c = self.config
        mixed, index = self.project(x), self.index(x)
        query = attention_step.prepare(
            mixed, index, position, tables, (self.block.q_norm, self.block.k_norm), c.num_heads, c.rms_norm_eps, state.keys, state.values, state.index_keys
        )
        chosen = self.chosen(index, state.index_keys, position, tables)
        return self.out(attention_step.attend(query, state.keys, state.values, position, mixed, chosen, c.indexer_block))

    def chosen(self, index: Tensor, raw_keys: Tensor, position: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor | None:
        """uint8 [B, blocks]: the best complete blocks. None where the budget holds every block there is room for: attention is then dense by definition."""
        c, indexer = self.config, self.block.indexer
        block, budget = c.indexer_block, c.indexer_budget // c.indexer_block
        if raw_keys.shape[1] // block <= budget:
            return None
        if raw_keys.shape[1] // block > MOST_BLOCKS:
            return indexer.chosen_at(index, raw_keys, position.long(), tables)
        norms = indexer.q_norm, indexer.k_norm
        scores = indexer_step.block_scores(index, raw_keys, position, tables, norms, c.indexer_heads, block, c.rms_norm_eps)
        return indexer_step.choose_blocks(scores, position, block, budget)


class StepMoe:
    """x [B, H] -> (routed output, the shared expert's share of it), each [B, H]."""

    def __init__(self, block: SparseMoe, dtype: torch.dtype) -> None:
        self.config, self.experts = block.config, block.experts
        self.router = Small(dtype, block.gate, block.shared_gate)
        self.shared = Shared(block.shared[0], block.shared[1], block.shared_down)

    def __call__(self, x: Tensor, side: Beside) -> tuple[Tensor, Tensor]:
        c = self.config
        with side:
            inner = self.shared.inner(x)
        logits = self.router(x)
        if x.element_size() == 2:
            ids, weights, share = rows_step.choose(logits, c.experts_per_token, c.norm_topk_prob)
        else:
            weights, ids = logits[:, :-1].softmax(-1, dtype=torch.float32).topk(c.experts_per_token, dim=-1)
            weights = weights / weights.sum(-1, keepdim=True) if c.norm_topk_prob else weights
            share = torch.sigmoid(logits[:, -1:].float())
        with side:
            shared = self.shared.outer(inner, share, x.dtype)
        if isinstance(self.experts, KernelExperts):
            self.experts.count(ids.numel())
            routed = self.experts.slots(x, ids, weights)
        elif (step := getattr(self.experts, "step", None)) is not None:  # experts kept in part (lab.placement): their planes are not by expert number
            routed = step(x, ids, weights)
        else:
            routed = self.experts(x, ids.long(), weights.to(x.dtype))
        side.join()
        return routed, shared


@dataclass(frozen=True)
class Joined:
    """A model's weights as every kind of step takes them, layer by layer. Joined once and shared by the steps of one model."""

    blocks: list[Any]
    """StepDelta or StepAttention."""
    moes: list[StepMoe]
    injections: list[StepInjection | None]

    @classmethod
    def of(cls, model: Qwen4Exp, dtype: torch.dtype) -> Joined:
        """Raises LabError with the reason where a part of this model has no step."""
        blocks = [StepAttention(layer.attention, dtype) if layer.attention is not None else StepDelta(_delta(layer.delta), dtype) for layer in model.layers]
        moes = [StepMoe(layer.moe, dtype) for layer in model.layers]
        return cls(blocks, moes, [None if layer.ple is None else StepInjection(layer.ple) for layer in model.layers])


class DecodeStep:
    """A model's step: (ids int64 [B, 1], state, position int32 [1]) -> logits [B, 1, V]."""

    def __init__(self, model: Qwen4Exp, device: torch.device, dtype: torch.dtype, joined: Joined | None = None) -> None:
        """`joined`: of another step of this model. Raises LabError with the reason where a part of this model has no step."""
        self.model, self.config, self.device, self.dtype = model, model.config, device, dtype
        c = self.config
        self.mixers = [(StepMixer(layer.attn_mixer, dtype), StepMixer(layer.mlp_mixer, dtype)) for layer in model.layers]
        joined = joined or Joined.of(model, dtype)
        self.blocks, self.moes, self.injections = joined.blocks, joined.moes, joined.injections
        self.last = StepMixer(model.mixer, dtype)
        self.tables = RotaryTables(c, device, dtype)
        self.beside, self.fetch = Beside(device), Beside(device)
        self._count = c.hc_count

    def __call__(self, ids: Tensor, state: ModelState, position: Tensor) -> Tensor:
        """Advances the tensors of `state` by one token; `state.length` is the caller's business."""
        tables = self.tables(state.capacity)
        streams = self.model.embed(ids).expand(-1, self._count, -1).contiguous()
        pending: Pending | None = None
        for index, (before, after) in enumerate(self.mixers):
            if (injection := self.injections[index]) is not None:
                self._inject(injection, streams, pending, ids, state, before.norm)
                pending = None
            x, given = before(streams, pending)
            own: Any = state.layers[index]
            block = self.blocks[index]
            # What the mixers and the shared expert read next is fetched while the block before them waits for its own latencies.
            self._ahead([*_words(block.out), *_words(after.down, after.up)])
            y = block(x, own, position, tables) if isinstance(block, StepAttention) else block(x, own, position)
            x, given_mlp = after(streams, (y, None, given))
            self._ahead(self._next(index))
            pending = (*self.moes[index](x, self.beside), given_mlp)
        x, _ = self.last(streams, pending)
        self.fetch.join()
        return self.model.head(x).unsqueeze(1)

    def _next(self, index: int) -> list[Region]:
        """What is read after a layer's routed experts: its shared expert, then the next layer's mixer and the beginning of its projections."""
        shared = self.moes[index].shared
        found = [(shared.fused.gate_up_planes.words, 1 << 30)] if isinstance(shared.fused, LowBitExperts) else []
        following = self.mixers[index + 1][0] if index + 1 < len(self.mixers) else self.last
        found += _words(following.down, following.up)
        if index + 1 < len(self.blocks) and (whole := self.blocks[index + 1].project.whole) is not None:
            found.append((whole.planes.words, AHEAD_BYTES))
        return found

    def _ahead(self, regions: list[Region]) -> None:
        """Fetches into the cache beside the step's own chain."""
        if regions and AHEAD_BYTES and use_ptx():
            with self.fetch:
                prefetch(regions)

    def _inject(self, injection: StepInjection, streams: Tensor, pending: Pending | None, ids: Tensor, state: ModelState, norm: Tensor) -> None:
        """The n-gram module on the streams, in place, with the pending output written back first."""
        if pending is not None:
            hyper_step.norm_streams(streams, pending, norm, None, self.config.rms_norm_eps)  # for the streams; what they are normed to is not used
        scaled = torch.empty_like(streams, dtype=torch.float16)  # for a chain's mixer; not used either
        injection(Streams(streams, scaled, scaled), ids, state, norm)


def _mixes(down: Any, up: Any, count: int) -> bool:
    """Whether the two fused projections can serve these operations."""
    return isinstance(down, KernelLinear) and isinstance(up, KernelLinear) and hyper_step.mixes(down.int8.planes, up.int8.planes, count) is None


def _delta(block: GatedDelta | None) -> GatedDelta:
    assert block is not None
    return block
