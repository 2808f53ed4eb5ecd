"""The one command for all kernels: nothing is timed after a red part, and every part exists. What it does not prove: what a GPU says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from experiments.gpu_bench import parts, run_all


def test_a_red_part_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[str] = []

    def run(name: str, words: Sequence[str]) -> int:
        ran.append(name)
        return 1 if name == "flash_next_bench" else 0

    assert run_all(parts(8, None), run) == 1
    assert ran == ["kernel_bench", "flash_next_bench"]
    assert "flash_next_bench ended with exit code 1" in capsys.readouterr().out


def test_what_is_not_installed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_all([("humming_bench", (), "no_such_package")], lambda name, words: 1) == 0
    assert "humming_bench: not run, no_such_package is not installed" in capsys.readouterr().out


def test_every_part_is_a_module_and_keeps_its_samples(tmp_path: Path) -> None:
    todo = parts(8, tmp_path)
    assert all(find_spec(f"experiments.{name}") is not None for name, _, _ in todo)
    assert {Path(words[-1]).name for _, words, _ in todo if "--out" in words} == {"kernels.json", "tiers.json", "gguf.json", "humming.json"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, "-m", "experiments.gpu_bench"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("gpu_bench needs a GPU")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing where there is no GPU")
@pytest.mark.parametrize("name", ["kernel_bench", "flash_next_bench", "prefill_bench", "gguf_gpu_bench", "humming_bench", "fallback_check"])
def test_every_part_says_so_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", [name])
    assert import_module(f"experiments.{name}").main() == 2
    told = capsys.readouterr()
    assert told.err.startswith(f"{name} needs a GPU") and told.err.count("\n") == 1 and not told.out


@pytest.mark.parametrize("name", ["flash_next_bench", "prefill_bench"])
def test_a_part_that_there_is_not_is_a_wrong_command(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", [name, "cheks"])
    with pytest.raises(SystemExit, match="2"):
        import_module(f"experiments.{name}").main()
    assert "no part 'cheks'; there are checks," in capsys.readouterr().err


def test_a_fallback_check_on_an_unknown_device_is_a_wrong_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["fallback_check", "--device", "foo"])
    assert import_module("experiments.fallback_check").main() == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("name", ["check_rows", "check_delta", "check_indexer", "check_mixer_bf16", "check_shared_bf16"])
def test_a_steps_checks_run_and_are_green(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Those that the interpreter can take at true sizes; a check that cannot run would cost a GPU its time. The interpreter cuts bfloat16 where a GPU rounds,
    hence twice the benches' tolerance."""
    pytest.importorskip("triton", reason="triton is not installed")
    from experiments import step_checks
    from tests.kernels.support import DEVICE

    monkeypatch.setattr(step_checks, "DEVICE", DEVICE)
    found = list(getattr(step_checks, name)(1))
    assert found and all(error <= 2e-2 for _, error in found), found
