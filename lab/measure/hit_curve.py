"""Which share of a text's expert requests a cache of so many slots would have served, for every number of slots at once, from a recorded routing.

Why: one run has one number of slots; what another would give decides whether a card with less memory is worth trying. Exact for the least recently used order
by stack distances (Mattson, Gecsei, Slutz, Traiger 1970): an expert is found by S slots if fewer than S others were used since. All experts of a token
are asked for at once, as in a decode step; the earlier place counts as the more recent, as in `lab.kernels.slots`, whose counts this equals.
What it does not prove: anything about another text, a batch of texts, or routers whose weights are random; the caller says which it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lab.measure.text import Corpus

SLOTS = (16, 32, 64, 128, 256, 512)
TOKENS = 1024
"""Tokens of text whose routing is recorded."""


def stack_distances(trace: Tensor, experts: int) -> Tensor:
    """trace integer [steps, layers, k], in 0..experts-1 -> int64 [steps, layers, k]: how many other experts of the layer were used more recently than the one
    asked for, before this step; `experts` where it had never been. Within a step all are different."""
    steps, layers, k = trace.shape
    recency = torch.full((layers, experts), -1, dtype=torch.int64)
    found = torch.empty(steps, layers, k, dtype=torch.int64)
    order = torch.arange(k - 1, -1, -1)
    for step, asked in enumerate(trace.long()):
        last = recency.gather(1, asked)
        newer = (recency.unsqueeze(1) > last.unsqueeze(2)).sum(-1)
        found[step] = torch.where(last < 0, experts, newer)
        recency.scatter_(1, asked, step * k + order.expand(layers, k))
    return found


def hit_curve(trace: Tensor, experts: int, slots: Sequence[int] = SLOTS) -> dict[str, Any]:
    """{slots: {number: share of requests found}, for each number that is below `experts` or the first that is not; first_uses: share of requests for an
    expert that had never been used; steps, layers, per_token}. `trace` as `stack_distances` takes it, from empty slots."""
    distances = stack_distances(trace, experts)
    shown = [number for number in slots if number < experts]
    return {
        "slots": {str(number): float((distances < number).double().mean()) for number in (*shown, experts)},
        "first_uses": float((distances == experts).double().mean()),
        "steps": trace.shape[0],
        "layers": trace.shape[1],
        "per_token": trace.shape[2],
    }


class _Recorder:
    """A layer's experts that notes what it is asked for."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.asked = inner, list[Tensor]()

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        self.asked.append(ids.to(torch.int16))
        result: Tensor = self.inner(x, ids, weights)
        return result


@contextmanager
def _recorded(model: Any) -> Iterator[list[_Recorder]]:
    """Records every layer with routed experts while inside."""
    inner: list[Any] = [getattr(layer, name, None) for layer in model.layers for name in ("moe", "mlp")]
    blocks = [block for block in inner if hasattr(block, "experts")]
    recorders = [_Recorder(block.experts) for block in blocks]
    try:
        for block, recorder in zip(blocks, recorders, strict=True):
            block.experts = recorder
        yield recorders
    finally:
        for block, recorder in zip(blocks, recorders, strict=True):
            block.experts = recorder.inner


@torch.no_grad()
def record_routing(engine: Any, corpus: Corpus, tokens: int = TOKENS) -> Tensor | None:
    """int16 [tokens, layers, k]: the experts that each token of the text asks for in each layer, as decoding it would; None without routed experts.

    One pass over the text as a prompt: what a token asks for depends on what is before it alone, so it is what steps would ask for, to rounding.
    """
    ids = corpus.prompts(1, tokens, offset=0)
    with _recorded(engine.model) as recorders:
        if not recorders:
            return None
        engine.model.hidden(ids.to(engine.device))
    return torch.stack([torch.cat(recorder.asked) for recorder in recorders], 1).cpu()
