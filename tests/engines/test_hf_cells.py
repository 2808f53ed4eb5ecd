"""Which cells engine=transformers takes, what its ledger counts, and the smaller table of synthetic models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lab.artifacts import open_model
from lab.capacity.build import build
from lab.cell import Cell
from lab.compose import plan
from lab.errors import LabError
from lab.models import inventory
from lab.models.fields import config_json
from lab.models.qwen4_exp.config import from_dict
from lab.models.qwen4_exp.table_rows import with_table_rows
from lab.preflight import clear
from lab.project import Project
from lab.record import Status

ROOT = Path(__file__).parents[2]
SIZES = ROOT / "conf" / "geometry" / "flash_next.json"
LARGE = ("model=flash_next", "artifact=synthetic", "engine=transformers", "path=reference", "device=h200")


def cell(*words: str) -> Cell:
    return plan(Project(root=ROOT, runs=ROOT / "runs"), words, with_codecs=False).cells[0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("path=expert_q2",), "path=expert_q2 stores them otherwise; use path=reference"),
        (("path=reference", "path.components.experts.codec=q2_g32"), "path=reference stores them otherwise"),
        (("path=reference", "mode=graph"), "mode=graph: transformers' model is run operation by operation"),
    ],
)
def test_what_transformers_cannot_hold_or_do_is_a_gap(words: tuple[str, ...], said: str, tmp_path: Path) -> None:
    found = clear(Project(root=ROOT, runs=tmp_path), cell("model=nano", "engine=transformers", "device=cpu", *words), force=False)
    assert found.stop is not None and found.stop[0] is Status.UNSUPPORTED
    assert said in found.stop[1]


def test_the_reference_path_is_let_through_and_named(tmp_path: Path) -> None:
    asked = cell("model=nano", "engine=transformers", "device=cpu", "path=reference")
    assert clear(Project(root=ROOT, runs=tmp_path), asked, force=False).stop is None
    assert "-transformers-" in asked.id


def test_a_smaller_table_is_another_cell_and_a_full_one_keeps_its_hash() -> None:
    whole, small = cell(*LARGE), cell(*LARGE, "model.table_rows=1000000")
    assert whole.hash != small.hash
    assert "table_rows" not in whole.identity()["model"]
    assert small.identity()["model"]["table_rows"] == 1000000
    with pytest.raises(LabError, match="model.table_rows=7: only for artifact=synthetic"):
        cell("model=flash_next", "model.table_rows=7", "device=cpu", "layers=4")


def test_a_table_is_made_smaller_not_larger() -> None:
    with pytest.raises(LabError, match="model.table_rows=1600001: the model's own table has about 1600000 rows, and the key makes it smaller"):
        with_table_rows({"ple_layer_ids": [1], "ngram_vocab_size_base": 100000, "ngram_size": 3, "heads_per_ngram": 8}, 1600001, "x")


@pytest.mark.parametrize("rows", [32, 1000, 4_000_000])
def test_table_rows_are_those_asked_for_or_a_little_more(rows: int) -> None:
    def found(data: dict[str, Any]) -> int:
        (size,) = inventory(from_dict(data, "x").truncated(2)).tables.values()
        return size[0]

    true = config_json(SIZES)
    assert rows <= found(with_table_rows(true, rows, "x")) < rows + 16 * 400
    assert found(true) > 320_000_000
    changed = with_table_rows(true, rows, "x")["text_config"]
    assert {key for key, value in true["text_config"].items() if changed[key] != value} == {"ngram_vocab_size_base"}


def test_a_model_without_a_table_or_rows_for_its_heads_is_refused() -> None:
    with pytest.raises(LabError, match="the model has no n-gram table"):
        with_table_rows({"hidden_size": 4}, 100, "x")
    with pytest.raises(LabError, match="16 heads need at least 32 rows"):
        with_table_rows(config_json(SIZES), 31, "x")


def test_the_artifact_says_how_many_rows(tmp_path: Path) -> None:
    found = [open_model(ROOT, cell(*LARGE, *more).model).inspect() for more in ((), ("model.table_rows=5000",))]
    assert "table" not in found[0]["layout"]
    assert found[1]["layout"].endswith("n-gram table of 5000 rows")
    assert found[0]["sha256"] != found[1]["sha256"]


def test_the_ledger_counts_what_transformers_holds() -> None:
    """Everything in the dtype it computes in; the true table leaves no room for 24 layers, a small one does."""
    data = config_json(SIZES)
    whole = build(cell(*LARGE, "layers=24"), data, "x")
    small = build(cell(*LARGE, "layers=24", "model.table_rows=4000000"), data, "x")
    assert {line.codec for line in whole.lines} == {"bfloat16"}
    table = next(line for line in whole.lines if line.component == "ple")
    assert table.bytes == 2 * table.weights > 102e9
    memory = cell(*LARGE).device.memory_bytes
    assert memory is not None and small.device_bytes < memory < whole.device_bytes
    nano = cell("model=nano", "engine=transformers", "device=cpu", "path=reference")
    in_float32 = build(nano, config_json(ROOT / "experiments" / "nano" / "config.json"), "x")
    assert {line.codec for line in in_float32.lines} == {"float32"}
    assert any("float32" in note for note in in_float32.notes)
    assert all(line.bytes == 4 * line.weights for line in in_float32.lines)
