"""The lab's cells through Hugging Face's own model, in process: `engine=transformers` (extra `[transformers]`).

Why: the baseline a user has today, measured by the lab's own protocols on the same tokens, weights and depth, so that a ratio against it is one of engines and
of nothing else. Weights are held in the precision they are computed in, so that only `path=reference` makes sense here. What transformers computes inside is
its own word; hooks count the rows that went through embedding, layers, experts, table and head, and `evidence` compares them with what was asked.
"""
