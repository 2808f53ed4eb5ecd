"""Trains `experiments/qwen3_small`, a small real model with the shape of Qwen3, on the same text and tokenizer as `nano`.

Why: the Kestrel stage is about dense Qwen3 models in VQF files, and its measures need a model whose text is no noise. transformers' own
`Qwen3ForCausalLM` does the training, so the lab's forward code is checked against weights it had no part in. Its numbers say nothing about 8B.
"""
