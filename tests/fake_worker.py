"""Stands in for `lab.worker` in tests of the runner: same protocol, no model, and every way to fail on request.

`FAKE_MODE` names what happens instead of a result (ENDINGS) or what is wrong with the result (RESULTS); with `-q2` at its end, only paths with q2 in
their name are affected. `FAKE_SIGN` is a file that appears when the measurement is under way, so that tests wait for a fact and not for a time. It
shows nothing about the real worker.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

NOT_FAKED = ("bits_per_byte", "kld_p99", "top1_agreement", "load_s", "resident_bytes", "peak_memory_bytes", "decode_bytes_per_token",
             "expert_cosine", "ple_cosine")  # fmt: skip
"""Gaps that no second attempt would fill, so that a good result is a full answer."""

RATES = ("pp512_tok_s", "tg128_tok_s", "agg4_tg128_tok_s")

events = os.fdopen(int(sys.argv[sys.argv.index("--events-fd") + 1]), "w")


def emit(**event: Any) -> None:
    """Send one event."""
    events.write(json.dumps(event) + "\n")
    events.flush()


def emit_metric(name: str) -> None:
    """Send one good metric on its own, as the worker does as soon as it has one."""
    emit(event="metric", name=name, measurement=good_result()["metrics"][name])


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


def hang() -> None:
    """Measure for ever."""
    time.sleep(600)


def die() -> None:
    """Be killed from outside, after the first metric."""
    emit_metric("ppl")
    print("allocating far too much", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def die_late() -> None:
    """Crash while decoding, when quality and prefill have already been reported and the first turns were impossibly short."""
    emit_metric("ppl")
    emit_metric("pp512_tok_s")
    emit(event="phase", name="decode", detail="1 + 5 runs of 128 tokens")
    print("turn 1: 0.86 s\nturn 2: 0.0005 s", flush=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.SIGSEGV)


def fail() -> NoReturn:
    """An unexpected error."""
    raise ValueError("the worker has a bug")


def leave() -> NoReturn:
    """End through SystemExit, with exit code 0 and without a result."""
    sys.exit(0)


def vanish() -> NoReturn:
    """End at once with exit code 0, past every handler, after the first metric."""
    emit_metric("ppl")
    os._exit(0)


def self_test() -> NoReturn:
    """Meet an option it does not know, and do something else successfully."""
    print("unknown option --layers\nself-test: 26 PASS, 0 FAIL", flush=True)
    sys.exit(0)


def send_garbage() -> NoReturn:
    """Say something that is no event."""
    events.write("this is not JSON\n")
    sys.exit(0)


def fill_disk() -> None:
    """Write until the disk of FAKE_DISK is full, and then more into the log."""
    size = 1 << 16
    with (Path(os.environ["FAKE_DISK"]) / "filler").open("wb", buffering=0) as stream:
        while size:
            try:
                stream.write(b"\0" * size)
            except OSError:
                size //= 2
    print("x" * 100_000, flush=True)


def other_result(result: dict[str, Any], **fields: Any) -> None:
    """Replace the whole result."""
    result.clear()
    result.update(fields)


def at_half_speed(result: dict[str, Any]) -> None:
    """The same cell on a busier machine: other times, another reading of memory."""
    for name in RATES:
        found = result["metrics"][name]
        result["metrics"][name] = found | measurement(found["unit"], found["protocol"], [s / 2 for s in found["samples"]], **found["details"])
    result["metrics"]["peak_memory_bytes"] = {"value": 7e9, "unit": "B", "protocol": "peak@1"}
    del result["gaps"]["peak_memory_bytes"]


def nothing_answered(result: dict[str, Any]) -> None:
    """Every request failed, and empty lists were averaged to zero."""
    zeros = {name: {**result["metrics"][name], "value": 0.0, "samples": [], "median": 0.0, "min": 0.0, "max": 0.0} for name in RATES}
    result["metrics"] = zeros
    result["gaps"]["ppl"] = ["INFRA", "every request failed"]


def code_found_here(result: dict[str, Any]) -> None:
    """Say which code it is that a worker started in this folder would run, as the real worker does."""
    sys.path.insert(0, os.getcwd())
    from lab.provenance import code_sha256

    result["environment"]["code_sha256"] = code_sha256()


ENDINGS: dict[str, Callable[[], None]] = {
    "hang": hang,
    "stubborn": hang,
    "die": die,
    "die-late": die_late,
    "raise": fail,
    "silent": leave,
    "vanish": vanish,
    "self-test": self_test,
    "garbage": send_garbage,
    "fill-disk": fill_disk,
    "slow": lambda: time.sleep(0.3),
}
"""What happens before the result, which mostly never comes."""

RESULTS: dict[str, Callable[[dict[str, Any]], None]] = {
    "other-code": lambda result: result["environment"].update(code_sha256="0" * 64),
    "code-found-here": code_found_here,
    "other-files": lambda result: result["artifact"].update(sha256="f" * 64),
    "part": lambda result: result["gaps"].update(kld_mean=["INFRA", "the reference could not be made"]),
    "nan": lambda result: result["metrics"]["ppl"].update(value=float("nan")),
    "oom": lambda result: other_result(result, status="OOM", reason="needs 9 GB, 2 GB are free"),
    "empty": lambda result: other_result(result, status="OK"),
    "not-executed": lambda result: result["evidence"].update(fallback=True),
    "half-speed": at_half_speed,
    "nothing-answered": nothing_answered,
    "forgetful": lambda result: result["metrics"].pop("pp512_tok_s"),
    "no-parity": lambda result: result["evidence"].update(parity={"tokens": 64, "kld_mean": 0.5, "tolerance": 1e-6}),
}
"""What is wrong with the result."""

EXIT_CODES = {"bad-end": 7}
"""A good result, and then an exit code that denies it."""


def main() -> None:
    """Behave as FAKE_MODE says."""
    job = json.loads(sys.stdin.read())
    path = job["cell"]["path"]["name"]
    mode = os.environ.get("FAKE_MODE", "ok")
    if mode.endswith("-q2"):
        mode = mode.removesuffix("-q2") if "q2" in path else "ok"
    if mode not in {"ok", *ENDINGS, *RESULTS, *EXIT_CODES}:
        sys.exit(f"FAKE_MODE={mode} is none that this worker knows")
    print("worker says hello on stdout", flush=True)
    print("worker says hello on stderr", file=sys.stderr, flush=True)
    emit(event="phase", name="load", detail=path)
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sign := os.environ.get("FAKE_SIGN"):
        Path(sign).write_text(str(os.getpid()))
    ENDINGS.get(mode, lambda: None)()
    result = good_result()
    RESULTS.get(mode, lambda _: None)(result)
    emit(event="result", result=result)
    sys.exit(EXIT_CODES.get(mode, 0))


main()
