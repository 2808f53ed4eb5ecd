"""The launcher of llama.cpp's server: one line for every mistake, and the settings that a measurement needs."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lab.cell import PathSpec
from lab.engines.llama_cpp.serve import main
from lab.engines.server.process import start_command


@pytest.mark.parametrize("arguments", [[], ["m.gguf"], ["m.gguf", "port"], ["m.gguf", "-1"], ["m.gguf", "1", "two"], ["m.gguf", "1", "2", "3"]])
def test_wrong_arguments_print_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "usage: python -m lab.engines.llama_cpp.serve FILE.gguf PORT" in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "m.gguf"), "8090"]) == 2
    assert "m.gguf: no such file" in capsys.readouterr().err


def test_without_the_package_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.gguf").touch()
    monkeypatch.setitem(sys.modules, "xllamacpp", None)
    assert main([str(tmp_path / "m.gguf"), "8090"]) == 2
    assert capsys.readouterr().err == "error: llama.cpp's server needs xllamacpp: pip install 'migration-lab[llama_server]'\n"


def test_prompts_are_not_kept_and_four_fit_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SimpleNamespace(model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace())
    served: list[Any] = []

    def serve(given: Any) -> Any:
        served.append(given)
        return SimpleNamespace(listening_address="here")

    fake = SimpleNamespace(CommonParams=lambda: params, Server=serve, llama_flash_attn_type=lambda value: value)
    monkeypatch.setitem(sys.modules, "xllamacpp", fake)
    monkeypatch.setattr("time.sleep", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    (tmp_path / "m.gguf").touch()
    with pytest.raises(KeyboardInterrupt):
        main([str(tmp_path / "m.gguf"), "8091"])
    assert served == [params]
    assert (params.model.path, params.port) == (str(tmp_path / "m.gguf"), 8091)
    assert (params.cache_prompt, params.cache_ram_mib, params.n_parallel, params.flash_attn_type) == (False, 0, 4, 0)
    assert params.n_ctx // params.n_parallel >= 512 + 128


def test_the_path_starts_this_launcher() -> None:
    import yaml

    file = Path(__file__).parents[2] / "conf" / "paths" / "llama_server.yaml"
    spec = PathSpec.model_validate(yaml.safe_load(file.read_text())).server
    assert spec is not None
    words = start_command(spec, Path("some/m.gguf"), 30, 8090, 2)
    assert words[1:] == ["-m", "lab.engines.llama_cpp.serve", "some/m.gguf", "8090", "2"]
    assert spec.url.endswith(":8090/v1")
