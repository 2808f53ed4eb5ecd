"""Small random llama, qwen3, qwen3_moe and Qwen3-VL checkpoints made and written by transformers, and a binder that hands their tensors to our model.

Sizes are odd on purpose: heads that are no power of two, one key head for all, heads wider or narrower than hidden / heads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from lab.artifacts import Checkpoint
from lab.models.binder import Experts, Linear, Table
from lab.models.transformer.config import TransformerConfig, from_dict
from lab.models.transformer.model import Transformer

VOCAB = 101
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
_COMMON = {"vocab_size": VOCAB, "num_hidden_layers": 3, "intermediate_size": 56, "rms_norm_eps": 3e-3, "eos_token_id": 5, "bos_token_id": 1}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "patch_size": 4,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
_MOE = {"num_attention_heads": 4, "num_key_value_heads": 2, "moe_intermediate_size": 18, "num_experts": 7, "num_experts_per_tok": 3}


def _mrope(*sections: int, interleaved: bool = True) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 5e3, "mrope_section": list(sections), "mrope_interleaved": interleaved}


def _llama(**sizes: Any) -> tuple[type, Any]:
    return hf.LlamaForCausalLM, hf.LlamaConfig(**{**_COMMON, **sizes})


def _qwen3(**sizes: Any) -> tuple[type, Any]:
    return hf.Qwen3ForCausalLM, hf.Qwen3Config(**{**_COMMON, **sizes})


def _qwen3_moe(**sizes: Any) -> tuple[type, Any]:
    return hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig(**{**_COMMON, **_MOE, "hidden_size": 40, "head_dim": 14, **sizes})


def _vision_and_text(kind: str, text: dict[str, Any], **top: Any) -> tuple[type, Any]:
    config = getattr(hf, f"{kind}Config")(text_config={**_COMMON, **text}, vision_config={**_VISION, "out_hidden_size": text["hidden_size"]}, **top)
    return getattr(hf, f"{kind}ForConditionalGeneration"), config


CASES: dict[str, tuple[type, Any]] = {
    "llama": _llama(hidden_size=72, num_attention_heads=6, num_key_value_heads=3),
    "llama_llama3_one_key_head": _llama(hidden_size=50, num_attention_heads=5, num_key_value_heads=1, head_dim=18, rope_parameters=LLAMA3),
    "llama_linear_tied_no_groups": _llama(
        hidden_size=48, num_attention_heads=3, tie_word_embeddings=True, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    ),
    "qwen3_tied": _qwen3(hidden_size=44, num_attention_heads=3, num_key_value_heads=1, head_dim=10, tie_word_embeddings=True),
    "qwen3": _qwen3(hidden_size=64, num_attention_heads=8, num_key_value_heads=2, head_dim=16, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen3_moe": _qwen3_moe(norm_topk_prob=True),
    "qwen3_moe_not_normalised": _qwen3_moe(norm_topk_prob=False, tie_word_embeddings=True),
    "qwen3_moe_mixed": _qwen3_moe(norm_topk_prob=True, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]),
    "qwen3_vl_tied": _vision_and_text(
        "Qwen3VL",
        {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16, "rope_parameters": _mrope(3, 3, 2)},
        tie_word_embeddings=True,
    ),
    "qwen3_vl": _vision_and_text(
        "Qwen3VL",
        {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 20, "rope_parameters": _mrope(4, 4, 2, interleaved=False)},
    ),
    "qwen3_vl_moe": _vision_and_text("Qwen3VLMoe", {**_MOE, "hidden_size": 40, "head_dim": 12, "rope_parameters": _mrope(2, 2, 2)}),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Imported where these models run: their products are so small that threads wait for each other many times longer than they compute."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tiny(case: str, seed: int = 0) -> Any:
    """A model of this case in float32, attention in plain torch. Weights keep activations near one and are exact in bf16; norm weights differ everywhere."""
    kind, config = CASES[case]
    torch.manual_seed(seed)
    model = kind(config).eval()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # transformers' grouped products want aligned sizes in bf16
    for name, parameter in model.named_parameters():
        scale = 0.3 if parameter.ndim < 2 else 1.0 if "embed" in name else parameter.shape[-1] ** -0.5
        parameter.data = (torch.randn_like(parameter) * scale + (parameter.ndim < 2)).to(torch.bfloat16).float()
    if model.get_output_embeddings().weight.data_ptr() != model.get_input_embeddings().weight.data_ptr():
        model.get_output_embeddings().weight.data *= 2
    return model


def text_ids(batch: int, tokens: int, seed: int = 0) -> Tensor:
    """Random ids [batch, tokens]."""
    return torch.randint(0, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def saved_config(folder: Path) -> dict[str, Any]:
    """The config.json that transformers wrote."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def loaded(folder: Path, layers: int | None = None, dtype: torch.dtype = torch.float32) -> tuple[Transformer, CheckpointBinder]:
    """Our model over the files that `save_pretrained` left in `folder`, and the binder, which knows what was asked for."""
    config: TransformerConfig = from_dict(saved_config(folder), "config.json")
    binder = CheckpointBinder(Checkpoint(folder), dtype)
    with torch.no_grad():
        return Transformer(config if layers is None else config.truncated(layers), binder), binder


def stepwise(model: Transformer, ids: Tensor, pieces: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits of all tokens, fed in pieces of these lengths into a state that they fill exactly."""
    state = model.new_state(ids.shape[0], ids.shape[1], torch.device("cpu"), dtype)
    state.cache.fill_(torch.nan)  # what is read before it is written shows
    found = torch.cat([model.logits(piece, state) for piece in ids.split(pieces, 1)], 1)
    assert state.length == ids.shape[1]
    return found


class CheckpointBinder:
    """Plain operations on a checkpoint's tensors, computed in `dtype`. Every shape asked for must be the file's."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self.checkpoint, self.dtype = checkpoint, dtype
        self.asked: dict[str, str] = {}

    def at_layer(self, layer: int | None) -> None:
        """Everything is in memory."""

    def _get(self, name: str, shape: tuple[int, ...], component: str) -> Tensor:
        value = self.checkpoint.get(name)
        assert tuple(value.shape) == shape, (name, value.shape, shape)
        self.asked[name] = component
        return value

    def linear(self, name: str, out_features: int, in_features: int, component: str) -> Linear:
        """x W^T."""
        weight = self._get(name, (out_features, in_features), component).to(self.dtype)
        return lambda x: linear(x, weight)

    def vector(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Float32."""
        return self._get(name, shape, "vectors").float()

    def integers(self, name: str, default: list[int]) -> Tensor:
        """No plain transformer has any."""
        raise AssertionError(name)

    def experts(self, prefix: str, count: int, width: int, hidden: int) -> Experts:
        """All chosen matrices gathered, one for every token and choice."""
        gate_up, down = (self.checkpoint.expert_stack(prefix, count, kind)[0].to(self.dtype) for kind in ("gate_up", "down"))
        assert gate_up.shape == (count, 2 * width, hidden) and down.shape == (count, hidden, width)
        self.asked[prefix] = "experts"

        def run(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
            gate, up = torch.einsum("tkoh,th->tko", gate_up[ids], x).chunk(2, -1)
            return torch.einsum("tkhw,tkw,tk->th", down[ids], silu(gate) * up, weights)

        return run

    def table(self, prefix: str, rows: int, width: int) -> Table:
        """No plain transformer has any."""
        raise AssertionError(prefix)

    def embedding(self, name: str, rows: int, width: int) -> Table:
        """Rows by id."""
        weight = self._get(name, (rows, width), "embed").to(self.dtype)
        return lambda ids: embedding(ids, weight)
