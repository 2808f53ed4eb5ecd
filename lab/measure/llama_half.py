"""Perplexity as llama.cpp's own tool counts it, protocol `ppl/llama-half@1`, and the likelihood of every token that it scored.

Why beside `ppl/window@1`: published GGUF figures are made this way, and two engines' likelihoods can be compared token by token. The text is cut into
chunks of `context` tokens that do not overlap; where the model's texts begin with BOS, one stands before the text and replaces each chunk's first token.
Only the second half is scored: the logits at positions context/2 to context-2 against the tokens after them (llama.cpp, tools/perplexity/perplexity.cpp).
Like the tool it refuses a text of fewer than two chunks. Two things differ: the tool takes special tokens spelled in the text as plain characters, and it
prints a standard error that takes neighbouring tokens as independent; here that one is a detail, and `stderr` takes the chunks as the units.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import Tensor

from lab.errors import LabError
from lab.measure.perplexity import perplexity_of
from lab.measure.scoring import Forward, chosen
from lab.metrics import METRICS
from lab.record import Measurement

_DECIMALS = 5
"""Of a kept likelihood: far below what two sound engines differ by."""
_ROWS = 64
"""Rows normalised at a time: float64 copies of a large vocabulary's rows are what bounds memory."""


def half_chunks(ids: Tensor, bos: int | None, context: int, chunks: int) -> Tensor:
    """ids int64 [N] -> [n, context], n the smaller of `chunks` and what the text gives. Raises LabError where it gives fewer than two."""
    if bos is not None:
        ids = torch.cat([torch.tensor([bos]), ids])
    found = len(ids) // context
    if found < 2:
        raise LabError(f"bench.llama_half_context={context}: the text has {len(ids)} tokens, and at least two chunks are needed")
    cut = ids[: min(found, chunks) * context].view(-1, context).clone()
    if bos is not None:
        cut[:, 0] = bos
    return cut


def llama_half(forward: Forward, ids: Tensor, bos: int | None, context: int, chunks: int, details: dict[str, Any]) -> tuple[Measurement, dict[str, Any]]:
    """(ppl_llama_half, {protocol, ids_sha256, nll}): `ids` int64 [N] is the text without BOS, `forward` takes ids [1, context] to logits [1, context, V].

    `nll` has the negative log-likelihood of each scored token in nat, in order; `ids_sha256` is that of the chunks as they were fed (int64, little endian).
    Raises ValueError when a likelihood is not finite, after every chunk was evaluated; LabError for a text that is too short.
    """
    cut = half_chunks(ids, bos, context, chunks)
    first = context // 2
    found = []
    for row in cut:
        logits = forward(row[None])[0, first:-1]
        found += [_nll(rows, targets) for rows, targets in zip(logits.split(_ROWS), row[first + 1 :].split(_ROWS), strict=True)]
    nll = torch.cat(found)
    chunk = torch.arange(len(cut)).repeat_interleave(context - 1 - first)
    ppl, stderr, mean = perplexity_of(nll, chunk, "chunk")
    count = len(nll)
    known = METRICS["ppl_llama_half"]
    measured = Measurement(
        value=ppl,
        unit=known.unit,
        protocol=known.protocol,
        stderr=stderr,
        details={
            **details,
            "context": context,
            "chunks": len(cut),
            "scored_tokens": count,
            "bos": "none" if bos is None else f"id {bos} first in every chunk",
            "nll_mean_nat": mean,
            "stderr_method": "over chunks",
            "stderr_llama_perplexity": ppl * math.sqrt(max(0.0, float(nll.square().mean()) - mean**2) / (count - 1)) if count > 1 else None,
        },
    )
    digest = hashlib.sha256(cut.numpy().astype("<i8").tobytes()).hexdigest()
    return measured, {"protocol": known.protocol, "ids_sha256": digest, "nll": [round(value, _DECIMALS) for value in nll.tolist()]}


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    """float64 [n], on the CPU. In float64 like the tool: the float32 function of torch is 1e-5 off here, and the same way in every row."""
    return chosen(logits.double().log_softmax(-1), targets.to(logits.device)).cpu()
