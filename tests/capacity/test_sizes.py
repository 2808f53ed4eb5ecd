"""Tensor lists and block types against sizes that others published: counts of parameters and bytes of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lab.capacity.formats import file_type, is_file_type
from lab.capacity.qwen4_exp import qwen4_exp_sizes
from lab.capacity.sizes import ModelSizes, Weight, transformer_sizes
from lab.errors import LabError
from lab.models.fields import Fields
from tests.runner_helpers import ROOT

MIB = 1 << 20


def geometry(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((ROOT / "conf" / "geometry" / f"{name}.json").read_text())
    return data


def sizes(name: str, layers: int, arch: str = "", **changes: Any) -> ModelSizes:
    data = {**geometry(name), **changes}
    return transformer_sizes(Fields(data, name), arch or data["model_type"], layers, 2)


def total(found: ModelSizes, *components: str) -> int:
    return sum(w.count for w in found.weights if not components or w.component in components)


def vqf_bytes(weight: Weight, quantised: str) -> int:
    """Bytes in a VQF file, which pads every tensor to 64."""
    name = {"embedding": "vqf:F16", "vector": "vqf:F32"}.get(weight.kind, "vqf:F32" if weight.component == "small" else quantised)
    return file_type(name, weight.shape[-1]).nbytes(weight.shape)


def test_flash_next_has_the_published_number_of_parameters() -> None:
    found = qwen4_exp_sizes(geometry("flash_next"), "flash_next", 48, torch.bfloat16)
    assert total(found) == 176_943_899_520  # "176.944 B", llama.cpp's count of text model and table
    assert total(found, "ple") == 320_001_536 * 160
    assert total(found, "experts") == 48 * 512 * 3 * 640 * 2560
    # 36 recurrent layers of 48 x 128 x 128 float32 and a ring of 4 x 10240 inputs of the convolution, 12 attention layers of 24 + 3 KiB per token.
    assert found.state_bytes(1, 0) == 36 * (48 * 128 * 128 * 4 + 4 * 10240 * 2) + 2 * 8 + 9 * 10240 * 2
    assert found.state_bytes(1, 100) - found.state_bytes(1, 0) == 100 * (24 + 3) * 1024


def test_an_fp8_release_is_read_from_its_config() -> None:
    data = geometry("flash_next")
    data["quantization_config"] = {"quant_method": "fp8"}
    data["text_config"]["ple_embedding_dtype"] = "float8_e4m3fn"
    found = qwen4_exp_sizes(data, "flash_next", 3, torch.bfloat16)
    assert found.released == {"experts": ("e4m3", {"scale": "block128"}), "ple": ("e4m3", {"scale": "global"})}
    assert qwen4_exp_sizes(geometry("flash_next"), "flash_next", 3, torch.bfloat16).released == {}


def test_the_30b_file_has_the_published_size() -> None:
    found = sizes("qwen3_30b_a3b", 48)
    stacked: dict[str, int] = {}
    for weight in found.weights:  # a VQF file holds one entry per name, its layers one after the other
        stacked[weight.name] = stacked.get(weight.name, 0) + vqf_bytes(weight, "vqf:Q4_0")
    assert len(stacked) == 15
    assert 4096 + sum(-(-size // 64) * 64 for size in stacked.values()) + 8 == 17_665_601_544


@pytest.mark.parametrize(("name", "codec", "mib"), [("qwen3_2b", "vqf:Q8_0", 51.0), ("qwen3_30b_a3b", "vqf:Q4_0", 334.1)])
def test_a_layer_has_the_bytes_that_the_converter_prints(name: str, codec: str, mib: float) -> None:
    found = sum(vqf_bytes(w, codec) for w in sizes(name, 2).weights if w.layer == 1 and w.component in ("trunk", "experts"))
    assert round(found / MIB, 1) == pytest.approx(mib, abs=0.11 if name == "qwen3_30b_a3b" else 0.05)


def test_qwen3_has_norms_that_llama_has_not_and_experts_where_the_config_says() -> None:
    dense = sizes("qwen3_8b", 2)
    llama = sizes("qwen3_8b", 2, arch="llama")
    assert total(dense) - total(llama) == 2 * 2 * 128
    mixed = sizes("qwen3_30b_a3b", 4, decoder_sparse_step=2, mlp_only_layers=[3])
    assert mixed.expert_layers == [1]
    assert dense.state_bytes(4, 4096) == 2 * 2 * 4 * 4096 * 8 * 128 * 2


@pytest.mark.parametrize(
    ("changes", "layers", "message"),
    [
        ({"hidden_size": "wide"}, 2, "qwen3_8b: field hidden_size: 'wide' is not a whole number"),
        ({"mlp_only_layers": 5}, 2, "qwen3_8b: mlp_only_layers 5: expected a list"),
        ({"vocab_size": None}, 2, "qwen3_8b: field vocab_size is missing"),
        ({}, 37, "qwen3_8b: the model has 36 layers, not 37"),
    ],
)
def test_wrong_sizes_are_one_line(changes: dict[str, Any], layers: int, message: str) -> None:
    with pytest.raises(LabError, match=message):
        sizes("qwen3_8b", layers, **changes)


def test_block_types_give_published_sizes() -> None:
    assert file_type("gguf:IQ4_NL", 160).nbytes((320_001_536, 160)) == 28_800_138_240  # Strata's table file less its 192-byte header
    assert file_type("gguf:Q2_0", 640).nbytes((2560, 640)) == 460_800
    assert file_type("gguf:IQ2_XS", 2560).nbytes((512, 1280, 2560)) == 2 * 231.25 * MIB


def test_a_row_that_a_gguf_block_cannot_hold_goes_to_another_type() -> None:
    assert file_type("gguf:IQ2_XS", 2560).name == "gguf:IQ2_XS"
    assert file_type("gguf:IQ2_XS", 640).name == "gguf:IQ4_NL"
    assert file_type("gguf:IQ2_XS", 16).name == "gguf:F16"
    assert is_file_type("vqf:Q4_0") and not is_file_type("q2_g32")
    with pytest.raises(LabError, match=r"rows of 16 weights are no multiple of its block of 32"):
        file_type("vqf:Q4_0", 16)
    with pytest.raises(LabError, match=r"codec gguf:IQ9: unknown type; choose from: gguf:F32"):
        file_type("gguf:IQ9", 256)


def test_every_shipped_geometry_is_named_by_a_model() -> None:
    named = {
        Path(line.split()[1]).stem for file in (ROOT / "conf/model").glob("*.yaml") for line in file.read_text().splitlines() if line.startswith("geometry:")
    }
    assert named == {file.stem for file in (ROOT / "conf/geometry").glob("*.json")}
