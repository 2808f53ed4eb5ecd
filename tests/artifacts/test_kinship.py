"""Files of another model are refused under this one's name. What it does not prove: that weights of the same sizes are the model's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lab.artifacts.kinship import check_kinship
from lab.cell import ModelSpec
from lab.errors import LabError
from lab.models import ModelConfig, read_config
from lab.models.fields import config_json
from tests.runner_helpers import ROOT

SMALL = ROOT / "experiments" / "qwen3_small" / "config.json"


def config(**changes: int) -> ModelConfig:
    return read_config("qwen3", config_json(SMALL) | changes, "config")


def spec(**given: str) -> ModelSpec:
    return ModelSpec(name="mine", arch="qwen3", artifact="other", corpus="text", **given)


def test_the_models_own_files_a_cut_and_files_of_no_known_model_pass(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(SMALL.read_text())
    for model in (spec(source="own"), spec(geometry="own/config.json"), spec(), spec(source="absent", geometry="own/config.json")):
        check_kinship(tmp_path, model, config())
        check_kinship(tmp_path, model, config(num_hidden_layers=2))
        check_kinship(tmp_path, model, config(vocab_size=4096))  # padded


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"hidden_size": 512}, "width 512, not 256"),
        ({"num_attention_heads": 8}, "heads 8, not 4"),
        ({"num_key_value_heads": 1}, "key-value heads 1, not 2"),
        ({"num_hidden_layers": 7}, "layers 7, not 6"),
    ],
)
def test_another_model_is_named_by_what_differs(tmp_path: Path, change: dict[str, int], told: str) -> None:
    (tmp_path / "g.json").write_text(json.dumps(config_json(SMALL)))
    with pytest.raises(LabError, match=f"^other: {told}: these are no files of model=mine; name the model that they hold \\(a file in conf/model\\)$"):
        check_kinship(tmp_path, spec(geometry="g.json"), config(**change))
