"""Stands in for `lab.worker` in tests of the runner: same protocol, no model, and every way to fail on request.

`FAKE_MODE` chooses the behaviour, `FAKE_SIGN` a file that appears when the measurement is under way, so that tests wait for a fact and not
for a time. It shows nothing about the real worker.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

NOT_FAKED = ("bits_per_byte", "kld_p99", "top1_agreement", "load_s", "resident_bytes", "peak_memory_bytes", "decode_bytes_per_token",
             "expert_cosine", "ple_cosine")  # fmt: skip
"""Gaps that no second attempt would fill, so that a good result is a full answer."""

events = os.fdopen(int(sys.argv[sys.argv.index("--events-fd") + 1]), "w")


def emit(**event: Any) -> None:
    """Send one event."""
    events.write(json.dumps(event) + "\n")
    events.flush()


def measurement(unit: str, protocol: str, samples: list[float], **details: Any) -> dict[str, Any]:
    """A repeated measurement as the worker sends it."""
    middle = sorted(samples)[len(samples) // 2]
    return {"value": middle, "unit": unit, "protocol": protocol, "samples": samples, "median": middle, "min": min(samples),
            "max": max(samples), "details": details}  # fmt: skip


def good_result() -> dict[str, Any]:
    """What a healthy worker reports."""
    return {
        "status": "OK",
        "metrics": {
            "ppl": {"value": 9.5, "unit": "ppl", "protocol": "ppl/window@1"},
            "pp512_tok_s": measurement("tok/s", "pp@1", [500.0, 510.0, 505.0, 507.0, 499.0]) | {"roofline_pct": 12.5},
            "tg128_tok_s": measurement("tok/s", "tg@1", [50.0, 51.0, 50.5, 50.7, 49.9], requested_tokens=128, realised_tokens=128),
            "agg4_tg128_tok_s": measurement("tok/s", "agg@1", [150.0, 151.0, 150.5, 150.7, 149.9]),
        },
        "gaps": {"kld_mean": ["UNSUPPORTED", "no reference at this depth"]} | {name: ["UNSUPPORTED", "not faked"] for name in NOT_FAKED},
        "evidence": {"vocab_size": 4096, "resident": [{"component": "experts", "codec": "q2_g32", "device": "cpu", "bytes": 3 << 19}] * 2},
        "artifact": {"bytes": 12},
        "environment": {"torch": "fake"},
    }


def main() -> None:
    """Behave as FAKE_MODE says."""
    mode = os.environ.get("FAKE_MODE", "ok")
    job = json.loads(sys.stdin.read())
    print("worker says hello on stdout", flush=True)
    print("worker says hello on stderr", file=sys.stderr, flush=True)
    emit(event="phase", name="load", detail=job["cell"]["path"]["name"])
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sign := os.environ.get("FAKE_SIGN"):
        Path(sign).write_text(str(os.getpid()))
    if mode in ("hang", "stubborn") or (mode == "hang-q2" and "q2" in job["cell"]["path"]["name"]):
        time.sleep(600)
    if mode == "die" or (mode == "die-q2" and "q2" in job["cell"]["path"]["name"]):
        emit(event="metric", name="ppl", measurement={"value": 9.5, "unit": "ppl", "protocol": "ppl/window@1"})
        print("allocating far too much", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if mode == "raise":
        raise ValueError("the worker has a bug")
    if mode == "silent":
        return
    if mode == "garbage":
        events.write("this is not JSON\n")
        return
    result = good_result()
    if mode == "other-code":
        result["environment"]["code_sha256"] = "0" * 64
    if mode == "other-files":
        result["artifact"]["sha256"] = "f" * 64
    if mode == "part":
        result["gaps"]["kld_mean"] = ["INFRA", "the reference could not be made"]
    if mode == "nan":
        result["metrics"]["ppl"]["value"] = float("nan")
    if mode == "oom":
        result = {"status": "OOM", "reason": "needs 9 GB, 2 GB are free"}
    if mode == "not-executed":
        result["evidence"]["fallback"] = True
    if mode == "fill-disk":
        fill(Path(os.environ["FAKE_DISK"]))
        print("x" * 100_000, flush=True)
    if mode == "slow":
        time.sleep(0.3)
    emit(event="result", result=result)


def fill(folder: Path) -> None:
    """Write until the disk of `folder` is full."""
    size = 1 << 16
    with (folder / "filler").open("wb", buffering=0) as stream:
        while size:
            try:
                stream.write(b"\0" * size)
            except OSError:
                size //= 2


main()
