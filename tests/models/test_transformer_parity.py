"""Plain transformers against transformers 5.24 on random models read from its files: logits whole, in chunks, step by step, batched and truncated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3VLTextConfig, Qwen3VLTextModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from lab.models import inventory
from lab.models.transformer.attention import attend
from lab.models.transformer.config import from_dict
from lab.models.transformer.rope import inverse_frequencies
from tests.models.transformers_tiny import CASES, LLAMA3, loaded, one_thread, saved_config, stepwise, text_ids, tiny  # noqa: F401

TOLERANCE = 1e-4
TOKENS = 41


@pytest.fixture(scope="module", params=CASES)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """(transformers' model, the folder it was saved to)."""
    folder = tmp_path_factory.mktemp(request.param)
    model = tiny(request.param)
    model.save_pretrained(folder)
    return model, folder


@pytest.mark.parametrize("batch", [1, 3])
@torch.no_grad()
def test_logits_equal_transformers(saved: tuple[Any, Path], batch: int) -> None:
    theirs, folder = saved
    ours, _ = loaded(folder)
    ids = text_ids(batch, TOKENS, seed=batch)
    expected = theirs(input_ids=ids, use_cache=False).logits
    assert expected.std() > 0.3, "the random model must not be flat"
    torch.testing.assert_close(ours.logits(ids), expected, atol=TOLERANCE, rtol=0)
    for pieces in ([20] + [1] * 21, [7] * 5 + [6], [1, 2, 13, 1, 24]):
        torch.testing.assert_close(stepwise(ours, ids, pieces), expected, atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_keys_and_values_equal_transformers_own_cache(saved: tuple[Any, Path]) -> None:
    theirs, folder = saved
    ours, _ = loaded(folder)
    ids = text_ids(2, 19, seed=7)
    cache = theirs(input_ids=ids, use_cache=True).cache
    state = ours.new_state(2, 30, torch.device("cpu"), torch.float32)
    ours.hidden(ids[:, :11], state)
    ours.hidden(ids[:, 11:], state)
    held = 0
    for layer, (keys, values) in zip(cache.layers, state.layers, strict=True):
        torch.testing.assert_close(keys[:, :, :19], layer.keys, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(values[:, :, :19], layer.values, atol=TOLERANCE, rtol=0)
        held += layer.keys.nbytes + layer.values.nbytes
    assert state.read_bytes() == held and state.nbytes() * 19 == held * 30


@torch.no_grad()
def test_first_layers_equal_transformers(saved: tuple[Any, Path]) -> None:
    theirs, folder = saved
    ids = text_ids(2, 17, seed=3)
    text = getattr(theirs.model, "language_model", theirs.model)
    whole, count = text.layers, text.config.num_hidden_layers
    for layers in (1, 2):
        text.layers, text.config.num_hidden_layers = whole[:layers], layers
        try:
            expected = theirs(input_ids=ids, use_cache=False).logits
        finally:
            text.layers, text.config.num_hidden_layers = whole, count
        ours, _ = loaded(folder, layers)
        assert len(ours.layers) == ours.config.num_layers == layers
        torch.testing.assert_close(ours.logits(ids), expected, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(stepwise(ours, ids, [9, 8]), expected, atol=TOLERANCE, rtol=0)


def test_every_stored_parameter_is_asked_for_once(saved: tuple[Any, Path]) -> None:
    """By the forward code and by the inventory that ledger and inspection read; weights counted as transformers counts parameters."""
    theirs, folder = saved
    ours, binder = loaded(folder)
    names = {name.split(".experts.")[0] + ".experts" if ".experts." in name else name for name in binder.checkpoint.names()}
    assert set(binder.asked) == names - {"lm_head.weight"} | ({"lm_head.weight"} if not ours.config.tie_word_embeddings else set())
    listed = inventory(ours.config)
    assert set(listed.linears) | set(listed.vectors) | set(listed.expert_stacks) | set(listed.embeddings) == set(binder.asked)
    counted = sum(listed.weights().values()) + sum(shape[0] for shape in listed.vectors.values())
    twice = theirs.get_input_embeddings().weight.numel() if ours.config.tie_word_embeddings else 0
    vision = sum(p.numel() for p in theirs.model.visual.parameters()) if hasattr(theirs.model, "visual") else 0
    assert counted - twice == theirs.num_parameters() - vision
    sparse = [i for i, s in enumerate(ours.config.is_sparse) if s]
    assert listed.component_layers().get("experts", []) == listed.component_layers().get("small", []) == sparse
    assert bool(sparse) == bool(ours.config.experts_per_token) and ours.config.ngram_heads == 0
    assert listed.component_layers()["head"] == listed.component_layers()["embed"] == [None]


@torch.no_grad()
def test_bfloat16_is_as_close_to_float32_as_transformers_is(saved: tuple[Any, Path]) -> None:
    theirs, folder = saved
    ids = text_ids(2, 24, seed=5)
    exact = theirs(input_ids=ids, use_cache=False).logits
    try:
        rounded = theirs.bfloat16()(input_ids=ids, use_cache=False).logits.float()
    finally:
        theirs.float()  # weights are exact in bf16
    ours, _ = loaded(folder, dtype=torch.bfloat16)

    def noise(found: torch.Tensor) -> torch.Tensor:
        """The median token's: where rounding turns a router, that token's logits say nothing about the arithmetic."""
        return (found.float() - exact).abs().mean(-1).median()

    for found in (ours.logits(ids), stepwise(ours, ids, [10, 13, 1], torch.bfloat16)):
        assert found.dtype == torch.bfloat16
        assert noise(found) < 1.3 * noise(rounded)


@pytest.mark.parametrize("sections", [(4, 3, 1), (1, 1, 6), (2, 3, 3)])
@pytest.mark.parametrize("interleaved", [True, False])
@torch.no_grad()
def test_mrope_of_text_is_plain_rope(sections: tuple[int, int, int], interleaved: bool, tmp_path: Path) -> None:
    """Three equal positions: neither the sections nor their order matter. The bare text model, which has no head: final hidden states are compared."""
    rope = {"rope_type": "default", "rope_theta": 700.0, "mrope_section": list(sections), "mrope_interleaved": interleaved}
    sizes = {"vocab_size": 101, "hidden_size": 40, "intermediate_size": 30, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3VLTextConfig(**sizes, head_dim=16, rope_parameters=rope, eos_token_id=3, tie_word_embeddings=True)
    torch.manual_seed(sum(sections))
    theirs = Qwen3VLTextModel(config).eval()
    theirs.save_pretrained(tmp_path)
    ids = text_ids(2, 33)
    positions = torch.arange(33).expand(3, 2, -1)
    expected = theirs(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    ours, _ = loaded(tmp_path)
    torch.testing.assert_close(ours.hidden(ids), expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("head_dim", "rope"),
    [
        (
            128,
            {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        (
            64,
            {
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        (30, {**LLAMA3, "low_freq_factor": 1.7, "high_freq_factor": 2.1}),
        (96, {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4}),
        (128, {"rope_type": "default", "rope_theta": 5e6}),
    ],
)
def test_frequencies_equal_transformers(head_dim: int, rope: dict[str, Any]) -> None:
    """The released Llama 3.1 and 3.2 scalings among them. To float32 rounding; position times frequency is compared through logits elsewhere."""
    config = LlamaConfig(hidden_size=2 * head_dim, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, vocab_size=9, rope_parameters=rope)
    expected = LlamaForCausalLM(config).model.rotary_emb.inv_freq
    found = inverse_frequencies(from_dict(config.to_dict()).rope, head_dim)
    torch.testing.assert_close(found, expected, rtol=5e-7, atol=0)


@torch.no_grad()
def test_factors_of_a_file_replace_llama3_scaling(tmp_path: Path) -> None:
    """GGUF files hold llama3 scaling as divisors; with transformers' frequencies turned into such divisors the logits are those of llama3."""
    theirs = tiny("llama_llama3_one_key_head")
    theirs.save_pretrained(tmp_path)
    ours, binder = loaded(tmp_path)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](theirs.config)
    plain = 1.0 / LLAMA3["rope_theta"] ** (torch.arange(0, 18, 2) / 18)
    assert (plain / scaled).unique().numel() > 2
    data = {**saved_config(tmp_path), "rope_parameters": {"rope_theta": LLAMA3["rope_theta"]}, "rope_factors": (plain / scaled).tolist()}
    by_factors = type(ours)(from_dict(data), binder)
    ids = text_ids(1, 60)
    expected = theirs(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(by_factors.logits(ids), expected, atol=TOLERANCE, rtol=0)
    without = type(ours)(from_dict({**data, "rope_factors": None}), binder)
    assert (without.logits(ids) - expected).abs().max() > 0.05


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("heads", "keys"), [(6, 2), (5, 1), (4, 4)])
@pytest.mark.parametrize("tokens", [1, 9, 23])
def test_attention_on_a_gpu_equals_the_cpu(heads: int, keys: int, tokens: int) -> None:
    q, k, v = torch.randn(2, tokens, heads, 16), torch.randn(2, keys, 23, 16), torch.randn(2, keys, 23, 16)
    mask = torch.full((tokens, 23), -torch.inf).triu(24 - tokens) if 1 < tokens < 23 else None
    found = attend(q.cuda(), k.cuda(), v.cuda(), None if mask is None else mask.cuda()).cpu()
    torch.testing.assert_close(found, attend(q, k, v, mask), atol=1e-5, rtol=0)
