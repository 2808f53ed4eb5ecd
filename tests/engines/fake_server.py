"""A small OpenAI-compatible server with switchable faults: in a thread for tests of the client, as a program for tests of starting and ending one.

It counts words as tokens, waits a little for each token of a prompt that it has not seen, and streams one word per update. It shows nothing about a real
server's speed; what it shows is how each fault looks from outside.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "fake-model"


@dataclass
class Behaviour:
    """What the server does beside answering. Numbers count requests for completions, from 1."""

    model: str = MODEL
    prefill_s: float = 0.02
    update_s: float = 0.0003
    declines: bool = False
    tokenizes: bool = False
    answers_as: str = ""
    completions: bool = True
    knows_options: bool = True
    cache: bool = False
    reports_cache: bool = True
    shared_tokens: int = 0
    words_per_update: int = 1
    shorter_by: int = 0
    one_at_a_time: bool = False
    no_usage: bool = False
    fail_with_500_at: int = 0
    stream_error_at: int = 0
    cut_at: int = 0
    die_at: int = 0
    hang_at: int = 0
    logprobs: str = ""
    prompts: list[Any] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)
    turn: Any = field(default_factory=threading.Lock)


class Handler(BaseHTTPRequestHandler):
    """Answers by `server.behaviour`."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    @property
    def how(self) -> Behaviour:
        return self.server.behaviour  # type: ignore[attr-defined]

    def log_message(self, *_: object) -> None:
        return

    def do_GET(self) -> None:
        if self.path == "/health":
            self._json(200, {})
        elif self.path == "/v1/models":
            self._json(200, {"data": [{"id": self.how.model}]})
        elif self.path == "/version":
            self._json(200, {"version": "0.0-fake", "features": ["left", "out"]})
        else:
            self._json(404, {"error": {"message": "no such route"}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        how = self.how
        if self.path == "/tokenize" and how.tokenizes:
            return self._json(200, {"tokens": [0] * len(body["prompt"].split())})
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            return self._json(404, {"error": {"message": "no such route"}})
        if how.declines:
            return self._json(400, {"error": {"message": "no such model"}})
        if self.path == "/v1/completions" and not how.completions:
            return self._json(404, {"error": {"message": "only chat here"}})
        if not how.knows_options and "ignore_eos" in body:
            return self._json(400, {"message": "unknown field ignore_eos"})
        if body.get("echo"):
            return self._echo(body)
        prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        with how.lock:
            number = len(how.prompts) + 1
            seen = prompt in how.prompts
            how.prompts.append(prompt)
            how.bodies.append(body)
        if number == how.fail_with_500_at:
            return self._json(500, {"error": {"message": "an expert is missing"}})
        if number == how.hang_at:
            time.sleep(2)
        if how.one_at_a_time:
            with how.turn:
                return self._stream(body, prompt, seen, number)
        self._stream(body, prompt, seen, number)

    def _stream(self, body: dict[str, Any], prompt: str, seen: bool, number: int) -> None:
        how = self.how
        tokens = len(prompt.split())
        cached = (tokens - 1 if how.cache and seen else 0) + how.shared_tokens
        if not (how.cache and seen):
            time.sleep(how.prefill_s * random.uniform(0.98, 1.02))
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        wanted = body["max_tokens"] - how.shorter_by
        sent = 0
        chat = "messages" in body
        while sent < wanted:
            time.sleep(how.update_s * random.uniform(0.9, 1.1))
            words = min(how.words_per_update, wanted - sent)
            sent += words
            text = "word\u2028 " * words
            choice: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            choice["finish_reason"] = "length" if sent == wanted else None
            self._event({"model": how.answers_as or how.model, "choices": [choice]})
            if sent == 5 and number == how.stream_error_at:
                self._event({"error": {"message": "kernel launch failed"}})
                return self._chunk(b"")
            if sent == 5 and number == how.cut_at:
                return self._chunk(b"")
            if sent == 5 and number == how.die_at:
                print("a page fault, and that was it", flush=True)
                os._exit(3)
        if not how.no_usage:
            usage: dict[str, Any] = {"prompt_tokens": tokens, "completion_tokens": wanted}
            if how.reports_cache:
                usage["prompt_tokens_details"] = {"cached_tokens": cached}
            self._event({"model": how.answers_as or how.model, "choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _echo(self, body: dict[str, Any]) -> None:
        if self.how.logprobs != "yes":
            return self._json(500, {"error": {"message": "Only no echo is supported"}})
        ids = body["prompt"]
        scores = [None, *(-1.0 - index / 100 for index in range(1, len(ids) + 1))]
        text = self.server.decode(ids)  # type: ignore[attr-defined]
        answer = {"choices": [{"text": text, "logprobs": {"token_logprobs": scores}}], "usage": {"prompt_tokens": len(ids)}}
        self._json(200, answer)

    def _event(self, data: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _json(self, status: int, data: dict[str, Any]) -> None:
        content = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def make(behaviour: Behaviour, port: int = 0) -> ThreadingHTTPServer:
    """The server, bound and not yet serving."""
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    server.behaviour = behaviour  # type: ignore[attr-defined]
    server.decode = lambda ids: " ".join(map(str, ids))  # type: ignore[attr-defined]
    return server


@contextmanager
def serving(behaviour: Behaviour) -> Iterator[ThreadingHTTPServer]:
    """The server in a thread; `server.server_port` is its port."""
    server = make(behaviour)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def main() -> None:
    """As a program: may load slowly, fail while loading, die at a request, or leave a child that hides from its group."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--fail-loading", action="store_true")
    parser.add_argument("--die-at", type=int, default=0)
    parser.add_argument("--hiding-child", default="")
    parser.add_argument("--layers", default="")
    args = parser.parse_args()
    print(f"loading {os.environ.get('FAKE_WEIGHTS', 'nothing')}, {args.layers or 'all'} layers", flush=True)
    if args.fail_loading:
        sys.exit("weights: tensor blk.3 is missing")
    if args.hiding_child:
        # A worker as vLLM's: a group of its own, deaf to SIGTERM, its parent soon gone.
        code = (
            f"import os,signal,time; signal.signal(15, signal.SIG_IGN); os.setsid(); open({args.hiding_child!r}, 'w').write(str(os.getpid())); time.sleep(600)"
        )
        subprocess.run([sys.executable, "-c", f"import subprocess,sys; subprocess.Popen([sys.executable, '-c', {code!r}])"], check=True)
    make(Behaviour(die_at=args.die_at), args.port).serve_forever()


if __name__ == "__main__":
    main()
