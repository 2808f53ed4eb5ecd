"""Perplexity through a server, by the very protocol of the local engine (`ppl/window@1`) or not at all.

The same windows of token ids are sent to `/completions` with `echo` and `logprobs`; the server's log-probability of each scored token enters the same sum.
That needs a server that takes ids as they are (no BOS added), returns one value per token, and has the model's own vocabulary: each is checked, and
whatever is missing makes a gap with its name. A server's log-probabilities are believed; that sampling settings did not touch them is not checked.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from tokenizers import Tokenizer

from lab.cell import BenchSpec
from lab.engines.server.client import Client
from lab.errors import GapError
from lab.measure.perplexity import PerplexityTally
from lab.measure.text import Corpus
from lab.record import Measurement, Status

_EDGE_CHARACTERS = 16
"""At the end of a window a character may be cut in the middle of its bytes, and is then written in different ways."""


def perplexity(client: Client, corpus: Corpus, tokenizer: Tokenizer, bench: BenchSpec) -> dict[str, Measurement]:
    """{ppl, bits_per_byte}. Raises GapError where the server does not offer exactly this protocol, ValueError where a value is not finite."""
    windows, scored = corpus.windows(bench.ppl_context, bench.ppl_stride, bench.ppl_windows)
    tally = PerplexityTally(corpus.token_bytes)
    for index, (ids, mask) in enumerate(zip(windows, scored, strict=True)):
        answer = client.prompt_logprobs(ids.tolist(), settling=index == 0)
        values = token_logprobs(answer, len(ids))
        if index == 0:
            _check_vocabulary(answer, ids.tolist(), tokenizer)
        tally.nll.append(-torch.tensor(values, dtype=torch.float64)[mask[1:]])
        tally.window.append(torch.full((int(mask[1:].sum()),), index))
        if corpus.token_bytes is not None:
            tally.text_bytes += int(corpus.token_bytes[ids[mask]].sum())
    shape = {"context": bench.ppl_context, "stride": bench.ppl_stride, "bos": "none", "corpus": corpus.facts}
    return tally.metrics({**shape, "engine": "server", "definition": "log-probabilities of echoed token ids, as the server returns them"})


def token_logprobs(answer: dict[str, Any], tokens: int) -> list[float]:
    """The log-probabilities of the 2nd to the last of `tokens` prompt tokens, in nat. Raises GapError where the answer does not hold exactly these."""
    choice = (answer.get("choices") or [{}])[0]
    logprobs = choice.get("logprobs")
    values = logprobs.get("token_logprobs") if isinstance(logprobs, dict) else None
    if not isinstance(values, list) or len(values) <= 1:
        raise _unsupported("the endpoint returns no log-probabilities of the prompt (completions with echo and logprobs)")
    counted = answer.get("usage", {}).get("prompt_tokens")
    # One more for the token that had to be generated; some servers generate none beside an echo.
    if counted != tokens or len(values) not in (tokens, tokens + 1):
        raise _unsupported(f"{tokens} token ids were sent, {counted} counted and {len(values)} scored: another protocol than ppl/window")
    scores = values[1:tokens]
    if not all(isinstance(value, float | int) and math.isfinite(value) for value in scores):
        raise ValueError("the server returned a log-probability that is no finite number")
    return [float(value) for value in scores]


def _check_vocabulary(answer: dict[str, Any], ids: list[int], tokenizer: Tokenizer) -> None:
    """Raises GapError where the server reads the ids as another text than our tokenizer: it then serves another vocabulary."""
    theirs = str(answer["choices"][0].get("text", ""))
    for token in tokenizer.get_added_tokens_decoder().values():
        theirs = theirs.replace(token.content, "")
    ours = _letters(tokenizer.decode(ids))[:-_EDGE_CHARACTERS]
    if not ours or not _letters(theirs).startswith(ours):
        raise _unsupported("the server echoes the token ids as another text than model.artifact's tokenizer: another vocabulary")


def _letters(text: str) -> str:
    return re.sub(r"[\W_]+", "", text)


def _unsupported(reason: str) -> GapError:
    return GapError(Status.UNSUPPORTED, f"no perplexity: {reason}")
