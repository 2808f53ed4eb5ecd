"""A GGUF model whose header or tensors do not hold is refused in one line that names the file, before anything is loaded and without a traceback.

The files are right ones (`tests.artifacts.gguf_models`) with one thing changed, or with random bytes of the header changed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from transformers import PreTrainedModel

from lab.artifacts.gguf_model import GgufArtifact
from lab.artifacts.weights import Stored
from lab.errors import LabError
from tests.artifacts.gguf_models import EXPERTS, HIDDEN, LAYERS, VOCAB, WIDTH, Model, hf_model, model_of

ARCHES = ("llama", "qwen3", "qwen3moe")
Data = npt.NDArray[Any]
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
    "other heads": (
        "llama",
        {"llama.attention.head_count": 12, "llama.attention.head_count_kv": 4},
        None,
        {},
        "needs row 191 of 'blk.0.attn_q.weight', which has 96 rows",
    ),
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
    "attention factor": ("llama", {"llama.rope.scaling.attn_factor": 2.0}, None, {}, "llama.rope.scaling.attn_factor is set, and the engine does not"),
    "sliding windows": ("llama", {"llama.attention.sliding_window": [128, 0]}, None, {}, "llama.attention.sliding_window is set, and the engine does not"),
    "BOS without an id": (
        "llama",
        {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None},
        None,
        {},
        "tokenizer.ggml.add_bos_token is true without tokenizer.ggml.bos_token_id",
    ),
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
    "a flat matrix": ("llama", {}, _replace("blk.0.attn_v.weight", np.ravel), {}, r"has shape \[1, 3072\], the metadata ask for \[32, 96\]"),
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


@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_damaged_headers_are_refused_or_read(arch: str, models: dict[str, PreTrainedModel], tmp_path: Path) -> None:
    """No byte of the header can be changed into a traceback, and no message is more than a line."""
    path = model_of(models[arch], arch).write(tmp_path / "m.gguf")
    whole, header = path.read_bytes(), GgufArtifact(path).gguf.files[0].data_start
    draw, refused = random.Random(7), 0
    for _ in range(150):
        damaged = bytearray(whole)
        for at in draw.choices(range(24, header), k=draw.randint(1, 3)):
            damaged[at] = draw.choice([damaged[at] ^ (1 << draw.randrange(8)), draw.randrange(256), 0, 255])
        path.write_bytes(damaged)
        try:
            GgufArtifact(path).inspect()
        except LabError as error:
            refused += 1
            assert str(error).isprintable() and len(str(error)) < 1000
    assert refused > 100


def test_weights_check_without_an_inspection(models: dict[str, PreTrainedModel], tmp_path: Path) -> None:
    """The engine may ask before anyone has inspected."""
    model = model_of(models["llama"], "llama")
    model.change = _replace("blk.0.attn_q.weight", lambda data: data[:64])
    weights = GgufArtifact(model.write(tmp_path / "m.gguf")).weights()
    with pytest.raises(LabError, match=r"'blk.0.attn_q.weight' has 64 rows, but row 95 is needed"):
        weights.matrix("layers.0.self_attn.q_proj.weight")
    weights = GgufArtifact(model_of(models["qwen3moe"], "qwen3moe").write(tmp_path / "e.gguf")).weights()
    with pytest.raises(LabError, match=r"'blk.0.ffn_gate_exps.weight' holds 5 experts; the metadata say 6"):
        weights.experts("layers.0.mlp.experts", EXPERTS + 1)
    gate_up, down = weights.experts("layers.0.mlp.experts", EXPERTS)
    assert [block.shape for block in (*gate_up, *down)] == [(EXPERTS, WIDTH, HIDDEN)] * 2 + [(EXPERTS, HIDDEN, WIDTH)]
    assert all(isinstance(block, Stored) for block in gate_up)
