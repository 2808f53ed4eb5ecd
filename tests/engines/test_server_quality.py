"""Perplexity through a server: the same sum as the local protocol, or a gap that names what is missing."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from lab.artifacts import load_tokenizer
from lab.engines.server.quality import token_logprobs
from lab.errors import GapError
from lab.record import Status
from tests.engines.fake_server import Behaviour, serving
from tests.engines.helpers import attempt, cell_for
from tests.runner_helpers import ROOT

NANO = ROOT / "experiments" / "nano"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project with nano's tokenizer and a piece of its text."""
    (tmp_path / "model").mkdir()
    shutil.copy(NANO / "tokenizer.json", tmp_path / "model")
    (tmp_path / "text.txt").write_text((NANO / "heldout.txt").read_text()[:20000])
    return tmp_path


def test_echoed_log_probabilities_become_the_protocols_perplexity(root: Path) -> None:
    tokenizer = load_tokenizer(root / "model")
    with serving(Behaviour(logprobs="yes")) as running:
        running.decode = tokenizer.decode  # type: ignore[attr-defined]
        result = attempt(cell_for(f"http://127.0.0.1:{running.server_port}/v1"), root)
    found = result.metrics["ppl"]
    assert found.protocol == "ppl/window@1"
    # Windows of 32 every 16: the first scores positions 1 to 31, the others 16 to 31. Position i got -1 - i / 100.
    scores = [1.0 + i / 100 for i in range(1, 32)] + [1.0 + i / 100 for i in range(16, 32)] * 3
    assert found.details["scored_tokens"] == len(scores)
    assert found.value == pytest.approx(math.exp(sum(scores) / len(scores)))
    assert "bits_per_byte" in result.metrics
    assert result.evidence["vocab_size"] == tokenizer.get_vocab_size()


def test_a_server_of_another_vocabulary_gives_no_perplexity(root: Path) -> None:
    with serving(Behaviour(logprobs="yes")) as running:
        result = attempt(cell_for(f"http://127.0.0.1:{running.server_port}/v1"), root)
    assert result.gaps["ppl"][0] is Status.UNSUPPORTED
    assert "another vocabulary" in result.gaps["ppl"][1]


def test_an_endpoint_that_scores_no_prompts_is_a_gap_and_no_failure(root: Path) -> None:
    with serving(Behaviour()) as running:
        result = attempt(cell_for(f"http://127.0.0.1:{running.server_port}/v1"), root)
    assert result.gaps["ppl"] == (Status.UNSUPPORTED, "HTTP 500 from /v1/completions: Only no echo is supported")
    assert result.evidence["requests"]["failed"] == 0
    assert "tg128_tok_s" in result.metrics


def answer(values: list[Any] | None, counted: int = 4) -> dict[str, Any]:
    return {"choices": [{"logprobs": {"token_logprobs": values}}], "usage": {"prompt_tokens": counted}}


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        ({}, "no log-probabilities"),
        ({"choices": []}, "no log-probabilities"),
        ({"choices": [{"logprobs": None}]}, "no log-probabilities"),
        (answer(None), "no log-probabilities"),
        (answer([-1.0]), "no log-probabilities"),
        (answer([None, -1, -1, -1, -1, -1], counted=5), "4 token ids were sent, 5 counted and 6 scored"),
        (answer([None, -1, -1, -1], counted=5), "5 counted and 4 scored"),
        (answer([None, -1, -1]), "another protocol"),
    ],
)
def test_an_answer_that_is_not_the_protocol_is_refused(found: dict[str, Any], reason: str) -> None:
    with pytest.raises(GapError, match=reason) as raised:
        token_logprobs(found, 4)
    assert raised.value.status is Status.UNSUPPORTED


@pytest.mark.parametrize("bad", [math.nan, -math.inf, None, "x"])
def test_values_that_are_no_numbers_are_invalid_output(bad: Any) -> None:
    assert token_logprobs(answer([None, -1, -2, -3]), 4) == [-1.0, -2.0, -3.0]
    assert token_logprobs(answer([None, -1, -2, -3, -9]), 4) == [-1.0, -2.0, -3.0]
    with pytest.raises(ValueError, match="no finite number"):
        token_logprobs(answer([None, -1, bad, -3]), 4)
