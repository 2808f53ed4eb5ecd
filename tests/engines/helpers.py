"""Cells and attempts for tests of the server engine: a project of one text, an attempt run here, its result read back from its events."""

from __future__ import annotations

import io
import json
import random
import socket
from pathlib import Path
from typing import Any

from lab.cell import Cell
from lab.engines.server.attempt import ServerAttempt
from lab.engines.server.stream import Answer
from lab.record import WorkerResult

COMPONENT = {"codec": "source"}


def words(count: int, seed: int = 0) -> str:
    """A text of `count` words of even length, so that characters tell tokens of the fake server."""
    letters = random.Random(seed)
    return " ".join("".join(letters.choices("abcdefghij", k=5)) for _ in range(count))


def cell_for(url: str, **server: Any) -> Cell:
    """A cell whose path asks the server at `url`."""
    spec = {"url": url, "request_timeout_s": 10.0, "start_timeout_s": 20.0, "lossy": ("fp8 KV cache",)} | server
    return Cell.model_validate({
        "model": {"name": "nano", "arch": "qwen4_exp", "artifact": "model", "corpus": "text.txt"},
        "path": {"name": "fake_server", "title": "Fake", "components": {"experts": COMPONENT}, "server": spec},
        "layers": 3,
        "engine": "server",
        "device": {"name": "cpu", "torch_device": "cpu", "compute_dtype": "float32"},
        "bench": {"name": "quick", "ppl_context": 32, "ppl_stride": 16, "ppl_windows": 4, "warmup": 1, "repeats": 5, "timeout_s": 60},
    })  # fmt: skip


def attempt(cell: Cell, root: Path) -> WorkerResult:
    """Runs the attempt in this process. The text is made where `root` holds none."""
    (root / "model").mkdir(exist_ok=True)
    if not (root / "text.txt").exists():
        (root / "text.txt").write_text(words(4000))
    events = io.StringIO()
    ServerAttempt(cell, root, root, events).run()
    last = json.loads(events.getvalue().splitlines()[-1])
    assert last["event"] == "result"
    return WorkerResult.model_validate_json(json.dumps(last["result"]))


def answer(sent_s: float = 0.0, ttft_s: float = 0.1, step_s: float = 0.01, updates: int = 128, **changes: Any) -> Answer:
    """An answer whose updates come evenly."""
    times = tuple(sent_s + ttft_s + step_s * index for index in range(updates))
    values: dict[str, Any] = {"prompt_tokens": 512, "completion_tokens": 128, "model": "m", "last_s": times[-1]} | changes
    return Answer(sent_s=sent_s, updates_s=times, **values)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
