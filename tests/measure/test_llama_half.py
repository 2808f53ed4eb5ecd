"""`ppl/llama-half@1` against llama.cpp's own tool, whose figures are written here, and against torch's cross entropy."""

from __future__ import annotations

import hashlib
import math
import random
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lab.errors import LabError
from lab.measure.llama_half import half_chunks, llama_half
from tests.artifacts.gguf_models import hf_model, small_vocabulary

CONTEXT = 96
# What llama-perplexity of the llama.cpp in llama-cpp-python 0.3.36 prints for `golden_model` and `golden_text`, written as GGUF in F32:
# -c 96 -b 96 -ub 96 -fa off -ctk f32 -ctv f32 --chunks 5, tokenizer.ggml.add_bos_token false and true.
TOOL = {False: (322.9361, 15.90688), True: (343.1249, 13.97386)}
BOS = 256


@cache
def golden_model() -> PreTrainedModel:
    """A random llama of transformers whose weights no version of torch's generator changes."""
    model = hf_model("llama")
    draw = np.random.default_rng(7)
    for _, parameter in sorted(model.named_parameters()):
        parameter.data = torch.from_numpy(draw.normal(0, 0.3, parameter.shape).astype(np.float32))
    return model


def golden_text() -> str:
    """Lower-case words of four letters: 599 characters, and as many tokens of bytes."""
    letters = random.Random(3)
    return " ".join("".join(letters.choices("bcdfgklmnprs", k=4)) for _ in range(120))


def golden_ids() -> Tensor:
    """The text by its bytes: no merge of the small vocabulary is in it."""
    tokens = small_vocabulary(263).tokens
    return torch.tensor([tokens.index("Ġ" if character == " " else character) for character in golden_text()])


def forward(ids: Tensor) -> Tensor:
    with torch.no_grad():
        return golden_model()(ids).logits


@pytest.mark.parametrize("bos", [False, True])
def test_perplexity_and_its_standard_error_are_the_tools(bos: bool) -> None:
    found, _ = llama_half(forward, golden_ids(), BOS if bos else None, CONTEXT, 5, {})
    ppl, stderr = TOOL[bos]
    assert found.value == pytest.approx(ppl, abs=6e-4)
    assert found.details["stderr_llama_perplexity"] == pytest.approx(stderr, abs=6e-5)
    assert (found.protocol, found.unit, found.details["chunks"], found.details["scored_tokens"]) == ("ppl/llama-half@1", "ppl", 5, 5 * 47)


@pytest.mark.parametrize(("context", "bos"), [(4, None), (7, 3), (32, None), (33, 0)])
def test_likelihoods_are_the_second_halves_in_order(context: int, bos: int | None) -> None:
    generator = torch.Generator().manual_seed(context)
    ids = torch.randint(0, 11, (5 * context + 3,), generator=generator)
    seen: list[Tensor] = []

    def random_logits(row: Tensor) -> Tensor:
        seen.append(row.clone())
        return torch.randn(1, context, 11, generator=torch.Generator().manual_seed(len(seen)))

    found, kept = llama_half(random_logits, ids, bos, context, 3, {"corpus": "x"})
    assert len(seen) == 3
    text = ids if bos is None else torch.cat([torch.tensor([bos]), ids])
    expected = []
    for number, row in enumerate(seen):
        cut = text[number * context : (number + 1) * context].clone()
        cut[0] = cut[0] if bos is None else bos
        assert torch.equal(row[0], cut)
        logits = torch.randn(1, context, 11, generator=torch.Generator().manual_seed(number + 1))[0]
        expected += [float(torch.nn.functional.cross_entropy(logits[t], cut[t + 1])) for t in range(context // 2, context - 1)]
    assert kept["nll"] == pytest.approx(expected, abs=1.1e-5)
    assert found.value == pytest.approx(math.exp(sum(expected) / len(expected)), rel=1e-5)
    assert kept["ids_sha256"] == hashlib.sha256(b"".join(int(i).to_bytes(8, "little") for row in seen for i in row[0])).hexdigest()
    assert found.details["corpus"] == "x"
    per_chunk = torch.tensor(expected, dtype=torch.float64).view(3, -1).mean(1)
    assert found.stderr == pytest.approx(found.value * float(per_chunk.std() / math.sqrt(3)), rel=1e-4)


def test_a_text_of_one_chunk_is_refused() -> None:
    with pytest.raises(LabError, match=r"bench.llama_half_context=64: the text has 127 tokens"):
        half_chunks(torch.arange(127), None, 64, 9)
    assert half_chunks(torch.arange(127), 5, 64, 9).shape == (2, 64)


def test_a_likelihood_that_is_not_finite_is_named_after_all_chunks_ran() -> None:
    calls = []

    def poisoned(row: Tensor) -> Tensor:
        calls.append(row)
        logits = torch.zeros(1, 8, 5)
        logits[0, 6] = math.nan if len(calls) == 2 else 0.0
        return logits

    with pytest.raises(ValueError, match="from chunk 1 on"):
        llama_half(poisoned, torch.zeros(40, dtype=torch.int64), None, 8, 4, {})
    assert len(calls) == 4


def test_what_is_not_scored_does_not_count() -> None:
    def first_half_poisoned(row: Tensor) -> Tensor:
        logits = torch.full((1, 8, 5), math.nan)
        logits[0, 4:7] = 0.0
        return logits

    found, _ = llama_half(first_half_poisoned, torch.zeros(16, dtype=torch.int64), None, 8, 2, {})
    assert found.value == pytest.approx(5.0, rel=1e-6)
