"""`python -m lab convert SRC DST --to FORMAT`: writes a model's weights in another format, checked while they are written.

Why a table of targets: each format has its own options and its own module, imported when it is asked for; a new format is a new line.
What it does not prove: that a model in fewer bits is any good. `python -m lab run` measures that.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from lab.errors import LabError

TARGETS = {"gguf": "lab.convert.gguf", "vqf": "lab.artifacts.vqf_convert", "safetensors": "lab.convert.safetensors"}
"""Format -> module with `add_arguments(parser)` and `run(source, target, arguments) -> int`."""

CONVERT_HELP = """python -m lab convert SRC DST --to FORMAT [options of the format] [--force]

Writes the model at SRC to DST in another format. The file has its name only when all of it is written and read again; after an error or with a full disk
nothing is left.

  --to gguf       one GGUF file for llama.cpp and for the lab, from a safetensors folder of qwen4_exp. Every tensor is decoded again and compared with its
                  source; the summary gives bytes and cosine per type, and bits per weight
    --types PLAN  which tensor gets which block type: a name in conf/gguf_plans, or a YAML file
    --device DEV  where weights are encoded: cpu (the default), or cuda, which low-bit types of a large model need
  --to vqf        a VQF file (Kestrel) of a plain transformer, from safetensors, GGUF or VQF
    --wmode MODE, --layout WORD, --q8-layout NAME   how weights are encoded and laid out
  --to safetensors   a Hugging Face folder (config.json, tokenizer.json, shards) of a plain transformer, from GGUF or VQF: every weight as it decodes,
                  in bf16 where that is exact, else float16 or float32
    --q8-layout NAME   rows or 4x4, for a VQF file that does not say which
  --force         replace DST where it exists

Exit: 0, 2."""


_ONE_FILE = ("gguf",)
"""Formats of a single file, known by its name. A VQF target may be a folder, which then holds config.json and tokenizer.json, too."""
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LabError(f"convert: {message} (python -m lab convert --help)")


def convert_command(argv: Sequence[str]) -> int:
    """The verb `convert`; see CONVERT_HELP. Raises LabError."""
    if "-h" in argv or "--help" in argv:
        print(CONVERT_HELP)
        return 0
    parser = _Parser(prog="python -m lab convert", add_help=False, allow_abbrev=False)
    parser.add_argument("--to", required=True, choices=sorted(TARGETS))
    target = import_module(TARGETS[parser.parse_known_args(argv)[0].to])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    target.add_arguments(parser)
    arguments = parser.parse_args(argv)
    if arguments.to in _ONE_FILE and (arguments.target.suffix != f".{arguments.to}" or _SHARD.search(arguments.target.name)):
        raise LabError(f"convert: {arguments.target}: name the file with .{arguments.to}, and not as a shard (-00001-of-00003); others go by that")
    code: int = target.run(arguments.source, arguments.target, arguments)
    return code
