"""A `qwen4exp` file read back is the checkpoint it was made from, tensor by tensor; a header that lies is one line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize

from lab.artifacts.gguf import Gguf, open_gguf
from lab.artifacts.gguf_model import GgufArtifact
from lab.artifacts.gguf_names_qwen4exp import Change, ValueHeads
from lab.artifacts.gguf_qwen4exp import Qwen4ExpLayout
from lab.artifacts.gguf_writer import Planned, writing
from lab.artifacts.hf import HfArtifact
from lab.artifacts.weights import Weights
from lab.codecs.gguf_types import TYPES
from lab.convert.gguf import convert
from lab.errors import LabError
from lab.models import inventory
from lab.models.qwen4_exp.config import Qwen4ExpConfig
from tests.convert_helpers import NANO, dense, matrices, small_checkpoint

PLANS = NANO.parent.parent / "conf" / "gguf_plans"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(checkpoint, F32 file) of a random model."""
    folder = tmp_path_factory.mktemp("small")
    source = small_checkpoint(folder / "source")
    convert(source, folder / "small.gguf", PLANS / "f32.yaml")
    return source, folder / "small.gguf"


def _assert_same(source: HfArtifact, file: GgufArtifact) -> None:
    config = source.config()
    assert isinstance(config, Qwen4ExpConfig)
    right, found = source.weights(), file.weights()
    expected = matrices(config, right)
    for name, matrix in matrices(config, found).items():
        assert torch.equal(matrix, expected[name]), name
    wanted = inventory(config)
    assert wanted.vectors and bool(wanted.constants) == (config.ple_layer is not None)
    for name, shape in wanted.vectors.items():
        _assert_same_vector(name, shape, right, found)
    for name in wanted.constants:
        assert found.integers(name).dtype == torch.int64 and torch.equal(found.integers(name), right.integers(name)), name


def _assert_same_vector(name: str, shape: tuple[int, ...], right: Weights, found: Weights) -> None:
    want, got = right.vector(name).float(), found.vector(name)
    assert got.dtype == torch.float32 and tuple(got.shape) == shape, name
    if name.endswith("A_log"):  # through exp and log in float32
        assert torch.allclose(got, want, rtol=3e-7, atol=3e-7), name
    elif name.endswith(("conv1d.weight", "dt_bias", "linear_attn.norm.weight")):
        assert torch.equal(got, want), name
    else:  # 1 + w is what the model multiplies with, and what the file holds
        assert torch.equal(1 + got, 1 + want), name


def test_nano_comes_back_as_it_was(tmp_path: Path) -> None:
    convert(NANO, tmp_path / "nano.gguf", PLANS / "f32.yaml")
    source, file = HfArtifact(NANO, "qwen4_exp"), GgufArtifact(tmp_path / "nano.gguf")
    _assert_same(source, file)
    assert {**asdict(file.config()), "ngram_shards": None} == {**asdict(source.config()), "ngram_shards": None}  # type: ignore[call-overload]
    facts = file.inspect()
    assert facts["tokenizer"]["pre"] == "qwen35" and facts["unused"] == []
    text = "Ein Text, 12345 naïve words\n\n  of\tmany कि kinds: 漢字 🦙!"
    assert file.tokenizer().encode(text).ids == source.tokenizer().encode(text, add_special_tokens=False).ids


def test_a_random_model_comes_back_as_it_was(small: tuple[Path, Path]) -> None:
    _assert_same(HfArtifact(small[0], "qwen4_exp"), GgufArtifact(small[1]))


@pytest.mark.parametrize("changes", [{"ple_layer_ids": []}, {"tie_word_embeddings": True}, {"linear_num_value_heads": 3}, {"linear_num_key_heads": 1}])
def test_models_without_a_part_come_back_too(tmp_path: Path, changes: dict[str, Any]) -> None:
    source = small_checkpoint(tmp_path / "source", **changes)
    convert(source, tmp_path / "x.gguf", PLANS / "f32.yaml")
    _assert_same(HfArtifact(source, "qwen4_exp"), GgufArtifact(tmp_path / "x.gguf"))


def test_the_fp8_release_is_written_as_the_values_it_stands_for(tmp_path: Path) -> None:
    source = small_checkpoint(tmp_path / "source", layout="fp8", moe_intermediate_size=128)
    convert(source, tmp_path / "x.gguf", PLANS / "f32.yaml")
    _assert_same(HfArtifact(source, "qwen4_exp"), GgufArtifact(tmp_path / "x.gguf"))


def test_the_gguf_package_agrees_on_every_tensor(small: tuple[Path, Path], tmp_path: Path) -> None:
    convert(small[0], tmp_path / "q8.gguf", PLANS / "q8_0.yaml")
    opened, seen = GgufArtifact(tmp_path / "q8.gguf"), set()
    for tensor in GGUFReader(tmp_path / "q8.gguf").tensors:
        ours = opened.gguf.tensors[tensor.name]
        assert ours.shape == tuple(tensor.shape.tolist()[::-1]) and ours.type.name == tensor.tensor_type.name
        right = dequantize(tensor.data, tensor.tensor_type).reshape(ours.shape)
        assert np.array_equal(_decoded(opened.gguf, tensor.name), right), tensor.name
        seen.add(ours.type.name)
    assert seen == {"F32", "F16", "Q8_0"}


def _decoded(gguf: Gguf, name: str) -> np.ndarray:
    from lab.artifacts.gguf_model import decoded

    return decoded(gguf, name).numpy()


@pytest.mark.parametrize(("keys", "values", "width"), [(2, 8, 5), (3, 6, 4), (16, 48, 128), (5, 5, 3), (1, 4, 2)])
def test_value_heads_are_tiled(keys: int, values: int, width: int) -> None:
    """Against the transposition that llama.cpp's converter is documented to make: [keys, share, width] -> [share, keys, width]."""
    heads = ValueHeads(keys, values, keys * width, width)
    rows = torch.randn(values * width, 3)
    tiled = rows.view(keys, values // keys, width, 3).transpose(0, 1).reshape(rows.shape)
    to, back = heads.to_file(Change.VALUES), heads.from_file(Change.VALUES)
    if keys in (1, values):
        assert to is None and back is None and torch.equal(tiled, rows)
        return
    assert to is not None and back is not None
    assert torch.equal(rows[torch.from_numpy(to)], tiled) and torch.equal(tiled[torch.from_numpy(back)], rows)
    mixed = heads.to_file(Change.QKV)
    assert (
        mixed is not None
        and np.array_equal(mixed[: 2 * keys * width], np.arange(2 * keys * width))
        and np.array_equal(mixed[2 * keys * width :], to + 2 * keys * width)
    )


def _rewritten(file: Path, target: Path, changes: dict[str, Any], tensors: dict[str, np.ndarray] | None = None, without: frozenset[str] = frozenset()) -> Path:
    """The file with other metadata (None: left out), with more F32 tensors and without some."""
    opened = open_gguf(file)
    values: dict[str, Any] = {key: _typed(opened, key) for key in opened.metadata if key != "general.alignment"} | changes
    kept = [Planned(name, t.shape, t.type) for name, t in opened.tensors.items() if name not in without]
    extra = [Planned(name, data.shape, TYPES["F32"]) for name, data in (tensors or {}).items()]
    with writing(target, {key: value for key, value in values.items() if value is not None}, [*kept, *extra], lambda _: None, force=True) as sink:
        for each in kept:
            sink.write(each.name, opened.raw(each.name))
        for each in extra:
            sink.write(each.name, (tensors or {})[each.name].astype("<f4").view(np.uint8))
    return target


def _typed(opened: Gguf, key: str) -> Any:
    value = opened.metadata[key]
    if isinstance(value, bool | str | list | np.ndarray):
        return value
    return np.float32(value) if isinstance(value, float) else np.uint64(value) if value > 0xFFFFFFFF or key == "lab.ngram_seed" else np.uint32(value)


A = "qwen4exp."
LIES: list[tuple[str, Any]] = [
    (f"{A}block_count", np.uint32(2_000_000_000)),
    (f"{A}block_count", "4"),
    (f"{A}block_count", None),
    (f"{A}ssm.group_count", np.uint32(4)),
    (f"{A}ssm.time_step_rank", np.uint32(7)),
    (f"{A}ssm.inner_size", np.uint32(2_000_000_000)),
    (f"{A}ssm.state_size", np.uint32(0)),
    (f"{A}attention.value_length", np.uint32(16)),
    (f"{A}attention.compress_ratios", np.array([4], dtype=np.int32)),
    (f"{A}attention.compress_ratios", np.array([0, 0, 0, 0], dtype=np.int32)),
    (f"{A}attention.recurrent_layers", np.array([1, 1, 1, 0], dtype=np.int32)),
    (f"{A}rope.scaling.type", "yarn"),
    (f"{A}rope.freq_base", np.float32("nan")),
    (f"{A}ple.layers", np.array([1, 2], dtype=np.int32)),
    (f"{A}ple.layers", np.array([77], dtype=np.int32)),
    (f"{A}ple.heads_per_ngram", np.uint32(3)),
    (f"{A}ple.head_vocab_sizes", np.array([0, 0, 0, 0], dtype=np.uint64)),
    (f"{A}ple.head_vocab_sizes", "many"),
    (f"{A}hyper_connection.count", np.uint32(1)),
    (f"{A}nextn_predict_layers", np.uint32(4)),
]


@pytest.mark.parametrize(("key", "value"), LIES)
def test_a_lie_in_the_metadata_is_one_line(small: tuple[Path, Path], tmp_path: Path, key: str, value: Any) -> None:
    path = _rewritten(small[1], tmp_path / "x.gguf", {key: value})
    with pytest.raises(LabError) as caught:
        GgufArtifact(path).inspect()
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert re.search(r"qwen4exp\.|tensor|num_|ple_|hc_", str(caught.value))


def test_constants_that_went_through_a_float_are_refused(small: tuple[Path, Path], tmp_path: Path) -> None:
    key = f"{A}ple.layer_multipliers"
    value = open_gguf(small[1]).metadata[key]
    assert isinstance(value, np.ndarray)
    path = _rewritten(small[1], tmp_path / "x.gguf", {key: value.astype(np.float32).astype(np.uint64)})
    with pytest.raises(LabError, match=r"layer_multipliers"):
        GgufArtifact(path).inspect()


def test_gate_and_up_in_one_stack_are_read(small: tuple[Path, Path], tmp_path: Path) -> None:
    opened = GgufArtifact(small[1])
    gate_up, _ = opened.weights().experts("layers.2.mlp.experts", 8)
    joined = torch.cat([dense(block) for block in gate_up], dim=1)
    without = frozenset({"blk.2.ffn_gate_exps.weight", "blk.2.ffn_up_exps.weight"})
    path = _rewritten(small[1], tmp_path / "x.gguf", {}, {"blk.2.ffn_gate_up_exps.weight": joined.numpy()}, without)
    (fused,), _ = GgufArtifact(path).weights().experts("layers.2.mlp.experts", 8)
    assert torch.equal(dense(fused), joined)


def test_a_draft_head_behind_the_layers_is_left_alone(small: tuple[Path, Path], tmp_path: Path) -> None:
    more = {"blk.4.nextn.eh_proj.weight": np.zeros((4, 32)), "blk.4.attn_q.weight": np.zeros((4, 32))}
    changes = {
        f"{A}block_count": np.uint32(5),
        f"{A}nextn_predict_layers": np.uint32(1),
        f"{A}attention.compress_ratios": np.array([0, 0, 0, 4, 4], dtype=np.int32),
        f"{A}attention.recurrent_layers": np.array([True, True, True, False, False]),
    }
    opened = GgufArtifact(_rewritten(small[1], tmp_path / "x.gguf", changes, more))
    assert opened.config().num_layers == 4 and opened.layout.unused() == frozenset(more)


def test_a_decay_that_is_none_is_refused(small: tuple[Path, Path], tmp_path: Path) -> None:
    path = _rewritten(small[1], tmp_path / "x.gguf", {}, {"blk.0.ssm_a": np.array([-1, -1, 0, -1, -1, -1])}, frozenset({"blk.0.ssm_a"}))
    with pytest.raises(LabError, match=r"blk\.0\.ssm_a holds values that are not negative"):
        GgufArtifact(path).weights().vector("layers.0.linear_attn.A_log")


@pytest.mark.parametrize("name", ["layers.4.mlp.gate.weight", "layers.0.mlp.experts.gate", "norm.weight", "layers.x.mlp.gate.weight", ""])
def test_an_unknown_name_is_refused_by_every_question(small: tuple[Path, Path], name: str) -> None:
    layout = Qwen4ExpLayout(open_gguf(small[1]))
    for ask in _questions(layout, name):
        with pytest.raises(LabError, match="qwen4exp has no tensor for"):
            ask()


def _questions(layout: Qwen4ExpLayout, name: str) -> Iterator[Any]:
    yield lambda: layout.matrix(name)
    yield lambda: layout.vector(name, lambda _: torch.zeros(1))
    yield lambda: layout.integers(name)
    yield lambda: layout.experts(name)
    yield lambda: layout.table(name)


def test_a_single_row_may_be_written_without_its_row_dimension(small: tuple[Path, Path]) -> None:
    """Files differ in how they write the shared expert's gate: [1, n] by the converter of 2026, [n] in older ones."""
    artifact = GgufArtifact(small[1])
    as_rows = artifact.weights().matrix("layers.0.mlp.shared_expert_gate.weight")[0]
    for name, tensor in list(artifact.gguf.tensors.items()):
        if name.endswith("ffn_gate_inp_shexp.weight"):
            flat = replace(tensor, shape=tensor.shape[-1:])
            artifact.gguf.tensors[name] = flat
            for file in artifact.gguf.files:
                file.tensors[name] = flat
    artifact.inspect()
    (found,) = artifact.weights().matrix("layers.0.mlp.shared_expert_gate.weight")
    assert found.shape == as_rows.shape and torch.equal(found.parts["blocks"], as_rows.parts["blocks"])
