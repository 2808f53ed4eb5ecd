"""Reading config.json of plain transformers: the library's own files and defaults, and one line naming the field for what is not computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.errors import LabError
from lab.models.transformer.config import MODEL_TYPES, from_dict
from lab.models.transformer.rope import Rope, inverse_frequencies
from tests.models.transformers_tiny import CASES

GEOMETRY = Path(__file__).parents[2] / "conf" / "geometry"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "eos_token_id": 2,
}
MOE = {**LLAMA, "model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
VL = {"model_type": "qwen3_vl", "text_config": {**LLAMA, "model_type": "qwen3_vl_text", "head_dim": 8}}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("case", CASES)
def test_sizes_are_those_that_transformers_reads(case: str) -> None:
    theirs = CASES[case][1]
    text = theirs.get_text_config()
    ours = from_dict(json.loads(theirs.to_json_string()))
    assert (ours.vocab_size, ours.hidden_size, ours.num_layers, ours.head_dim) == (text.vocab_size, text.hidden_size, text.num_hidden_layers, text.head_dim)
    assert (ours.num_heads, ours.num_kv_heads, ours.rms_norm_eps) == (text.num_attention_heads, text.num_key_value_heads, text.rms_norm_eps)
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.rope.theta == text.rope_parameters["rope_theta"] and ours.rope.kind == text.rope_parameters["rope_type"]
    assert ours.experts_per_token == getattr(text, "num_experts_per_tok", 0) and ours.num_experts == getattr(text, "num_experts", 0)
    assert ours.eos_token_id == text.eos_token_id


@pytest.mark.parametrize(
    ("kind", "config"), [("llama", hf.LlamaConfig), ("qwen3", hf.Qwen3Config), ("qwen3_moe", hf.Qwen3MoeConfig), ("qwen3_vl_text", hf.Qwen3VLTextConfig)]
)
def test_fields_left_out_have_the_library_s_defaults(kind: str, config: Any) -> None:
    data = {**MOE, "model_type": kind, "head_dim": 8}
    theirs, ours = config(**data), from_dict(data)
    assert ours.rope.theta == theirs.rope_parameters["rope_theta"] and ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.norm_topk_prob == getattr(theirs, "norm_topk_prob", False)
    assert ours.tie_word_embeddings == getattr(theirs, "tie_word_embeddings", False)


def test_older_words_for_rope_are_read_as_transformers_reads_them() -> None:
    for old in (
        {"rope_theta": 7e4, "rope_scaling": {"type": "linear", "factor": 3}},
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_scaling": None},
        {"rope_theta": 9e3, "rope_parameters": {"rope_type": "default", "rope_theta": 8e3}},
        {"rope_parameters": {"rope_theta": 8e3}, "rope_scaling": {"type": "linear", "factor": 2.0}},
    ):
        theirs, ours = hf.LlamaConfig(**{**LLAMA, **old}), from_dict({**LLAMA, **old})
        assert (ours.rope.kind, ours.rope.theta) == (theirs.rope_parameters["rope_type"], theirs.rope_parameters["rope_theta"])
        assert ours.rope.factor == theirs.rope_parameters.get("factor", 1.0)


def test_heads_left_out() -> None:
    data = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert (from_dict(data).num_kv_heads, from_dict(data).head_dim) == (8, 8)
    with pytest.raises(LabError, match="field num_key_value_heads is missing"):
        from_dict({**data, "model_type": "qwen3", "head_dim": 8})
    with pytest.raises(LabError, match="field head_dim is missing"):
        from_dict({**LLAMA, "model_type": "qwen3"})


@pytest.mark.parametrize("name", ["qwen3_2b", "qwen3_8b", "qwen3_30b_a3b"])
def test_public_sizes_are_read(name: str) -> None:
    config = from_dict({**json.loads((GEOMETRY / f"{name}.json").read_text()), "eos_token_id": 151645})
    assert config.head_dim == 128 and config.qk_norm and config.experts_per_token == (8 if name == "qwen3_30b_a3b" else 0)


def test_a_composite_file_s_own_tie_counts() -> None:
    for top, inner, expected in ((True, False, True), (False, True, False), (None, True, True), (None, None, False)):
        assert from_dict({**VL, "tie_word_embeddings": top, "text_config": {**VL["text_config"], "tie_word_embeddings": inner}}).tie_word_embeddings is expected


def test_the_first_of_several_end_tokens_stands_for_all() -> None:
    assert from_dict({**LLAMA, "eos_token_id": [7, 9]}).eos_token_id == 7
    text = {k: v for k, v in VL["text_config"].items() if k != "eos_token_id"}
    assert from_dict({**VL, "eos_token_id": [8, 9], "text_config": text}).eos_token_id == 8


def test_truncated() -> None:
    config = from_dict({**MOE, "decoder_sparse_step": 2})
    assert config.is_sparse == (False, True, False, True)
    assert config.truncated(3).is_sparse == (False, True, False) and config.truncated(3).num_layers == 3
    for layers in (0, 5, -1):
        with pytest.raises(LabError, match=f"layers={layers}: the model has 4 layers"):
            config.truncated(layers)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mistral"}, "model_type 'mistral'"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"hidden_act": ["silu"]}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"pretraining_tp": 2}, "pretraining_tp 2"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"attention_multiplier": 0.1}, "attention_multiplier"),
        ({"residual_multiplier": 0.2}, "residual_multiplier"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "rope_type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "default", "attention_factor": 1.2}}, "field attention_factor"),
        ({"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "field full_attention"),
        ({"rope_scaling": {"rope_type": "linear"}}, "field factor is missing"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "field factor"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "field low_freq_factor is missing"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4}}, "high_freq_factor must be greater"),
        ({"rope_scaling": LLAMA3, "original_max_position_embeddings": 4096}, "original_max_position_embeddings contradicts"),
        ({"rope_theta": float("inf")}, "must be finite"),
        ({"rope_theta": "1e4"}, "rope_theta"),
        ({"rope_factors": [1.0, 2.0]}, "rope_factors: expected 4 numbers"),
        ({"rope_factors": [1.0, 0.0, 1.0, 1.0]}, "rope_factors"),
        ({"rope_factors": [1.0, float("nan"), 1.0, 1.0]}, "rope_factors"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, "no multiple of num_attention_heads 6"),
        ({"head_dim": 7}, "head_dim 7 must be even"),
        ({"head_dim": 10**15}, "head_dim"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"vocab_size": None}, "field vocab_size is missing"),
        ({"eos_token_id": None}, "field eos_token_id is missing"),
        ({"eos_token_id": []}, "field eos_token_id is missing"),
        ({"eos_token_id": 100}, "eos_token_id 100 must be below vocab_size"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(LabError) as refused:
        from_dict({**LLAMA, **change}, "some/config.json")
    assert str(refused.value).startswith("some/config.json: ") and named in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({**MOE, "num_experts": None}, "field num_experts is missing"),
        ({**MOE, "num_local_experts": 9}, "num_experts and num_local_experts contradict"),
        ({**MOE, "num_experts_per_tok": 9}, "num_experts_per_tok must be 1..num_experts"),
        ({**MOE, "mlp_only_layers": [0.5]}, "mlp_only_layers"),
        ({**MOE, "mlp_only_layers": "none"}, "mlp_only_layers"),
        ({**MOE, "norm_topk_prob": 1}, "norm_topk_prob"),
        ({**MOE, "model_type": "qwen3_vl_moe_text", "norm_topk_prob": False}, "norm_topk_prob false"),
        ({"model_type": "qwen3_vl"}, "field text_config is missing"),
        ({**VL, "text_config": {**VL["text_config"], "model_type": "llama"}}, "text_config has model_type 'llama'"),
        ([], "expected an object"),
    ],
)
def test_experts_and_composites_are_refused_by_name(data: Any, named: str) -> None:
    with pytest.raises(LabError) as refused:
        from_dict(data, "config.json")
    assert named in str(refused.value)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**30), 10**30),
    st.floats(),
    st.text(max_size=4),
    st.lists(st.integers(-3, 9), max_size=3),
    st.dictionaries(st.sampled_from(["rope_type", "type", "factor", "rope_theta", "x"]), st.one_of(st.none(), st.floats(), st.text(max_size=3)), max_size=3),
)
FIELDS = sorted({*MOE, "head_dim", "rope_scaling", "rope_parameters", "rope_theta", "rope_factors", "mlp_only_layers", "decoder_sparse_step", "layer_types"})


@settings(max_examples=300, deadline=None, derandomize=True)
@given(changes=st.dictionaries(st.sampled_from(FIELDS), JUNK, min_size=1, max_size=3), kind=st.sampled_from(MODEL_TYPES), inner=st.booleans())
def test_damaged_files_give_one_line(changes: dict[str, Any], kind: str, inner: bool) -> None:
    """Whatever stands in a field: sizes, or a LabError; never another exception, never a large allocation."""
    text = {**MOE, "model_type": kind, "head_dim": 8, **changes}
    try:
        config = from_dict({"model_type": "qwen3_vl_moe", "text_config": {**text, "model_type": "qwen3_vl_moe_text"}} if inner else text)
    except LabError as error:
        assert "\n" not in str(error)
        return
    assert inverse_frequencies(config.rope, config.head_dim).isfinite().all()


def test_factors_of_another_length_are_refused_where_they_are_used() -> None:
    with pytest.raises(LabError, match="rope_factors: 3 numbers for 4 frequencies"):
        inverse_frequencies(Rope(1e4, factors=(1.0, 2.0, 3.0)), 8)
