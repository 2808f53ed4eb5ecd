"""Small random `qwen4_exp` checkpoints, made by transformers, so that names, shapes and values come from code that is not ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers.models.qwen4_exp.configuration_qwen4_exp import Qwen4ExpTextConfig
from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpForCausalLM

VOCAB = 97
EOS = 5


def tiny_config(layers: int, **changes: Any) -> Qwen4ExpTextConfig:
    """Every part present, sizes with nothing in common, a sparse budget of 16 tokens."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "hc_lowrank": 12,
        "ple_layer_ids": [2],
        "ple_embed_dim": 32,
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 53,
        "make_ngram_vocab_size_divisible_by": 8,
        "split_ngram_parts": 4,
        "indexer_n_heads": 2,  # few heads: relu makes many equal scores, and both sides must then choose the same blocks
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "output_gate_type": "sigmoid",
        "eos_token_id": EOS,
        "full_attention_interval": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    config = Qwen4ExpTextConfig(**{**sizes, **changes})
    config._attn_implementation = "eager"
    return config


def tiny_model(layers: int, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Qwen4ExpForCausalLM:
    """Random weights of a size that keeps activations near one, so that a wrong part shows in the logits. Values are exact in bf16."""
    torch.manual_seed(1000 * seed + layers)
    model = Qwen4ExpForCausalLM(tiny_config(layers, **changes)).eval()
    for name, parameter in model.named_parameters():
        scale = 0.3 if parameter.ndim < 2 else 1.0 if "embed" in name else parameter.shape[-1] ** -0.5
        offset = 1.0 if name.endswith("linear_attn.norm.weight") else 0.0
        parameter.data = (torch.randn_like(parameter) * scale + offset).to(torch.bfloat16).to(dtype)
    return model.to(dtype)


def text_ids(batch: int, tokens: int, seed: int = 0) -> Tensor:
    """Random ids with EOS inside, also twice in a row and at a state boundary."""
    ids = torch.randint(0, VOCAB, (batch, tokens), generator=torch.Generator().manual_seed(seed))
    for position in (13, 29, 40):
        if position < tokens:
            ids[:, position] = EOS
    ids[0, min(14, tokens - 1)] = EOS
    return ids


def write_tokenizer(folder: Path, vocab: int = VOCAB) -> None:
    """A word-level tokenizer with `vocab` entries; id 5 is the end of text."""
    words = {("<|endoftext|>" if i == EOS else f"w{i}"): i for i in range(vocab)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer.json"))


def write_checkpoint(folder: Path, model: Qwen4ExpForCausalLM, layout: str, prefix: str = "model.language_model.") -> None:
    """`fused`: bf16 stacks and bf16 table shards; `fp8`: one e4m3 matrix per expert with block scales and an e4m3 table with one global scale."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        plain = name.removeprefix("model.")
        target = plain if plain == "lm_head.weight" else prefix + plain
        if plain.endswith("ngram_embedding.weight"):
            tensors |= _table(target.removesuffix("weight"), value, layout)
        elif ".mlp.experts." in plain and layout == "fp8":
            tensors |= _experts(target, value)
        else:
            tensors[target] = value if value.dtype == torch.int64 else value.to(torch.bfloat16).contiguous()
    save_file(tensors, folder / "model.safetensors")
    config = model.config.to_dict()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen4_exp", "text_config": config}, default=str))
    write_tokenizer(folder)


def _table(stem: str, value: Tensor, layout: str) -> dict[str, Tensor]:
    scale = (value.abs().max() / 448).to(torch.bfloat16)
    stored = (value / scale).to(torch.float8_e4m3fn) if layout == "fp8" else value.to(torch.bfloat16)
    parts = stored.view(torch.uint8).chunk(4) if layout == "fp8" else stored.chunk(4)
    found = {f"{stem}shard_{i}.weight": (p.contiguous().view(torch.float8_e4m3fn) if layout == "fp8" else p.contiguous()) for i, p in enumerate(parts)}
    return {**found, f"{stem}weight_scale": scale[None]} if layout == "fp8" else found


def _experts(target: str, value: Tensor) -> dict[str, Tensor]:
    stem, kind = target.rsplit(".", 1)
    found: dict[str, Tensor] = {}
    for e, matrix in enumerate(value):
        pieces = zip(("gate", "up"), matrix.chunk(2), strict=True) if kind == "gate_up_proj" else [("down", matrix)]
        for name, piece in pieces:
            rows, cols = -(-piece.shape[0] // 128), -(-piece.shape[1] // 128)
            scale = torch.full((rows, cols), float(piece.abs().max()) / 448).to(torch.bfloat16)
            found[f"{stem}.{e}.{name}_proj.weight"] = (piece / scale.float()[0, 0]).to(torch.float8_e4m3fn)
            found[f"{stem}.{e}.{name}_proj.weight_scale_inv"] = scale
    return found
