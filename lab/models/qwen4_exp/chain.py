"""One decode step of `qwen4_exp` as a chain of launches on one stream, each of which asks for its weights while the one before it still runs.

For models whose trunk is int8 and whose activations are 16 bit; others take lab.models.qwen4_exp.step, which both must equal to rounding. A layer is 11
launches: mixer (2), projection, Gated DeltaNet, output with write-back, mixer (2), router, choice, gate and up, down with write-back.
What it does not prove: that the chain can be captured, which the engine tries and records (lab.engines.graphs).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lab.errors import LabError
from lab.kernels import attention_step, delta_step, mixer_step, moe_step, project_step
from lab.kernels.experts import LowBitExperts
from lab.kernels.mixer_step import Streams
from lab.kernels.quads import quad_order
from lab.models.qwen4_exp.delta import DeltaState
from lab.models.qwen4_exp.hyper import HyperMixer
from lab.models.qwen4_exp.model import ModelState, Qwen4Exp
from lab.models.qwen4_exp.sparse_attention import AttentionState, RotaryTables
from lab.models.qwen4_exp.step import DecodeStep, Joined, StepAttention, StepDelta, StepMoe
from lab.models.qwen4_exp.step_parts import Small, Stacked
from lab.ops import PackedTable
from lab.ops_gpu import KernelExperts, KernelLinear


def _require(reason: str | None) -> None:
    if reason is not None:
        raise LabError(reason)


def _planes(op: Any, name: str) -> Any:
    """The planes of an operation that must be int8. Raises LabError."""
    if not isinstance(op, KernelLinear):
        raise LabError(f"chained step: {name} is {type(op).__name__}, not int8 in planes")
    return op.int8.planes


class ChainMixer:
    """Streams -> (x [B, H] natural, x float16 in quad order, injection logits [B, C])."""

    def __init__(self, mixer: HyperMixer, dtype: torch.dtype) -> None:
        c = mixer.config
        self.eps, self.norm = c.rms_norm_eps, mixer.norm
        self.down: Any = mixer.down
        self.up: Any = mixer.up
        _require(mixer_step.refused(c.hidden_size, c.hc_count, _planes(mixer.down, "a mixer"), _planes(mixer.up, "a mixer")))
        self.inject = None if mixer.inject is None else Small(dtype, mixer.inject)
        self.rows = None
        if self.inject is not None:
            self.rows = quad_order(self.inject.weight.unflatten(-1, (c.hc_count, -1))).flatten(-2).contiguous()

    def __call__(self, streams: Streams) -> tuple[Tensor, Tensor, Tensor]:
        batch = len(streams.raw)
        for op in (self.down, self.up, self.inject):
            if op is not None:
                op.count(batch)
        inner, rate, given = mixer_step.narrow(streams, self.down.int8.planes, self.rows, self.eps)
        return *mixer_step.wide(streams, inner, rate, self.up.int8.planes), given


class ChainOut:
    """A block's output projection, written back to the streams."""

    def __init__(self, op: Any) -> None:
        self.op = op
        _require(project_step.refused(_planes(op, "an output projection")))

    def __call__(self, quads: Tensor, streams: Streams, given: Tensor, norm: Tensor) -> Streams:
        self.op.count(len(quads))
        return project_step.project_back(quads, self.op.int8.planes, streams, given, norm)


class ChainIn:
    """Projections of one input joined, with small rows beside them: (x, quads) -> (projections [B, out], small products [B, n])."""

    def __init__(self, stacked: Stacked, small: Small) -> None:
        self.stacked, self.small = stacked, small
        if stacked.whole is None:
            raise LabError("chained step: projections of one input are not int8 matrices that can be joined")
        _require(project_step.refused(stacked.whole.planes))

    def __call__(self, x: Tensor, quads: Tensor) -> tuple[Tensor, Tensor]:
        for op in self.stacked.ops:
            op.count(len(x))
        self.small.count(len(x))
        assert self.stacked.whole is not None
        return project_step.project(quads, self.stacked.whole.planes, x.dtype, (x, self.small.weight))


class ChainDelta:
    """A Gated DeltaNet block."""

    def __init__(self, step: StepDelta) -> None:
        self.weights, self.out = step.weights, ChainOut(step.out)
        self.project = ChainIn(step.project, step.gates)

    def __call__(self, x: Tensor, quads: Tensor, state: DeltaState, position: Tensor) -> Tensor:
        mixed, gates = self.project(x, quads)
        return delta_step.delta_step(gates, mixed, position, state.conv, state.memory, self.weights, chained=True)


class ChainAttention:
    """An attention block."""

    def __init__(self, step: StepAttention) -> None:
        self.step, self.out = step, ChainOut(step.out)
        self.project = ChainIn(step.project, step.index)

    def __call__(self, x: Tensor, quads: Tensor, state: AttentionState, position: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        c, block = self.step.config, self.step.block
        mixed, index = self.project(x, quads)
        query = attention_step.prepare(
            mixed, index, position, tables, (block.q_norm, block.k_norm), c.num_heads, c.rms_norm_eps, state.keys, state.values, state.index_keys
        )
        chosen = self.step.chosen(index, state.index_keys, position, tables)
        return attention_step.attend(query, state.keys, state.values, position, mixed, chosen, c.indexer_block, quads=True)


class ChainMoe:
    """Router, routed experts and the shared one, written back to the streams."""

    def __init__(self, step: StepMoe) -> None:
        self.step, self.config, self.shared = step, step.config, step.shared
        self.experts: Any = step.experts
        if not isinstance(fused := self.shared.fused, LowBitExperts):
            raise LabError("chained step: the shared expert is not int8")
        self.fused = fused
        _require(moe_step.refused(fused.gate_up_planes, fused.down_planes))
        self.take: Any = getattr(self.experts, "take", None)
        """Of experts kept in part (lab.placement.tiered): expert numbers to slots, what is missing brought into them."""
        slots = self.experts.slots if isinstance(self.experts, KernelExperts) else getattr(self.experts, "slot_kernel", None)
        self.low_bit = slots if isinstance(slots, LowBitExperts) else None

    def __call__(self, x: Tensor, quads: Tensor, streams: Streams, given: Tensor, norm: Tensor) -> Streams:
        c, shared, fused = self.config, self.shared, self.fused
        for op in (self.step.router, shared.gate, shared.up, shared.down):
            op.count(len(x))
        logits, inner = moe_step.route(x, quads, self.step.router.weight, fused.gate_up_planes)
        ids, weights, _, extra = moe_step.choose(logits, c.experts_per_token, c.norm_topk_prob, inner, fused.down_planes)
        if self.low_bit is not None:
            if self.take is None:
                self.experts.count(ids.numel())
            else:
                ids = self.take(ids)
            h = moe_step.gate_up(quads, ids, self.low_bit.gate_up_planes)
            return moe_step.down_back(h, ids, weights, self.low_bit.down_planes, extra, streams, given, norm)
        if isinstance(self.experts, KernelExperts):
            self.experts.count(ids.numel())
            routed = self.experts.slots(x, ids, weights)
        elif (step := getattr(self.experts, "step", None)) is not None:  # experts kept in part (lab.placement): their planes are not by expert number
            routed = step(x, ids, weights)
        else:
            routed = self.experts(x, ids.long(), weights.to(x.dtype))
        return mixer_step.add(streams, routed, extra, given, norm)


class ChainStep:
    """A model's step: (ids int64 [B, 1], state, position int32 [1]) -> logits [B, 1, V]. Weights are joined once, here. For up to `most_sequences`: the
    kernels are unrolled over tokens, and for 8 they take more than a minute to compile."""

    most_sequences = 4

    def __init__(self, model: Qwen4Exp, device: torch.device, dtype: torch.dtype) -> None:
        """Raises LabError with the reason where a part of this model has no place in a chain."""
        if dtype.itemsize != 2:
            raise LabError(f"chained step: activations are {str(dtype).removeprefix('torch.')}, not 16-bit")
        self.model, self.config, self.device, self.dtype = model, model.config, device, dtype
        self.mixers = [(ChainMixer(layer.attn_mixer, dtype), ChainMixer(layer.mlp_mixer, dtype)) for layer in model.layers]
        self.last = ChainMixer(model.mixer, dtype)
        self.head: Any = model.head
        _require(project_step.refused(_planes(model.head, "the head")))
        self._joined = Joined.of(model, dtype)
        self.blocks = [ChainAttention(block) if isinstance(block, StepAttention) else ChainDelta(block) for block in self._joined.blocks]
        self.moes = [ChainMoe(moe) for moe in self._joined.moes]
        self.injections = self._joined.injections
        self.tables = RotaryTables(self.config, self.device, dtype)

    def for_more(self) -> DecodeStep:
        """The step for more sequences, on the same joined weights."""
        return DecodeStep(self.model, self.device, self.dtype, self._joined)

    def __call__(self, ids: Tensor, state: ModelState, position: Tensor) -> Tensor:
        """Advances the tensors of `state` by one token; `state.length` is the caller's business."""
        tables = self.tables(state.capacity)
        streams = self._start(ids)
        for index, (before, after) in enumerate(self.mixers):
            if (injection := self.injections[index]) is not None:
                streams = injection(streams, ids, state, before.norm)
            x, quads, given = before(streams)
            own: Any = state.layers[index]
            block = self.blocks[index]
            read = block(x, quads, own, position, tables) if isinstance(block, ChainAttention) else block(x, quads, own, position)
            streams = block.out(read, streams, given, after.norm)
            x, quads, given = after(streams)
            following = self.mixers[index + 1][0] if index + 1 < len(self.mixers) else self.last
            streams = self.moes[index](x, quads, streams, given, following.norm)
        _, quads, _ = self.last(streams)
        self.head.count(len(quads))
        return project_step.project(quads, self.head.int8.planes, self.dtype)[0].unsqueeze(1)

    def _start(self, ids: Tensor) -> Streams:
        """The embedded tokens in every stream."""
        embed, norm = self.model.embed, self.mixers[0][0].norm
        if isinstance(embed, PackedTable) and embed.weight.codec.name == "bf16" and self.dtype == torch.bfloat16 and embed.weight.device == ids.device:
            embed.weight.count(ids.numel(), 0, ids.numel() * 2 * self.config.hidden_size)
            return mixer_step.start(embed.weight.parts["weight"], ids.flatten(), self.config.hc_count, norm)
        rows = embed(ids).flatten(0, 1).contiguous()
        return mixer_step.start(rows, torch.arange(len(rows), device=rows.device), self.config.hc_count, norm)
