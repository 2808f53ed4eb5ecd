"""`python -m lab convert --to safetensors`: transformers loads the folder and computes what the file holds; nothing is left where it fails."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as hf
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from lab.artifacts import open_artifact
from lab.artifacts.hf import HfArtifact
from lab.artifacts.vqf import VqfArtifact
from lab.artifacts.vqf_convert import run as to_vqf
from lab.artifacts.vqf_flags import Engine
from lab.convert import convert_command
from lab.convert.safetensors import convert, narrowest
from lab.counters import Counters
from lab.engines.path_binder import PathBinder
from lab.errors import LabError
from lab.models import build
from tests.artifacts.gguf_models import hf_model, model_of
from tests.artifacts.test_vqf_engine import with_weights_of
from tests.artifacts.test_vqf_writer import VOCAB, arguments, dense, mixture, saved
from tests.artifacts.vqf_files import one_thread  # noqa: F401


def logits(artifact: Any, ids: torch.Tensor) -> torch.Tensor:
    binder = PathBinder(artifact.weights(), {}, torch.device("cpu"), torch.float32, Counters())
    return build(artifact.config(), binder).logits(ids)


@torch.no_grad()
@pytest.mark.parametrize(("make", "wmode"), [(dense, "q4"), (dense, "q8"), (mixture, "q4")])
@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000])
def test_a_vqf_file_becomes_what_transformers_loads(tmp_path: Path, make: Any, wmode: str, shard_bytes: int) -> None:
    saved(make(), tmp_path / "hf")
    to_vqf(tmp_path / "hf", tmp_path / "vqf", arguments(wmode=wmode, layout="0x1"))  # no engine runs it, so that the gate does not apply
    convert(tmp_path / "vqf" / "model.vqf", tmp_path / "out", shard_bytes=shard_bytes)
    model = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    source = VqfArtifact(tmp_path / "vqf", Engine(q4_4x4=False))
    ids = torch.randint(0, VOCAB, (2, 21), generator=torch.Generator().manual_seed(4))
    expected = with_weights_of(make(), source)
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert torch.equal(model(ids).logits, expected(ids).logits)
    ours = HfArtifact(tmp_path / "out", source.arch)
    assert float((logits(ours, ids) - expected(ids).logits).abs().max()) < 1e-4
    assert (tmp_path / "out" / "model.safetensors.index.json").exists() == (shard_bytes < 1 << 30)
    assert ours.tokenizer().get_vocab() == source.tokenizer().get_vocab()


@torch.no_grad()
@pytest.mark.parametrize(("arch", "tied"), [("qwen3", True), ("qwen3", False), ("qwen3moe", False), ("llama", False)])
def test_a_gguf_file_is_a_source_too(tmp_path: Path, arch: str, tied: bool) -> None:
    made = model_of(hf_model(arch, tied), arch)
    made.kind_of = lambda name: Kind.Q8_0 if "attn" in name else Kind.F16
    made.write(tmp_path / "m.gguf")
    convert(tmp_path / "m.gguf", tmp_path / "out", shard_bytes=50_000)
    ids = torch.randint(0, 256, (2, 21), generator=torch.Generator().manual_seed(4))
    source = open_artifact(tmp_path / "m.gguf", "qwen3_moe" if arch == "qwen3moe" else arch)
    expected, model = logits(source, ids), hf.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert float((model(ids).logits - expected).abs().max()) < 1e-4 * float(expected.abs().max()) + 1e-5
    again = open_artifact(tmp_path / "out", source.arch)  # type: ignore[attr-defined]
    names = {block.codec.name for i in range(2) for block in again.weights().matrix(f"layers.{i}.self_attn.q_proj.weight")}
    assert names == {"gguf:F32"} and again.config().num_layers == source.config().num_layers


def test_the_narrowest_float_changes_no_value() -> None:
    exact = torch.tensor([1.0, -2.5, 2.0**100])
    assert narrowest(exact).dtype is torch.bfloat16
    assert narrowest(torch.tensor([1.0 + 2.0**-10])).dtype is torch.float16
    for odd in ([1.0 + 2.0**-20], [1.0 + 2.0**-10, 2.0**100]):
        assert torch.equal(narrowest(torch.tensor(odd)), torch.tensor(odd)) and narrowest(torch.tensor(odd)).dtype is torch.float32


@pytest.fixture
def file(tmp_path: Path) -> Path:
    saved(dense(), tmp_path / "hf")
    to_vqf(tmp_path / "hf", tmp_path / "vqf", arguments(wmode="q4"))
    return tmp_path / "vqf" / "model.vqf"


def test_the_command_says_what_it_wrote_and_replaces_only_checkpoints(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(file), str(tmp_path / "out"), "--to", "safetensors"]
    assert convert_command(words) == 0
    assert "as float16" in capsys.readouterr().out
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    with pytest.raises(LabError, match="exists; choose another name or say --force"):
        convert_command(words)
    assert convert_command([*words, "--force"]) == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    (tmp_path / "out" / "thesis.tex").write_text("\n")
    with pytest.raises(LabError, match=r"holds thesis\.tex, which is no part of a checkpoint"):
        convert_command([*words, "--force"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out", "vqf"]


def test_a_failure_leaves_nothing_and_keeps_what_was_there(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(file, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    calls = iter(range(100))

    def failing(*given: Any, **named: Any) -> None:
        if next(calls) == 2:
            raise OSError(28, "No space left on device")
        save_file(*given, **named)

    monkeypatch.setattr("lab.convert.safetensors.save_file", failing)
    with pytest.raises(LabError, match=r"out: cannot be written \(No space left on device\); nothing was left behind"):
        convert(file, tmp_path / "out", force=True, shard_bytes=10_000)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out", "vqf"]


def test_what_cannot_be_a_source_is_one_line(file: Path, tmp_path: Path) -> None:
    with pytest.raises(LabError, match="hf: neither a .gguf nor a .vqf file"):
        convert(tmp_path / "hf", tmp_path / "out")
    spoilt = tmp_path / "spoilt"
    shutil.copytree(file.parent, spoilt)
    content = bytearray((spoilt / "model.vqf").read_bytes())
    content[-5000] ^= 1
    (spoilt / "model.vqf").write_bytes(content)
    with pytest.raises(LabError, match="checksum"):
        convert(spoilt / "model.vqf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_target_is_looked_at_before_the_source_is_read(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(file.read_bytes())
    content[-100] ^= 1  # whoever reads it all finds the wrong checksum first
    file.write_bytes(content)
    (tmp_path / "taken").mkdir()
    (tmp_path / "text").write_text("\n")
    for name, force, message in (
        ("taken", False, "taken exists; choose another name or say --force"),
        ("text", True, "text: no folder; --force does not replace it"),
        ("text/deep/out", False, r"out: .*/text is no folder; choose another name"),
        ("out.safetensors", False, r"out\.safetensors: --to safetensors writes a folder; name it without \.safetensors"),
        ("out", False, "checksum"),
    ):
        with pytest.raises(LabError, match=message):
            convert(file, tmp_path / name, force)
    monkeypatch.setattr("lab.artifacts.publish.shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(LabError, match=r"out: needs \d{6} bytes, .* has 1000 free; make room"):
        convert(file, tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "taken", "text", "vqf"]


def test_files_have_the_mode_of_new_files_and_progress_reaches_the_end(file: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    before = os.umask(0o027)
    try:
        done = convert(file, tmp_path / "out", shard_bytes=20_000, progress=lambda *step: seen.append(step))
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o640}
    count = sum(done.weights.values())
    assert any(what == "checking the sum" for *_, what in seen) and (2 * count, 2 * count) in [(at, total) for at, total, _ in seen]


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_came_meanwhile_is_kept(file: Path, tmp_path: Path, force: bool) -> None:
    def meanwhile(*_: Any) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "thesis.tex").write_text("\n")

    with pytest.raises(LabError, match="out exists; choose another" if not force else r"holds thesis\.tex"):
        convert(file, tmp_path / "out", force, progress=meanwhile)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["thesis.tex"] and len(list(tmp_path.iterdir())) == 3


def test_a_folder_that_another_made_is_never_removed(file: Path, tmp_path: Path) -> None:
    (tmp_path / f".out.{os.getpid()}.partial").mkdir()
    (tmp_path / f".out.{os.getpid()}.partial" / "thesis.tex").write_text("\n")
    convert(file, tmp_path / "out")
    assert (tmp_path / f".out.{os.getpid()}.partial" / "thesis.tex").exists() and (tmp_path / "out" / "config.json").exists()
