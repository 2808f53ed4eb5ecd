"""The lab's cells through llama.cpp, in process: `engine=llama_cpp` (extra `[llama]`).

Why: the engine that most GGUF files are made for, measured by the lab's own protocols on the same tokens, so that its numbers and the local engine's stand
side by side. Through the low-level interface of llama-cpp-python, which gives the logits of every position. What llama.cpp computes inside is its own word:
`evidence` compares its log and its counters with what was asked.
"""
