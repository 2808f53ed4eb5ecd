"""Parity of the model with itself: the same text as one sequence and step by step must give the same distributions.

Decoding speed is measured through the state kept between steps; a state that is written or read wrongly makes fast, wrong text. Comparing
with the whole sequence catches that on the very model that was loaded, before any speed is taken. It does not prove that the model is right:
both ways share their weights and their arithmetic; `transformers` is the outside anchor, in the tests.
"""

from __future__ import annotations

from typing import Any

import torch

from lab.measure.text import Corpus
from lab.measure.throughput import Engine

TOKENS = 64
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2e-2}
"""Mean KLD in nat. float32: five orders above what rounding leaves on nano (1e-13 to 1e-11). bfloat16: a hundred times the noise floor of
another batch shape on an H200 (1.6e-4), since steps and the whole round in different places and may choose other blocks of keys."""


def step_parity(engine: Engine, corpus: Corpus) -> dict[str, Any]:
    """{tokens, kld_mean, kld_max (nat), top1_agreement, tolerance, dtype}: KL(whole || steps) over the first TOKENS tokens of the text."""
    ids = corpus.prompts(1, TOKENS, offset=0)
    whole = torch.log_softmax(engine.logits(ids)[0].double(), dim=-1)
    state = engine.new_state(1, TOKENS)
    steps = torch.stack([torch.log_softmax(engine.logits(ids[:, t : t + 1], state)[0, -1].double(), dim=-1) for t in range(TOKENS)])
    kld = (whole.exp() * (whole - steps)).sum(dim=-1)
    if not bool(torch.isfinite(kld).all()):
        raise ValueError("stepping through the text gave NaN or infinite probabilities")
    agree = (whole.argmax(-1) == steps.argmax(-1)).double().mean()
    return {
        "tokens": TOKENS,
        "kld_mean": max(0.0, float(kld.mean())),
        "kld_max": max(0.0, float(kld.max())),
        "top1_agreement": float(agree),
        "tolerance": TOLERANCE[engine.dtype],
        "dtype": str(engine.dtype).removeprefix("torch."),
    }
