"""Perplexity, divergence and the windows they are taken over, against plain computations."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lab.artifacts import load_tokenizer
from lab.errors import LabError
from lab.measure.divergence import DivergenceTally, divergence_metrics, kl_divergence
from lab.measure.perplexity import PerplexityTally
from lab.measure.scoring import score_windows
from lab.measure.text import Corpus, load_corpus

VOCAB = 11
NANO = Path(__file__).parents[2] / "experiments" / "nano"


def corpus(tokens: int) -> Corpus:
    ids = torch.randint(0, VOCAB, (tokens,), generator=torch.Generator().manual_seed(tokens))
    return Corpus(ids, torch.arange(VOCAB), {"name": "t", "sha256": "0" * 64, "bytes": 1, "tokens": tokens})


def fixed_model(ids: Tensor) -> Tensor:
    """Logits that depend on the current and previous token only, so that windows and full text give the same scores."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))
    return table[ids]


@given(tokens=st.integers(40, 200), context=st.integers(3, 40), data=st.data())
def test_every_token_is_scored_once_with_the_promised_context(tokens: int, context: int, data: st.DataObject) -> None:
    stride = data.draw(st.integers(1, context - 1))
    text = corpus(tokens)
    windows, scored = text.windows(context, stride, 10**6)
    starts = torch.arange(0, tokens - context + 1, stride)
    positions = (starts[:, None] + torch.arange(context))[scored]
    assert positions.tolist() == list(range(1, int(starts[-1]) + context)), "each token once, in order, none left out between windows"
    assert not scored[:, 0].any() and (windows == text.ids[starts[:, None] + torch.arange(context)]).all()
    assert all(int(row.nonzero()[0]) >= context - stride for row in scored[1:])


@pytest.mark.parametrize("batch", [1, 3, 7])
def test_perplexity_equals_the_plain_computation(batch: int) -> None:
    text = corpus(101)
    windows, scored = text.windows(21, 10, 10**6)
    tally = PerplexityTally(text.token_bytes)
    for log_p, targets, window in score_windows(fixed_model, windows, scored, batch):
        tally.add(log_p, targets, window)
    found = tally.metrics({})
    log_p = fixed_model(text.ids[:-1]).log_softmax(-1)
    nll = -log_p.gather(1, text.ids[1:, None]).double()
    assert found["ppl"].value == pytest.approx(math.exp(float(nll.mean())), rel=1e-6)
    assert found["ppl"].details["scored_tokens"] == 100
    assert found["bits_per_byte"].value == pytest.approx(float(nll.sum()) / math.log(2) / int(text.ids[1:].sum()), rel=1e-6)


def test_standard_error_is_that_of_independent_windows() -> None:
    """Windows of equal size: the delta method is the textbook standard error of the mean."""
    generator = torch.Generator().manual_seed(0)
    tally = PerplexityTally(None)
    per_window = torch.rand(50, generator=generator) + 1
    for i, level in enumerate(per_window):
        p = torch.full((8, 2), float(torch.log1p(-torch.exp(-level))))
        p[:, 0] = -level
        tally.add(p, torch.zeros(8, dtype=torch.int64), torch.full((8,), i))
    assert set(tally.metrics({})) == {"ppl"}, "without byte counts there are no bits per byte"
    found = tally.metrics({})["ppl"]
    assert found.stderr == pytest.approx(found.value * float(per_window.double().std() / 50**0.5), rel=1e-4)


def test_an_infinite_likelihood_is_no_perplexity() -> None:
    for value, message in ((-torch.inf, "not finite from window 4 on"), (-800.0, "800 nat: the perplexity is no finite number")):
        tally = PerplexityTally(None)
        tally.add(torch.tensor([[0.0, value]]), torch.tensor([1]), torch.tensor([4]))
        with pytest.raises(ValueError, match=message):
            tally.metrics({})


@given(st.integers(0, 10**6))
def test_divergence_is_the_definition_and_zero_for_equals(seed: int) -> None:
    p, q = (torch.randn(5, 7, generator=torch.Generator().manual_seed(seed + i)).log_softmax(-1) for i in range(2))
    by_torch = torch.nn.functional.kl_div(q.double().log_softmax(-1), p.double().log_softmax(-1), reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(kl_divergence(p, q), by_torch)
    assert (kl_divergence(p, q) > 0).all() and kl_divergence(p, p).abs().max() < 1e-12


def test_a_tiny_divergence_is_not_lost_in_rounded_log_probabilities() -> None:
    """Over 2560 float32 log-probabilities the sum is off by about 1e-7; without normalising again a divergence of 1e-9 could come out negative."""
    logits = torch.randn(20, 2560, generator=torch.Generator().manual_seed(4)) * 4
    moved = logits + torch.randn(20, 2560, generator=torch.Generator().manual_seed(5)) * 1e-5
    assert (kl_divergence(logits.log_softmax(-1), moved.log_softmax(-1)) > -1e-13).all()


def test_divergence_compares_the_reference_rows_and_no_more() -> None:
    reference = torch.randn(10, 6, generator=torch.Generator().manual_seed(1)).log_softmax(-1)
    other = reference.roll(1, -1)
    tally = DivergenceTally(reference)
    for number, rows in enumerate(torch.cat([other, other]).split(4)):
        if not tally.full:
            tally.add(rows, torch.full((len(rows),), number))
    summary = tally.summary()
    assert summary["tokens"] == 10 and summary["mean"] == pytest.approx(float(kl_divergence(reference, other).mean()))
    assert summary["stderr"] > 0 and summary["p99"] <= summary["max"] and summary["top1"] == 0.0
    found = divergence_metrics(summary, {"mean": 1e-9, "p99": 1e-8, "top1": 1.0}, {"batch": 4})
    assert found["kld_mean"].details["noise_floor"] == 1e-9 and found["top1_agreement"].details["noise_floor"] == 1.0


def test_too_short_text_and_bad_stride_are_refused() -> None:
    with pytest.raises(LabError, match="fewer than one window of bench.ppl_context=50"):
        corpus(40).windows(50, 10, 5)
    with pytest.raises(LabError, match="bench.ppl_stride=20 must be below"):
        corpus(40).windows(20, 20, 5)


def test_prompts_longer_than_the_text_are_refused() -> None:
    with pytest.raises(LabError, match="40 tokens are too few for prompts of 640"):
        corpus(40).prompts(1, 640)


def test_shipped_text_has_both_languages_in_the_first_windows_and_counts_bytes() -> None:
    text = load_corpus(load_tokenizer(NANO), NANO / "heldout.txt")
    raw = (NANO / "heldout.txt").read_text(encoding="utf-8")
    assert text.token_bytes is not None
    assert int(text.token_bytes[text.ids].sum()) == len(raw.replace("<|endoftext|>", "").encode())
    assert int((text.ids == 0).sum()) == raw.count("<|endoftext|>")
    prompts = text.prompts(3, 640, offset=1)
    assert prompts.shape == (3, 640) and len({tuple(row) for row in prompts.tolist()}) == 3
