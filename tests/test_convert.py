"""`python -m lab convert --to gguf`: plans that say what they mean, refusals in one line, and nothing left where it fails."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from lab.artifacts.gguf import open_gguf
from lab.artifacts.gguf_model import GgufArtifact
from lab.artifacts.hf import HfArtifact
from lab.codecs import cosine, gguf_encode
from lab.codecs.gguf_types import TYPES
from lab.convert import convert_command
from lab.convert.gguf import convert
from lab.convert.gguf_plan import find_plan, read_plan
from lab.errors import LabError
from lab.models.qwen4_exp.config import Qwen4ExpConfig
from tests.convert_helpers import NANO, matrices, small_checkpoint

PLANS = NANO.parent.parent / "conf" / "gguf_plans"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_checkpoint(tmp_path_factory.mktemp("convert") / "source", hc_lowrank=32)


def _plan(folder: Path, text: str) -> Path:
    path = folder / "plan.yaml"
    path.write_text("name: x\ntitle: y\n" + text)
    return path


MIXED = r"""
rules:
  - {tensors: 'blk\.\d+\.ffn_(gate|up)_exps\.weight', layers: "0,2-3", type: Q2_0}
  - {tensors: 'blk\.\d+\.ffn_(gate|up)_exps\.weight', type: IQ4_NL}
  - {tensors: 'blk\.\d+\.ffn_down_exps\.weight', type: Q4_K, fallback: Q2_0}
  - {tensors: 'per_layer_token_embd\.weight', type: IQ4_NL, fallback: BF16}
default: {type: Q8_0, fallback: F16}
"""


def test_a_mixed_plan_gives_each_tensor_its_type(source: Path, tmp_path: Path) -> None:
    if "Q4_K" not in gguf_encode.ENCODERS:
        pytest.skip("no encoder for Q4_K")
    sums = convert(source, tmp_path / "x.gguf", _plan(tmp_path, MIXED))
    types = {name: tensor.type.name for name, tensor in open_gguf(tmp_path / "x.gguf").tensors.items()}
    assert [types[f"blk.{i}.ffn_up_exps.weight"] for i in range(4)] == ["Q2_0", "IQ4_NL", "Q2_0", "Q2_0"]
    assert {types[f"blk.{i}.ffn_down_exps.weight"] for i in range(4)} == {"Q2_0"}
    assert types["per_layer_token_embd.weight"] == "BF16" and types["blk.3.attn_q.weight"] == "Q8_0"
    assert {types[name] for name in types if name.endswith(("norm.weight", "conv1d.weight", "ssm_a", "bias"))} == {"F32"}
    assert sum(each.tensors for each in sums.values()) == len(types)
    opened = open_gguf(tmp_path / "x.gguf")
    for name, each in sums.items():
        assert each.nbytes == sum(t.nbytes for t in opened.tensors.values() if t.type.name == name)
    right, file = HfArtifact(source, "qwen4_exp"), GgufArtifact(tmp_path / "x.gguf")
    config = right.config()
    assert isinstance(config, Qwen4ExpConfig)
    expected = matrices(config, right.weights())
    for name, found in matrices(config, file.weights()).items():
        assert cosine(found, expected[name]) > (0.85 if ".experts" in name else 0.999), name


def test_an_encoder_that_is_wrong_is_found_and_nothing_stays(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = gguf_encode.ENCODERS["Q8_0"]
    monkeypatch.setitem(gguf_encode.ENCODERS, "Q8_0", lambda rows: right(rows.roll(1, dims=0)))
    with pytest.raises(LabError, match=r"tensor token_embd\.weight: codec gguf:Q8_0: cosine"):
        convert(source, tmp_path / "x.gguf", PLANS / "q8_0.yaml")
    assert not list(tmp_path.iterdir())


def test_the_command_writes_and_refuses_to_overwrite(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(source), str(tmp_path / "x.gguf"), "--to", "gguf", "--types", "q8_0"]
    assert convert_command(words) == 0
    shown = capsys.readouterr()
    assert "Q8_0" in shown.out and "bpw" in shown.out and "NFC" in shown.err
    before = (tmp_path / "x.gguf").read_bytes()
    with pytest.raises(LabError, match="exists; choose another name or say --force"):
        convert_command(words)
    assert convert_command([*words, "--force"]) == 0
    assert (tmp_path / "x.gguf").read_bytes() == before  # the same source and plan give the same file
    assert list(tmp_path.iterdir()) == [tmp_path / "x.gguf"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--to"),
        (["a", "b", "--to", "onnx"], "invalid choice: 'onnx'"),
        (["a", "b", "--to", "gguf"], "--types"),
        (["a", "--to", "gguf", "--types", "q8_0"], "target"),
        (["a", "b", "--to", "gguf", "--types", "q8_0", "--fast"], "--fast"),
        (["a.gguf", "b.gguf", "--to", "gguf", "--types", "q8_0"], "GGUF to GGUF is not supported"),
        (["a", "b.gguf", "--to", "gguf", "--types", "q8_0", "--device", "abacus"], "--device abacus: not usable here"),
        (["a", "b.gguf", "--to", "gguf", "--types", "nine"], "--types nine: no such file"),
        (["no-such-folder", "b.gguf", "--to", "gguf", "--types", "q8_0"], "no-such-folder: no such artifact folder"),
    ],
)
def test_a_wrong_command_is_one_line(words: list[str], said: str) -> None:
    with pytest.raises(LabError) as caught:
        convert_command(words)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_help_names_the_formats(capsys: pytest.CaptureFixture[str]) -> None:
    assert convert_command(["--help"]) == 0
    assert "--to gguf" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("default: {type: Q9_9}", "default.type: 'Q9_9' is no type"),
        ("default: {type: TQ1_0}", "default.type: 'TQ1_0' is only read, not written"),
        ("rules: []", "default: missing"),
        ("default: Q8_0", "default: missing"),
        ("default: {type: Q8_0}\nruls: []", "ruls: unknown key"),
        ("default: {type: Q8_0, tensors: x}", "default: has only type and fallback"),
        ("rules: [{tensors: 'a(', type: Q8_0}]\ndefault: {type: Q8_0}", "rules[0].tensors: 'a(' is no regular expression"),
        ("rules: [{tensors: a, type: Q8_0, layer: 1}]\ndefault: {type: Q8_0}", "rules[0].layer: unknown key"),
        ("rules: [{type: Q8_0}]\ndefault: {type: Q8_0}", "rules[0].tensors: expected"),
        ("rules: [{tensors: a, type: Q8_0, layers: 3-1}]\ndefault: {type: Q8_0}", "rules[0].layers: '3-1' is no list of layers"),
        ("rules: [{tensors: a, type: Q8_0, layers: all}]\ndefault: {type: Q8_0}", "rules[0].layers: 'all'"),
        ("rules: [{tensors: a, type: Q8_0, fallback: F99}]\ndefault: {type: Q8_0}", "rules[0].fallback: 'F99' is no type"),
        ("rules: [x]\ndefault: {type: Q8_0}", "rules[0]: expected tensors and type"),
        ("rules: 3\ndefault: {type: Q8_0}", "rules: expected a list"),
        ("default: {type: [Q8_0]}", "default.type"),
        ("default: {type: Q8_0", "cannot be read as YAML"),
    ],
)
def test_a_wrong_plan_is_one_line_with_its_key(tmp_path: Path, text: str, said: str) -> None:
    path = _plan(tmp_path, text)
    with pytest.raises(LabError) as caught:
        read_plan(path)
    assert str(caught.value).startswith(f"{path}: ") and said in str(caught.value) and "\n" not in str(caught.value)


def test_a_row_that_fits_nothing_names_tensor_and_type(tmp_path: Path) -> None:
    plan = read_plan(_plan(tmp_path, "rules: [{tensors: a, type: IQ4_NL}, {tensors: b, type: Q8_0, fallback: Q2_0}]\ndefault: {type: Q8_0, fallback: F16}"))
    with pytest.raises(LabError, match=r"tensor a: rows of 48 weights are no whole blocks of 32 \(IQ4_NL\); name a fallback"):
        plan.choose("a", 0, 48)
    with pytest.raises(LabError, match="tensor b: rows of 48 weights fit neither Q8_0 nor its fallback Q2_0"):
        plan.choose("b", 0, 48)
    assert plan.choose("aa", None, 48) == TYPES["F16"] and plan.choose("aa", 3, 64) == TYPES["Q8_0"]


def test_rules_that_decide_nothing_are_known(tmp_path: Path) -> None:
    rules = "rules: [{tensors: 'a.*', type: F16}, {tensors: ab, type: F32}, {tensors: c, layers: 5, type: F32}, {tensors: d, layers: 0-2, type: F32}]"
    plan = read_plan(_plan(tmp_path, rules + "\ndefault: {type: Q8_0, fallback: F16}"))
    assert plan.idle([("ab", 0), ("c", 4), ("d", 2), ("e", None)]) == [1, 2]


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_plan_that_comes_with_the_project_fits_nano_and_the_released_sizes(path: Path) -> None:
    plan = read_plan(path)
    assert plan.name == path.stem and find_plan(path.stem, PLANS) == path
    for name, layer, cols in (("blk.47.ffn_down_exps.weight", 47, 640), ("per_layer_token_embd.weight", None, 160), ("blk.9.hc_ffn_up.weight", 9, 16)):
        assert plan.choose(name, layer, cols).fits(cols)
    assert plan.choose("blk.3.ffn_gate_inp.weight", 3, 2560) == TYPES["F32"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"output_gate_type": "silu"}, "output_gate_type 'silu': llama.cpp computes a sigmoid"),
        ({"norm_topk_prob": False}, "norm_topk_prob false"),
        ({"ple_embed_dim": 32}, "ple_embed_dim is not hidden_size"),
        ({"linear_value_head_dim": 32}, "linear_key_head_dim and linear_value_head_dim differ"),
        ({"model_type": "llama"}, "only qwen4_exp can be written"),
    ],
)
def test_what_llama_cpp_would_compute_otherwise_is_refused(source: Path, tmp_path: Path, changes: dict[str, object], said: str) -> None:
    if set(changes) & {"ple_embed_dim", "linear_value_head_dim"}:
        folder = small_checkpoint(tmp_path / "source", **changes)
    else:
        folder = tmp_path / "source"
        shutil.copytree(source, folder)
        data = json.loads((folder / "config.json").read_text())
        (data if "model_type" in changes else data["text_config"]).update(changes)
        (folder / "config.json").write_text(json.dumps(data))
    with pytest.raises(LabError) as caught:
        convert(folder, tmp_path / "x.gguf", PLANS / "f32.yaml")
    assert said in str(caught.value) and not (tmp_path / "x.gguf").exists()


def _tokenizer(folder: Path, source: Path, old: str, new: str) -> Path:
    shutil.copytree(source, folder)
    text = (folder / "tokenizer.json").read_text()
    assert old in text
    (folder / "tokenizer.json").write_text(text.replace(old, new))
    return folder


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (r"[\\p{L}\\p{M}]+|\\p{N}|", r"[\\p{L}\\p{M}]+|\\p{N}{1,3}|", "no pre-tokeniser with this pattern"),
        ('"type": "NFC"', '"type": "NFKC"', "normalizer 'NFKC' is not supported"),
        ('"ignore_merges": false', '"ignore_merges": true', "follows its merges"),
        ('"use_regex": false', '"use_regex": true', "no pre-tokeniser with this pattern"),
    ],
)
def test_a_tokenizer_that_llama_cpp_would_read_otherwise_is_refused(source: Path, tmp_path: Path, old: str, new: str, said: str) -> None:
    folder = _tokenizer(tmp_path / "source", source, old, new)
    with pytest.raises(LabError, match=said):
        convert(folder, tmp_path / "x.gguf", PLANS / "f32.yaml")
    assert not (tmp_path / "x.gguf").exists()


def test_ids_without_a_token_are_unused_ones(tmp_path: Path) -> None:
    source = small_checkpoint(tmp_path / "source", vocab_size=2563)
    convert(source, tmp_path / "x.gguf", PLANS / "f32.yaml")
    opened = open_gguf(tmp_path / "x.gguf")
    tokens, kinds = opened.metadata["tokenizer.ggml.tokens"], opened.metadata["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list) and tokens[2560:] == ["[PAD2560]", "[PAD2561]", "[PAD2562]"] and list(kinds[2559:]) == [1, 5, 5, 5]  # type: ignore[index]
    assert tokens[0] == "<|endoftext|>" and kinds[0] == 3  # type: ignore[index]
    rows = torch.from_numpy(opened.raw("token_embd.weight").copy()).view(torch.float32)
    assert rows.shape == (2563, 64)


@pytest.mark.parametrize("name", ["model.bin", "model", "model-00001-of-00003.gguf"])
def test_a_name_that_nothing_would_take_for_a_gguf_file_is_refused_before_any_work(name: str, tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"name the file with \.gguf, and not as a shard"):
        convert_command([str(NANO), str(tmp_path / name), "--to", "gguf", "--types", "q8_0"])
    assert not list(tmp_path.iterdir())
