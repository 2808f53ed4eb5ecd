"""Sizes and directories from a config alone: the three published files to the byte, and the directory's rows and cols as the notes list them."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from lab.artifacts.vqf_arch import arch_of_fields
from lab.artifacts.vqf_plan import catalogue, flags_of, matrix_shape, placed, selection, size_of
from lab.errors import LabError
from lab.project import find_project

_TOWER: dict[str, Any] = {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2, "num_position_embeddings": 2304, "num_heads": 16}
_TOWER["deepstack_visual_indexes"] = [5, 11, 17]
TOWERS: dict[str, dict[str, Any]] = {
    "qwen3_2b": {**_TOWER, "depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "out_hidden_size": 2048},
    "qwen3_8b": {**_TOWER, "depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "out_hidden_size": 4096},
}


def geometry(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((find_project().conf / "geometry" / f"{name}.json").read_text())
    return data


def with_tower(name: str) -> dict[str, Any]:
    return {"model_type": "qwen3_vl", "text_config": {**geometry(name), "model_type": "qwen3_vl_text"}, "vision_config": TOWERS[name]}


@pytest.mark.parametrize(
    ("name", "wmode", "vision", "tensors", "nbytes"),
    [
        ("qwen3_30b_a3b", "q4", False, 15, 17_665_601_544),
        ("qwen3_8b", "q4", True, 41, 6_601_514_056),
        ("qwen3_2b", "q8", True, 41, 3_191_541_768),
        ("qwen3_2b", "dual", True, 49, 4_159_295_496),
    ],
)
def test_published_sizes(name: str, wmode: str, vision: bool, tensors: int, nbytes: int) -> None:
    config = with_tower(name) if vision else geometry(name)
    assert size_of(config, wmode, vision=vision) == nbytes
    arch = arch_of_fields(config, vision=vision)
    sets = {"q4": ("q4",), "q8": ("q8",), "dual": ("q8", "q4")}[wmode]
    assert len(selection(arch, flags_of(wmode, mixture=bool(arch.n_experts), vision=vision), sets)) == tensors


def test_modes_of_the_same_bits_have_the_same_size() -> None:
    config = geometry("qwen3_2b")
    assert size_of(config, "q8") == size_of(config, "q4i") == size_of(config, "g256") > size_of(config, "q4")


def test_directory_words_are_the_converters() -> None:
    arch = arch_of_fields(with_tower("qwen3_8b"), vision=True)
    found = {name: (p.rows, p.cols) for name, p in catalogue(arch, flags_of("dual", vision=True)).items()}
    layers, dim, queries, keys, ff, vocab = 36, 4096, 4096, 1024, 12288, 151936
    expected = {
        **{"token_embed": (vocab, dim), "final_norm": (dim, 1), "attn_norm": (layers * dim, 1), "k_norm": (layers * 128, 1), "q8_lm": (vocab, dim)},
        **{"q4_q": (layers * dim, queries), "q8_k": (layers * dim, keys), "q4_v": (layers * dim, keys), "q8_o": (layers * queries, dim)},
        **{"q4_gate": (layers * ff, dim), "q8_up": (layers * ff, dim), "q8_down": (layers * dim, ff), "x8_down": (layers * dim, ff)},
        **{"v_q8_qkv": (27, 3 * 1152 * 1152), "v_q8_fc1": (27, 4304 * 1152), "v_q8_fc2": (27, 1152 * 4320), "v_patch_embed": (1, 1152 * 3 * 2 * 256)},
        **{"v_pos_embed": (1, 2304 * 1152), "v_norm2_b": (27, 1152), "v_merger_nw": (1, 1152), "v_merger_f2w": (1, 4608 * 4096), "v_ds_nw": (3, 4608)},
    }
    assert {name: found[name] for name in expected} == expected
    mixture = arch_of_fields(geometry("qwen3_30b_a3b"))
    router = catalogue(mixture, flags_of("q4", mixture=True))["moe_router"]
    assert (router.rows, router.cols, mixture.ffn_dim) == (48 * 128, 2048, 128 * 768)
    assert matrix_shape(mixture, "down") == (2048, 128 * 768)


def test_tensors_lie_at_multiples_of_64_in_order() -> None:
    arch = arch_of_fields(with_tower("qwen3_2b"), vision=True)
    entries, start, end = placed(selection(arch, flags_of("dual", vision=True), ("q8", "q4")))
    assert start == 4096 and all(e.offset % 64 == 0 for e in entries)
    assert all(b.offset - (a.offset + a.nbytes) < 64 for a, b in pairwise(entries)) and 0 <= end - entries[-1].offset - entries[-1].nbytes < 64
    assert [e.name for e in entries][:8] == ["token_embed", "final_norm", "attn_norm", "ffn_norm", "q_norm", "k_norm", "q8_q", "q8_k"]
    assert placed(selection(arch, 0x63, ("q8", "q4")) + selection(arch, 0x63, ("q8",)))[1] == 8192  # more than 57 entries


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "config: field hidden_size is missing"),
        ({"head_dim": "wide"}, "config: field head_dim: 'wide' is not a whole number"),
        ({"hidden_size": 2050}, "tensor q4_q: rows of 2050 weights are no whole blocks of 32"),
        ({"rope_scaling": {"mrope_section": [1, 2, 3, 4, 5]}}, "mrope_section"),
    ],
)
def test_wrong_configs_are_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(LabError, match=message):
        size_of({**geometry("qwen3_2b"), **changes}, "q4")


def test_a_tower_is_asked_for_by_field() -> None:
    with pytest.raises(LabError, match="field vision_config is missing"):
        size_of(geometry("qwen3_2b"), "q4", vision=True)
    with pytest.raises(LabError, match="vision_config: field depth is missing"):
        size_of({**with_tower("qwen3_2b"), "vision_config": {**TOWERS["qwen3_2b"], "depth": None}}, "q4", vision=True)
