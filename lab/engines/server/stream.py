"""One streamed answer: what arrived when, and how many tokens the server says it was.

Server-sent events of `/completions` and `/chat/completions` become one `Answer`. Times are of arrival; counts come from `usage` alone, since one update
can carry several tokens (speculation) or part of one. A stream that reports an error, breaks off or counts nothing is a failed request and never a
short answer. That the counts are true is the server's word; `lab.engines.server.timing` looks at what can be doubted.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from lab.errors import GapError
from lab.record import Status


@dataclass(frozen=True)
class Answer:
    """Times in seconds on one monotonic clock; `updates_s` are the moments at which text arrived, `last_s` that of the last word of the choice.

    `cached_tokens` is None where the server does not say; so are `drafted` and `accepted` (tokens of speculation).
    """

    sent_s: float
    updates_s: tuple[float, ...]
    last_s: float
    prompt_tokens: int
    completion_tokens: int
    model: str
    cached_tokens: int | None = None
    drafted: int | None = None
    accepted: int | None = None

    @property
    def first_s(self) -> float:
        """Arrival of the first update with text."""
        return self.updates_s[0]

    @property
    def ttft_s(self) -> float:
        """Time to first token: from sending the request to the first update with text."""
        return self.first_s - self.sent_s


class StreamReader:
    """Takes the lines of one stream as they arrive. `feed` and `finish` raise GapError for a failed request."""

    def __init__(self, sent_s: float) -> None:
        self.sent_s = sent_s
        self.updates_s: list[float] = []
        self.last_s: float | None = None
        self.complete = False
        self.model = ""
        self.usage: dict[str, Any] = {}
        self.extra: dict[str, Any] = {}

    def feed(self, line: bytes, now_s: float) -> None:
        """One line without its end. Only `data:` lines say something; a comment keeps the connection alive."""
        text = line.strip()
        if text.startswith(b"error:"):
            raise _failed(f"the stream carried an error: {_short(text[6:])}")
        if not text.startswith(b"data:"):
            return
        payload = text[5:].strip()
        if payload == b"[DONE]":
            self.complete = True
            return
        try:
            event = json.loads(payload)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            raise _failed(f"the stream carried no JSON object: {_short(payload)}")
        if event.get("error"):
            raise _failed(f"the stream carried an error: {_short(json.dumps(event['error']).encode())}")
        self._take(event, now_s)

    def finish(self) -> Answer:
        """The answer, once the stream has ended."""
        if not self.complete:
            raise _failed("the stream ended before the answer was complete")
        prompt_tokens, completion_tokens = _count(self.usage.get("prompt_tokens")), _count(self.usage.get("completion_tokens"))
        if not prompt_tokens or not completion_tokens:
            raise _failed("the server counted no tokens in `usage` (stream_options.include_usage), and updates are no tokens")
        if not self.updates_s or self.last_s is None:
            raise _failed(f"{completion_tokens} tokens were counted and no text arrived")
        return Answer(
            sent_s=self.sent_s,
            updates_s=tuple(self.updates_s),
            last_s=self.last_s,
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            model=self.model,
            cached_tokens=self._cached(prompt_tokens),
            **self._drafts(),
        )

    def _take(self, event: dict[str, Any], now_s: float) -> None:
        self.model = str(event.get("model") or self.model)
        if isinstance(event.get("usage"), dict):
            self.usage = event["usage"]
        self.extra |= {key: event[key] for key in ("timings", "tokens_evaluated") if key in event}
        for choice in event.get("choices") or ():
            # The chat route sends deltas (thinking apart from the answer), the plain one text.
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
            # What one read of the connection brought arrived together, in however many events.
            if text and self.updates_s[-1:] != [now_s]:
                self.updates_s.append(now_s)
            if choice.get("finish_reason"):
                self.complete = True
            self.last_s = now_s

    def _cached(self, prompt_tokens: int) -> int | None:
        """Prompt tokens not computed for this request, by the most that any field admits; None where none says anything.

        OpenAI: usage.prompt_tokens_details.cached_tokens. llama-server: timings.cache_n, and timings.prompt_n or tokens_evaluated, which count what was read.
        """
        evaluated = (self._timing("prompt_n"), _count(self.extra.get("tokens_evaluated")))
        said = [self._detail("prompt", "cached_tokens"), self._timing("cache_n"), *(max(0, prompt_tokens - n) for n in evaluated if n is not None)]
        return max((n for n in said if n is not None), default=None)

    def _drafts(self) -> dict[str, int | None]:
        """Tokens of speculation, by OpenAI's usage.completion_tokens_details or llama-server's timings."""
        accepted, rejected = self._detail("completion", "accepted_prediction_tokens"), self._detail("completion", "rejected_prediction_tokens")
        if accepted is not None and rejected is not None:
            return {"drafted": accepted + rejected, "accepted": accepted}
        return {"drafted": self._timing("draft_n"), "accepted": self._timing("draft_n_accepted")}

    def _detail(self, of: str, key: str) -> int | None:
        details = self.usage.get(f"{of}_tokens_details")
        return _count(details.get(key)) if isinstance(details, dict) else None

    def _timing(self, key: str) -> int | None:
        timings = self.extra.get("timings")
        return _count(timings.get(key)) if isinstance(timings, dict) else None


def _count(value: object) -> int | None:
    """A whole number of at least 0, or None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _failed(reason: str) -> GapError:
    return GapError(Status.CRASHED, reason)


def _short(text: bytes) -> str:
    return " ".join(text.decode(errors="replace").split())[:200]
