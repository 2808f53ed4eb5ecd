"""Everything that makes `nano`: its text, its tokenizer, an n-gram baseline to compare with, and its training.

The text comes from distribution packages (`sources`), is parsed by pure functions (`extract`) and split into
train and held-out by whole works (`corpus`). `tokenizer` trains the byte-level BPE, and `ngram_baseline` says
what counting alone achieves on the same token ids: a model that does not beat it has learned nothing useful.
Numbers made here are nano's; they say nothing about any larger model.
"""
