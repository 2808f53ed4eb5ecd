"""transformers' model as the lab's protocols take an engine: logits of tokens with or without a state, counted rows, one clock.

The state is transformers' own cache, made by its first forward pass and used again by the next, one pass per token. Which of its expert implementations runs
is chosen as its `generate` chooses: its default for whole prompts, and on a GPU `batched_mm` for single steps. Rows are counted by hooks on the parts that
compute them, and only for passes that ended; weight bytes and operations are then those parts' own sizes, as the roofline of the lab's engine counts them.
What it does not prove: which kernels ran inside a part.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lab.attempt import one_line
from lab.cell import Cell
from lab.counters import Counters
from lab.engines.hf.loading import load
from lab.engines.local import is_out_of_memory, peak_resident_bytes, usable_device
from lab.engines.threads import TRIED_TOKENS, Threads
from lab.errors import GapError
from lab.record import Status

OP = "transformers"
STEPS_ON_GPU = {"grouped_mm": "batched_mm"}
"""What transformers' generate (5.24, `_optimize_model_for_decode`) uses for single steps on a GPU instead of what prompts run with."""


@dataclass
class HfState:
    """transformers' cache of B sequences; None before the first pass."""

    capacity: int
    cache: Any = None
    length: int = 0

    def nbytes(self) -> int:
        """Bytes of every tensor in the cache."""
        return sum(tensor.nbytes for layer in getattr(self.cache, "layers", ()) for tensor in _tensors(vars(layer)))

    def read_bytes(self) -> float:
        """All of them: a step reads what is kept."""
        return float(self.nbytes())


class HfEngine:
    """A loaded model. `load_s` is the wall time from opening the files to the last weight in its place; `fed` counts tokens of passes that ended."""

    def __init__(self, cell: Cell, root: Path) -> None:
        """Raises GapError with transformers' own error where it cannot load the cell."""
        self.device, self.dtype = usable_device(cell.device.torch_device), getattr(torch, cell.device.compute_dtype)
        self.threads = Threads.of(cell.device)
        torch.set_num_threads(self.threads.most)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        started = time.perf_counter()
        loaded = load(cell, root, self.device, self.dtype)
        self.synchronise()
        self.load_s = time.perf_counter() - started
        self.model, self.library, self.loading = loaded.model, loaded.library, loaded.loading
        self.counters, self.fed = Counters(), 0
        self._pending: list[tuple[tuple[int | None, str, str, str], int, int, int]] = []
        named = inspect.signature(self.model.forward).parameters
        self._cache_word = "cache" if "cache" in named else "past_key_values"
        self.parts = Parts(self.model)
        self.parts.watch(self._note)
        prompts = getattr(self.model.config, "_experts_implementation", None) if self.parts.experts else None
        steps = STEPS_ON_GPU.get(prompts, prompts) if prompts and self.device.type != "cpu" else prompts
        self.experts: dict[str, str | None] = {"prompts": prompts, "steps": steps}

    def new_state(self, batch: int, capacity: int) -> HfState:
        """No cache yet: transformers makes it in the first pass, for as many sequences as that has."""
        return HfState(capacity)

    def logits(self, ids: Tensor, state: HfState | None = None, last_only: bool = False) -> Tensor:
        """ids int64 [B, T] (any device) -> logits [B, T or 1, V] in the compute dtype. Raises GapError with transformers' own error."""
        self.threads.use(ids.shape[1])
        return self._logits(ids, state, last_only)

    def settle_threads(self) -> dict[str, Any] | None:
        """As `LocalEngine.settle_threads`; None, too, where the model does not run, which its measurements will say."""
        if self.threads.fixed:
            return None
        ids = torch.arange(TRIED_TOKENS)[None] % self.model.get_input_embeddings().num_embeddings
        state, fed = self.new_state(1, 2 * TRIED_TOKENS), self.fed
        try:
            with self.counters.recording():
                self._logits(ids, state, True)
                self.threads.settle(lambda: self._logits(ids, None, True), lambda: self._logits(ids[:, :1], state, True))
        except GapError:
            return None
        finally:
            self.fed = fed
        return self.threads.facts()

    def _logits(self, ids: Tensor, state: HfState | None, last_only: bool) -> Tensor:
        options: dict[str, Any] = {"use_cache": state is not None}
        if state is not None and state.cache is not None:
            options[self._cache_word] = state.cache
        if last_only:
            options["logits_to_keep"] = 1
        self._choose_experts("steps" if state is not None and state.length and ids.shape[1] == 1 else "prompts")
        out = self._forward(ids, options)
        if state is not None:
            state.cache, state.length = out[self._cache_word], state.length + ids.shape[1]
        found: Tensor = out["logits"]
        return found

    def scores(self, ids: Tensor) -> Tensor:
        """ids int64 [B, T] -> logits [B, T, V] as a user gets them, in the compute dtype."""
        return self.logits(ids)

    @property
    def vector_bytes(self) -> int:
        """Bytes of what every pass reads outside layers, embedding and head."""
        return self.parts.between_bytes

    def synchronise(self) -> None:
        """Waits for the device, so that a clock read after it is honest."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def peak_memory_bytes(self) -> int:
        """Peak bytes so far: allocated on the GPU, or resident in this process on the CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else peak_resident_bytes()

    def free_cached(self) -> None:
        """Hands back memory that torch keeps for later, after a pass that ran out of it."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _choose_experts(self, phase: str) -> None:
        wanted = self.experts[phase]
        if wanted is not None and wanted != self.model.config._experts_implementation:
            self.model.set_experts_implementation(wanted)

    @torch.no_grad()
    def _forward(self, ids: Tensor, options: dict[str, Any]) -> Any:
        self._pending = []
        try:
            out = self.model(input_ids=ids.to(self.device), **options)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise GapError(Status.UNSUPPORTED, f"transformers {self.library['version']}: {type(error).__name__}: {one_line(error)}") from error
        for key, rows, weight_bytes, flops in self._pending:
            self.counters.add(key, rows, weight_bytes, flops)
        self.fed += ids.numel()
        return out

    def _note(self, layer: int | None, component: str, rows: int, weight_bytes: int, flops: int) -> None:
        self._pending.append(((layer, component, OP, self.device.type), rows, weight_bytes, flops))


Note = Callable[[int | None, str, int, int, int], None]
"""(layer, component, rows, weight bytes read, operations)."""


class Parts:
    """Embedding, layers, experts, table and head of transformers' model, found by its own accessors, with their sizes."""

    def __init__(self, model: Any) -> None:
        body = model.model
        self.model, self.layers = model, list(body.layers)
        self.embed, self.head = model.get_input_embeddings(), model.get_output_embeddings()
        self.experts = {index: found for index, layer in enumerate(self.layers) for name, found in layer.named_modules() if name == "mlp.experts"}
        self.tables = {index: found for index, layer in enumerate(self.layers) for found in layer.modules() if isinstance(found, nn.Embedding)}
        named = {id(p) for part in (*self.layers, self.embed, self.head) for p in part.parameters()}
        self.between_bytes = sum(p.nbytes for p in body.parameters() if id(p) not in named)

    def watch(self, note: Note) -> None:
        """Hooks on every part; each tells `note` of the rows that went through when it ended."""
        self.embed.register_forward_hook(lambda _module, _args, out: note(None, "embed", out.shape[:-1].numel(), out.nbytes, 0))
        weight = self.head.weight
        self.head.register_forward_hook(
            lambda _module, _args, out: note(None, "head", out.shape[:-1].numel(), weight.nbytes, 2 * out.shape[:-1].numel() * weight.numel())
        )
        for index, layer in enumerate(self.layers):
            layer.register_forward_hook(_layer_hook(note, index, *self._dense(index)))
        for index, table in self.tables.items():
            table.register_forward_hook(lambda _module, _args, out, index=index: note(index, "ple", out.shape[:-1].numel(), out.nbytes, 0))
        for index, experts in self.experts.items():
            experts.register_forward_hook(_experts_hook(note, index, experts))

    def _dense(self, index: int) -> tuple[int, int]:
        """(bytes, numbers) of a layer's parameters without routed experts and table."""
        apart = {id(p) for part in (self.experts.get(index), self.tables.get(index)) if part is not None for p in part.parameters()}
        rest = [p for p in self.layers[index].parameters() if id(p) not in apart]
        return sum(p.nbytes for p in rest), sum(p.numel() for p in rest)

    def held(self) -> list[dict[str, Any]]:
        """[{component, weights, bytes, dtype, device}] of all parameters; a head that is the embedding counts as both, its bytes once."""
        found: dict[tuple[str, str, str], list[int]] = {}
        for component, parameter, again in self._parameters():
            entry = found.setdefault((component, str(parameter.dtype).removeprefix("torch."), parameter.device.type), [0, 0])
            entry[0] += parameter.numel()
            entry[1] += 0 if again else parameter.nbytes
        return [{"component": c, "weights": n, "bytes": size, "dtype": dtype, "device": device} for (c, dtype, device), (n, size) in sorted(found.items())]

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter, bool]]:
        """(component, parameter, whether its bytes are counted already)."""
        parts = [("embed", self.embed), ("head", self.head), *(("experts", e) for e in self.experts.values()), *(("ple", t) for t in self.tables.values())]
        seen: set[int] = set()
        for component, part in [*parts, ("trunk", self.model)]:
            for parameter in part.parameters():
                if component != "trunk" or id(parameter) not in seen:
                    yield component, parameter, id(parameter) in seen
                seen.add(id(parameter))


def _layer_hook(note: Note, index: int, nbytes: int, numbers: int) -> Callable[[Any, Any, Any], None]:
    def hook(_module: Any, _args: Any, out: Any) -> None:
        rows = (out[0] if isinstance(out, tuple) else out).shape[:-1].numel()
        note(index, "trunk", rows, nbytes, 2 * rows * numbers)

    return hook


def _experts_hook(note: Note, index: int, experts: Any) -> Callable[[Any, Any, Any], None]:
    """Rows are (token, expert) pairs; bytes those of each pair's expert, at most all experts once."""
    count, numbers, nbytes = len(next(experts.parameters())), sum(p.numel() for p in experts.parameters()), sum(p.nbytes for p in experts.parameters())

    def hook(_module: Any, args: Any, _out: Any) -> None:
        slots = args[1].numel()
        note(index, "experts", slots, nbytes // count * min(slots, count), 2 * slots * (numbers // count))

    return hook


def _tensors(value: Any) -> Iterator[Tensor]:
    """Tensors in dictionaries, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
