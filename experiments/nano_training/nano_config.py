"""The sizes of `nano`: every part of `qwen4_exp`, small enough to train in minutes and ship in 32 MiB.

Hidden size is a multiple of 256 and expert width of 64, so that every codec and GGUF block type fits; head ratios (grouped queries, several value
heads per key head), the 1-in-4 attention pattern, 4 streams, 3-gram hashing and the sparse budget below the context are kept. `config.json` is the
Hugging Face form.
"""

from __future__ import annotations

from typing import Any

TRAINED_DEPTHS = (3, 6, 12)
"""Prefix lengths the training draws from; other depths load and run but were never trained to end there."""

CONTEXT = 512
"""Tokens per training sequence."""


def config_json(vocab_size: int, eos_token_id: int) -> dict[str, Any]:
    """`config.json` of nano for a tokenizer with this vocabulary and end-of-text id."""
    return {
        "architectures": ["Qwen4ExpForCausalLM"],
        "model_type": "qwen4_exp_text",
        "dtype": "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "output_gate_type": "sigmoid",
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "router_aux_loss_coef": 0.01,
        "hc_count": 4,
        "hc_lowrank": 16,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 32,
        "indexer_budget": 128,
        "indexer_compress_ratio": 4,
        "ple_layer_ids": [2],
        "ple_embed_dim": 256,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 4,
        "ngram_vocab_size_base": 2801,
        "make_ngram_vocab_size_divisible_by": 128,
        "split_ngram_parts": 128,
        "seed": 1234,
        "eos_token_id": eos_token_id,
        "bos_token_id": eos_token_id,
        "pad_token_id": None,
    }
