"""The engine against transformers on random models: same logits, whole and step by step, at depths with and without attention layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM

from experiments.nano_training.parameters import ParameterBinder, from_checkpoint
from lab.artifacts import Checkpoint, HfWeights, load_tokenizer
from lab.counters import Counters
from lab.engines.path_binder import PathBinder
from lab.errors import LabError
from lab.models.qwen4_exp.config import from_dict, from_file
from lab.models.qwen4_exp.model import Qwen4Exp
from lab.models.qwen4_exp.ngram import hash_multipliers, head_sizes
from tests.models.tiny import text_ids, tiny_model, write_checkpoint

CPU = torch.device("cpu")
TOLERANCE = 1e-4
NANO = Path(__file__).parents[2] / "experiments" / "nano"


def engine_of(model: Qwen4ExpForCausalLM) -> Qwen4Exp:
    tensors = {name.removeprefix("model."): value for name, value in model.state_dict().items()}
    return Qwen4Exp(from_dict(model.config.to_dict()), ParameterBinder(CPU, tensors=tensors))


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("layers", [3, 4, 6, 12])
@torch.no_grad()
def test_logits_equal_transformers(layers: int, batch: int) -> None:
    theirs = tiny_model(layers)
    ours = engine_of(theirs)
    ids = text_ids(batch, 57, seed=layers)
    expected = theirs(input_ids=ids, use_cache=False).logits
    assert expected.std() > 0.1, "the random model must not be flat"
    torch.testing.assert_close(ours.logits(ids), expected, atol=TOLERANCE, rtol=0)

    state = ours.new_state(batch, 64, CPU, torch.float32)
    steps = [ours.logits(ids[:, :30], state), *(ours.logits(ids[:, i : i + 1], state) for i in range(30, 57))]
    torch.testing.assert_close(torch.cat(steps, 1), expected, atol=TOLERANCE, rtol=0)
    assert state.length == 57


@torch.no_grad()
def test_decode_equals_transformers_own_cache() -> None:
    theirs = tiny_model(4)
    ours = engine_of(theirs)
    ids = text_ids(2, 40)
    out = theirs(input_ids=ids[:, :33], use_cache=True)
    state = ours.new_state(2, 40, CPU, torch.float32)
    ours.logits(ids[:, :33], state)
    cache = getattr(out, "cache", None) or out.past_key_values
    for i in range(33, 40):
        step = theirs(input_ids=ids[:, i : i + 1], cache=cache, use_cache=True)
        torch.testing.assert_close(ours.logits(ids[:, i : i + 1], state), step.logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("split", [1, 2, 5, 64, 70])
@torch.no_grad()
def test_any_split_of_the_prompt_gives_the_same_logits(split: int) -> None:
    """Chunk borders (64), states shorter than the convolutions, and one-token pieces."""
    ours = engine_of(tiny_model(4))
    ids = text_ids(2, 75)
    whole = ours.logits(ids)
    state = ours.new_state(2, 75, CPU, torch.float32)
    pieces = [ours.logits(piece, state) for piece in ids.split(split, 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, atol=TOLERANCE, rtol=0)


@torch.no_grad()
def test_sequences_of_a_batch_do_not_see_each_other() -> None:
    ours = engine_of(tiny_model(4))
    ids = text_ids(3, 50)
    torch.testing.assert_close(ours.logits(ids)[1:2], ours.logits(ids[1:2]), atol=TOLERANCE, rtol=0)


def test_a_full_state_is_refused() -> None:
    ours = engine_of(tiny_model(3))
    with pytest.raises(LabError, match="do not fit a state of 8"):
        ours.logits(text_ids(1, 9), ours.new_state(1, 8, CPU, torch.float32))


@pytest.mark.parametrize("change", [{"ple_layer_ids": None}, {"output_gate_type": "silu"}, {"norm_topk_prob": False}, {"linear_conv_kernel_dim": 3}])
@torch.no_grad()
def test_config_switches_are_followed(change: dict[str, object]) -> None:
    theirs = tiny_model(4, **change)
    ids = text_ids(1, 40)
    torch.testing.assert_close(engine_of(theirs).logits(ids), theirs(input_ids=ids, use_cache=False).logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("prefix", ["model.language_model.", "model."])
@torch.no_grad()
def test_the_bf16_release_streams_from_files(tmp_path: Path, prefix: str) -> None:
    theirs = tiny_model(4)
    write_checkpoint(tmp_path, theirs, "fused", prefix)
    ours = Qwen4Exp(from_file(tmp_path / "config.json"), PathBinder(HfWeights(Checkpoint(tmp_path)), {}, CPU, torch.float32, Counters()))
    ids = text_ids(2, 40)
    torch.testing.assert_close(ours.logits(ids), theirs(input_ids=ids, use_cache=False).logits, atol=TOLERANCE, rtol=0)


def test_block_scales_that_cannot_be_joined_are_refused(tmp_path: Path) -> None:
    """Experts 64 wide: gate and up share a 128-row block once stacked."""
    write_checkpoint(tmp_path, tiny_model(4), "fp8")
    with pytest.raises(LabError, match="no multiple of the 128-row scale blocks"):
        Qwen4Exp(from_file(tmp_path / "config.json"), PathBinder(HfWeights(Checkpoint(tmp_path)), {}, CPU, torch.float32, Counters()))


def test_hash_constants_of_the_released_model() -> None:
    """The published integers of Qwen3.8-Flash-Next (vocabulary 248320, seed 1234): exact, or the n-gram table is read at random."""
    config = from_dict({**tiny_model(2).config.to_dict(), "vocab_size": 248320, "ngram_vocab_size_base": 20_000_000, "heads_per_ngram": 8})
    assert hash_multipliers(config) == [23703573157769, 20109073645365, 8052911324071]
    assert head_sizes(config)[0] == 20000003 and head_sizes(config)[-1] == 20000171 and sum(head_sizes(config)) == 320001446


def _adopt_quantised(model: Qwen4ExpForCausalLM, checkpoint: Checkpoint) -> None:
    """Replaces the model's experts and table by what the e4m3 file holds."""
    for name, parameter in model.named_parameters():
        plain = name.removeprefix("model.")
        if plain.endswith("ngram_embedding.weight"):
            names, scale = checkpoint.table(plain.removesuffix(".weight"))
            assert scale is not None
            parameter.data = torch.cat([checkpoint.get(name).float() for name in names]) * scale.float()


@torch.no_grad()
def test_fp8_release_with_wide_experts(tmp_path: Path) -> None:
    """Expert width 128: block scales can be joined, experts and table are read as released, bit for bit."""
    theirs = tiny_model(2, moe_intermediate_size=128, hidden_size=64)
    write_checkpoint(tmp_path, theirs, "fp8")
    checkpoint = Checkpoint(tmp_path)
    _adopt_quantised(theirs, checkpoint)
    for index, layer in enumerate(theirs.model.layers):
        for kind in ("gate_up", "down"):
            weight, scale = checkpoint.expert_stack(f"layers.{index}.mlp.experts", 8, kind)
            assert scale is not None
            wide = scale.float().repeat_interleave(128, 1).repeat_interleave(128, 2)[:, : weight.shape[1], : weight.shape[2]]
            getattr(layer.mlp.experts, f"{kind}_proj").data = weight.float() * wide
    counters = Counters()
    ours = Qwen4Exp(from_file(tmp_path / "config.json"), PathBinder(HfWeights(checkpoint), {}, CPU, torch.float32, counters))
    ids = text_ids(2, 40)
    torch.testing.assert_close(ours.logits(ids), theirs(input_ids=ids, use_cache=False).logits, atol=TOLERANCE, rtol=0)
    assert {key[2] for key in counters.tallies if key[1] in ("experts", "ple")} == {"e4m3"}


@torch.no_grad()
def test_shipped_nano_loads_in_transformers_with_the_same_logits() -> None:
    """Through transformers' own loading, so that names, shards and config are right for other people too."""
    theirs = Qwen4ExpForCausalLM.from_pretrained(NANO, dtype=torch.float32, attn_implementation="eager").eval()
    config = from_file(NANO / "config.json")
    ours = Qwen4Exp(config, PathBinder(HfWeights(Checkpoint(NANO)), {}, CPU, torch.float32, Counters()))
    from lab.measure.text import load_corpus

    ids = load_corpus(load_tokenizer(NANO), NANO / "heldout.txt").prompts(2, 200)
    assert config.indexer_budget < 200
    expected = theirs(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(ours.logits(ids), expected, atol=TOLERANCE, rtol=0)
    state = ours.new_state(2, 200, CPU, torch.float32)
    steps = [ours.logits(ids[:, :150], state), *(ours.logits(ids[:, i : i + 1], state) for i in range(150, 200))]
    torch.testing.assert_close(torch.cat(steps, 1), expected, atol=TOLERANCE, rtol=0)


def test_training_checkpoint_names_round_trip() -> None:
    from experiments.nano_training.parameters import checkpoint_tensors

    binder = ParameterBinder(CPU, seed=3)
    Qwen4Exp(from_dict(tiny_model(4).config.to_dict()), binder)
    back = from_checkpoint(checkpoint_tensors(binder, 4))
    assert set(back) == set(binder.parameters) | set(binder.constants)
    for name, parameter in binder.parameters.items():
        torch.testing.assert_close(back[name].float(), parameter.detach().to(torch.bfloat16).float(), atol=0, rtol=0)
