"""Requests to the endpoint, and how their failures are named.

A failed request is an exception with a status and is counted; it never becomes a short or empty answer. Which route and options a server takes is
settled once, before anything is timed. The client cannot tell a slow server from a slow network between the two.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from lab.attempt import one_line
from lab.cell import ServerSpec
from lab.engines.server.address import address
from lab.engines.server.stream import Answer, StreamReader
from lab.errors import GapError, LabError
from lab.record import Status

try:
    import httpx
except ImportError:
    raise LabError("engine=server needs httpx: pip install 'migration-lab[server]'") from None

_INVALID = (400, 404, 405, 415, 422, 501)
"""HTTP answers that say: not this route, or not these options."""


class DeclinedError(GapError):
    """The server understood and does not take such a request; nothing broke."""

    def __init__(self, reason: str) -> None:
        super().__init__(Status.UNSUPPORTED, reason)


@dataclass(frozen=True)
class Dialect:
    """One way of asking: the route, and options beyond OpenAI's that make an answer as long as asked and its prompt uncached."""

    route: str
    options: tuple[str, ...] = ()

    def body(self, prompt: str, tokens: int) -> dict[str, Any]:
        """The request for `tokens` greedy tokens after `prompt`."""
        asked: dict[str, Any] = {"prompt": prompt} if self.route == "/completions" else {"messages": [{"role": "user", "content": prompt}]}
        known = {"ignore_eos": True, "min_tokens": tokens, "cache_prompt": False}
        return asked | {"max_tokens": tokens, "temperature": 0} | {name: known[name] for name in self.options}


_LONG = ("ignore_eos", "min_tokens", "cache_prompt")
DIALECTS = (Dialect("/completions", _LONG), Dialect("/completions"), Dialect("/chat/completions", _LONG), Dialect("/chat/completions"))
"""Tried in this order: raw text before a chat template, which would put the same tokens in front of every prompt. `ignore_eos` and `min_tokens` are of
vLLM and SGLang, `ignore_eos` and `cache_prompt` of llama-server; servers mostly ignore an option that they do not know."""


class Client:
    """The endpoint of one cell. Methods that ask for tokens raise GapError when the request fails; all are safe to call from several threads."""

    def __init__(self, spec: ServerSpec) -> None:
        self.spec, self.address = spec, address(spec.url)
        # A connection for each request, since a server may close an idle one at the very moment it is used again. Proxies of the environment are for the
        # outside world, and a compressed stream arrives in blocks.
        alone = httpx.Limits(max_keepalive_connections=0)
        self.http = httpx.Client(timeout=spec.request_timeout_s, trust_env=False, limits=alone, headers={"Accept-Encoding": "identity"})
        self.dialect = DIALECTS[0]
        self.model = spec.model
        self.declined: list[str] = []
        self.answers: list[Answer] = []
        self.failures: list[tuple[str, str]] = []
        self.plain_ok = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def health(self) -> tuple[int | None, str]:
        """(HTTP status, "") of the health route, or (None, why) where nothing answers."""
        try:
            return self.http.get(self.address.root + self.spec.health, timeout=5.0).status_code, ""
        except httpx.HTTPError as error:
            return None, one_line(error)

    def ask(self, url: str) -> str | None:
        """The text that a GET of `url` gives, or None where the server has no such route."""
        try:
            response = self.http.get(url, timeout=10.0)
        except httpx.HTTPError:
            return None
        return response.text if response.status_code == 200 else None

    def count_tokens(self, text: str) -> int | None:
        """Tokens of `text` by the server's own tokenizer, without computing anything; None where it does not offer that."""
        # vLLM and SGLang read `prompt`, llama-server `content`; all answer with `tokens`.
        body = {"model": self.model, "prompt": text, "content": text}
        try:
            response = self.http.post(f"{self.address.root}/tokenize", json=body, timeout=10.0)
            tokens = response.json().get("tokens") if response.status_code == 200 else None
        except (httpx.HTTPError, ValueError, AttributeError):
            return None
        return len(tokens) if isinstance(tokens, list) and tokens else None

    def settle(self, prompt: str, tokens: int) -> Answer:
        """Finds how this server wants to be asked, by asking; later requests are asked alike. Raises GapError when no way is taken."""
        for self.dialect in DIALECTS:
            try:
                return self.complete(prompt, tokens, settling=True)
            except DeclinedError as declined:
                self.declined.append(declined.reason)
        raise GapError(Status.LOAD_FAILED, f"{self.address.api} takes no completion request for model {self.model}: {'; '.join(self.declined)}")

    def complete(self, prompt: str, tokens: int, settling: bool = False) -> Answer:
        """One streamed answer of `tokens` tokens. A request that is declined while `settling` is no failure."""
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **self.dialect.body(prompt, tokens)}
        with self._counting(settling):
            answer = self._stream(self.address.api + self.dialect.route, body)
        with self._lock:
            self.answers.append(answer)
        return answer

    def together(self, prompts: Sequence[str], tokens: int) -> list[Answer]:
        """One answer per prompt, all sent at the same moment. Raises the first failure once none is under way any more."""
        if len(prompts) == 1:
            return [self.complete(prompts[0], tokens)]
        start = threading.Barrier(len(prompts))
        found: dict[int, Answer] = {}
        raised: list[BaseException] = []

        def lane(index: int) -> None:
            start.wait()
            try:
                found[index] = self.complete(prompts[index], tokens)
            except BaseException as error:
                raised.append(error)

        # Daemons: a request to end this process must not wait for answers.
        threads = [threading.Thread(target=lane, args=(index,), daemon=True) for index in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if raised:
            raise raised[0]
        return [found[index] for index in range(len(prompts))]

    def prompt_logprobs(self, ids: list[int], settling: bool = False) -> dict[str, Any]:
        """The plain answer to `ids` echoed with log-probabilities (as lm-evaluation-harness's local-completions asks).

        While `settling`, an error status only says that the server does not offer this: some answer 500 to an option they do not know.
        """
        body = {"model": self.model, "prompt": ids, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
        with self._counting(settling):
            response = self.http.post(f"{self.address.api}/completions", json=body)
            _check_status(response, response.content, declined=settling)
            try:
                answer: dict[str, Any] = response.json()
            except ValueError:
                raise GapError(Status.CRASHED, "the answer is no JSON") from None
            with self._lock:
                self.plain_ok += 1
            return answer

    def _stream(self, url: str, body: dict[str, Any]) -> Answer:
        limit_s = self.spec.request_timeout_s
        reader = StreamReader(time.perf_counter())
        with self.http.stream("POST", url, json=body) as response:
            if response.status_code != 200:
                _check_status(response, response.read())
            rest = b""
            for chunk in response.iter_bytes():
                now = time.perf_counter()
                # Cut at newlines only: text may hold other characters that Python's own line splitting would break a JSON object at.
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    reader.feed(line, now)
                # The client's own limit is one of silence; this one is for a server that drips.
                if now - reader.sent_s > limit_s:
                    raise _late(limit_s)
            reader.feed(rest, time.perf_counter())
        return reader.finish()

    @contextmanager
    def _counting(self, settling: bool) -> Iterator[None]:
        """Names what goes wrong inside, and counts it, as one failed request."""
        try:
            try:
                yield
            except httpx.TimeoutException:
                raise _late(self.spec.request_timeout_s) from None
            except httpx.HTTPError as error:
                raise GapError(Status.CRASHED, f"the connection broke ({one_line(error)})") from None
        except GapError as error:
            if not (settling and isinstance(error, DeclinedError)):
                with self._lock:
                    self.failures.append((str(error.status), error.reason))
            raise


def _check_status(response: httpx.Response, content: bytes, declined: bool = False) -> None:
    if response.status_code == 200:
        return
    reason = f"HTTP {response.status_code} from {response.request.url.path}: {_message(content)}"
    raise DeclinedError(reason) if declined or response.status_code in _INVALID else GapError(Status.CRASHED, reason)


def _message(content: bytes) -> str:
    """What an error body says, in one short line; servers put it under `error` or `message`, or send plain text."""
    text = content.decode(errors="replace")
    try:
        data = json.loads(text)
        error = data.get("error", data)
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, AttributeError, KeyError):
        return " ".join(text.split())[:200] or "no text"
    return " ".join(text.split())[:200]


def _late(limit_s: float) -> GapError:
    return GapError(Status.TIMEOUT, f"no complete answer within path.server.request_timeout_s={limit_s:g} s")
