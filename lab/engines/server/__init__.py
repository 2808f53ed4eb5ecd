"""Measuring through an OpenAI-compatible endpoint (`engine=server`): vLLM and its plugins, Strata, radiance, SGLang, llama-server.

The lab is then a client with a clock: it starts the server where the path names a command, sends requests, and times what comes back. What the
server computed, on which weights and where they lay, it cannot count; `lab.engines.server_evidence` says what is checked instead.
"""
