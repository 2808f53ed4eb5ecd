"""An artifact folder that is wrong in any one way is refused in one line that names the file or tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lab.artifacts import Checkpoint, open_artifact
from lab.errors import LabError
from tests.models.tiny import tiny_model, write_checkpoint, write_tokenizer


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifact") / "good"
    write_checkpoint(folder, tiny_model(3), "fused")
    return folder


def _config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    data = json.loads(path.read_text())
    data["text_config"].update(changes)
    path.write_text(json.dumps(data))


def _tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


P = "model.language_model."
TABLE = f"{P}layers.1.ple.ple_embedding.ngram_embedding.shard_"


def _truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _float_constant(t: dict[str, torch.Tensor]) -> None:
    name = f"{P}layers.1.ple.ple_embedding.layer_multipliers"
    t[name] = t[name].float().long()


def _e4m3_norm(t: dict[str, torch.Tensor]) -> None:
    name = f"{P}hyper_connection_mixer.hc_norm.weight"
    t[name] = t[name].to(torch.float8_e4m3fn)


def _e4m3_shard(t: dict[str, torch.Tensor]) -> None:
    t[f"{TABLE}1.weight"] = t[f"{TABLE}1.weight"].to(torch.float8_e4m3fn)


def _short_constants(t: dict[str, torch.Tensor]) -> None:
    name = f"{P}layers.1.ple.ple_embedding.ngram_heads_offsets"
    t[name] = t[name].int()


FAULTS: list[tuple[str, Callable[[Path], Any], str]] = [
    ("no weights", lambda f: (f / "model.safetensors").unlink(), "model.safetensors: no such file"),
    ("truncated", _truncate, "model.safetensors: truncated or not a safetensors file"),
    ("not safetensors", lambda f: (f / "model.safetensors").write_text("hello"), "not a safetensors file"),
    ("empty file", lambda f: (f / "model.safetensors").write_bytes(b""), "not a safetensors file"),
    ("no config", lambda f: (f / "config.json").unlink(), "config.json: no such file"),
    ("broken config", lambda f: (f / "config.json").write_text("{"), "config.json: not valid JSON"),
    ("config without end", lambda f: (f / "config.json").write_text("[" * 100_000), "config.json: not valid JSON"),
    ("config with a number of 5000 digits", lambda f: (f / "config.json").write_text('{"hidden_size": ' + "9" * 5000 + "}"), "config.json: not valid JSON"),
    ("index without end", lambda f: (f / "model.safetensors.index.json").write_text("[" * 100_000), "model.safetensors.index.json: not a safetensors index"),
    ("config is a list", lambda f: (f / "config.json").write_text("[]"), "config.json: expected an object"),
    ("other model", lambda f: (f / "config.json").write_text('{"model_type": "llama"}'), "model_type 'llama' is not one of qwen4_exp"),
    ("field missing", lambda f: _config(f, hc_count=None), "field hc_count is missing"),
    ("field is text", lambda f: _config(f, hidden_size="wide"), "field hidden_size: 'wide' is not a whole number"),
    ("field negative", lambda f: _config(f, num_experts=-8), "field num_experts: -8 must be at least 1"),
    ("rope type", lambda f: _config(f, rope_parameters={"rope_type": "yarn"}), "rope_type 'yarn' is not supported"),
    ("two PLE layers", lambda f: _config(f, ple_layer_ids=[1, 2]), "more than one PLE layer"),
    ("layer types", lambda f: _config(f, layer_types=["linear_attention", "mamba", "linear_attention"]), "unknown: ['mamba']"),
    ("heads", lambda f: _config(f, num_key_value_heads=3), "num_attention_heads must be a multiple"),
    ("other size", lambda f: _config(f, shared_expert_intermediate_size=64), "has shape [48, 64], config.json asks for [64, 64]"),
    (
        "more layers",
        lambda f: _config(f, num_hidden_layers=4, layer_types=None),
        "tensor layers.3.attn_hyper_connection.input_mix_weight_down.weight is missing",
    ),
    ("tensor missing", lambda f: _tensors(f, lambda t: t.pop(f"{P}layers.2.linear_attn.A_log")), "layers.2.linear_attn.A_log is missing"),
    ("shard missing", lambda f: _tensors(f, lambda t: t.pop(f"{TABLE}2.weight")), "are not 0..n-1"),
    ("short table", lambda f: _tensors(f, lambda t: t.update({f"{TABLE}3.weight": t[f"{TABLE}3.weight"][:-1].clone()})), "rows in 4 parts, expected"),
    ("hash constant through a float", lambda f: _tensors(f, _float_constant), "integers read through a float lose digits"),
    (
        "weights as int32",
        lambda f: _tensors(f, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].int()})),
        "lm_head.weight is stored as I32; expected BF16",
    ),
    ("norm as e4m3", lambda f: _tensors(f, _e4m3_norm), "hc_norm.weight is F8_E4M3 but its scale"),
    ("table as e4m3 without scale", lambda f: _tensors(f, _e4m3_shard), "is F8_E4M3 but its scale"),
    ("constants as int32", lambda f: _tensors(f, _short_constants), "hash constants must be I64"),
    ("a billion layers", lambda f: _config(f, num_hidden_layers=10**9, layer_types=None), "num_hidden_layers: 1000000000 must be at most 4096"),
    ("no tokenizer", lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json: no such file"),
    ("broken tokenizer", lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json: not a tokenizer"),
    ("tokenizer too large", lambda f: write_tokenizer(f, 98), "token id 97 does not fit the model's vocabulary of 97 rows"),
    ("eos unknown", lambda f: (write_tokenizer(f, 4), None), "eos_token_id 5 is no token of this tokenizer"),
    (
        "index names a missing shard",
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"a": "x.safetensors"}}'),
        "x.safetensors: no such file",
    ),
    ("index is no index", lambda f: (f / "model.safetensors.index.json").write_text("[1]"), "not a safetensors index"),
]


@pytest.mark.parametrize(("break_it", "message"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_a_wrong_folder_is_refused_in_one_line(good: Path, tmp_path: Path, break_it: Callable[[Path], Any], message: str) -> None:
    folder = tmp_path / "artifact"
    shutil.copytree(good, folder)
    break_it(folder)
    with pytest.raises(LabError) as refused:
        open_artifact(folder, "qwen4_exp").inspect()
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="no such artifact folder"):
        open_artifact(tmp_path / "nowhere", "qwen4_exp").inspect()


def test_facts_and_digest(good: Path, tmp_path: Path) -> None:
    facts = open_artifact(good, "qwen4_exp").inspect()
    assert facts["layers"] == 3 and facts["layout"] == "fused experts" and facts["vocab_size"] == 97
    shutil.copytree(good, tmp_path / "copy")
    assert open_artifact(tmp_path / "copy", "qwen4_exp").inspect()["sha256"] == facts["sha256"]
    write_tokenizer(tmp_path / "copy", 96)
    assert open_artifact(tmp_path / "copy", "qwen4_exp").inspect()["sha256"] != facts["sha256"], "another tokenizer is another artifact"


def test_sharded_files_and_foreign_tensors(good: Path, tmp_path: Path) -> None:
    """Two weight files with an index, as large checkpoints come; the draft head and vision tower are left out."""
    shutil.copytree(good, tmp_path / "a")
    tensors = load_file(good / "model.safetensors")
    names = sorted(tensors)
    halves = {"one.safetensors": names[::2], "two.safetensors": names[1::2]}
    for file, part in halves.items():
        extra = {"mtp.fc_hidden.weight": torch.ones(2), "model.visual.patch.weight": torch.ones(2)} if file.startswith("one") else {}
        save_file({**{n: tensors[n] for n in part}, **extra}, tmp_path / "a" / file)
    (tmp_path / "a" / "model.safetensors").unlink()
    index = {"weight_map": {n: f for f, part in halves.items() for n in part}}
    (tmp_path / "a" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert open_artifact(tmp_path / "a", "qwen4_exp").inspect()["tensors"] == open_artifact(good, "qwen4_exp").inspect()["tensors"]
    assert sorted(Checkpoint(tmp_path / "a").names()) == sorted(Checkpoint(good).names())
