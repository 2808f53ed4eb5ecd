"""A path's codecs and placements on a checkpoint: what is adopted, what is encoded, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lab.artifacts import Checkpoint, HfWeights
from lab.cell import ComponentPlan
from lab.counters import Counters
from lab.engines.path_binder import PathBinder
from lab.errors import LabError
from lab.models import inventory
from lab.models.qwen4_exp.config import from_file
from lab.models.qwen4_exp.model import Qwen4Exp
from lab.ops import PackedTable
from tests.models.tiny import text_ids, tiny_model, write_checkpoint

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(path / "fused", tiny_model(3), "fused")
    write_checkpoint(path / "fp8", tiny_model(2, moe_intermediate_size=128), "fp8")
    return path


def load(folder: Path, **codecs: str | ComponentPlan) -> tuple[Qwen4Exp, PathBinder]:
    plan = {name: c if isinstance(c, ComponentPlan) else ComponentPlan(codec=c) for name, c in codecs.items()}
    binder = PathBinder(HfWeights(Checkpoint(folder)), plan, CPU, torch.float32, Counters())
    return Qwen4Exp(from_file(folder / "config.json"), binder), binder


@torch.no_grad()
def test_each_codec_runs_and_is_further_from_the_source_the_fewer_its_bits(folder: Path) -> None:
    ids = text_ids(1, 60)
    source = load(folder / "fused")[0].logits(ids).log_softmax(-1)
    errors = {}
    for codec in ("bf16", "int8_g128", "w3_levels", "q2_g32", "q2_levels"):
        model, binder = load(folder / "fused", experts=codec)
        errors[codec] = float((model.logits(ids).log_softmax(-1) - source).square().mean())
        assert {e["codec"] for e in binder.resident() if e["component"] == "experts"} == {codec}
    assert errors["bf16"] == 0 < errors["int8_g128"] < errors["w3_levels"] < errors["q2_g32"] < errors["q2_levels"]


@torch.no_grad()
def test_few_tokens_and_many_take_different_code_and_give_the_same(folder: Path) -> None:
    """Up to as many slots as experts go through one batched product, more through one product per expert."""
    model, _ = load(folder / "fused", experts="q2_g32")
    experts = model.layers[0].moe.experts
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(0, 8, (40, 3), generator=torch.Generator().manual_seed(1))
    weights = torch.rand(40, 3, generator=torch.Generator().manual_seed(2))
    one_by_one = torch.cat([experts(x[i : i + 1], ids[i : i + 1], weights[i : i + 1]) for i in range(40)])
    torch.testing.assert_close(experts(x, ids, weights), one_by_one, atol=1e-5, rtol=1e-5)


def test_released_e4m3_is_adopted_by_an_e4m3_path_without_requantising(folder: Path) -> None:
    plan = ComponentPlan(codec="e4m3", options={"scale": "block128"})
    _, binder = load(folder / "fp8", experts=plan, ple="e4m3")
    assert "experts" not in binder.quality and "ple" not in binder.quality
    assert {e["codec"] for e in binder.resident() if e["component"] in ("experts", "ple")} == {"e4m3"}


def test_released_e4m3_is_decoded_before_another_codec_encodes_it(folder: Path) -> None:
    _, binder = load(folder / "fp8", experts="q2_g32", ple="q2_rows")
    assert len({found["checksum"] for found in binder.encodings().values()}) == 2
    assert 0.8 < binder.encodings()["experts"]["min"] < 0.99 and binder.encodings()["ple"]["tensors"] == 4, "the table is encoded shard by shard"


def test_a_table_on_the_host_is_counted_there(folder: Path) -> None:
    _, binder = load(folder / "fused", ple=ComponentPlan(codec="q2_rows", placement="host"))
    (entry,) = [e for e in binder.resident() if e["component"] == "ple"]
    rows, width = next(iter(inventory(from_file(folder / "fused" / "config.json")).tables.values()))
    assert entry["device"] == "cpu" and entry["bytes"] == rows * (width // 4 + 4)


@pytest.mark.parametrize("codec", ["source", "bf16", "int8_g128", "q2_rows", "e4m3"])
def test_a_sharded_table_is_the_same_as_one_encoded_whole(folder: Path, tmp_path: Path, codec: str) -> None:
    """Four shards, written one by one into their place, against one tensor."""
    from lab.models.qwen4_exp.ngram import NGramInjection

    tensors = load_file(folder / "fused" / "model.safetensors")
    names = sorted(n for n in tensors if ".shard_" in n)
    tensors[names[0].replace("shard_0.weight", "weight")] = torch.cat([tensors.pop(n) for n in names])
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "fused" / "config.json").read_text())
    injections = [load(f, ple=codec)[0].layers[1].ple for f in (folder / "fused", tmp_path)]
    tables = [i.table for i in injections if isinstance(i, NGramInjection) and isinstance(i.table, PackedTable)]
    assert len(tables) == 2 and tables[0].weight.parts.keys() == tables[1].weight.parts.keys()
    for key, part in tables[0].weight.parts.items():
        assert torch.equal(part.view(torch.uint8), tables[1].weight.parts[key].view(torch.uint8)), key


def test_an_unknown_placement_or_codec_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(LabError, match="path.components.experts.placement=tiered"):
        load(folder / "fused", experts=ComponentPlan(codec="bf16", placement="tiered"))
    with pytest.raises(LabError, match="path.components.head.placement=host: the local engine places head on device only"):
        load(folder / "fused", head=ComponentPlan(codec="bf16", placement="host"))
    with pytest.raises(LabError, match="w5"):
        load(folder / "fused", experts="w5")


def _not_a_number(t: dict[str, Tensor]) -> None:
    t["lm_head.weight"] = t["lm_head.weight"].float()
    t["lm_head.weight"][3, 1] = torch.nan


def _as_float64(t: dict[str, Tensor]) -> None:
    t["lm_head.weight"] = t["lm_head.weight"].double()


def _constants_as_float(t: dict[str, Tensor]) -> None:
    name = "model.language_model.layers.1.ple.ple_embedding.layer_multipliers"
    t[name] = t[name].double()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_not_a_number, "lm_head.weight: codec gguf:F32: the weight holds NaN or infinity"),
        (_as_float64, "lm_head.weight is stored as torch.float64"),
        (_constants_as_float, "hash constants must be int64"),
    ],
)
def test_other_dtypes_than_the_released_are_refused(folder: Path, tmp_path: Path, change: Callable[[dict[str, Tensor]], None], message: str) -> None:
    tensors = load_file(folder / "fused" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "fused" / "config.json").read_text())
    with pytest.raises(LabError, match=message):
        load(tmp_path)
