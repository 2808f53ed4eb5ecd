"""What llama.cpp's logits say: log-probabilities for the lab's protocols, parity with itself, and whether it reads the text as the same tokens.

Parity here compares what was measured with what was measured: one batch of BATCH tokens, as perplexity and prefill use it, with single steps, as decoding
does. Those run different kernels (a prebuilt package of a fork once gave a perplexity of 205 by batches and 39 by steps, from one file). It does not prove
that both are right; the local engine on the same file is the outside view.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.artifacts.gguf import Gguf
from lab.engines.llama_cpp.session import BATCH, Context, LlamaModel
from lab.measure.scoring import Forward, chosen
from lab.measure.text import Corpus

TOKENS = 64
TOLERANCE = {"float": 1e-3, "quantised": 5e-2}
"""Mean KLD in nat between one batch and single steps, by whether all matrices of the file are floating point. Measured on SmolLM2-135M (CPU, AVX-512, KV f16,
flash attention off and on): F16 3e-6, BF16 1.2e-4; Q4_0, Q4_1, Q8_0, Q4_K, Q6_K, Q2_K 1.7e-3 to 7.4e-3, since activations are quantised too and the two
ways sum in another order. Some seven times that; the fork's wrong kernel gave more than 1."""
_FLOATS = ("F32", "F16", "BF16")


def forward(context: Context) -> Forward:
    """ids [B, T] -> logits float32 [B, T, V], each row alone in a cleared context."""

    def logits(ids: Tensor) -> Tensor:
        rows = []
        for row in ids.numpy():
            context.clear()
            rows.append(torch.from_numpy(context.prefill(row, every=True)))
        return torch.stack(rows)

    return logits


def tolerance(gguf: Gguf) -> float:
    """The TOLERANCE for this file."""
    return TOLERANCE["float" if all(tensor.type.name in _FLOATS for tensor in gguf.tensors.values()) else "quantised"]


def step_parity(context: Context, corpus: Corpus, tolerated: float) -> dict[str, Any]:
    """The keys of `lab.measure.parity`, and batch_tokens, nll_batch_nat, nll_steps_nat: KL(batch || steps) over the first TOKENS tokens of the text.

    Raises ValueError when a probability is not finite.
    """
    ids = corpus.prompts(1, batch_tokens(corpus))[0]
    whole = forward(context)(ids[None])[0, :TOKENS]
    context.clear()
    steps = torch.from_numpy(np.concatenate([context.prefill(ids[t : t + 1].numpy()) for t in range(TOKENS)]))
    p, q = whole.double().log_softmax(-1), steps.double().log_softmax(-1)
    kld = (p.exp() * (p - q)).sum(-1)
    if not bool(torch.isfinite(kld).all()):
        raise ValueError("a batch of text, or stepping through it, gave NaN or infinite probabilities")
    targets = ids[1:TOKENS]
    return {
        "tokens": TOKENS,
        "batch_tokens": len(ids),
        "kld_mean": max(0.0, float(kld.mean())),
        "kld_max": max(0.0, float(kld.max())),
        "top1_agreement": float((p.argmax(-1) == q.argmax(-1)).double().mean()),
        "nll_batch_nat": float(chosen(p[:-1], targets).mean()),
        "nll_steps_nat": float(chosen(q[:-1], targets).mean()),
        "tolerance": tolerated,
        "dtype": "native",
    }


def batch_tokens(corpus: Corpus) -> int:
    """Tokens in the batch that parity compares with steps: BATCH, or fewer in a short text."""
    return max(TOKENS, min(BATCH, len(corpus.ids) - 1))


def tokenization(model: LlamaModel, text: str, corpus: Corpus) -> dict[str, Any]:
    """{equal, ours, theirs, first_difference}: token counts, and the position of the first id that differs or None."""
    ours, theirs = corpus.ids.tolist(), model.tokenize(text)
    different = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    first = next(different, None if len(ours) == len(theirs) else min(len(ours), len(theirs)))
    return {"equal": first is None, "ours": len(ours), "theirs": len(theirs), "first_difference": first}
