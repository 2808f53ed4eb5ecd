"""`python -m lab convert` when it is stopped, and words of its command line that cannot be meant."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from lab.artifacts.vqf_plan import WMODES
from lab.convert import CONVERT_HELP, convert_command
from lab.errors import LabError
from tests.artifacts.vqf_files import dual, one_thread, put_beside  # noqa: F401

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def nobody(number: int, _frame: FrameType | None) -> None:
    raise RuntimeError(f"signal {number} came through")


@pytest.fixture(autouse=True)
def caught() -> Iterator[None]:
    """A signal that the command does not take ends the test and not the whole run."""
    before = {number: signal.signal(number, nobody) for number in STOPPING}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = dual().write(tmp_path / "m.vqf")
    put_beside(tmp_path)
    return path


@pytest.mark.parametrize("number", STOPPING)
@pytest.mark.parametrize(("words", "step"), [(["--to", "vqf", "--wmode", "q4"], "vqf_writer._write_layer"), (["--to", "safetensors"], "save_file")])
def test_a_request_to_stop_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: list[str], step: str) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        assert any(path.name.startswith(".") for path in (tmp_path, tmp_path / "new") for path in (path.iterdir() if path.is_dir() else ()))
        os.kill(os.getpid(), number)

    monkeypatch.setattr(f"lab.artifacts.{step}" if "." in step else f"lab.convert.safetensors.{step}", stopped)
    with pytest.raises(KeyboardInterrupt):
        convert_command([str(source), str(tmp_path / "new"), *words])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.vqf", "tokenizer.json"]
    assert all(signal.getsignal(each) is nobody for each in STOPPING)


def test_a_second_request_does_not_disturb_the_clearing_away(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.close

    def stopped(*_: Any) -> None:
        monkeypatch.setattr("lab.artifacts.vqf_sink.os.close", lambda handle: (os.kill(os.getpid(), signal.SIGTERM), real(handle)))
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("lab.artifacts.vqf_writer._write_layer", stopped)
    with pytest.raises(KeyboardInterrupt):
        convert_command([str(source), str(tmp_path / "new.vqf"), "--to", "vqf", "--wmode", "q4"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.vqf", "tokenizer.json"]


def test_a_signal_that_is_ignored_stays_ignored(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nohup."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    monkeypatch.setattr("lab.artifacts.vqf_convert._print", lambda done: os.kill(os.getpid(), signal.SIGHUP))
    try:
        assert convert_command([str(source), str(tmp_path / "new.vqf"), "--to", "vqf"]) == 0
    except KeyboardInterrupt:  # would end the whole run of the tests
        pytest.fail("SIGHUP was not ignored")


@pytest.mark.parametrize("to", [["vqf"], ["safetensors"], ["gguf", "--types", "q8_0"]])
def test_names_that_cannot_be_meant_are_refused(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: list[str]) -> None:
    monkeypatch.chdir(tmp_path)
    for given, said in (
        ([str(source), ""], "target: an empty name"),
        (["", "new"], "source: an empty name"),
        (["/dev/null", "n.gguf"], "/dev/null: neither a"),
    ):
        with pytest.raises(LabError, match=said):
            convert_command([*given, "--to", *to])
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(LabError, match=r"pipe\.gguf: neither a regular file nor a folder"):
        convert_command(["pipe.gguf", "n.gguf", "--to", *to])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.vqf", "pipe.gguf", "tokenizer.json"]


def test_help_says_what_the_options_mean() -> None:
    for word in (
        *WMODES,
        "default",
        "130",
        "SIGTERM",
        "folder DST",
        "DST is a .vqf file, or a folder",
        "config.json and tokenizer.json beside it",
        "does not run g256",
    ):
        assert word in CONVERT_HELP, word
    assert max(map(len, CONVERT_HELP.splitlines())) <= 160
