"""Streams: times are of arrival, counts are of `usage`, and what is no complete answer is a failure."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.engines.server.stream import Answer, StreamReader
from lab.errors import GapError

USAGE = {"prompt_tokens": 512, "completion_tokens": 128}


def data(**event: Any) -> bytes:
    return b"data: " + json.dumps(event).encode()


def text(word: str = "word", **rest: Any) -> bytes:
    return data(model="m", choices=[{"text": word, **rest}])


def read(lines: list[tuple[float, bytes]], sent_s: float = 0.0) -> Answer:
    reader = StreamReader(sent_s)
    for now_s, line in lines:
        reader.feed(line, now_s)
    return reader.finish()


@given(
    st.lists(st.floats(0.001, 1.0), min_size=1, max_size=20),
    st.floats(0.0, 100.0),
    st.integers(1, 9999),
    st.integers(1, 9999),
    st.sampled_from(["text", "content", "reasoning_content", "reasoning"]),
)
def test_any_stream_keeps_its_times_and_the_servers_counts(steps: list[float], sent_s: float, prompt: int, completion: int, kind: str) -> None:
    times = [sent_s + sum(steps[: index + 1]) for index in range(len(steps))]
    choice = {"text": "a"} if kind == "text" else {"delta": {kind: "a"}}
    lines = [(t, data(model="m", choices=[choice])) for t in times]
    lines += [(times[-1] + 1, data(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion})), (times[-1] + 1, b"data: [DONE]")]
    found = read([(sent_s, b": keep-alive"), (sent_s, b""), *lines], sent_s)
    assert (found.prompt_tokens, found.completion_tokens, found.model) == (prompt, completion, "m")
    assert (found.first_s, found.last_s) == (times[0], times[-1])
    assert found.ttft_s == times[0] - sent_s
    assert len(found.updates_s) == len(set(times))


def test_a_role_alone_is_no_token_and_events_of_one_read_are_one_update() -> None:
    role = data(choices=[{"delta": {"role": "assistant", "content": ""}}])
    done = [(0.5, data(choices=[], usage=USAGE)), (0.5, b"data: [DONE]")]
    found = read([(0.1, role), (0.3, text()), (0.3, text()), (0.4, text("", finish_reason="length")), *done])
    assert found.updates_s == (0.3,)
    assert found.last_s == 0.4


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([text()], "ended before"),
        ([text(), b"data: [DONE]"], "counted no tokens"),
        ([text(), data(choices=[], usage={"prompt_tokens": 512, "completion_tokens": 0}), b"data: [DONE]"], "counted no tokens"),
        ([text(), data(choices=[], usage={"prompt_tokens": True, "completion_tokens": 1}), b"data: [DONE]"], "counted no tokens"),
        ([data(choices=[], usage=USAGE), b"data: [DONE]"], "no text arrived"),
        ([text(), data(error={"message": "out of memory"})], "out of memory"),
        ([text(), b'error: {"message": "old llama-server"}'], "old llama-server"),
        ([text(), b"data: {broken"], "no JSON object: {broken"),
        ([b"data: 5"], "no JSON object: 5"),
    ],
)
def test_what_is_no_complete_answer_is_a_failure(lines: list[bytes], reason: str) -> None:
    with pytest.raises(GapError, match=reason):
        read([(0.1 * index, line) for index, line in enumerate(lines)])


@pytest.mark.parametrize(
    ("usage", "rest", "cached"),
    [
        ({}, {}, None),
        ({"prompt_tokens_details": None}, {}, None),
        ({"prompt_tokens_details": {"cached_tokens": 0}}, {}, 0),
        ({"prompt_tokens_details": {"cached_tokens": 496}}, {}, 496),
        ({}, {"timings": {"cache_n": 7, "prompt_n": 505}}, 7),
        ({"prompt_tokens_details": {"cached_tokens": 0}}, {"timings": {"prompt_n": 12}}, 500),
        ({}, {"tokens_evaluated": 512}, 0),
    ],
)
def test_cached_tokens_are_the_most_that_any_field_admits(usage: dict[str, Any], rest: dict[str, Any], cached: int | None) -> None:
    found = read([(0.1, text()), (0.2, data(choices=[], usage=USAGE | usage, **rest)), (0.2, b"data: [DONE]")])
    assert found.cached_tokens == cached


@pytest.mark.parametrize(
    ("usage", "rest", "drafts"),
    [
        ({}, {}, (None, None)),
        ({"completion_tokens_details": {"accepted_prediction_tokens": 90, "rejected_prediction_tokens": 30}}, {}, (120, 90)),
        ({}, {"timings": {"draft_n": 100, "draft_n_accepted": 60}}, (100, 60)),
    ],
)
def test_drafts_are_read_where_they_are_reported(usage: dict[str, Any], rest: dict[str, Any], drafts: tuple[int | None, int | None]) -> None:
    found = read([(0.1, text()), (0.2, data(choices=[], usage=USAGE | usage, **rest)), (0.2, b"data: [DONE]")])
    assert (found.drafted, found.accepted) == drafts
