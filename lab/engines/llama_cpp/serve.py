"""`python -m lab.engines.llama_cpp.serve FILE.gguf PORT [THREADS]`: llama.cpp's own HTTP server, for `engine=server` (conf/paths/llama_server.yaml).

Why this launcher: llama.cpp has no binary in a package registry; `xllamacpp` (extra `[llama_server]`) is llama-server as a Python library, prebuilt, without a
command. Settings are those that a measurement needs: four slots of 1024 tokens, no prompt kept from one request for the next, flash attention off as in
the engine in process. It shows what llama.cpp's server makes of a request; weights and places are as invisible as through any server.
"""

from __future__ import annotations

import sys
import time
from importlib import import_module
from pathlib import Path

from lab.devices import usable_cores

SLOTS, SLOT_TOKENS = 4, 1024
"""As many as agg4 asks together; 512 + 128 tokens and a chat template fit."""
_FLASH_OFF = 0


def main(arguments: list[str]) -> int:
    """Serves until it is ended. Returns 2, with one line, for wrong arguments or without the package."""
    if len(arguments) not in (2, 3) or not all(word.isdecimal() for word in arguments[1:]):
        print("error: usage: python -m lab.engines.llama_cpp.serve FILE.gguf PORT [THREADS]", file=sys.stderr)
        return 2
    path, port = Path(arguments[0]), int(arguments[1])
    if not path.is_file():
        print(f"error: {path}: no such file; give a GGUF file", file=sys.stderr)
        return 2
    try:
        xllamacpp = import_module("xllamacpp")
    except ModuleNotFoundError:
        print("error: llama.cpp's server needs xllamacpp: pip install 'migration-lab[llama_server]'", file=sys.stderr)
        return 2
    params = xllamacpp.CommonParams()
    params.model.path, params.model_alias, params.port = str(path), {path.name}, port
    params.n_parallel, params.n_ctx = SLOTS, SLOTS * SLOT_TOKENS
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(arguments[2]) if len(arguments) == 3 else usable_cores()
    params.n_gpu_layers = 0  # the cell is a CPU's; for a GPU name its own server in path.server.command
    params.cache_prompt, params.cache_ram_mib = False, 0
    params.flash_attn_type = xllamacpp.llama_flash_attn_type(_FLASH_OFF)
    params.fit_params, params.ui = False, False
    server = xllamacpp.Server(params)
    print(f"serving {path.name} at {server.listening_address}", flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
