"""Decoding as one captured graph per state: the launches of a step are recorded once and replayed, so that a token costs no Python and no launch gaps.

A graph is bound to addresses, so states come from a pool here: one that nobody holds any more is cleared and handed out again with its graph. Capturing
happens when a state is made, outside anything timed. What cannot be captured runs operation by operation, and the reason stays in the record.
`torch.cuda.CUDAGraph` is the same interface on CUDA and ROCm. What it does not prove: that a replay is faster; eager runs are `mode=eager`.
"""

from __future__ import annotations

import copy
import weakref
from typing import Any, Literal

import torch
from torch import Tensor

from lab.counters import Counters
from lab.errors import LabError, flat
from lab.models import Model, State
from lab.models.qwen4_exp.model import ModelState, Qwen4Exp
from lab.models.transformer.model import Transformer, TransformerState
from lab.ops_gpu import DISABLED, unavailable

Kept = ModelState | TransformerState
"""States that can be cleared, taken over and handed out again with their graph."""
Mode = Literal["auto", "graph", "eager"]
MOST_SEQUENCES = 8
"""Batches up to which a step is captured: what the decode kernels are made for."""
PROMPT_TOKENS = 4096
"""Tokens up to which a whole prompt is captured: with more, the device is busy for longer than Python needs to launch. 48 layers of Flash-Next are 2,400
launches; uncaptured, prompts of 2,048 tokens ran at 9,600 to 19,400 tok/s as their host was slow or fast (experiments/kernel_log.md)."""
MOST_PROMPTS = 16
"""Shapes of prompts that are kept: each holds a state of its own, and the first one goes when there is one more."""
_WARM_RUNS = 2


class StepGraph:
    """The captured step of one state. `launches`: operations on the device in one step, counted by the profiler; None where it could not."""

    def __init__(self, step: Any, state: Kept, batch: int, counters: Counters, pool: Any, count: bool, spoil: bool = False) -> None:
        """Captures; leaves `state` cleared. Raises what torch raises where something in the step cannot be captured; `spoil` adds a wait, which cannot."""
        device = step.device
        self.ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self.position = torch.zeros(1, dtype=torch.int32, device=device)
        self._at, self.graph, self.launches = 0, torch.cuda.CUDAGraph(), None
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side), counters.recording():  # what warms up is no work of the cell
            for _ in range(_WARM_RUNS):
                step(self.ids, state, self.position)
            if count:
                self.launches = _launches(lambda: step(self.ids, state, self.position))
        torch.cuda.current_stream(device).wait_stream(side)
        with counters.recording() as self.recording, torch.cuda.graph(self.graph, pool=pool):
            self.logits = step(self.ids, state, self.position)
            if spoil:
                torch.cuda.synchronize(device)
            self.position += 1
        state.reset()

    def __call__(self, ids: Tensor, state: Kept) -> Tensor:
        """ids [B, 1] -> logits [B, 1, V]; advances `state`. Raises LabError when it is full."""
        if state.length >= state.capacity:
            raise LabError(f"{state.length} + 1 tokens do not fit a state of {state.capacity}")
        self.ids.copy_(ids, non_blocking=True)
        if self._at != state.length:
            self.position.fill_(state.length)
        self.graph.replay()
        state.length += 1
        self._at = state.length
        self.recording.replays += 1
        return self.logits.clone()


class PromptGraph:
    """The plain forward pass over one shape of prompt from an empty state, captured on a state of its own that is copied to the user's after a replay: a
    prompt of 512 tokens is over ten thousand small launches, which Python cannot issue as fast as they run."""

    def __init__(self, model: Model, batch: int, tokens: int, device: torch.device, dtype: torch.dtype, counters: Counters, pool: Any) -> None:
        """Captures. The same shape must have run before, so that its kernels are compiled. Prompts may share the memory `pool` of what lives inside a replay:
        they run one after another, and what outlasts a replay (state, ids, logits) is held here."""
        self.ids = torch.zeros(batch, tokens, dtype=torch.int64, device=device)
        state = model.new_state(batch, tokens, device, dtype)
        assert isinstance(state, Kept)
        self.state, self.graph = state, torch.cuda.CUDAGraph()
        with counters.recording() as self.recording, torch.cuda.graph(self.graph, pool=pool):
            self.state.reset()
            self.logits = model.logits(self.ids, self.state, True)

    def __call__(self, ids: Tensor, state: Kept) -> Tensor:
        """ids [B, T] -> logits [B, 1, V] of the last token; fills the empty `state`."""
        self.ids.copy_(ids, non_blocking=True)
        self.graph.replay()
        self.recording.replays += 1
        state.take(self.state)  # type: ignore[arg-type]  # both are of one model
        return self.logits.clone()


class Graphs:
    """Makes states, and steps those whose graph it has. Without a reason against it every state of a few sequences gets one."""

    def __init__(self, model: Model, device: torch.device, dtype: torch.dtype, counters: Counters, mode: Mode, disable: str | None = None) -> None:
        """`disable`: `graph` makes every capture fail, `kernels` leaves steps and prompts with the plain operations."""
        self.spoil, self.kernels = disable == "graph", disable != "kernels"
        self.model, self.device, self.dtype, self.counters = model, device, dtype, counters
        self.reason = "mode=eager" if mode == "eager" else self._against()
        self.launches: dict[int, int | None] = {}
        self._held: dict[tuple[int, int], list[tuple[StepGraph, Kept, weakref.ref[Kept]]]] = {}
        self._prompts: dict[tuple[int, int], PromptGraph] = {}
        self._uncaptured: dict[tuple[int, int], str] = {}
        self.prompt_reason: str | None = None
        """Why no prompt can be captured at all."""
        self.prompt_pass: dict[str, str] = {}
        self.step_reason: str | None = None
        """Why the step is not a chain of overlapping launches, where there could be one."""
        self._step: Any = None
        self._wide_step: Any = None
        self._pool: Any = None
        self._prompt_pool: Any = None
        if self.reason is None:
            self._prepare()
        if isinstance(model, Qwen4Exp):
            self._prepare_prompts(model)

    def new_state(self, batch: int, capacity: int) -> State:
        """An empty state, with a graph where there can be one."""
        if self.reason is not None or batch > MOST_SEQUENCES:
            return self.model.new_state(batch, capacity, self.device, self.dtype)
        held = self._held.setdefault((batch, capacity), [])
        for place, (graph, tensors, user) in enumerate(held):
            if user() is None:
                tensors.reset()
                held[place] = graph, tensors, weakref.ref(given := self._given(graph, tensors))
                return given
        fresh = self.model.new_state(batch, capacity, self.device, self.dtype)
        assert isinstance(fresh, Kept)
        try:
            graph = StepGraph(self._step_for(batch), fresh, batch, self.counters, self._pool, batch not in self.launches, self.spoil)
        except (RuntimeError, LabError) as error:  # torch raises RuntimeError for whatever a capture forbids
            self.reason = f"not captured: {flat(error)}" + (" (disable=graph)" if self.spoil else "")
            return self.model.new_state(batch, capacity, self.device, self.dtype)
        self.launches.setdefault(batch, graph.launches)
        given = self._given(graph, fresh)
        held.append((graph, fresh, weakref.ref(given)))
        return given

    def plain_step(self) -> Any:
        """What is captured, (ids, state, position) -> logits, to be launched operation by operation on a state without a graph; None where there is none."""
        return self._step

    def forget(self) -> None:
        """Drops the captured steps, so that the next states are captured anew."""
        self._held.clear()

    def logits(self, ids: Tensor, state: State | None, last_only: bool) -> Tensor | None:
        """Logits [B, 1, V] of one token, or of a prompt's last, by a replay; None where this call has no graph."""
        if not isinstance(state, Kept) or state.graph is None:
            return None
        if ids.shape[1] == 1:
            return state.graph(ids, state)
        if state.length or not last_only or ids.numel() > PROMPT_TOKENS or ids.shape[1] > state.capacity:
            return None
        shape = ids.shape[0], ids.shape[1]
        if (graph := self._prompts.get(shape)) is not None:
            return graph(ids, state)
        if self.prompt_reason is not None or shape in self._uncaptured:
            return None
        found = self.model.logits(ids.to(self.device), state, True)  # this call runs as it is; the next of this shape is a replay
        try:
            self._prompts[shape] = PromptGraph(self.model, *shape, self.device, self.dtype, self.counters, self._prompt_pool)
        except RuntimeError as error:
            self._uncaptured[shape] = f"not captured: {flat(error)}"
        if len(self._prompts) > MOST_PROMPTS:
            del self._prompts[next(iter(self._prompts))]
        return found

    def evidence(self) -> dict[str, Any]:
        """{mode: graph or eager, launches_per_step: by number of sequences, reason: why not a graph, or None; prompts: [sequences, tokens] whose capture is
        held, prompt_reason: why none or not all could be captured; prompt_pass: what prompts run where there is a choice, or why the plain operations; step:
        the class of step, step_reason: why not the one whose launches overlap}."""
        return {
            "mode": "eager" if self.reason else "graph",
            "launches_per_step": {str(b): n for b, n in self.launches.items()},
            "reason": self.reason,
            "prompts": [list(shape) for shape in self._prompts],
            "prompt_reason": self.prompt_reason or "; ".join(f"{b} x {t} tokens {why}" for (b, t), why in self._uncaptured.items()) or None,
            "prompt_pass": self.prompt_pass,
            "step": type(self._step).__name__ if self._step is not None else None,
            "step_reason": self.step_reason,
        }

    def _given(self, graph: StepGraph, tensors: Kept) -> Kept:
        """The state that a user holds: the same tensors, its own length. Its end is what frees the graph for another."""
        given = copy.copy(tensors)
        given.graph = graph
        return given

    def _against(self) -> str | None:
        if self.device.type != "cuda":
            return f"graphs need a GPU, not {self.device.type}"
        if not self.kernels:
            return DISABLED
        if not isinstance(self.model, Qwen4Exp | Transformer):
            return f"no decode step of fixed shapes for {type(self.model).__name__}"
        return unavailable(self.device, torch.bfloat16)  # the step's own kernels take float32 too

    def _prepare(self) -> None:
        from lab.models.qwen4_exp.step import DecodeStep
        from lab.models.transformer.step import TransformerStep

        assert isinstance(self.model, Qwen4Exp | Transformer)
        try:
            with torch.no_grad():
                if isinstance(self.model, Transformer):
                    self._step = TransformerStep(self.model, self.device, self.dtype)
                else:
                    self._step = self._chain(self.model) or DecodeStep(self.model, self.device, self.dtype)
        except LabError as error:
            self.reason = flat(error)
            return
        self._pool, self._prompt_pool = torch.cuda.graph_pool_handle(), torch.cuda.graph_pool_handle()

    def _prepare_prompts(self, model: Qwen4Exp) -> None:
        """Gives the model its pass of fused kernels for prompts, or notes why the plain operations run."""
        reason = f"kernels need a GPU, not {self.device.type}" if self.device.type != "cuda" else unavailable(self.device, self.dtype)
        reason = reason or (None if self.kernels else DISABLED)
        if reason is None:
            from lab.models.qwen4_exp.prompt import PromptPass

            try:
                with torch.no_grad():
                    model.prompt = PromptPass(model, self.device, self.dtype)
            except LabError as error:
                reason = flat(error)
        self.prompt_pass = {"plain": reason} if reason is not None else model.prompt.evidence()

    def _step_for(self, batch: int) -> Any:
        """The step that serves so many sequences."""
        if batch <= getattr(self._step, "most_sequences", batch):
            return self._step
        if self._wide_step is None:
            self._wide_step = self._step.for_more()
        return self._wide_step

    def _chain(self, model: Qwen4Exp) -> Any:
        """The step whose launches overlap, or None with the reason kept."""
        from lab.models.qwen4_exp.chain import ChainStep

        if not CHAINED:
            self.step_reason = "not asked for"
            return None
        try:
            return ChainStep(model, self.device, self.dtype)
        except LabError as error:
            self.step_reason = flat(error)
            return None


CHAINED = True
"""Whether a step is a chain of overlapping launches where the model allows it."""


def _launches(run: Any) -> int | None:
    """Kernels, copies and fills that one call of `run` puts on the device."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    found = sum(str(event.device_type).endswith("CUDA") for event in profile.events() or ())
    return found or None
