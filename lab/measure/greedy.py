"""Greedy continuations and where two of them part, protocol `greedy@1`: 128 tokens from each of four fixed prompts, the largest logit every time.

Why: a small error in one product changes an id sooner or later, and the first flip with the distance of the two best logits there says whether it was a
near tie or a different model. Ids are compared and hashed alone. Ties go to the lowest id; the end-of-text token does not stop. After the first flip both
sides read different text, so later positions are not compared. It does not prove that either side is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lab.engines.local import LocalEngine
from lab.measure.passages import ids_sha256, spaced
from lab.measure.text import Corpus
from lab.metrics import METRICS
from lab.record import Measurement

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 4, 32, 128
"""Kestrel's stream test has one prompt of about 32 tokens; four make a flip less of an accident."""


@dataclass(frozen=True)
class Continuation:
    """The ids chosen after one prompt; at each, the second best id and how far its logit is below."""

    ids: list[int]
    second: list[int]
    gap: list[float]


def continuations(engine: LocalEngine, corpus: Corpus) -> list[Continuation]:
    """One per prompt, through the logits that decoding uses. Raises ValueError when a logit is not finite, LabError for too short a text."""
    return [continuation(engine, prompt, NEW_TOKENS) for prompt in spaced(corpus, PROMPTS, PROMPT_TOKENS)[0]]


def continuation(engine: LocalEngine, prompt: Tensor, tokens: int) -> Continuation:
    """`tokens` ids after prompt int64 [T]; the first comes from the prompt's own logits."""
    state = engine.new_state(1, len(prompt) + tokens - 1)
    found = Continuation([], [], [])
    fed = prompt[None]
    for position in range(tokens):
        logits = engine.logits(fed, state, last_only=True)[0, -1].float().cpu()
        if not bool(torch.isfinite(logits).all()):
            raise ValueError(f"a logit is not finite {position} tokens after a prompt")
        best = int(logits.argmax())  # the first of equals, as torch documents
        rest = logits.clone()
        rest[best] = -torch.inf
        second = int(rest.argmax())
        found.ids.append(best)
        found.second.append(second)
        found.gap.append(float(logits[best] - logits[second]))
        fed = torch.tensor([[best]])
    return found


def first_flip(cpu: Continuation, device: Continuation) -> dict[str, Any] | None:
    """Where the two choose differently for the first time: position (from 0), ids, and on each side the logit gap to its second best; None if nowhere."""
    for position, (a, b) in enumerate(zip(cpu.ids, device.ids, strict=True)):
        if a != b:
            return {
                "position": position,
                "cpu_id": a,
                "device_id": b,
                "cpu_gap": cpu.gap[position],
                "device_gap": device.gap[position],
                "second_best_taken": b == cpu.second[position],
            }
    return None


def greedy_metrics(cpu: Sequence[Continuation], device: Sequence[Continuation], corpus: Corpus) -> dict[str, Measurement]:
    """{greedy_match_tokens, greedy_compared_tokens}: the ids equal before the first flip in the prompt where it comes first, and the ids compared in each."""
    compared = len(cpu[0].ids)
    flips = [first_flip(a, b) for a, b in zip(cpu, device, strict=True)]
    prompts, starts = spaced(corpus, len(cpu), PROMPT_TOKENS)
    equal = [compared if flip is None else int(flip["position"]) for flip in flips]
    listed = [
        {
            "start": start,
            "prompt_ids_sha256": ids_sha256(prompt),
            "cpu_ids_sha256": ids_sha256(torch.tensor(a.ids)),
            "device_ids_sha256": ids_sha256(torch.tensor(b.ids)),
            "equal_tokens": same,
            "first_flip": flip,
        }
        for start, prompt, a, b, same, flip in zip(starts, prompts, cpu, device, equal, flips, strict=True)
    ]
    details = {
        "definition": "ids equal from the first on, in the prompt that flips earliest; argmax, ties to the lowest id, the end-of-text token does not stop",
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": compared,
        "prompts": listed,
        "gap": "logit of the chosen id less that of the second best, from the logits that decoding uses, in each side's compute dtype",
    }
    values = {"greedy_match_tokens": min(equal), "greedy_compared_tokens": compared}
    return {name: Measurement(value=float(value), unit=METRICS[name].unit, protocol=METRICS[name].protocol, details=details) for name, value in values.items()}
